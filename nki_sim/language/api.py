"""`nki.language`: creating tensors, loops, program ids, and operators as values.

The helpers that compute (`load`, `add`, `softmax`, ...) are in `math.py`.
"""

from __future__ import annotations

import builtins
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from nki_sim import isa
from nki_sim.dialects import old_names
from nki_sim.dtypes import (
    DType,
    as_dtype,
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    int64,
    tfloat32,
    uint8,
    uint16,
    uint32,
    uint64,
)
from nki_sim.errors import LanguageError
from nki_sim.isa.operators import OPERATORS
from nki_sim.isa.query import running_target
from nki_sim.language import math as language_math
from nki_sim.language.grids import (
    NkiBlockGrid,
    NkiGrid,
    NkiTileGrid,
    alloc_blocks,
    alloc_tiles,
    blocks,
    empty_like,
    tiles,
)
from nki_sim.language.loops import dynamic_range, fori_loop, while_loop
from nki_sim.language.objects import NKIObject, create, find_region
from nki_sim.machine import DynamicSlice, MemoryRegion, NkiTensor, SequencerValue, current

sbuf: Final = MemoryRegion.sbuf
psum: Final = MemoryRegion.psum
private_hbm: Final = MemoryRegion.private_hbm
shared_hbm: Final = MemoryRegion.shared_hbm
hbm: Final = MemoryRegion.private_hbm


class _TileSize(NKIObject):
    """Sizes of the hardware; those that differ between generations follow the running kernel."""

    pmax: int = 128
    psum_fmax: int = 512
    psum_bank_fmax: int = 512
    psum_bank_fmax_bytes: int = 2048
    gemm_stationary_fmax: int = 128
    gemm_moving_fmax: int = 512
    bn_stats_fmax: int = 512
    psum_min_align: int = 4
    sbuf_min_align: int = 1

    @property
    def psum_num_banks(self) -> int:
        """PSUM banks."""
        return running_target().psum_banks

    @property
    def sbuf_size_bytes(self) -> int:
        """Usable bytes of SBUF over all partitions."""
        return 128 * running_target().sbuf_bytes

    @property
    def sbuf_fmax(self) -> int:
        """Usable float32 elements of an SBUF partition."""
        return running_target().sbuf_bytes // 4

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Usable bytes of an SBUF partition."""
        return running_target().sbuf_bytes

    @property
    def total_available_sbuf_size(self) -> int:
        """Usable bytes of an SBUF partition."""
        return running_target().sbuf_bytes


tile_size: Final = _TileSize()


class _TensorType(type):
    """Makes `nl.ndarray(...)` create tensors and `isinstance(t, nl.ndarray)` recognise them."""

    def __call__(
        cls,
        shape: Sequence[int],
        dtype: Any,
        buffer: Any = MemoryRegion.sbuf,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        """Create a tensor without values.

        Args:
            shape: sizes of the axes, partitions first on chip.
            dtype: element type.
            buffer: memory region.
            name: unique name, for schedules and messages.
            address: (partition, byte) at which to place it; None leaves that to the compiler.
        """
        return create(shape, dtype, buffer, name, address)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, NkiTensor)


class ndarray(metaclass=_TensorType):
    """The type of tensors; calling it creates one without values."""


def _filled(shape: Any, dtype: Any, buffer: Any, name: str, value: Any) -> NkiTensor:
    tensor = create(shape, dtype, buffer, name)
    isa.memset(tensor, value)
    return tensor


def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Create a tensor of zeros."""
    return _filled(shape, dtype, buffer, name, 0)


def ones(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Create a tensor of ones."""
    return _filled(shape, dtype, buffer, name, 1)


def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Create a tensor of equal values."""
    return _filled(shape, dtype, buffer, name, fill_value)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Create a tensor of zeros with the shape of another."""
    return _filled(x.shape, dtype or x.dtype, buffer or x.buffer, name, 0)


def shared_constant(constant: Any) -> NkiTensor:
    """Put an array, or the array of an .npy file, in shared HBM."""
    core = current()
    array = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    count = core.shared_count.get("constant", 0)
    core.shared_count["constant"] = count + 1
    return core.bind_input(
        np.array(array, copy=True, order="C"), as_dtype(array.dtype), f"constant:{count}"
    )


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """Return an identity matrix [n, n] in SBUF, loaded from a constant in HBM."""
    kind = as_dtype(dtype)
    target = create((n, n), kind) if dst is None else dst
    source = shared_constant(np.eye(n, dtype=np.float32).astype(target.dtype.numpy))
    isa.dma_copy(target, source.view(target.dtype))
    return target


def is_hbm(buffer: Any) -> bool:
    """Whether a memory region is in HBM."""
    return find_region(buffer) in (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


def is_sbuf(buffer: Any) -> bool:
    """Whether a memory region is SBUF."""
    return find_region(buffer) is MemoryRegion.sbuf


def is_psum(buffer: Any) -> bool:
    """Whether a memory region is PSUM."""
    return find_region(buffer) is MemoryRegion.psum


def is_on_chip(buffer: Any) -> bool:
    """Whether a memory region is SBUF or PSUM."""
    return not is_hbm(buffer)


def ds(start: Any, size: int) -> Any:
    """Return the slice of `size` elements from `start`, an int, a register or a scalar."""
    if isinstance(start, SequencerValue):
        return DynamicSlice(start, int(size))
    return slice(start, start + size)


def _deprecated(name: str, instead: str) -> None:
    """Warn, at the kernel's line, of a name that a later release removes."""
    text = f"nl.{name} is deprecated. Use {instead}."
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def _old_range(name: str) -> Callable[..., builtins.range]:
    """Return Python's range under a deprecated name."""

    def counted(start: Any, stop: Any = None, step: int = 1) -> builtins.range:
        """Python's range; deprecated."""
        _deprecated(name, "range")
        return builtins.range(start) if stop is None else builtins.range(start, stop, step)

    counted.__name__ = counted.__qualname__ = name
    return counted


affine_range = _old_range("affine_range")
sequential_range = _old_range("sequential_range")
static_range = _old_range("static_range")
range = builtins.range


def program_id(axis: int = 0) -> int:
    """Return the number of this core in the launch, on an axis of a grid of the first NKI."""
    core = current()
    _check_axis(axis)
    return int(np.unravel_index(core.id, core.grid or (1,))[axis])


def num_programs(axes: Any = 0) -> int:
    """Return the number of cores of the launch, on some axes of a grid of the first NKI."""
    grid = current().grid or (1,)
    chosen = axes if isinstance(axes, (tuple, list)) else (axes,)
    for axis in chosen:
        _check_axis(axis)
    return math.prod(grid[axis] for axis in chosen)


def _check_axis(axis: Any) -> None:
    count = max(1, len(current().grid))
    if axis not in range(count):
        rule = "0, the only axis of a launch" if count == 1 else f"0 to {count - 1}"
        raise LanguageError("axis", rule, str(axis))


def program_ndim() -> int:
    """Return the axes of the brackets of the launch; 0 without brackets."""
    return len(current().grid)


@contextmanager
def no_reorder() -> Any:
    """Keep the instructions inside in program order."""
    core = current()
    core.no_reorder += 1
    try:
        yield
    finally:
        core.no_reorder -= 1


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a tensor when the kernel runs."""
    print(print_prefix, tensor.resolve().array())  # noqa: T201  printing is its purpose


globals().update(OPERATORS)
_OLD: Final = old_names("nl")


def __getattr__(name: str) -> Any:
    if name == "bool":  # the spelling before 0.6; as a plain name it would hide Python's own here
        return bool_
    if name in _OLD:
        return _OLD[name]
    return language_math.find(name)


__all__ = [
    "DType",
    "MemoryRegion",
    "NKIObject",
    "NkiBlockGrid",
    "NkiGrid",
    "NkiTensor",
    "NkiTileGrid",
    "affine_range",
    "alloc_blocks",
    "alloc_tiles",
    "bfloat16",
    "blocks",
    "bool_",
    "device_print",
    "ds",
    "dynamic_range",
    "empty_like",
    "float4_e2m1fn_x4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fn_x4",
    "float8_e5m2",
    "float8_e5m2_x4",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "fori_loop",
    "full",
    "hbm",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_hbm",
    "is_on_chip",
    "is_psum",
    "is_sbuf",
    "ndarray",
    "no_reorder",
    "num_programs",
    "ones",
    "private_hbm",
    "program_id",
    "program_ndim",
    "psum",
    "range",
    "sbuf",
    "sequential_range",
    "shared_constant",
    "shared_hbm",
    "shared_identity_matrix",
    "static_range",
    "tfloat32",
    "tile_size",
    "tiles",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "while_loop",
    "zeros",
    "zeros_like",
    *OPERATORS,
    "_TileSize",  # public in the stubs
]
