"""How checkpoint tensors become a parameter, and back: small named steps that compose.

A transform works on tensors that are read in parts, so it states how a selection of its result
maps to selections of its sources. Called with tensors in memory it simply converts them.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from neuron_moe.checkpoint.lazy import (
    Indices,
    LazyTensor,
    Selection,
    everything,
    from_tensor,
    hull,
    take,
    within,
)
from neuron_moe.quantize.bf16 import FLOAT_DTYPES, is_finite
from neuron_moe.quantize.mxfp4 import (
    E8M0_NAN,
    MXFP4_GROUP_SIZE,
    check_mxfp4,
    decode_mxfp4,
    encode_mxfp4,
)

_LARGEST_SAFE_SCALE = 252  # 6 * 2^(252 - 127) is finite in bfloat16, 6 * 2^(253 - 127) is not


class Transform(ABC):
    """One invertible change of the last two axes, the same for every index of those before.

    Attributes:
        num_sources: how many tensors it takes.
        keeps_first_axis: of a tensor with three and more axes, each index can be inverted alone.
        swaps_axes: rows of the result are columns of the sources.
    """

    name: ClassVar[str]
    num_sources: int = 1
    keeps_first_axis: bool = True
    swaps_axes: bool = False

    @abstractmethod
    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Return the result, to be read in parts.

        Raises:
            ValueError: if a source has the wrong shape or dtype; the message names it.
        """

    @abstractmethod
    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the sources that make `tensor`."""

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Convert tensors that are in memory."""
        result = self.apply(*(from_tensor(t, f"source {i}") for i, t in enumerate(tensors)))
        return result.read(everything(result.shape))


class Identity(Transform):
    """Leave a float tensor as it is.

    Example:
        >>> identity(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """

    name = "identity"

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Check the dtype, change nothing."""
        (source,) = sources
        _check_float(source)
        return source

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor."""
        return (tensor,)


class WholeNumbers(Transform):
    """Leave a table of whole numbers as it is, in int64.

    Example:
        >>> whole_numbers(torch.tensor([[1, 2]], dtype=torch.int32))
        tensor([[1, 2]])
    """

    name = "whole_numbers"

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Check the dtype, and widen it."""
        (source,) = sources
        if source.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{source.name}: dtype {source.dtype} must be int32 or int64, of a table of whole"
                " numbers. Download the checkpoint again."
            )

        def read(selection: Selection) -> Tensor:
            return source.read(selection).long()

        return LazyTensor(source.name, source.shape, torch.int64, read)

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor."""
        return (tensor,)


class Transpose(Transform):
    """Swap the last two axes.

    Example:
        >>> transpose(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[1., 3.],
                [2., 4.]])
    """

    name = "transpose"
    swaps_axes = True

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Read with the last two selections swapped."""
        (source,) = sources
        _check_float(source)
        _check_rank(source, 2)

        def read(selection: Selection) -> Tensor:
            *front, rows, columns = selection
            return source.read((*front, columns, rows)).transpose(-1, -2)

        *front, rows, columns = source.shape
        shape = (*front, columns, rows)
        return LazyTensor(source.name, shape, source.dtype, read, not source.is_transposed)

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Swap them again."""
        return (tensor.transpose(-1, -2),)


class OnlyRow(Transform):
    """Take the only row of a matrix.

    Example:
        >>> only_row(torch.tensor([[1.0, 2.0]]))
        tensor([1., 2.])
    """

    name = "only_row"

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Read the row."""
        (source,) = sources
        _check_float(source)
        if len(source.shape) != 2 or source.shape[0] != 1:
            raise ValueError(
                f"{source.name} {list(source.shape)}: must have one row. The file is damaged, or of"
                " another model."
            )
        return LazyTensor(
            source.name,
            source.shape[1:],
            source.dtype,
            lambda selection: source.read((range(1), *selection))[0],
        )

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Make it a matrix."""
        return (tensor.unsqueeze(0),)


class FirstOf(Transform):
    """Take the first rows of a tensor that is filled up behind them; the way back adds zeros.

    Args:
        count: how many.
        published: how many there are in all.

    Example:
        >>> first_of(2, 3)(torch.tensor([1.0, 2.0, 0.0]))
        tensor([1., 2.])
    """

    name = "first_of"
    keeps_first_axis = False

    def __init__(self, count: int, published: int) -> None:
        self.count, self.published = count, published

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Read none of the rest."""
        (source,) = sources
        _check_float(source)
        if not source.shape or source.shape[0] < self.count:
            raise ValueError(
                f"{source.name} {list(source.shape)}: must have at least {self.count} rows."
                " The file is damaged, or of another model."
            )
        shape = (self.count, *source.shape[1:])
        return LazyTensor(source.name, shape, source.dtype, source.read, source.is_transposed)

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Fill it up."""
        filler = tensor.new_zeros(self.published - self.count, *tensor.shape[1:])
        return (torch.cat((tensor, filler)),)


class DeinterleaveGateUp(Transform):
    """Split gate and up, alternating along the last axis, into two halves, gate first.

    Example:
        >>> deinterleave_gate_up(torch.tensor([10.0, 20.0, 11.0, 21.0]))  # g0 u0 g1 u1
        tensor([10., 11., 20., 21.])
    """

    name = "deinterleave_gate_up"

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Read the stretch of columns that covers the selected ones, then pick."""
        (source,) = sources
        _check_float(source)
        _check_rank(source, 1)
        if source.shape[-1] % 2:
            raise ValueError(
                f"{source.name} {list(source.shape)}: the last axis must be even, gate and up "
                "alternating. Check intermediate_size in config.json."
            )
        half = source.shape[-1] // 2

        def read(selection: Selection) -> Tensor:
            *front, columns = selection
            if columns == range(2 * half) and not source.is_transposed:
                both = source.read(selection)
                return torch.cat((both[..., 0::2], both[..., 1::2]), dim=-1)
            # Of a transposed source these are rows: it reads them in this order at no extra cost.
            alternating = tuple(2 * c if c < half else 2 * (c - half) + 1 for c in columns)
            return source.read((*front, alternating))

        return LazyTensor(source.name, source.shape, source.dtype, read, source.is_transposed)

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Let gate and up alternate again."""
        gate, up = tensor.chunk(2, dim=-1)
        return (torch.stack((gate, up), dim=-1).flatten(-2),)


class Concat(Transform):
    """Put tensors of one shape behind each other: rows of up below those of gate.

    Args:
        num_sources: how many.
        axis: along which: -2, [..., I, H] to [..., n I, H], or 0.

    Example:
        >>> concat_gate_up(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([[1., 2.],
                [3., 4.]])
    """

    name = "concat"

    def __init__(self, num_sources: int, axis: int) -> None:
        self.num_sources, self.axis, self.keeps_first_axis = num_sources, axis, axis != 0

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Read from each source the rows selected in it."""
        first = sources[0]
        for source in sources:
            _check_float(source)
            _check_rank(source, 2)
            if source.shape != first.shape or source.dtype != first.dtype:
                raise ValueError(
                    f"{source.name} {list(source.shape)} {source.dtype}: must be"
                    f" {list(first.shape)} {first.dtype} as {first.name}. Check that both come from"
                    " one checkpoint."
                )
        place = self.axis % len(first.shape)
        size = first.shape[place]

        def read(selection: Selection) -> Tensor:
            before, rows, after = selection[:place], selection[place], selection[place + 1 :]
            chosen = [
                tuple(row - size * number for row in rows if row // size == number)
                for number in range(len(sources))
            ]
            parts = [
                source.read((*before, _as_range(own), *after))
                for source, own in zip(sources, chosen, strict=True)
                if own
            ]
            joined = torch.cat(parts, dim=place)
            read_order = sorted(range(len(rows)), key=lambda index: rows[index] // size)
            if read_order == list(range(len(rows))):
                return joined
            return joined.index_select(place, torch.tensor(read_order).argsort())

        name = " + ".join(source.name for source in sources)
        shape = (*first.shape[:place], size * len(sources), *first.shape[place + 1 :])
        return LazyTensor(name, shape, first.dtype, read)

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the parts."""
        return tensor.chunk(self.num_sources, dim=self.axis)


class Mxfp4(Transform):
    """Decode MXFP4: blocks [..., G, 16] and scales [..., G] to [..., 32 G] bfloat16.

    Every MXFP4 weight of an ordinary size is exact in bfloat16, hence in wider types too. The way
    back is exact for weights that were decoded, and rounds others.

    Example:
        >>> blocks = torch.full((1, 16), 0x22, dtype=torch.uint8)  # code 2 is 1.0
        >>> mxfp4(blocks, torch.tensor([128], dtype=torch.uint8))[:4]  # times 2^(128 - 127)
        tensor([2., 2., 2., 2.], dtype=torch.bfloat16)
    """

    name = "mxfp4"
    num_sources = 2

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Decode the groups that the selection touches."""
        blocks, scales = sources
        _check_codes(blocks, scales)

        def read(selection: Selection) -> Tensor:
            *front, columns = selection
            span = hull(columns)
            groups = range(span.start // MXFP4_GROUP_SIZE, -(-span.stop // MXFP4_GROUP_SIZE))
            powers = scales.read((*front, groups))
            largest = int(powers.max()) if powers.numel() else 0
            if largest == E8M0_NAN:
                raise ValueError(
                    f"{scales.name} holds {int((powers == E8M0_NAN).sum())} scales of {E8M0_NAN}, "
                    "which is NaN: weights must be finite. The file is damaged; download it again."
                )
            codes = blocks.read((*front, groups, range(blocks.shape[-1])))
            values = decode_mxfp4(codes, powers)
            if largest > _LARGEST_SAFE_SCALE and not is_finite(values):
                raise ValueError(
                    f"{scales.name} holds scales so large that weights become infinite: weights "
                    "must be finite. The file is damaged; download it again."
                )
            local = within(columns, groups.start * MXFP4_GROUP_SIZE)
            return take(values, (*everything(values.shape[:-1]), local))

        shape = (*scales.shape[:-1], scales.shape[-1] * MXFP4_GROUP_SIZE)
        return LazyTensor(f"{blocks.name} + {scales.name}", shape, torch.bfloat16, read)

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Encode by the OCP rule; on the meta device only shapes are made."""
        if tensor.is_meta:
            shape = (*tensor.shape[:-1], tensor.shape[-1] // MXFP4_GROUP_SIZE)
            codes = tensor.new_empty((*shape, MXFP4_GROUP_SIZE // 2), dtype=torch.uint8)
            return codes, tensor.new_empty(shape, dtype=torch.uint8)
        return encode_mxfp4(tensor)


class SplitRows(Transform):
    """Cut the rows of a matrix into equal parts, one for each expert: [E * I, H] to [E, I, H].

    Args:
        num_parts: E.

    Example:
        >>> split_rows(2)(torch.tensor([[1.0], [2.0], [3.0], [4.0]])).tolist()
        [[[1.0], [2.0]], [[3.0], [4.0]]]
    """

    name = "split_rows"
    keeps_first_axis = False

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Read the selected rows of each selected part."""
        (source,) = sources
        _check_float(source)
        if len(source.shape) != 2 or source.shape[0] % self.num_parts:
            raise ValueError(
                f"{source.name} {list(source.shape)}: must have rows for {self.num_parts} experts,"
                " the same number for each. Check the sizes in config.json."
            )
        size = source.shape[0] // self.num_parts

        def read(selection: Selection) -> Tensor:
            parts, rows, columns = selection
            read_parts = [source.read((within(rows, -part * size), columns)) for part in parts]
            return torch.stack(read_parts)

        shape = (self.num_parts, size, source.shape[1])
        return LazyTensor(source.name, shape, source.dtype, read)

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Put the parts below each other."""
        return (tensor.flatten(0, 1),)


class ScaleAlong(Transform):
    """Multiply a tensor along one axis with a vector that is published beside it, in float32.

    The way back gives an equal tensor and a vector of ones.

    Args:
        axis: 0 or -1.
        factor: of the whole, which is not published.

    Example:
        >>> scale_along(-1)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 10.0]))
        tensor([[ 1., 20.],
                [ 3., 40.]])
    """

    name = "scale_along"
    num_sources = 2
    keeps_first_axis = False

    def __init__(self, axis: int, factor: float = 1.0) -> None:
        self.axis, self.factor = axis, factor

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Read both where they meet."""
        tensor, vector = sources
        for source in sources:
            _check_float(source)
        if vector.shape != (tensor.shape[self.axis],):
            raise ValueError(
                f"{vector.name} {list(vector.shape)}: must be [{tensor.shape[self.axis]}], one for"
                f" each index of axis {self.axis} of {tensor.name}. The file is damaged, or of"
                " another model."
            )

        def read(selection: Selection) -> Tensor:
            scale = vector.read((selection[self.axis],)).double() * self.factor
            behind = (1,) * (len(selection) - 1 if self.axis == 0 else 0)
            return tensor.read(selection).float() * scale.float().view(-1, *behind)

        name = f"{tensor.name} x {vector.name}"
        return LazyTensor(name, tensor.shape, torch.float32, read, tensor.is_transposed)

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Leave the scale in the tensor."""
        return tensor, tensor.new_full((tensor.shape[self.axis],), 1 / self.factor)


class Chain(Transform):
    """Apply several transforms one after the other.

    Those before one that takes several sources are applied to each source.

    Raises:
        ValueError: more than one takes several sources.

    Example:
        >>> chain(transpose, deinterleave_gate_up)(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        tensor([[1., 3., 2., 4.]])
    """

    name = "chain"

    def __init__(self, *steps: Transform) -> None:
        self.steps = steps
        self.num_sources = max(step.num_sources for step in steps)
        self.keeps_first_axis = all(step.keeps_first_axis for step in steps)
        self.swaps_axes = sum(step.swaps_axes for step in steps) % 2 == 1
        several = [step.name for step in steps if step.num_sources > 1]
        if len(several) > 1:
            raise ValueError(
                f"{' and '.join(several)} take several sources: only one transform of a chain may."
                " Split the rule."
            )

    def apply(self, *sources: LazyTensor) -> LazyTensor:
        """Apply from first to last."""
        for step in self.steps:
            if step.num_sources > 1:
                sources = (step.apply(*sources),)
            else:
                sources = tuple(step.apply(source) for source in sources)
        (result,) = sources
        return result

    def invert(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Invert from last to first."""
        tensors: tuple[Tensor, ...] = (tensor,)
        for step in reversed(self.steps):
            tensors = tuple(source for each in tensors for source in step.invert(each))
        return tensors


identity = Identity()
whole_numbers = WholeNumbers()
transpose = Transpose()
deinterleave_gate_up = DeinterleaveGateUp()
concat_gate_up = Concat(2, -2)
concat_mixed = Concat(3, 0)  # of queries, keys and values
mxfp4 = Mxfp4()
only_row = OnlyRow()
first_of, split_rows, scale_along, chain = FirstOf, SplitRows, ScaleAlong, Chain


def invert_in_parts(transform: Transform, tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the sources that make `tensor`; temporaries are those of one expert.

    Args:
        transform: any.
        tensor: what it shall make; of three and more axes, the first is worked off one by one.
    """
    is_whole = transform is identity or not transform.keeps_first_axis
    if tensor.ndim < 3 or len(tensor) < 2 or is_whole:
        return transform.invert(tensor)
    results: tuple[Tensor, ...] = ()
    for index in range(len(tensor)):
        parts = transform.invert(tensor[index : index + 1])
        if not results:
            results = tuple(part.new_empty(len(tensor), *part.shape[1:]) for part in parts)
        for result, part in zip(results, parts, strict=True):
            result[index].copy_(part[0])
    return results


def _check_float(source: LazyTensor) -> None:
    """Refuse codes where numbers are expected."""
    if source.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{source.name}: dtype {source.dtype} must be bfloat16, float16 or float32. Codes need"
            " their scales beside them, as <name>_scale_inv or <name>_scale; convert other dtypes."
        )


def _check_rank(source: LazyTensor, least: int) -> None:
    """Refuse a tensor with too few axes."""
    if len(source.shape) < least:
        raise ValueError(
            f"{source.name} {list(source.shape)}: must have at least {least} axes. "
            "Check that the tensor is what its name says."
        )


def _check_codes(blocks: LazyTensor, scales: LazyTensor) -> None:
    """Refuse what is not an MXFP4 weight, by shape and dtype alone."""
    for source in (blocks, scales):
        if source.dtype != torch.uint8:
            raise ValueError(
                f"{source.name}: dtype {source.dtype} must be uint8 MXFP4 codes. Weights that were "
                "decoded before saving belong under the name without _blocks; export them again."
            )
    try:
        check_mxfp4(
            torch.empty(blocks.shape, dtype=torch.uint8, device="meta"),
            torch.empty(scales.shape, dtype=torch.uint8, device="meta"),
        )
    except ValueError as error:
        raise ValueError(f"{blocks.name}, {scales.name}: {error}") from error


def _as_range(indices: tuple[int, ...]) -> Indices:
    """Return neighbours in order as a range, anything else as it is."""
    whole = range(indices[0], indices[0] + len(indices))
    return whole if indices == tuple(whole) else indices
