"""Decode: a few tokens through the experts they chose, each expert read once.

`decode_moe` computes routed experts; `decode_layer` a whole layer in one launch: norm, router,
routed and shared experts, residual. Both are compiled for a configuration, which the `make_`
functions build from frozen records and which says why it is what it is. Weights are packed once,
at load time.

    sizes = DecodeSizes(T=1, H=2880, I=360, E=128, K=4, num_experts=128)
    config = make_decode_config(sizes, ExpertFormula(), WeightForm(layout="packed"))
    gate_up, down = pack_gate_up(config, gate_up_EH2I), pack_down(config, down_EIH)
    output = decode_moe[2](hidden, gate_up, down, index, affinities, first_expert, config)
"""

import nki_kernels.provided  # noqa: F401  answers to `import nki`
from nki_kernels.common.mx_layout import pack_mx_down, pack_mx_gate_up
from nki_kernels.decode.config import (
    MAX_TOKENS,
    MAX_TOP_K,
    DecodeConfig,
    DecodeRequest,
    DecodeSizes,
    WeightForm,
    loads_bias,
)
from nki_kernels.decode.cost import cost_decode_moe
from nki_kernels.decode.items import mx_form
from nki_kernels.decode.kernel import decode_moe
from nki_kernels.decode.layer_config import (
    LayerConfig,
    LayerForm,
    check_decode_layer,
    check_layer_form,
    make_layer_config,
)
from nki_kernels.decode.layer_cost import cost_decode_layer
from nki_kernels.decode.layer_kernel import decode_layer
from nki_kernels.decode.layer_reference import LayerArrays, LayerResult, decode_layer_ref
from nki_kernels.decode.layout import pack_down, pack_gate_up, weight_shapes
from nki_kernels.decode.options import make_decode_config, why_not_decoded
from nki_kernels.decode.reference import decode_moe_ref
from nki_kernels.decode.router import pack_router_weight
from nki_kernels.decode.shared import pack_shared_experts

__all__ = [
    "MAX_TOKENS",
    "MAX_TOP_K",
    "DecodeConfig",
    "DecodeRequest",
    "DecodeSizes",
    "LayerArrays",
    "LayerConfig",
    "LayerForm",
    "LayerResult",
    "WeightForm",
    "check_decode_layer",
    "check_layer_form",
    "cost_decode_layer",
    "cost_decode_moe",
    "decode_layer",
    "decode_layer_ref",
    "decode_moe",
    "decode_moe_ref",
    "loads_bias",
    "make_decode_config",
    "make_layer_config",
    "mx_form",
    "pack_down",
    "pack_gate_up",
    "pack_mx_down",
    "pack_mx_gate_up",
    "pack_router_weight",
    "pack_shared_experts",
    "weight_shapes",
    "why_not_decoded",
]
