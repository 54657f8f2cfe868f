"""Forms of weights that are made once and kept until the weights change."""

import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from neuron_moe.backends.narrow import NarrowMatrices

T = TypeVar("T")
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


class Prepared:
    """Forms by the weights they were made from; gone with them, and left out of copies of this."""

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, _state: dict[str, object]) -> None:
        self._kept = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget every form."""
        self._kept = WeakTensorKeyDictionary()

    def get(self, weights: Sequence[Tensor], form: str, make: Callable[[], T]) -> T:
        """Return a form of some weights; `make` it if there is none, or they changed.

        Args:
            weights: whatever the form depends on.
            form: tells several forms of the same weights apart.
            make: returns the form; it must not hold the first weight itself.
        """
        forms = self._kept.setdefault(weights[0], {})  # type: ignore[no-untyped-call]
        if form not in forms or not forms[form][0].fits(weights):
            forms[form] = (Stamp(weights), make())
        kept: T = forms[form][1]
        return kept
