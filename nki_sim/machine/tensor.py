"""Tensors: strided views over an allocation, indexed by kernels and read by instructions.

Element (i0, .., in-1) of a view is at ``offset + sum(strides[k] * ik)`` elements of its type from
the start of the allocation, counted row-major over partitions: on chip one step of the first
axis is one partition. `Geometry` translates a view once into partitions and bytes; a pattern that
leaves its partition or its tensor is refused there.

A dynamic view carries `Dynamic`: an offset that is read when an instruction runs. Scalar offsets
become ordinary views at that moment (`NkiTensor.resolve`); vector offsets are served by the DMA
instructions only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_sim import dtypes
from nki_sim.dtypes import Array, DType
from nki_sim.errors import (
    IllegalOperand,
    LanguageError,
    NkiValidationError,
    OutOfBounds,
    UninitializedRead,
    UnknownValue,
)
from nki_sim.machine.ambient import running
from nki_sim.machine.geometry import Geometry, contiguous_strides, find_geometry, memory_range
from nki_sim.machine.memory import Allocation, MemoryRegion
from nki_sim.machine.numbers import watch_integers, watch_narrowing
from nki_sim.machine.registers import DynamicSlice, SequencerValue
from nki_sim.machine.views import Dynamic, Views
from nki_sim.trace import HBM, Trace


class NkiTensor(Views):
    """A view of an allocation.

    Args:
        shape: sizes of the axes, partition axis first on chip.
        dtype: element type.
        storage: the allocation.
        buffer: memory region.
        name: name given by the kernel.
    """

    __slots__ = ()

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        storage: Any,
        buffer: MemoryRegion | str = MemoryRegion.sbuf,
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

    def __repr__(self) -> str:
        memory = self._alloc.region.name
        return f"NkiTensor({self.label()}, {list(self.shape)}, {self.dtype}, {memory})"

    def __bool__(self) -> bool:
        """Refuse to be a condition; in NKI 0.6 a tensor is true, as it is not None.

        One element of a tensor is refused there too: it is meant for its value.
        """
        core = running()
        is_element = self.size == 1 < self._alloc.size
        if core is not None and core.nki == "0.6" and not is_element:
            return True
        raise LanguageError(
            self.label(),
            "a condition known at compile time",
            f"a tensor of shape {list(self.shape)}",
            "Python decides while the kernel is compiled, before there are values. Compare with "
            "None, make a mask with nisa.tensor_scalar, or load a register for nl.while_loop",
        )

    def __len__(self) -> int:
        return self.shape[0]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Say whether it is the same view; a comparison of its values with a number raises."""
        if isinstance(other, int | float):
            raise LanguageError(
                self.label(),
                "a number known at compile time",
                f"a tensor compared with {other}",
                "Use nisa.tensor_scalar with a comparison",
            )
        return self is other

    def __ne__(self, other: object) -> bool:
        """Undo `==`."""
        return not self == other

    def __iter__(self) -> Any:
        raise LanguageError(self.label(), "an index or a slice", "a loop over a tensor")

    def __getitem__(self, key: Any) -> NkiTensor:
        if type(key) is not tuple:
            key = (key,)
        shape = self.shape
        if len(key) < len(shape) or any(item is Ellipsis for item in key):
            key = _expand_ellipsis(self, key)
        elif len(key) > len(shape):
            raise LanguageError(self.label(), f"at most {len(shape)} indices", f"{len(key)}")
        on_chip = self._alloc.space != HBM
        offset = self.offset
        new_shape: list[int] = []
        new_strides: list[int] = []
        dynamic: tuple[SequencerValue, int, int] | None = None
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
                dynamic = _one_register(self, dynamic, item.start, stride, size - item.size)
                new_shape.append(item.size)
                new_strides.append(stride)
            elif isinstance(item, SequencerValue):
                dynamic = _one_register(self, dynamic, item, stride, size - 1)
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
            register, multiplier, limit = dynamic
            view._dynamic = Dynamic("scalar", register, multiplier, 0, offset, limit)
        return view

    def __setitem__(self, key: Any, value: Any) -> None:
        raise LanguageError(
            self.label(),
            "an instruction that writes it",
            "an assignment to t[...]",
            "Use nisa.tensor_copy or nisa.dma_copy",
        )

    def _refuse_operator(self, *others: Any) -> Any:
        raise LanguageError(
            self.label(),
            "an instruction",
            "an operator between tensors",
            "Use nisa.tensor_tensor or nisa.tensor_scalar",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_operator
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = _refuse_operator
    __lt__ = __le__ = __gt__ = __ge__ = _refuse_operator

    @property
    def data(self) -> NkiTensor:
        """Itself, as a grid of tiles has its operand there."""
        return self

    # What instructions use.

    @property
    def geometry(self) -> Geometry:
        """Where the view is. Raises OutOfBounds if it leaves its tensor."""
        found = self._geometry
        if found is None:
            try:
                found = self._geometry = find_geometry(
                    self._alloc, self.dtype, self.shape, self.strides, self.offset, self.label()
                )
            except NkiValidationError as error:
                error.about = self
                raise
        return found

    def range_id(self, trace: Trace) -> int:
        """Return the id of the memory range in the trace."""
        geometry, alloc = self._geometry or self.geometry, self._alloc
        found: int | None = alloc.views.get(geometry)
        if found is None:
            found = alloc.views[geometry] = trace.range_id(memory_range(alloc, geometry))
        return found

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
        values = self.flat()
        if self.dtype.itemsize == 4 and self.dtype.is_integer:
            watch_integers(values)
        return dtypes.to_float32(values)

    def store(self, values: Array) -> None:
        """Round `values` to the element type and write them; shapes may differ in rank."""
        array = self.array()
        if values.dtype != array.dtype:
            watch_narrowing(values, self.dtype)
        if not dtypes.is_cast(values.dtype, self.dtype):
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
        shift = value * dynamic.multiplier
        if not 0 <= shift < max(dynamic.limit, 1):
            error = OutOfBounds(
                self.label(),
                f"a scalar offset that keeps the access inside {dynamic.limit} elements",
                f"{value} times {dynamic.multiplier}",
            )
            error.about = self
            raise error
        return self._derive(self.shape, self.strides, dynamic.static + shift, static=True)


def read_index(index: Any) -> int:
    """Read a register or a one-element tensor of integers as a signed number.

    Raises:
        UninitializedRead: nobody wrote it.
        UnknownValue: `indices` mode skipped the arithmetic it depends on.
    """
    if isinstance(index, SequencerValue):
        return index.read()
    if not isinstance(index, NkiTensor):
        return int(index)
    if index.size != 1:
        error = IllegalOperand(index.label(), "one element as a scalar offset", f"{index.shape}")
        error.about = index
        raise error
    values = read_indices(index)
    return int(values[0])


def read_indices(index: NkiTensor) -> Any:
    """Read a tensor of indices as a flat int64 array; see `read_index`."""
    try:
        static = index.resolve()
        check_defined(static)
        values = static.array().reshape(-1)
        if values.dtype.kind not in "iu":
            raise IllegalOperand(index.label(), "an integer tensor as an index", str(index.dtype))
    except NkiValidationError as error:
        error.about = index
        raise
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
    """Return start, count and step of a slice, refusing what is outside.

    An empty slice is taken: published kernels give one to a core that has no rows, and an
    instruction that writes one does nothing.

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
    if not 0 <= start <= stop <= size or step < 1:
        raise OutOfBounds(
            tensor.label(),
            f"0 <= start <= end <= {size} on axis {axis} (shape {list(tensor.shape)})",
            f"[{item.start}:{item.stop}{'' if item.step is None else f':{item.step}'}]",
        )
    return start, -(-(stop - start) // step), step


def _report_cut(tensor: NkiTensor, axis: int, item: slice, size: int) -> None:
    """Keep a finding about a slice that ends beyond its axis."""
    core = running()
    if core is not None:
        text = f"{tensor.label()}: [{item.start}:{item.stop}] on axis {axis} ends at {size}"
        core.note("slice", text)


def _one_register(
    tensor: NkiTensor, found: Any, register: Any, stride: int, last: int
) -> tuple[SequencerValue, int, int]:
    """Return a register index, the elements a step of it moves, and the elements it may move."""
    if found is not None or tensor._dynamic is not None:
        raise LanguageError(tensor.label(), "one dynamic index in a view", "a second one")
    tensor._check_offset(register)
    if last < 0:
        raise OutOfBounds(tensor.label(), "a slice no longer than its axis", f"{-last} more")
    return register, stride, last * stride + 1
