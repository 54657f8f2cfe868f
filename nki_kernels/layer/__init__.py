"""Layer: a whole MoE layer's prefill in one launch, from the norm to the weighted sum."""

import nki_kernels.provided  # noqa: F401  answers to `import nki`
from nki_kernels.layer.config import (
    GivenChoices,
    PrefillLayerConfig,
    check_prefill_layer,
    make_shared_config,
    shared_work_tiles,
)
from nki_kernels.layer.cost import cost_prefill_layer
from nki_kernels.layer.kernel import prefill_layer

__all__ = [
    "GivenChoices",
    "PrefillLayerConfig",
    "check_prefill_layer",
    "cost_prefill_layer",
    "make_shared_config",
    "prefill_layer",
    "shared_work_tiles",
]
