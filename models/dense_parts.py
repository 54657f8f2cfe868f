"""Which part of a dense weight a rank holds: one table for models, loaders and sums of memory.

| weights | cut |
| --- | --- |
| queries, sinks, what attention gives | by query heads |
| keys and values | by key/value heads, repeated where there are more ranks than heads |
| embedding, vocabulary projection, dense MLPs, shared experts, recurrent layers | evenly |
| norms, routers, biases added to a sum over ranks, latents that all heads share | not |

Outputs (`OUTPUTS`) are cut by columns, the rest by rows. Heads and rows that do not divide are
filled up; what fills is zero and changes nothing.

Letters: Q query heads, J key/value heads, n ranks.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from torch import Tensor

from neuron_moe.checkpoint.lazy import Indices, Selection, runs
from neuron_moe.errors import check_positive_int

OUTPUTS = ("o_proj", "out_proj", "down_proj")  # whose results are summed over ranks
_QUERIES = {"q_proj", "q_gate_proj", "q_b_proj", "kv_b_proj", "o_proj", "sinks"}
_KEYS = {"k_proj", "v_proj"}
_JOINT = {"qkv_proj"}  # queries, keys and values in one matrix
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
        kv_heads: J of the whole model.
        rank: this one.
    """

    size: int
    heads: int
    kv_heads: int
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "heads", "kv_heads"):
            check_positive_int(name, getattr(self, name))

    def check(self) -> None:
        """Raise ValueError unless every rank has whole key/value heads."""
        if max(self.size, self.kv_heads) % min(self.size, self.kv_heads):
            fits = [
                n for n in range(1, self.size) if not max(n, self.kv_heads) % min(n, self.kv_heads)
            ]
            raise ValueError(
                f"tensor_parallel_size={self.size}: must divide num_key_value_heads="
                f"{self.kv_heads}, or be a multiple of it. Use {fits[-1]}."
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
            if kinds & _QUERIES:
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


def is_cut(name: str, whole: Set[str] = frozenset()) -> bool:
    """Say whether ranks hold parts of a parameter; arguments as `DenseSplit.shape`."""
    parts = name.split(".")
    is_summed = parts[-1] == "bias" and not set(OUTPUTS).isdisjoint(parts)
    return not (is_norm(name) or is_summed or not whole.isdisjoint(parts))


def is_norm(name: str) -> bool:
    """Say whether a parameter is of a norm."""
    parts = name.split(".")
    return parts[-1] == "norm_weight" or any(part.endswith("norm") for part in parts[-2:-1])


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
