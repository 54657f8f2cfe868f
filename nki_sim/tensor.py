"""Tensors: strided views over an allocation, and every way the language derives one from another.

Element (i0, .., in-1) of a view lies at ``offset + sum(strides[k] * ik)`` elements of the view's type
from the start of the allocation, counted row-major over partitions: on chip one step of the first
axis is one partition. `Geometry` translates a view once into partitions and bytes; a pattern that
leaves its partition or its tensor is refused there.

A dynamic view carries `Dynamic`: an offset that is read when an instruction runs. Scalar offsets
become ordinary views at that moment (`NkiTensor.resolve`); vector offsets are served by the DMA
instructions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nki_sim import dtypes
from nki_sim.dtypes import Array, DType, as_dtype
from nki_sim.errors import (
    IllegalOperand,
    LanguageError,
    OutOfBounds,
    UninitializedRead,
    UnknownValue,
)
from nki_sim.memory import Allocation, Box, MemoryRegion, Walk
from nki_sim.registers import DynamicSlice, VirtualRegister
from nki_sim.trace import HBM, MemoryRange

if TYPE_CHECKING:
    from nki_sim.trace import Trace

MAX_DIMS = 5


class Profile(NamedTuple):
    """What the price of an instruction may depend on: one per distinct kind of view."""

    space: int
    dtype: DType
    partitions: int
    elements: int
    contiguous: bool


_PROFILES: dict[Profile, Profile] = {}
_GEOMETRIES: dict[tuple[Any, ...], Geometry] = {}


class Geometry:
    """Where a view lies: partitions and bytes, and whether it touches all bytes in between.

    Attributes:
        box: rows and bytes of the grid of its allocation.
        walk: the byte walk.
        start, end: first byte and one past the last byte, in flat numbering.
        run: elements of a contiguous piece, which on chip ends with the partition.
        partitions, elements: on chip, elements per partition; in HBM one "partition".
        start_partition: first partition.
        profile: interned summary for the cost of instructions.
    """

    __slots__ = (
        "box",
        "elements",
        "end",
        "partitions",
        "profile",
        "run",
        "start",
        "start_partition",
        "walk",
    )

    def __init__(self, tensor: NkiTensor) -> None:
        alloc = tensor._alloc
        itemsize = tensor.dtype.itemsize
        shape = tensor.shape
        strides = tuple([stride * itemsize for stride in tensor.strides])
        start = tensor.offset * itemsize
        span = itemsize
        size = 1
        for count, stride in zip(shape, strides, strict=True):
            span += (count - 1) * stride
            size *= count
        self.walk = Walk(start, shape, strides, itemsize)
        self.start = start
        self.end = end = start + span
        pitch = alloc.pitch
        if start < 0 or end > alloc.size_bytes or size == 0:
            raise OutOfBounds(
                tensor.label(),
                f"a non-empty view inside the {alloc.size_bytes} bytes of {_describe(alloc)}",
                f"bytes {start} to {end} for shape {list(shape)} and strides {list(tensor.strides)}",
            )
        if alloc.space == HBM:
            self.partitions = 1
            self.elements = size
            self.start_partition = 0
            self.box = _hbm_box(start, end, shape, strides, itemsize, pitch)
        else:
            self.partitions = shape[0]
            self.elements = size // shape[0]
            self.start_partition = start // pitch
            self.box = self._chip_box(tensor, shape, strides, itemsize, pitch)
        self.run = _runs(self.walk, 0 if alloc.space == HBM else 1)[0] // itemsize
        inner = [(c, s) for c, s in zip(shape, strides, strict=True) if c > 1]
        contiguous = (
            not inner
            or inner[-1][1] == itemsize
            or (alloc.space != HBM and len(inner) == 1 and shape[0] > 1)
        )
        profile = Profile(alloc.space, tensor.dtype, self.partitions, self.elements, contiguous)
        self.profile = _PROFILES.setdefault(profile, profile)

    def _chip_box(
        self,
        tensor: NkiTensor,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        item: int,
        pitch: int,
    ) -> Box:
        if shape[0] > 1 and strides[0] != pitch:
            raise IllegalOperand(
                tensor.label(),
                f"a first stride of one partition ({pitch // item} elements)",
                f"{tensor.strides[0]}",
            )
        first = self.start % pitch
        last = first + item
        touched = item
        dense_span = item
        for count, stride in zip(shape[1:], strides[1:], strict=True):
            last += (count - 1) * stride
            if count > 1 and stride:
                touched *= count
                dense_span += (count - 1) * stride
        if last > pitch:
            raise OutOfBounds(
                tensor.label(),
                f"a pattern inside one partition ({pitch} bytes) of {_describe(tensor._alloc)}",
                f"bytes {first} to {last} of the partition, shape {list(shape)}",
            )
        row = self.start_partition
        return Box(row, row + shape[0], first, last, touched == dense_span)


def _hbm_box(
    start: int, end: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int, pitch: int
) -> Box:
    """Rows by bytes of an HBM walk; not dense where it does not fit that form."""
    row, first = divmod(start, pitch)
    rows_span = 1
    rows_touched = 1
    last = first + item
    touched = item
    for count, stride in zip(shape, strides, strict=True):
        if count == 1 or stride == 0:
            continue
        if stride % pitch == 0:
            rows_span += (count - 1) * (stride // pitch)
            rows_touched *= count
        else:
            last += (count - 1) * stride
            touched *= count
    if last <= pitch:
        dense = rows_span == rows_touched and touched == last - first
        return Box(row, row + rows_span, first, last, dense)
    flat = first == 0 and end % pitch == 0
    total = item
    for count, stride in zip(shape, strides, strict=True):
        total *= count if stride else 1
    return Box(row, -(-end // pitch), 0, pitch, flat and total == end - start)


class Dynamic(NamedTuple):
    """An offset that is known only when an instruction runs.

    `kind` is "scalar" or "vector"; `index` a register or an on-chip tensor; the start moves by
    value * `multiplier` elements; `limit` is the number of elements of the tensor that `.ap` was
    called on, `base` where that tensor starts and `static` the constant part of the offset.
    """

    kind: str
    index: Any
    multiplier: int
    base: int
    static: int
    limit: int


class NkiTensor:
    """A view of an allocation.

    Args:
        shape: sizes of the axes, partition axis first on chip.
        dtype: element type.
        storage: the allocation.
        buffer: memory region.
        name: name given by the kernel.
    """

    __slots__ = (
        "_alloc",
        "_array",
        "_dynamic",
        "_geometry",
        "buffer",
        "dtype",
        "name",
        "offset",
        "shape",
        "strides",
    )

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        storage: Any,
        buffer: MemoryRegion | str = "sbuf",
        name: str = "",
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self._alloc: Allocation = storage
        self.buffer: Any = MemoryRegion(buffer) if isinstance(buffer, str) else buffer
        self.name = name
        self.strides = contiguous_strides(shape)
        self.offset = 0
        self._geometry: Geometry | None = None
        self._array: Array | None = None
        self._dynamic: Dynamic | None = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for count in self.shape:
            size *= count
        return size

    def __repr__(self) -> str:
        return f"NkiTensor({self.label()}, {list(self.shape)}, {self.dtype}, {self._alloc.region.name})"

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        raise LanguageError(self.label(), "an index or a slice", "a loop over a tensor")

    def label(self) -> str:
        """Return the name to use in a message."""
        return self.name or self._alloc.name or "tensor"

    # Derived views. Every method shares the bytes.

    def _derive(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: DType | None = None,
    ) -> NkiTensor:
        if len(shape) > MAX_DIMS:
            raise LanguageError(
                self.label(), f"at most {MAX_DIMS} axes in a view", f"{list(shape)}"
            )
        view: NkiTensor = object.__new__(NkiTensor)
        view.shape = shape
        view.strides = strides
        view.offset = offset
        view.dtype = self.dtype if dtype is None else dtype
        view._alloc = self._alloc
        view.buffer = self.buffer
        view.name = self.name
        view._geometry = None
        view._array = None
        view._dynamic = self._dynamic
        return view

    @property
    def on_chip(self) -> bool:
        """Whether it lives in SBUF or PSUM."""
        return self._alloc.space != HBM

    def __getitem__(self, key: Any) -> NkiTensor:
        if type(key) is not tuple:
            key = (key,)
        shape = self.shape
        if Ellipsis in key or len(key) < len(shape):
            key = _expand_ellipsis(self, key)
        elif len(key) > len(shape):
            raise LanguageError(self.label(), f"at most {len(shape)} indices", f"{len(key)}")
        on_chip = self._alloc.space != HBM
        offset = self.offset
        new_shape: list[int] = []
        new_strides: list[int] = []
        dynamic: tuple[VirtualRegister, int] | None = None
        last_int: tuple[int, int] | None = None  # position, stride of the last dropped free axis
        for axis, item in enumerate(key):
            size = shape[axis]
            stride = self.strides[axis]
            if type(item) is slice:
                start, count, step = _slice(self, axis, item, size)
                offset += start * stride
                new_shape.append(count)
                new_strides.append(stride * step)
            elif isinstance(item, DynamicSlice):
                dynamic = _one_register(self, dynamic, item.start, stride)
                new_shape.append(item.size)
                new_strides.append(stride)
            elif isinstance(item, VirtualRegister):
                dynamic = _one_register(self, dynamic, item, stride)
                new_shape.append(1)
                new_strides.append(stride)
            else:
                try:
                    index = int(item.__index__())
                except (AttributeError, TypeError):
                    raise LanguageError(
                        self.label(),
                        "integers, slices or nl.ds as indices",
                        repr(item),
                        "Use .ap() with scalar_offset or vector_offset for indices in memory",
                    ) from None
                if not -size <= index < size:
                    raise OutOfBounds(
                        self.label(), f"index {axis} below {size} (shape {list(shape)})", str(index)
                    )
                offset += (index % size) * stride
                if on_chip and axis == 0:
                    new_shape.append(1)
                    new_strides.append(stride)
                else:
                    last_int = (len(new_shape), stride)
        if last_int is not None:
            short = len(new_shape) < (2 if on_chip else 1)
            if short and (not on_chip or len(shape) >= 2):
                new_shape.insert(last_int[0], 1)
                new_strides.insert(last_int[0], last_int[1])
        view = self._derive(tuple(new_shape), tuple(new_strides), offset)
        if dynamic is not None:
            register, multiplier = dynamic
            view._dynamic = Dynamic(
                "scalar", register, multiplier, 0, offset, self._alloc_elements()
            )
        return view

    def __setitem__(self, key: Any, value: Any) -> None:
        raise LanguageError(
            self.label(),
            "an instruction that writes it",
            "an assignment to t[...]",
            "Use nisa.tensor_copy or nisa.dma_copy",
        )

    def _alloc_elements(self) -> int:
        return self._alloc.size_bytes // self.dtype.itemsize

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Return the view with its axes in the order `dims`."""
        order = tuple(dims)
        if sorted(order) != list(range(self.ndim)):
            raise LanguageError(
                self.label(), f"a permutation of {self.ndim} axes", str(list(order))
            )
        self._keep_partition("permute", order[0] == 0)
        return self._derive(
            tuple(self.shape[d] for d in order), tuple(self.strides[d] for d in order), self.offset
        )

    def _keep_partition(self, what: str, keeps: bool) -> None:
        if not keeps and (self.on_chip or (self._dynamic and self._dynamic.kind == "vector")):
            raise LanguageError(
                self.label(), f"{what} to leave the partition axis alone", "axis 0 changed"
            )

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Return the view with axis `dim` of size 1 repeated `size` times."""
        dim = self._axis(dim)
        self._keep_partition("broadcast", dim != 0)
        if self.shape[dim] != 1:
            raise LanguageError(self.label(), f"size 1 on axis {dim}", str(self.shape[dim]))
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        strides = (*self.strides[:dim], 0, *self.strides[dim + 1 :])
        return self._derive(shape, strides, self.offset)

    def expand_dim(self, dim: int) -> NkiTensor:
        """Return the view with a new axis of size 1 before axis `dim`."""
        if dim < 0:
            dim += self.ndim + 1
        self._keep_partition("expand_dim", dim != 0)
        stride = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self._derive(
            (*self.shape[:dim], 1, *self.shape[dim:]),
            (*self.strides[:dim], stride, *self.strides[dim:]),
            self.offset,
        )

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Return the view without axis `dim`, which has size 1."""
        dim = self._axis(dim)
        self._keep_partition("squeeze_dim", dim != 0)
        if self.shape[dim] != 1:
            raise LanguageError(self.label(), f"size 1 on axis {dim}", str(self.shape[dim]))
        return self._derive(
            (*self.shape[:dim], *self.shape[dim + 1 :]),
            (*self.strides[:dim], *self.strides[dim + 1 :]),
            self.offset,
        )

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Return the view with axis `dim` split into `shape`, one of which may be -1."""
        dim = self._axis(dim)
        self._keep_partition("reshape_dim", dim != 0)
        parts = list(shape)
        total = self.shape[dim]
        known = 1
        for part in parts:
            known *= part if part != -1 else 1
        if (
            parts.count(-1) > 1
            or known == 0
            or total % known
            or (-1 not in parts and known != total)
        ):
            raise LanguageError(self.label(), f"sizes whose product is {total}", str(parts))
        parts = [total // known if part == -1 else part for part in parts]
        strides = []
        stride = self.strides[dim] * total
        for part in parts:
            stride //= part
            strides.append(stride)
        return self._derive(
            (*self.shape[:dim], *parts, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *strides, *self.strides[dim + 1 :]),
            self.offset,
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Return the view with axes `start_dim` to `end_dim` (inclusive) joined."""
        start_dim, end_dim = self._axis(start_dim), self._axis(end_dim)
        self._keep_partition("flatten_dims", start_dim > 0 or start_dim == end_dim)
        joined = _join(self.shape[start_dim : end_dim + 1], self.strides[start_dim : end_dim + 1])
        if joined is None:
            raise LanguageError(
                self.label(),
                f"axes {start_dim} to {end_dim} contiguous",
                f"shape {list(self.shape)}, strides {list(self.strides)}",
            )
        return self._derive(
            (*self.shape[:start_dim], joined[0], *self.shape[end_dim + 1 :]),
            (*self.strides[:start_dim], joined[1], *self.strides[end_dim + 1 :]),
            self.offset,
        )

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        """Return the view with another shape of as many elements; the layout must allow it."""
        new_shape = list(shape)
        if -1 in new_shape:
            known = 1
            for part in new_shape:
                known *= part if part != -1 else 1
            new_shape = [self.size // max(1, known) if part == -1 else part for part in new_shape]
        count = 1
        for part in new_shape:
            count *= part
        if count != self.size:
            raise LanguageError(self.label(), f"{self.size} elements", f"shape {new_shape}")
        self._keep_partition("reshape", bool(new_shape) and new_shape[0] == self.shape[0])
        strides = _reshape_strides(self.shape, self.strides, tuple(new_shape))
        if strides is None:
            raise LanguageError(
                self.label(),
                f"a layout that can be seen as {new_shape}",
                f"shape {list(self.shape)}, strides {list(self.strides)}",
            )
        return self._derive(tuple(new_shape), strides, self.offset)

    def rearrange(
        self, src_pattern: Sequence[Any], dst_pattern: Sequence[Any], fixed_sizes: Any = None
    ) -> NkiTensor:
        """Return the view rearranged: names and tuples of names, as in einops."""
        sizes: dict[str, int] = dict(fixed_sizes or {})
        view = self
        names: list[str] = []
        if len(src_pattern) != self.ndim:
            raise LanguageError(self.label(), f"{self.ndim} source axes", str(src_pattern))
        for entry in src_pattern:
            group = list(entry) if isinstance(entry, (tuple, list)) else [entry]
            if len(group) != 1:
                parts = [sizes.get(name, -1) for name in group]
                view = view.reshape_dim(len(names), parts)
            names += group
        flat = [n for e in dst_pattern for n in (e if isinstance(e, (tuple, list)) else (e,))]
        if sorted(flat) != sorted(names):
            raise LanguageError(self.label(), f"the names {names} on the right", str(flat))
        view = view.permute([names.index(name) for name in flat])
        for axis, entry in enumerate(dst_pattern):
            width = len(entry) if isinstance(entry, (tuple, list)) else 1
            if width > 1:
                view = view.flatten_dims(axis, axis + width - 1)
        return view

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Return the view of elements start, start + step, .. below `end` on axis `dim`."""
        dim = self._axis(dim)
        size = self.shape[dim]
        if not (0 <= start < end <= size and step >= 1):
            raise OutOfBounds(
                self.label(),
                f"0 <= start < end <= {size} and step >= 1 on axis {dim}",
                f"slice({start}, {end}, {step})",
            )
        count = -(-(end - start) // step)
        return self._derive(
            (*self.shape[:dim], count, *self.shape[dim + 1 :]),
            (*self.strides[:dim], self.strides[dim] * step, *self.strides[dim + 1 :]),
            self.offset + start * self.strides[dim],
        )

    def select(self, dim: int, index: Any) -> NkiTensor:
        """Return the view at one index of axis `dim`: an int, a register or a (1, 1) tensor."""
        dim = self._axis(dim)
        self._keep_partition("select", dim != 0)
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        strides = (*self.strides[:dim], *self.strides[dim + 1 :])
        if isinstance(index, (VirtualRegister, NkiTensor)):
            if self._dynamic is not None:
                raise LanguageError(self.label(), "one dynamic index in a view", "a second one")
            view = self._derive(shape, strides, self.offset)
            view._dynamic = Dynamic(
                "scalar", index, self.strides[dim], 0, self.offset, self._alloc_elements()
            )
            return view
        if not 0 <= int(index) < self.shape[dim]:
            raise OutOfBounds(self.label(), f"index below {self.shape[dim]}", str(index))
        return self._derive(shape, strides, self.offset + int(index) * self.strides[dim])

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Return the view whose row p is row `vector_offset[p]` of this HBM tensor."""
        if dim != 0 or self.on_chip:
            raise LanguageError(self.label(), "axis 0 of a tensor in HBM", f"axis {dim}")
        view = self._derive((vector_offset.size, *self.shape[1:]), self.strides, self.offset)
        view._dynamic = Dynamic(
            "vector",
            vector_offset,
            self.strides[0],
            self.offset,
            0,
            self.shape[0] * self.strides[0],
        )
        return view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """Return an access pattern on the storage of this tensor.

        Args:
            pattern: [stride, count] pairs, outermost first, in elements of `dtype`.
            offset: first element; None keeps the offset of this view.
            scalar_offset: register or (1, 1) tensor, in rows of axis `indirect_dim`.
            vector_offset: on-chip tensor with one row index per partition (DMA only).
            indirect_dim: axis of this tensor that the dynamic offset counts.
            dtype: reinterpret the bytes.

        Raises:
            LanguageError: both kinds of dynamic offset, or an explicit offset on a view that
                already has one (the guides contradict each other there).
        """
        view_dtype = self.dtype if dtype is None else as_dtype(dtype)
        shape = tuple([int(pair[1]) for pair in pattern])
        strides = tuple([int(pair[0]) for pair in pattern])
        ratio_from, ratio_to = self.dtype.itemsize, view_dtype.itemsize
        if offset is None:
            start = self.offset * ratio_from // ratio_to
        else:
            start = int(offset)
            if self.offset:
                raise LanguageError(
                    self.label(),
                    "offset=None, or .ap on a whole tensor",
                    f"offset={offset} on a view that starts at element {self.offset}",
                    "The guides disagree on whether the offsets add up",
                )
        view = self._derive(shape, strides, start, view_dtype)
        if scalar_offset is None and vector_offset is None:
            if self._dynamic is not None:
                raise LanguageError(self.label(), "a static tensor", ".ap on a dynamic view")
            return view
        if scalar_offset is not None and vector_offset is not None:
            raise LanguageError(self.label(), "scalar_offset or vector_offset", "both")
        multiplier = 1
        for count in self.shape[indirect_dim + 1 :]:
            multiplier *= count
        if ratio_from != ratio_to:
            raise LanguageError(
                self.label(),
                "a dtype of the same size beside a dynamic offset",
                f"{self.dtype} seen as {view_dtype}",
            )
        kind = "scalar" if vector_offset is None else "vector"
        index = scalar_offset if vector_offset is None else vector_offset
        if kind == "vector" and (indirect_dim != 0 or self.on_chip):
            raise LanguageError(
                self.label(),
                "indirect_dim=0 on a tensor in HBM for a vector_offset",
                f"indirect_dim={indirect_dim} in {self.buffer.name}",
            )
        if kind == "scalar" and self.on_chip and indirect_dim == 0:
            raise LanguageError(self.label(), "indirect_dim >= 1 on chip", "0")
        view._dynamic = Dynamic(kind, index, multiplier, 0, start, self.size)
        return view

    def view(self, dtype: Any) -> NkiTensor:
        """Return the same bytes as elements of another type; the last axis scales."""
        target = as_dtype(dtype)
        old, new = self.dtype.itemsize, target.itemsize
        if old == new:
            return self._derive(self.shape, self.strides, self.offset, target)
        if self._dynamic is not None:
            raise LanguageError(self.label(), "a static view", "view() of a dynamic one")
        bytes_last = self.shape[-1] * old
        if (self.strides[-1] != 1 and self.shape[-1] != 1) or bytes_last % new:
            raise LanguageError(
                self.label(),
                f"a contiguous last axis of a multiple of {new} bytes",
                f"shape {list(self.shape)}, strides {list(self.strides)} of {self.dtype}",
            )
        scaled = [stride * old for stride in self.strides[:-1]] + [self.offset * old]
        if any(value % new for value in scaled):
            raise LanguageError(self.label(), f"strides that are multiples of {new} bytes",
                                str(list(self.strides)))  # fmt: skip
        return self._derive(
            (*self.shape[:-1], bytes_last // new),
            (*[value // new for value in scaled[:-1]], 1),
            scaled[-1] // new,
            target,
        )

    reinterpret_cast = view

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Return a gather along the free axis (gen4)."""
        raise NotImplementedError(
            "NkiTensor.indirect: tensor indirection of gen4 is not simulated."
        )

    def is_contiguous(self) -> bool:
        """Return whether the elements lie side by side; on chip axis 0 is left out."""
        first = 1 if self.on_chip else 0
        expected = contiguous_strides(self.shape)
        return all(
            self.shape[k] == 1 or self.strides[k] == expected[k] for k in range(first, self.ndim)
        )

    def is_indirect(self) -> bool:
        """Return whether the view has a dynamic offset."""
        return self._dynamic is not None

    def get_pattern(self) -> list[list[int]]:
        """Return the [stride, count] pairs."""
        return [[s, c] for s, c in zip(self.strides, self.shape, strict=True)]

    def _axis(self, dim: int) -> int:
        axis = dim + self.ndim if dim < 0 else dim
        if not 0 <= axis < self.ndim:
            raise LanguageError(self.label(), f"an axis below {self.ndim}", str(dim))
        return axis

    # What instructions use.

    @property
    def geometry(self) -> Geometry:
        """Where the view lies. Raises OutOfBounds if it leaves its tensor."""
        found = self._geometry
        if found is None:
            alloc = self._alloc
            key = (alloc.space == HBM, alloc.rows, alloc.pitch, self.shape, self.strides,
                   self.offset, self.dtype, alloc.space)  # fmt: skip
            found = _GEOMETRIES.get(key)
            if found is None:
                found = _GEOMETRIES[key] = Geometry(self)
            self._geometry = found
        return found

    def range_id(self, trace: Trace) -> int:
        """Return the id of the memory range in the trace."""
        geometry = self.geometry
        alloc = self._alloc
        found = alloc.views.get(geometry)
        if found is None:
            found = alloc.views[geometry] = trace.range_id(_memory_range(alloc, geometry))
        return int(found)

    def array(self) -> Array:
        """Return the elements as a writable NumPy view of the simulated memory."""
        found = self._array
        if found is None:
            walk = self.geometry.walk
            found = self._array = np.ndarray(
                walk.shape, self.dtype.numpy, self._alloc.data, walk.offset, walk.strides
            )
        return found

    def flat(self) -> Array:
        """Return the elements as [partitions, elements per partition]; a copy where needed."""
        array = self.array()
        if array.ndim == 2:
            return array
        return array.reshape(array.shape[0], -1)

    def f32(self) -> Array:
        """Return the elements as float32 [partitions, elements per partition]."""
        return dtypes.to_float32(self.flat())

    def store(self, values: Array) -> None:
        """Round `values` to the element type and write them; shapes may differ in rank."""
        array = self.array()
        if values.dtype != array.dtype or self.dtype is dtypes.tfloat32:
            values = dtypes.convert(values, self.dtype)
        if values.shape != array.shape:
            values = values.reshape(array.shape)
        array[...] = values

    def resolve(self) -> NkiTensor:
        """Return the static view that a scalar offset means now; itself if it is static."""
        dynamic = self._dynamic
        if dynamic is None:
            return self
        if dynamic.kind != "scalar":
            raise IllegalOperand(
                self.label(),
                "a static tensor or a scalar_offset",
                "a vector_offset",
                "Only DMA instructions take one",
            )
        value = read_index(dynamic.index)
        view = self._derive(self.shape, self.strides, dynamic.static + value * dynamic.multiplier)
        view._dynamic = None
        return view


def read_index(index: Any) -> int:
    """Read a register or a one-element tensor of integers as a signed number.

    Raises:
        UninitializedRead: nobody wrote it.
        UnknownValue: `indices` mode skipped the arithmetic it depends on.
    """
    if isinstance(index, VirtualRegister):
        return index.read()
    if not isinstance(index, NkiTensor):
        return int(index)
    if index.size != 1:
        raise IllegalOperand(
            index.label(), "one element as a scalar offset", f"{list(index.shape)}"
        )
    values = read_indices(index)
    return int(values[0])


def read_indices(index: NkiTensor) -> Any:
    """Read a tensor of indices as a flat int64 array; see `read_index`."""
    index = index.resolve()
    check_defined(index)
    values = index.array().reshape(-1)
    if values.dtype.kind not in "iu":
        raise IllegalOperand(index.label(), "an integer tensor as an index", str(index.dtype))
    if values.dtype == np.uint32:
        values = values.view(np.int32) if values.flags.c_contiguous else values.astype(np.int32)
    return values.astype(np.int64)


def check_defined(tensor: NkiTensor) -> None:
    """Raise unless every element of a static view holds a known value."""
    alloc = tensor._alloc
    geometry = tensor.geometry
    if not alloc.defined.covers(geometry.box, geometry.walk):
        raise UninitializedRead(
            tensor.label(),
            "a value that was written before it is used as an address or register",
            f"unwritten elements in {tensor!r}" + "".join(f"; {p}" for p in alloc.poison[:1]),
        )
    if not alloc.known:
        raise UnknownValue(
            tensor.label(),
            "an address that depends on integers only",
            "one that depends on floating-point arithmetic, which mode='indices' leaves out",
            "Run with mode='full'",
        )


def _memory_range(alloc: Allocation, geometry: Geometry) -> MemoryRange:
    """Translate a view's geometry for the trace."""
    box = geometry.box
    run, dims = _runs(geometry.walk, skip=0 if alloc.space == HBM else 1)
    if alloc.space == HBM:
        if not dims:
            return MemoryRange(alloc.trace_id, 0, 1, geometry.start, geometry.end)
        return MemoryRange(alloc.trace_id, 0, 1, geometry.start, geometry.end, run, dims)
    if box.dense:
        return MemoryRange(alloc.trace_id, box.row_start, box.row_end, box.byte_start, box.byte_end)
    return MemoryRange(
        alloc.trace_id, box.row_start, box.row_end, box.byte_start, box.byte_end, run, dims
    )


def _runs(walk: Walk, skip: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the bytes of a contiguous run and the (stride, count) pairs around it."""
    run = walk.itemsize
    dims: list[tuple[int, int]] = []
    pairs = list(zip(walk.strides, walk.shape, strict=True))[skip:]
    for stride, count in reversed(pairs):
        if count == 1 or stride == 0:
            continue
        if not dims and stride == run:
            run *= count
        else:
            dims.insert(0, (stride, count))
    return run, tuple(dims)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _describe(alloc: Allocation) -> str:
    return f"{alloc.name or 'a tensor'} ({alloc.region.name}, shape {list(alloc.shape)}, {alloc.dtype})"


def _expand_ellipsis(tensor: NkiTensor, key: tuple[Any, ...]) -> tuple[Any, ...]:
    places = [k for k, item in enumerate(key) if item is Ellipsis]
    if len(places) > 1:
        raise LanguageError(tensor.label(), "one Ellipsis", f"{len(places)}")
    missing = tensor.ndim - (len(key) - len(places))
    if missing < 0:
        raise LanguageError(tensor.label(), f"at most {tensor.ndim} indices", f"{len(key)}")
    at = places[0] if places else len(key)
    rest = key[at + 1 :] if places else ()
    return (*key[:at], *([slice(None)] * missing), *rest)


def _slice(tensor: NkiTensor, axis: int, item: slice, size: int) -> tuple[int, int, int]:
    """Return start, count and step of a slice, refusing what lies outside.

    An end beyond the axis is cut off and reported as a finding: the compiler's front end cuts it
    too, and published kernels rely on that for a short last tile.
    """
    start, stop, step = item.start, item.stop, item.step
    start = 0 if start is None else int(start)
    stop = size if stop is None else int(stop)
    step = 1 if step is None else int(step)
    if start < 0:
        start += size
    if stop < 0:
        stop += size
    if 0 <= start < size < stop:
        _report_cut(tensor, axis, item, size)
        stop = size
    if not 0 <= start < stop <= size or step < 1:
        raise OutOfBounds(
            tensor.label(),
            f"0 <= start < end <= {size} on axis {axis} (shape {list(tensor.shape)})",
            f"[{item.start}:{item.stop}:{item.step}]",
        )
    return start, -(-(stop - start) // step), step


def _report_cut(tensor: NkiTensor, axis: int, item: slice, size: int) -> None:
    """Keep a finding about a slice that ends beyond its axis."""
    from nki_sim.machine import running

    core = running()
    if core is not None:
        text = f"{tensor.label()}: [{item.start}:{item.stop}] on axis {axis} ends at {size}"
        core.machine.find("slice", core.location(), text)


def _one_register(
    tensor: NkiTensor, found: tuple[VirtualRegister, int] | None, register: Any, stride: int
) -> tuple[VirtualRegister, int]:
    if found is not None or tensor._dynamic is not None:
        raise LanguageError(tensor.label(), "one dynamic index in a view", "a second one")
    return register, stride


def _join(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Return size and stride of axes seen as one, or None if they do not lie side by side."""
    size = 1
    stride: int | None = None
    expected = 0
    for count, step in zip(reversed(shape), reversed(strides), strict=True):
        if count == 1:
            continue
        if stride is None:
            stride = step
        elif step != expected:
            return None
        expected = step * count
        size *= count
    return size, 1 if stride is None else stride


def _reshape_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], new_shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the strides of a reshape without copy, or None if there are none."""
    old = [(c, s) for c, s in zip(shape, strides, strict=True) if c != 1]
    result = [1] * len(new_shape)
    position = 0
    k = 0
    while k < len(new_shape):
        if new_shape[k] == 1:
            k += 1
            continue
        first = k
        wanted = new_shape[k]
        have_first = position
        if position >= len(old):
            return None
        have = old[position][0]
        while wanted != have:
            if wanted < have:
                k += 1
                wanted *= new_shape[k]
            else:
                position += 1
                if position >= len(old):
                    return None
                have *= old[position][0]
        joined = _join(
            [c for c, _ in old[have_first : position + 1]],
            [s for _, s in old[have_first : position + 1]],
        )
        if joined is None:
            return None
        stride = joined[1]
        for axis in range(k, first - 1, -1):
            result[axis] = stride
            stride *= new_shape[axis]
        position += 1
        k += 1
    outer = 1
    for axis in range(len(new_shape) - 1, -1, -1):
        if new_shape[axis] == 1:
            result[axis] = outer
        else:
            outer = result[axis] * new_shape[axis]
    return tuple(result)
