"""`nki.language` helpers that compute: thin wrappers that allocate a result and issue instructions.

Each returns a new tile in SBUF (PSUM for `transpose` and `matmul`), with the type of its inputs
unless `dtype` says otherwise; of two types the wider float wins. Operands have the same shape:
there is no broadcasting, but a second operand may be a number. `language.py` shows these names.

Not implemented, because no instruction does it: `divide`, `fmod`, `mod`; and `dropout`, because how
the hardware does it is not documented. Random numbers are those of `isa/randoms.py`.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from nki_sim import isa
from nki_sim.dtypes import DType, as_dtype, bool_, float32, int32, uint8, uint32
from nki_sim.errors import IllegalOperand, LanguageError
from nki_sim.isa.operators import OPERATORS, Operator, operator
from nki_sim.machine import MemoryRegion, NkiTensor, current

NOT_IMPLEMENTED: Final = {
    "divide": "no engine divides. Use nl.reciprocal and nl.multiply.",
    "fmod": "no engine has a remainder. Use floor and nl.multiply.",
    "mod": "no engine has a remainder. Use floor and nl.multiply.",
    "dropout": "how the hardware makes a mask of random bits is not documented.",
}
_ADD: Final = operator("add")
_SUBTRACT: Final = operator("subtract")
_MULTIPLY: Final = operator("multiply")
_MAXIMUM: Final = operator("maximum")


def _tile(shape: Sequence[int], dtype: DType, region: MemoryRegion | None = None) -> NkiTensor:
    return current().allocate(shape, dtype, region or MemoryRegion.sbuf)


def _kind(dtype: Any, *inputs: Any) -> DType:
    """The type of a result: as asked, else that of the widest input, floats before integers."""
    if dtype is not None:
        return as_dtype(dtype)
    types = [value.dtype for value in inputs if isinstance(value, NkiTensor)]
    return builtins.max(types, key=lambda kind: (kind.is_float, kind.itemsize))


# Operators called as functions.


def _apply(code: Operator, *args: Any, dtype: Any = None) -> NkiTensor:
    """Run an operator of the language on tiles: what ``nl.add(x, y)`` does inside a kernel.

    Raises:
        NotImplementedError: no instruction does it.
        IllegalOperand: the operands do not fit it.
    """
    name = code.name
    if name in NOT_IMPLEMENTED:
        raise NotImplementedError(f"nki.language.{name}: {NOT_IMPLEMENTED[name]}")
    if name in _COMPOSED:
        return _COMPOSED[name](*args, dtype=dtype)
    if len(args) != code.arity:
        raise TypeError(f"nl.{name}: takes {code.arity} operands, {len(args)} were given.")
    if code.arity == 2:
        return _binary(code, args[0], args[1], dtype)
    return _unary(code, args[0], dtype)


def _binary(code: Operator, x: Any, y: Any, dtype: Any) -> NkiTensor:
    if code.alu is None:
        raise NotImplementedError(f"nki.language.{code.name}: no engine has this operation.")
    if not isinstance(x, NkiTensor) and not isinstance(y, NkiTensor):
        raise IllegalOperand("x", "a tile in x or y", f"{x!r} and {y!r}")
    truth = code.alu.kind in ("comparison", "logical")
    kind = bool_ if truth and dtype is None else _kind(dtype, x, y)
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        if x.shape != y.shape:
            raise IllegalOperand("y", f"shape {list(x.shape)} like x", f"{list(y.shape)}")
        result = _tile(x.shape, kind)
        isa.tensor_tensor(result, x, y, code)
    elif isinstance(x, NkiTensor):
        result = _tile(x.shape, kind)
        isa.tensor_scalar(result, x, code, y)
    else:
        result = _tile(y.shape, kind)
        isa.tensor_scalar(result, y, code, x, reverse0=True)
    return result


def _unary(code: Operator, x: NkiTensor, dtype: Any) -> NkiTensor:
    result = _tile(x.shape, _kind(dtype, x))
    if code.name == "copy":
        isa.tensor_copy(result, x)
    elif code.name == "reciprocal":
        isa.reciprocal(result, x)
    elif code.activation is not None and code.name != "rsqrt":
        isa.activation(result, code, x)
    elif code.alu is not None:
        isa.tensor_scalar(result, x, code, None)
    else:
        raise NotImplementedError(f"nki.language.{code.name}: no engine has this operation.")
    return result


def _negative(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    result = _tile(x.shape, _kind(dtype, x))
    isa.tensor_scalar(result, x, _MULTIPLY, -1.0)
    return result


def _logical_not(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    result = _tile(x.shape, bool_ if dtype is None else as_dtype(dtype))
    isa.tensor_scalar(result, x, operator("equal"), 0.0)
    return result


def _cos(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """cos(x) = sin(pi / 2 - |x|), which keeps the argument of the sine in its range."""
    magnitude = _tile(x.shape, float32)
    isa.tensor_scalar(magnitude, x, operator("abs"), None)
    quarter = _constant_column(x, math.pi / 2)
    result = _tile(x.shape, _kind(dtype, x))
    isa.activation(result, operator("sin"), magnitude, bias=quarter, scale=-1.0)
    return result


def _tan(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    sine = _tile(x.shape, float32)
    isa.activation(sine, operator("sin"), x)
    inverse = _tile(x.shape, float32)
    isa.reciprocal(inverse, _cos(x, float32))
    result = _tile(x.shape, _kind(dtype, x))
    isa.tensor_tensor(result, sine, inverse, _MULTIPLY)
    return result


def _floor(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Round through int32 and step down where that went up; magnitudes below 2^31."""
    return _round(x, dtype, correction=operator("greater"), step=_SUBTRACT)


def _ceil(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _round(x, dtype, correction=operator("less"), step=_ADD)


def _round(x: NkiTensor, dtype: Any, *, correction: Operator, step: Operator) -> NkiTensor:
    nearest = _tile(x.shape, int32)
    isa.tensor_copy(nearest, x)
    wrong = _tile(x.shape, float32)
    isa.tensor_tensor(wrong, nearest, x, correction)
    result = _tile(x.shape, _kind(dtype, x))
    isa.tensor_tensor(result, nearest, wrong, step)
    return result


def _trunc(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    magnitude = _tile(x.shape, float32)
    isa.tensor_scalar(magnitude, x, operator("abs"), None)
    sign = _tile(x.shape, float32)
    isa.activation(sign, operator("sign"), x)
    result = _tile(x.shape, _kind(dtype, x))
    isa.tensor_tensor(result, _floor(magnitude), sign, _MULTIPLY)
    return result


_COMPOSED: Final[dict[str, Callable[..., NkiTensor]]] = {
    "negative": _negative,
    "logical_not": _logical_not,
    "cos": _cos,
    "tan": _tan,
    "floor": _floor,
    "ceil": _ceil,
    "trunc": _trunc,
}


def _constant_column(x: NkiTensor, value: float) -> NkiTensor:
    column = _tile((x.shape[0], 1), float32)
    isa.memset(column, value)
    return column


# Moving data.


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Copy a tensor of HBM into a new tile."""
    result = _tile(src.shape, _kind(dtype, src))
    isa.dma_copy(result, src)
    return result


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy a tile into a tensor of HBM."""
    isa.dma_copy(dst, value)


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Load a 2-D tensor of HBM transposed."""
    if src.ndim != 2:
        raise LanguageError("src", "2 axes", str(src.ndim))
    transposed = _tile((src.shape[1], src.shape[0]), src.dtype)
    isa.dma_transpose(transposed, src)
    if dtype is None or as_dtype(dtype) is src.dtype:
        return transposed
    result = _tile(transposed.shape, as_dtype(dtype))
    isa.tensor_copy(result, transposed)
    return result


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """View a tile with a new axis of size 1."""
    return x.expand_dim(axis)


def broadcast_to(x: NkiTensor, shape: Sequence[int], dtype: Any = None) -> NkiTensor:
    """Repeat axes of size 1 up to `shape`, in a new tile; one partition may become many."""
    shape, kind = tuple(shape), _kind(dtype, x)
    if x.shape == shape and x.dtype is kind:
        return x
    if len(shape) != x.ndim:
        raise LanguageError("shape", f"{x.ndim} axes like x {list(x.shape)}", str(list(shape)))
    view = x
    for axis, (have, want) in enumerate(zip(x.shape[1:], shape[1:], strict=True), 1):
        if have != want:
            view = view.broadcast(axis, want)
    one_row = x.shape[0] == 1 != shape[0]
    result = _tile((1 if one_row else shape[0], *shape[1:]), kind)
    isa.tensor_copy(result, view)
    return _repeat_row(result, shape[0]) if one_row else result


def _repeat_row(row: NkiTensor, partitions: int) -> NkiTensor:
    """Copy one partition to many: a shuffle reaches 32 partitions."""
    result = _tile((partitions, *row.shape[1:]), row.dtype)
    for start in range(0, partitions, 32):
        isa.nc_stream_shuffle(result[start : builtins.min(start + 32, partitions)], row, [0] * 32)
    return result


def gather_flattened(
    data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None
) -> NkiTensor:
    """Gather elements of each partition by flat positions, shaped like `indices`."""
    if axis != 0:
        raise LanguageError("axis", "0", str(axis))
    gathered = _tile(indices.shape, data.dtype)
    isa.nc_n_gather(gathered, data, indices)
    if dtype is None or as_dtype(dtype) is data.dtype:
        return gathered
    result = _tile(indices.shape, as_dtype(dtype))
    isa.tensor_copy(result, gathered)
    return result


def where(condition: NkiTensor, x: NkiTensor, y: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Take x where the condition is nonzero, y elsewhere."""
    kind = _kind(dtype, x, y)
    predicate = condition
    if condition.dtype.kind != "u":
        predicate = _tile(condition.shape, uint8)
        isa.tensor_scalar(predicate, condition, operator("not_equal"), 0.0)
    result, chosen = _tile(y.shape, kind), x
    isa.tensor_copy(result, y)
    if x.dtype is not kind:
        chosen = _tile(x.shape, kind)
        isa.tensor_copy(chosen, x)
    isa.tensor_copy_predicated(result, chosen, predicate)
    return result


# Tensor engine.


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Exchange partition and free axis; the result is in PSUM."""
    if dtype is not None and as_dtype(dtype) is not x.dtype:
        raise LanguageError("dtype", f"{x.dtype}, as a transpose keeps it", str(dtype))
    result = _tile((x.size // x.shape[0], x.shape[0]), x.dtype, MemoryRegion.psum)
    isa.nc_transpose(result, x)
    return result


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """Multiply x transposed by y; the float32 result is in PSUM."""
    if not transpose_x:
        raise LanguageError("transpose_x", "True: x has the contraction on its partitions", "False")
    result = _tile((x.shape[1], y.shape[1]), float32, MemoryRegion.psum)
    isa.nc_matmul(result, x, y)
    return result


# Reductions over the last free axes.


def _free_axes(x: NkiTensor, axis: Any) -> list[int]:
    given = [axis] if isinstance(axis, int) else list(axis)
    axes = sorted(a + x.ndim if a < 0 else a for a in given)
    if not axes or axes != list(range(x.ndim - len(axes), x.ndim)) or axes[0] < 1:
        raise LanguageError("axis", f"the last free axes, ending at {x.ndim - 1}", str(axis))
    return axes


def _reduced_shape(x: NkiTensor, axis: Any, keepdims: bool) -> list[int]:
    axes = _free_axes(x, axis)
    if keepdims:
        return [1 if position in axes else size for position, size in enumerate(x.shape)]
    kept = [size for position, size in enumerate(x.shape) if position not in axes]
    return kept if len(kept) > 1 else [*kept, 1]


def _reduce(code: Operator, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool) -> NkiTensor:
    result = _tile(_reduced_shape(x, axis, keepdims), _kind(dtype, x))
    isa.tensor_reduce(result, code, x, tuple(_free_axes(x, axis)))
    return result


def sum(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Add up the last free axes."""
    return _reduce(_ADD, x, axis, dtype, keepdims)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Multiply the last free axes."""
    return _reduce(_MULTIPLY, x, axis, dtype, keepdims)


def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Take the largest element of the last free axes."""
    return _reduce(_MAXIMUM, x, axis, dtype, keepdims)


def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Take the smallest element of the last free axes."""
    return _reduce(operator("minimum"), x, axis, dtype, keepdims)


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """Test whether all elements of the last free axes are nonzero."""
    return _reduce(operator("logical_and"), x, axis, dtype or bool_, False)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Average the last free axes."""
    count = math.prod(x.shape[a] for a in _free_axes(x, axis))
    total = _reduce(_ADD, x, axis, float32, keepdims)
    result = _tile(total.shape, _kind(dtype, x))
    isa.tensor_scalar(result, total, _MULTIPLY, 1.0 / count)
    return result


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Compute the population variance of all free axes."""
    axes = _free_axes(x, axis)
    if axes != list(range(1, x.ndim)):
        raise LanguageError("axis", f"all free axes, {list(range(1, x.ndim))}", str(axis))
    average = mean(x, axis, float32)
    centred = _tile(x.shape, float32)
    isa.tensor_scalar(centred, x, _SUBTRACT, average)
    squares = _tile(x.shape, float32)
    isa.activation(squares, operator("square"), centred)
    return mean(squares, axis, _kind(dtype, x), keepdims)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Compute the softmax over all free axes of each partition."""
    if _free_axes(x, axis) != list(range(1, x.ndim)):
        raise LanguageError("axis", f"all free axes, {list(range(1, x.ndim))}", str(axis))
    column = (x.shape[0], 1)
    largest, total = _tile(column, float32), _tile(column, float32)
    isa.tensor_reduce(largest, _MAXIMUM, x, tuple(range(1, x.ndim)), negate=True)
    powers = _tile(x.shape, float32)
    isa.activation_reduce(powers, operator("exp"), x, _ADD, total, bias=largest)
    isa.reciprocal(total, total)
    result = _tile(x.shape, _kind(dtype, x))
    isa.tensor_scalar(result, powers, _MULTIPLY, total)
    return result


def rms_norm(
    x: NkiTensor,
    w: NkiTensor | None,
    axis: Any,
    n: int,
    epsilon: float = 1e-06,
    dtype: Any = None,
    compute_dtype: Any = None,
) -> NkiTensor:
    """Compute ``x / sqrt(sum(x^2) / n + epsilon) * w`` over the free axes; w has the shape of x."""
    if _free_axes(x, axis) != list(range(1, x.ndim)):
        raise LanguageError("axis", f"all free axes, {list(range(1, x.ndim))}", str(axis))
    kind = as_dtype(compute_dtype) if compute_dtype is not None else float32
    squares, total = _tile(x.shape, kind), _tile((x.shape[0], 1), float32)
    isa.activation_reduce(squares, operator("square"), x, _ADD, total)
    isa.tensor_scalar(total, total, _MULTIPLY, 1.0 / n, op1=_ADD, operand1=epsilon)
    isa.activation(total, operator("rsqrt"), total)
    result = _tile(x.shape, _kind(dtype, x))
    if w is None:
        isa.tensor_scalar(result, x, _MULTIPLY, total)
    else:
        isa.scalar_tensor_tensor(result, x, _MULTIPLY, total, _MULTIPLY, w)
    return result


# Random numbers.


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """Not implemented: how the hardware makes a mask of random bits is not documented."""
    raise NotImplementedError(f"nki.language.dropout: {NOT_IMPLEMENTED['dropout']}")


def rand(shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: str = "") -> NkiTensor:
    """Create a tile of uniform numbers from 0 to below 1."""
    words = _tile(shape, uint32)
    isa.rng(words)
    isa.tensor_scalar(words, words, operator("right_shift"), 8)
    result = current().allocate(shape, as_dtype(dtype), MemoryRegion(buffer), name)
    isa.tensor_scalar(result, words, _MULTIPLY, 2.0**-24)
    return result


def random_seed(seed: int | NkiTensor) -> None:
    """Seed the generators of the Vector engine with a number or a (1, 1) tile."""
    if isinstance(seed, NkiTensor):
        isa.set_rng_seed(seed)
        return
    tile = _tile((1, 1), uint32)
    isa.memset(tile, seed)
    isa.set_rng_seed(tile)


_HELPERS: Final = (
    all,
    broadcast_to,
    dropout,
    expand_dims,
    gather_flattened,
    load,
    load_transpose2d,
    matmul,
    max,
    mean,
    min,
    prod,
    rand,
    random_seed,
    rms_norm,
    softmax,
    store,
    sum,
    transpose,
    var,
    where,
)
_BY_NAME: Final[dict[str, Callable[..., Any]]] = {helper.__name__: helper for helper in _HELPERS}


def find(name: str) -> Callable[..., Any]:
    """Return the helper called `name`, for `nki.language`.

    Raises:
        AttributeError: there is no such name.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise AttributeError(f"module 'nki.language' has no attribute {name!r}") from None


for _code in OPERATORS.values():
    _code.compute = functools.partial(_apply, _code)
