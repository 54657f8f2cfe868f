"""The view methods of tensors: permute, reshape, slice, `.ap` and the others of the language.

Every method returns a view of the same bytes and costs nothing at run time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from nki_sim.dtypes import Array, DType, as_dtype, int32, int64, uint32
from nki_sim.errors import IllegalOperand, LanguageError, OutOfBounds
from nki_sim.machine.geometry import Geometry, contiguous_strides, join_axes, reshape_strides
from nki_sim.machine.memory import Allocation
from nki_sim.machine.registers import NkiScalar, SequencerValue
from nki_sim.trace import HBM


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


_MAX_DIMS = 5
_INDEX_TYPES = (int32, uint32)


class Views:
    """A strided walk over an allocation, and the methods that give other walks over it."""

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

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: DType
    buffer: Any
    name: str
    _alloc: Allocation
    _array: Array | None
    _dynamic: Dynamic | None
    _geometry: Geometry | None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def _is_named(self) -> bool:
        """Whether the kernel gave it a name."""
        return bool(self.name or self._alloc.name)

    def label(self) -> str:
        """Return the name to use in a message."""
        return self.name or self._alloc.name or "tensor"

    def _derive(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: DType | None = None,
        static: bool = False,
    ) -> Self:
        """Return another view; a dynamic offset goes along unless `static` drops it."""
        if len(shape) > _MAX_DIMS:
            raise LanguageError(
                self.label(), f"at most {_MAX_DIMS} axes in a view", f"{list(shape)}"
            )
        view = object.__new__(type(self))
        view.shape = shape
        view.strides = strides
        view.offset = offset
        view.dtype = self.dtype if dtype is None else dtype
        view._alloc = self._alloc
        view.buffer = self.buffer
        view.name = self.name
        view._geometry = None
        view._array = None
        dynamic = None if static else self._dynamic
        if dynamic is not None:
            if dynamic.kind == "vector" and (shape[:1], strides[:1]) != (
                self.shape[:1],
                self.strides[:1],
            ):
                raise LanguageError(
                    self.label(), "axis 0 whole, as a vector_offset chose its rows", f"{shape}"
                )
            dynamic = dynamic._replace(static=dynamic.static + offset - self.offset)
        view._dynamic = dynamic
        return view

    def _with_axes(
        self,
        start: int,
        end: int,
        shape: Sequence[int],
        strides: Sequence[int],
        shift: int = 0,
    ) -> Self:
        """Return the view with other axes in place of `start` to below `end`, `shift` further."""
        return self._derive(
            (*self.shape[:start], *shape, *self.shape[end:]),
            (*self.strides[:start], *strides, *self.strides[end:]),
            self.offset + shift,
        )

    @property
    def on_chip(self) -> bool:
        """Whether it lives in SBUF or PSUM."""
        return self._alloc.space != HBM

    def permute(self, dims: Sequence[int]) -> Self:
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

    def _check_not_empty(self, call: str) -> None:
        """Refuse to lay out anew what has no elements; instructions take it and do nothing."""
        if not self.size:
            raise LanguageError(self.label(), f"elements to {call}", f"shape {self.shape}")

    def _check_offset(self, index: Any) -> None:
        """Refuse a scalar of 64 bits as an offset on chip, and a tensor that is no index."""
        if isinstance(index, Views) and not (index.on_chip and index.dtype in _INDEX_TYPES):
            raise IllegalOperand(
                self.label(),
                "an integer offset in SBUF, int32 or uint32",
                f"{index.label()}, {index.dtype} in {index.buffer.name}",
            )
        if self.on_chip and isinstance(index, NkiScalar) and index.dtype == int64:
            raise LanguageError(
                self.label(), "an int32 scalar as an offset on chip", "an int64 one"
            )

    def _check_first_dynamic(self, index: Any) -> None:
        """Refuse an offset that is none, and a second one in a view."""
        self._check_offset(index)
        if self._dynamic is not None:
            raise LanguageError(self.label(), "one dynamic index in a view", "a second one")

    def _keep_partition(self, what: str, keeps: bool) -> None:
        if not keeps and (self.on_chip or (self._dynamic and self._dynamic.kind == "vector")):
            raise LanguageError(
                self.label(), f"{what} to leave the partition axis alone", "axis 0 changed"
            )

    def broadcast(self, dim: int, size: int) -> Self:
        """Return the view with axis `dim` of size 1 repeated `size` times."""
        dim = self._axis(dim)
        self._keep_partition("broadcast", dim != 0)
        if self.shape[dim] != 1:
            raise LanguageError(self.label(), f"size 1 on axis {dim}", str(self.shape[dim]))
        return self._with_axes(dim, dim + 1, (size,), (0,))

    def expand_dim(self, dim: int) -> Self:
        """Return the view with a new axis of size 1 before axis `dim`."""
        if not -self.ndim - 1 <= dim <= self.ndim:
            raise LanguageError(self.label(), f"an axis up to {self.ndim}", str(dim))
        dim %= self.ndim + 1
        self._keep_partition("expand_dim", dim != 0)
        stride = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self._with_axes(dim, dim, (1,), (stride,))

    def squeeze_dim(self, dim: int) -> Self:
        """Return the view without axis `dim`, which has size 1."""
        dim = self._axis(dim)
        self._keep_partition("squeeze_dim", dim != 0)
        if self.shape[dim] != 1:
            raise LanguageError(self.label(), f"size 1 on axis {dim}", str(self.shape[dim]))
        return self._with_axes(dim, dim + 1, (), ())

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> Self:
        """Return the view with axis `dim` split into `shape`, one of which may be -1."""
        self._check_not_empty("reshape_dim")
        dim = self._axis(dim)
        self._keep_partition("reshape_dim", dim != 0)
        parts = list(shape)
        total = self.shape[dim]
        known = math.prod(part for part in parts if part != -1)
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
        return self._with_axes(dim, dim + 1, parts, strides)

    def flatten_dims(self, start_dim: int, end_dim: int) -> Self:
        """Return the view with axes `start_dim` to `end_dim` (inclusive) joined."""
        self._check_not_empty("flatten_dims")
        start_dim, end_dim = self._axis(start_dim), self._axis(end_dim)
        self._keep_partition("flatten_dims", start_dim > 0 or start_dim == end_dim)
        joined = join_axes(
            self.shape[start_dim : end_dim + 1], self.strides[start_dim : end_dim + 1]
        )
        if joined is None:
            raise LanguageError(
                self.label(),
                f"axes {start_dim} to {end_dim} contiguous",
                f"shape {list(self.shape)}, strides {list(self.strides)}",
            )
        return self._with_axes(start_dim, end_dim + 1, joined[:1], joined[1:])

    def reshape(self, shape: Sequence[int]) -> Self:
        """Return the view with another shape of as many elements; the layout must allow it."""
        self._check_not_empty("reshape")
        new_shape = list(shape)
        if -1 in new_shape:
            known = math.prod(part for part in new_shape if part != -1)
            new_shape = [self.size // max(1, known) if part == -1 else part for part in new_shape]
        if math.prod(new_shape) != self.size:
            raise LanguageError(self.label(), f"{self.size} elements", f"shape {new_shape}")
        self._keep_partition("reshape", bool(new_shape) and new_shape[0] == self.shape[0])
        strides = reshape_strides(self.shape, self.strides, tuple(new_shape))
        if strides is None:
            raise LanguageError(
                self.label(),
                f"a layout that can be seen as {new_shape}",
                f"shape {list(self.shape)}, strides {list(self.strides)}",
            )
        return self._derive(tuple(new_shape), strides, self.offset)

    def rearrange(
        self, src_pattern: Sequence[Any], dst_pattern: Sequence[Any], fixed_sizes: Any = None
    ) -> Self:
        """Return the view rearranged: names and tuples of names, as in einops."""
        self._check_not_empty("rearrange")
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
        if sorted(flat, key=str) != sorted(names, key=str):
            raise LanguageError(self.label(), f"the names {names} on the right", str(flat))
        view = view.permute([names.index(name) for name in flat])
        for axis, entry in enumerate(dst_pattern):
            width = len(entry) if isinstance(entry, (tuple, list)) else 1
            if width > 1:
                view = view.flatten_dims(axis, axis + width - 1)
        return view

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> Self:
        """Return the view of elements start, start + step, .. below `end` on axis `dim`."""
        dim = self._axis(dim)
        size = self.shape[dim]
        if not (0 <= start < end <= size and step >= 1):
            raise OutOfBounds(
                self.label(),
                f"0 <= start < end <= {size} and step >= 1 on axis {dim}",
                f"slice({start}, {end}, {step})",
            )
        count, stride = -(-(end - start) // step), self.strides[dim]
        return self._with_axes(dim, dim + 1, (count,), (stride * step,), start * stride)

    def select(self, dim: int, index: Any) -> Self:
        """Return the view at one index of axis `dim`: an int, a register or a (1, 1) tensor."""
        dim = self._axis(dim)
        self._keep_partition("select", dim != 0)
        stride = self.strides[dim]
        if isinstance(index, (SequencerValue, Views)):
            self._check_first_dynamic(index)
            view = self._with_axes(dim, dim + 1, (), ())
            limit = self.shape[dim] * stride
            view._dynamic = Dynamic("scalar", index, stride, 0, self.offset, limit)
            return view
        if not 0 <= int(index) < self.shape[dim]:
            raise OutOfBounds(self.label(), f"index below {self.shape[dim]}", str(index))
        return self._with_axes(dim, dim + 1, (), (), int(index) * stride)

    def vector_select(self, dim: int, vector_offset: Views) -> Self:
        """Return the view whose row p is row `vector_offset[p]` of this HBM tensor."""
        if dim != 0 or self.on_chip:
            raise LanguageError(self.label(), "axis 0 of a tensor in HBM", f"axis {dim}")
        self._check_first_dynamic(vector_offset)
        view = self._derive((vector_offset.size, *self.shape[1:]), self.strides, self.offset)
        stride = self.strides[0]
        limit = self.shape[0] * stride
        view._dynamic = Dynamic("vector", vector_offset, stride, self.offset, 0, limit)
        return view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> Self:
        """Return an access pattern on the storage of this tensor.

        Args:
            pattern: [stride, count] pairs, outermost first, in elements of `dtype`. On chip the
                first stride is the next partition: a row of the whole tensor, or of this slice of
                it, as published kernels (mlp_tkg) count it.
            offset: first element; None keeps the offset of this view. On chip that of a slice
                counts from the slice's first element, by its rows.
            scalar_offset: register, scalar or (1, 1) tensor, in rows of axis `indirect_dim`.
            vector_offset: on-chip tensor with one row index per partition (DMA only).
            indirect_dim: axis of this tensor that the dynamic offset counts.
            dtype: reinterpret the bytes.

        Raises:
            LanguageError: both kinds of dynamic offset, or in HBM an explicit offset on a view
                that already has one (the guides contradict each other there).
        """
        self._check_not_empty("ap")
        view_dtype = self.dtype if dtype is None else as_dtype(dtype)
        shape = tuple([int(pair[1]) for pair in pattern])
        strides = tuple([int(pair[0]) for pair in pattern])
        ratio_from, ratio_to = self.dtype.itemsize, view_dtype.itemsize
        row = math.prod(self.shape[1:]) * ratio_from
        if self.on_chip and len(shape) > 1 and shape[0] > 1 and strides[0] * ratio_to == row:
            strides = (self.strides[0] * ratio_from // ratio_to, *strides[1:])
        if offset is None:
            start = self.offset * ratio_from // ratio_to
        else:
            start = int(offset)
            if self.offset and self.on_chip:
                partitions, rest = divmod(start * ratio_to, row)
                first = (self.offset + partitions * self.strides[0]) * ratio_from
                start = (first + rest) // ratio_to
            elif self.offset:
                raise LanguageError(
                    self.label(),
                    "offset=None, or .ap on a whole tensor",
                    f"offset={offset} on a view that starts at element {self.offset}",
                    "The guides disagree on whether the offsets add up",
                )
        if self._dynamic is not None:
            raise LanguageError(self.label(), "a static tensor", ".ap on a dynamic view")
        view = self._derive(shape, strides, start, view_dtype)
        if scalar_offset is None and vector_offset is None:
            return view
        if scalar_offset is not None and vector_offset is not None:
            raise LanguageError(self.label(), "scalar_offset or vector_offset", "both")
        multiplier = math.prod(self.shape[indirect_dim + 1 :])
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
        self._check_offset(index)
        view._dynamic = Dynamic(kind, index, multiplier, 0, start, self.size)
        return view

    def view(self, dtype: Any) -> Self:
        """Return the same bytes as elements of another type; the last axis scales."""
        self._check_not_empty("view")
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
            raise LanguageError(
                self.label(), f"strides that are multiples of {new} bytes", str(list(self.strides))
            )
        return self._derive(
            (*self.shape[:-1], bytes_last // new),
            (*[value // new for value in scaled[:-1]], 1),
            scaled[-1] // new,
            target,
        )

    reinterpret_cast = view

    def indirect(self, index: Views, num_elem: int | None = None) -> Self:
        """Return a gather along the free axis (gen4)."""
        raise NotImplementedError(
            "NkiTensor.indirect: tensor indirection of gen4 is not simulated."
        )

    def is_contiguous(self) -> bool:
        """Return whether the elements are side by side; on chip axis 0 is left out."""
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
