"""Which part of a dense weight a rank holds: one table for models, loaders and sums of memory.

| weights | cut |
| --- | --- |
| queries, sinks, what attention gives | by query heads |
| keys and values | by key/value heads, repeated where there are more ranks than heads |
| recurrent layers | by value heads, with their key heads, repeated as above |
| embedding, vocabulary projection, dense MLPs, shared experts | evenly |
| norms, routers, biases added to a sum over ranks, latents that all heads share | not |

Outputs (`OUTPUTS`) are cut by columns, the rest by rows. Heads and rows that do not divide are
filled up; what fills is zero and changes nothing.

Letters: Q query heads, J key/value heads, n ranks.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from neuron_moe.checkpoint.lazy import Indices, Selection, runs
from neuron_moe.errors import check_positive_int

if TYPE_CHECKING:
    from neuron_moe.models.delta_net import DeltaNetSizes

OUTPUTS = ("o_proj", "out_proj", "down_proj")  # whose results are summed over ranks
_QUERIES = {"q_proj", "q_gate_proj", "q_b_proj", "kv_b_proj", "o_proj", "sinks"}
_KEYS = {"k_proj", "v_proj"}
_JOINT = {"qkv_proj"}  # queries, keys and values in one matrix
# Of recurrent layers: queries, keys and values; with gates, by key head; gates and outputs; rates.
_MIXED, _FUSED = {"in_proj_qkv", "conv_weight"}, {"in_proj_qkvz"}
_VALUES, _RATES = {"in_proj_z", "out_proj"}, {"in_proj_b", "in_proj_a", "dt_bias", "A_log"}
_FUSED_RATES = {"in_proj_ba"}
_RECURRENT = _MIXED | _FUSED | _VALUES | _RATES | _FUSED_RATES
_PAIR = {"gate_up_proj"}  # gate, then up


class Part(NamedTuple):
    """What a rank holds of a weight.

    Attributes:
        axis: that is cut.
        indices: along it.
        real: so many of them; the rest fills up and is zero.
    """

    axis: int
    indices: Indices
    real: int

    def selection(self, shape: Sequence[int]) -> Selection:
        """Return the indices of every axis, of a weight of this whole shape."""
        found: list[Indices] = [range(size) for size in shape]
        found[self.axis] = self.indices
        return tuple(found)

    def clear(self, held: Tensor) -> Tensor:
        """Return what was read by these indices with zeros where it fills up, written in place."""
        filler = len(self.indices) - self.real
        if filler:
            held.narrow(self.axis, self.real, filler).zero_()
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSplit:
    """One of the ranks over which all but the routed experts is cut.

    Args:
        size: n.
        heads: Q of the whole model.
        kv_heads: J of the whole model; the fewest where layers differ.
        is_even: all layers have as many; else ranks cannot share a head.
        rank: this one.
        recurrent: sizes of recurrent layers, where there are any.
    """

    size: int
    heads: int
    kv_heads: int
    rank: int = 0
    is_even: bool = True
    recurrent: "DeltaNetSizes | None" = None

    def __post_init__(self) -> None:
        for name in ("size", "heads", "kv_heads"):
            check_positive_int(name, getattr(self, name))

    def check(self) -> None:
        """Raise ValueError unless every rank has whole key/value heads, or key heads."""
        counts = {"num_key_value_heads": self.kv_heads}
        if self.recurrent is not None:
            counts["linear_num_key_heads"] = self.recurrent.num_key_heads

        def fits(size: int, heads: int) -> bool:
            return max(size, heads) % min(size, heads) == 0 and (self.is_even or size <= heads)

        for name, heads in counts.items():
            if not fits(self.size, heads):
                sizes = [n for n in range(1, self.size) if all(fits(n, m) for m in counts.values())]
                rule = ", or be a multiple of it" if self.is_even else " of every layer"
                raise ValueError(
                    f"tensor_parallel_size={self.size}: must divide {name}={heads}{rule}. Use"
                    f" {sizes[-1]}."
                )

    @property
    def own_kv_heads(self) -> range:
        """The key/value heads of this rank; ranks beside each other have the same one."""
        count = ceil(self.kv_heads / self.size)
        first = self.rank * self.kv_heads // self.size
        return range(first, first + count)

    @property
    def own_heads(self) -> Part:
        """The query heads of this rank, those of its key/value heads."""
        group, copies = self.heads // self.kv_heads, max(1, self.size // self.kv_heads)
        keys = self.own_kv_heads
        if copies == 1:
            return Part(0, range(keys.start * group, keys.stop * group), len(keys) * group)
        part = _evenly(group, self.rank % copies, copies)
        return part._replace(indices=_shift(part.indices, keys.start * group))

    def shape(
        self, name: str, shape: Sequence[int], whole: Set[str] = frozenset()
    ) -> tuple[int, ...]:
        """Return the shape that any rank holds.

        Args:
            name: of the parameter, with the modules above it.
            shape: of the whole parameter.
            whole: modules whose weights are not cut.
        """
        found = list(shape)
        if is_cut(name, whole):
            axis = _axis(name)
            queries, keys = ceil(self.heads / self.size), ceil(self.kv_heads / self.size)
            kinds = set(name.split("."))
            if self.recurrent is not None and kinds & _RECURRENT:
                before, after = (
                    (sum(each.parts), each.parts[-1], each.num_value_heads)
                    for each in (self.recurrent, self.recurrent.shared_by(self.size))
                )
                here = after[0] if kinds & (_MIXED | _FUSED) else 0
                here += after[1] if kinds & (_FUSED | _VALUES) else 0
                here += (
                    after[2] * shape[axis] // before[2] if kinds & (_RATES | _FUSED_RATES) else 0
                )
                found[axis] = here
            elif kinds & _QUERIES:
                found[axis] = shape[axis] // self.heads * queries
            elif kinds & _KEYS:
                found[axis] = shape[axis] // self.kv_heads * keys
            elif kinds & _JOINT:
                size = shape[axis] // (self.heads + 2 * self.kv_heads)
                found[axis] = size * (queries + 2 * keys)
            elif kinds & _PAIR:
                found[axis] = 2 * ceil(shape[axis] // 2 / self.size)
            else:
                found[axis] = ceil(shape[axis] / self.size)
        return tuple(found)

    def part(self, name: str, shape: Sequence[int]) -> Part | None:
        """Return what this rank holds of a parameter, None for all of it; see `shape`."""
        if self.size == 1 or not is_cut(name):
            return None
        axis, kinds = _axis(name), set(name.split("."))
        total = shape[axis]
        queries = self.own_heads
        if self.recurrent is not None and kinds & _RECURRENT:
            return self._recurrent_part(kinds, axis, self.recurrent)
        if kinds & _QUERIES:
            width = total // self.heads
            indices = _spread(queries.indices, width)
            return Part(axis, indices, queries.real * width)
        if kinds & _KEYS:
            indices = _spread(self.own_kv_heads, total // self.kv_heads)
            return Part(axis, indices, len(indices))
        if kinds & _JOINT:
            keys, values = (
                _shift(self.own_kv_heads, self.heads + count * self.kv_heads) for count in (0, 1)
            )
            width = total // (self.heads + 2 * self.kv_heads)
            indices = _spread((*queries.indices, *keys, *values), width)
            return Part(axis, indices, len(indices))  # what fills up meets zeros of the output
        if kinds & _PAIR:
            half = _evenly(total // 2, self.rank, self.size).indices
            indices = _settle((*half, *_shift(half, total // 2)))
            return Part(axis, indices, len(indices))
        return _evenly(total, self.rank, self.size)._replace(axis=axis)

    def _recurrent_part(self, kinds: Set[str], axis: int, sizes: "DeltaNetSizes") -> Part:
        """Return what this rank holds of a recurrent layer: value heads beside their key heads."""
        split = DenseSplit(
            size=self.size,
            rank=self.rank,
            heads=sizes.num_value_heads,
            kv_heads=sizes.num_key_heads,
        )
        keys, values = split.own_kv_heads, split.own_heads
        group = sizes.num_value_heads // sizes.num_key_heads
        value_rows = _spread(values.indices, sizes.value_size)
        key_rows = _spread(keys, sizes.key_size)
        indices: Indices
        if kinds & _VALUES:  # what fills up meets zeros of the output
            return Part(axis, value_rows, values.real * sizes.value_size)
        if kinds & _MIXED:
            starts = 0, sizes.parts[0], 2 * sizes.parts[0]
            rows = zip(starts, (key_rows, key_rows, value_rows), strict=True)
            indices = _settle(row + start for start, each in rows for row in each)
        elif kinds & (_FUSED | _FUSED_RATES):
            # Of each key head: its query and key, or nothing; then two parts of its value heads.
            front, width = (2 * sizes.key_size, sizes.value_size) if kinds & _FUSED else (0, 1)
            own = {
                key: [each % group for each in values.indices if each // group == key]
                for key in keys
            }
            indices = _settle(
                key * (front + 2 * group * width) + row
                for key, heads in own.items()
                for row in (
                    *range(front),
                    *_shift(_spread(heads, width), front),
                    *_shift(_spread(heads, width), front + group * width),
                )
            )
        else:
            indices = values.indices
        return Part(axis, indices, len(indices))


def is_cut(name: str, whole: Set[str] = frozenset()) -> bool:
    """Say whether ranks hold parts of a parameter; arguments as `DenseSplit.shape`."""
    parts = name.split(".")
    is_summed = parts[-1] == "bias" and not set(OUTPUTS).isdisjoint(parts)
    return not (is_norm(name) or is_summed or not whole.isdisjoint(parts))


def is_norm(name: str) -> bool:
    """Say whether a parameter is of a norm, or scales a whole layer."""
    parts = name.split(".")
    return parts[-1] in ("norm_weight", "layer_scalar") or any(
        part.endswith("norm") for part in parts[-2:-1]
    )


def _axis(name: str) -> int:
    return 0 if set(OUTPUTS).isdisjoint(name.split(".")) else 1


def _evenly(total: int, rank: int, size: int) -> Part:
    """Return one of equal runs of `total`; the last index stands where the last runs are short."""
    count = ceil(total / size)
    run = range(rank * count, (rank + 1) * count)
    if run.stop <= total:
        return Part(0, run, count)
    return Part(0, tuple(min(i, total - 1) for i in run), max(0, total - run.start))


def _shift(indices: Indices, by: int) -> Indices:
    return _settle(index + by for index in indices)


def _spread(heads: Iterable[int], width: int) -> Indices:
    """Return the rows of heads."""
    return _settle(head * width + row for head in heads for row in range(width))


def _settle(indices: Iterable[int]) -> Indices:
    """Return a range where indices are one run."""
    found = tuple(indices)
    spans = runs(found)
    return spans[0] if len(spans) == 1 else found
