"""By what one sees whether something was made from weights as they still are."""

import weakref
from collections.abc import Sequence

from torch import Tensor

from neuron_moe.weights.narrow import NarrowMatrices

Source = Tensor | NarrowMatrices


class Stamp:
    """What something was made from: weak references, versions and places in memory.

    Seen is every change but one in place behind autograd's back (`weight.data.copy_(...)`), after
    which `ExpertMLPsV2.weights_changed` must be called.

    Args:
        sources: tensors, or matrices in a narrow form.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._made_from = [(weakref.ref(source), _version(source)) for source in sources]

    def fits(self, sources: Sequence[Source]) -> bool:
        """Say whether these are the sources, unchanged since."""
        return len(sources) == len(self._made_from) and all(
            reference() is source and version == _version(source)
            for (reference, version), source in zip(self._made_from, sources, strict=True)
        )


def _version(source: Source) -> tuple[int, int]:
    tensor = source.codes_Ekn if isinstance(source, NarrowMatrices) else source
    return tensor._version, tensor.data_ptr()
