"""Names of older dialects of NKI: how old each is, and what stands in its place today.

A kernel that uses one gets `OldDialectError` from the simulator, and NKI047 from the linter.
Sources: the migration guides of NKI 0.1 to 0.6 (aws-neuron-sdk, nki/migration).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

from nki_sim.errors import OldDialectError


class Old(NamedTuple):
    """What is known of an old name: the dialect that has it, since when it is gone, its heir."""

    dialect: str
    gone: str
    instead: str


_BETA: Final = "the first NKI (neuronxcc.nki, 2024)"


def _beta(instead: str) -> Old:
    return Old(_BETA, "0.2", instead)


# By module, as kernels write its name.
OLD_NAMES: Final[dict[str, dict[str, Old]]] = {
    "nki": {
        "baremetal": _beta("call the kernel with NumPy arrays; here nki_sim.run(kernel, ...)"),
        "benchmark": _beta("nki_sim.run(kernel, ...).timeline, on a chip neuron-explorer"),
        "profile": _beta("nki_sim.run(kernel, ...).timeline, on a chip neuron-explorer"),
        "simulate_kernel": _beta("nki.simulate(kernel)(...)"),
    },
    "nl": {
        "arange": _beta("slices and nl.ds(start, size)"),
        "atomic_rmw": _beta("nisa.dma_compute with dst among its sources"),
        "loop_reduce": _beta("nisa.tensor_tensor into a tile made before the loop"),
        "mgrid": _beta("slices and nl.ds(start, size)"),
        "nc": _beta("kernel[2] for two cores"),
        "par_dim": _beta("a plain first axis; a Python list of tiles for axes before it"),
        "spmd_dim": _beta("kernel[2] for two cores, loops for other axes"),
        "static_cast": _beta("nisa.tensor_copy into a tile of the type"),
    },
    "compiler": {
        "enable_stack_allocator": _beta("nothing; address= of nl.ndarray places a tensor"),
        "force_auto_alloc": _beta("nothing; address= of nl.ndarray places a tensor"),
        "psum": _beta("buffer=nl.psum, and address= of nl.ndarray to place a tensor"),
        "sbuf": _beta("buffer=nl.sbuf, and address= of nl.ndarray to place a tensor"),
        "skip_middle_end_transformations": _beta("nothing"),
    },
    "constants": {"sizeinbytes": _beta("itemsize of the type")},
    "nisa": {
        "tensor_copy_dynamic_dst": Old("NKI 0.3 (April 2026)", "0.4", ".ap(scalar_offset=)"),
        "tensor_copy_dynamic_src": Old("NKI 0.3 (April 2026)", "0.4", ".ap(scalar_offset=)"),
    },
}
# Parameters of instructions and helpers.
OLD_PARAMETERS: Final[dict[str, Old]] = {
    "directives": _beta("a plain range"),
    "dst_rmw_op": Old("NKI 0.2", "0.3", "nisa.dma_compute"),
    "dtype": _beta("the type of dst"),
    "mask": _beta("slices that end at the edge, min(size, left)"),
    "num_channels": Old("NKI 0.3 (April 2026)", "0.4", "channel_ids"),
    "precise_schedule": _beta("a plain range"),
    "use_gpsimd_dma": Old("NKI 0.2", "0.3", "dma_engine=nisa.dma_engine.gpsimd_dma"),
}
NO_DST: Final = _beta("a tile as dst, allocated before: nisa.{name}(dst=tile, ...)")
MODULE: Final = Old("NKI up to 0.3", "0.4", "import nki")


def refusal(name: str, old: Old) -> OldDialectError:
    """Return the error about an old name."""
    return OldDialectError(name, old.instead, f"{old.dialect}, gone since NKI {old.gone}")


def refuse_old(name: str, old: Old) -> NoReturn:
    """Raise OldDialectError for a name.

    Raises:
        OldDialectError: always.
    """
    raise refusal(name, old)


class OldName:
    """Stands for an old name, so that files which import it can be loaded; using it raises.

    Args:
        module, name: where it was, as kernels write it.
    """

    def __init__(self, module: str, name: str) -> None:
        self._name = f"{module}.{name}"
        self._old = OLD_NAMES[module][name]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise OldDialectError."""
        refuse_old(self._name, self._old)

    def __getitem__(self, key: Any) -> NoReturn:
        """Raise OldDialectError."""
        refuse_old(self._name, self._old)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise OldDialectError for what was wanted of the allocators of the compiler."""
        if name not in ("alloc", "auto_alloc", "mod_alloc"):
            raise AttributeError(name)
        refuse_old(self._name, self._old)

    def __repr__(self) -> str:
        return f"OldName({self._name!r})"


class ParDim(int):
    """The size of a first axis, as kernels that compile today still mark it: `nl.par_dim(128)`."""


def check_first_axis(shape: Sequence[Any]) -> None:
    """Check that no later axis is marked as the one of partitions.

    Raises:
        OldDialectError: the first NKI had block axes before it.
    """
    if any(isinstance(size, ParDim) for size in shape[1:]):
        refuse_old("nl.par_dim", OLD_NAMES["nl"]["par_dim"])


def old_names(module: str) -> dict[str, Any]:
    """Return what stands for the old names of a module."""
    names: dict[str, Any] = {name: OldName(module, name) for name in OLD_NAMES[module]}
    return names | ({"par_dim": ParDim} if "par_dim" in names else {})
