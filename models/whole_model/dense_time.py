"""Time of a step outside the routed experts, by formula from the peaks of the chip.

Each part takes the longest of its engines and of its bytes (nothing else overlaps): projections
the tensor engine or their weights; attention the tensor engine, the exponentials of the scalar
engine or its keys and values; norms the vector engine. Launches, copies between layouts and DMA
runs are left out, so a time is a bound from below. Counts of instructions are those of tiles of
128 x 128 by 512, each copied from PSUM by one more.

Letters: T tokens of a step, S of them of one sequence, C positions they see, Q and J query and
key/value heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from torch import nn

from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.models.attention import Reach
from neuron_moe.models.sizes import DenseRule, Spread
from neuron_moe.models.whole_model.layers import LayerKind, layer_kinds
from neuron_moe.moe import MoE
from neuron_moe.planner.coefficients import COEFFICIENTS, Machine
from neuron_moe.planner.collective_times import (
    ROW_BYTES,
    Collective,
    around,
    around_experts,
    gather,
)
from neuron_moe.planner.layer_cost import matmul_cycles

_MOVING = 512  # columns of an instruction of the tensor engine
_NORM_PASSES = 3  # squares, product with the factor, product with the weight
_STATE_PRODUCTS = 3  # what the memory answers, what is taken from it, what is added
_CHOICE_BYTES = 8  # a rank's likeliest token and its logit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step of a model.

    Args:
        phase: 'prefill' or 'decode'.
        sequences: U.
        new_tokens: S of each.
        context: C, positions of each when the step ends, new ones included.

    Raises:
        ValueError: a number that is not positive, or fewer positions than new tokens.
    """

    phase: str
    sequences: int
    new_tokens: int
    context: int

    def __post_init__(self) -> None:
        check_choice("phase", self.phase, ("prefill", "decode"))
        for name in ("sequences", "new_tokens", "context"):
            check_positive_int(name, getattr(self, name))
        if self.context < self.new_tokens:
            raise ValueError(
                f"context={self.context}: must hold the {self.new_tokens} new tokens. Raise it."
            )

    @property
    def tokens(self) -> int:
        """T."""
        return self.sequences * self.new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """A part of a layer, or of the model beside its layers, on one rank.

    Attributes:
        kind: name of the kind of layer, '' for what is beside the layers.
        name: of the part.
        count: how often a step has it.
        us: microseconds of one.
        bound: what they follow from, such as 'HBM'.
        instructions: of one, estimated.
    """

    kind: str
    name: str
    count: int
    us: float
    bound: str
    instructions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTimes:
    """What a step takes beside its routed experts.

    Attributes:
        parts: without collectives.
        collectives: by kind of layer ('' beside the layers), with how often a step has them.
    """

    parts: tuple[PartTime, ...]
    collectives: tuple[tuple[str, int, Collective], ...]

    @property
    def us(self) -> float:
        """Microseconds of all parts and collectives."""
        return self.parts_us + self.collectives_us

    @property
    def parts_us(self) -> float:
        """Microseconds of the parts."""
        return sum(part.count * part.us for part in self.parts)

    @property
    def collectives_us(self) -> float:
        """Microseconds of the collectives, those of the experts included."""
        return sum(count * each.us for _, count, each in self.collectives)


@dataclass(frozen=True, slots=True)
class _Rank:
    """What the parts of a step are computed with."""

    machine: Machine
    spread: Spread
    work: StepWork
    rule: DenseRule
    is_split: bool

    @property
    def own_tokens(self) -> int:
        """Tokens a rank has between the parts of a layer."""
        return ceil(self.work.tokens / self.spread.ranks) if self.is_split else self.work.tokens


def dense_times(
    model: nn.Module,
    config: Any,
    spread: Spread,
    machine: Machine,
    work: StepWork,
    *,
    is_split: bool = True,
) -> DenseTimes:
    """Compute a step of a model outside its routed experts.

    Args:
        model: a whole `DecoderModel`, which may be on the meta device.
        config: its facts.
        spread: how it is cut.
        machine: where.
        work: the step.
        is_split: prefill splits the sequence over ranks between parts.
    """
    split = is_split and work.phase == "prefill"
    rank = _Rank(machine, spread, work, DenseRule(model, config, spread), split)
    parts: list[PartTime] = []
    collectives: list[tuple[str, int, Collective]] = []
    for kind in layer_kinds(model):
        parts += _layer_parts(rank, kind, config.hidden_size)
        collectives += [
            (kind.name, kind.count, each) for each in _collectives(rank, kind, config.hidden_size)
        ]
    parts += _vocabulary(rank, model, config)
    if spread.dense > 1:
        choice = spread.dense * work.sequences * _CHOICE_BYTES
        collectives.append(("", 1, gather("vocabulary", machine, choice, spread.dense)))
    return DenseTimes(parts=tuple(parts), collectives=tuple(collectives))


def shared_experts_time(
    model: nn.Module,
    config: Any,
    spread: Spread,
    machine: Machine,
    work: StepWork,
    kind: LayerKind,
) -> PartTime | None:
    """Return the time of the shared experts of a kind of layers, where no kernel computes them.

    Args:
        model: as in `dense_times`, as the other arguments.
        config: its facts.
        spread: how it is cut.
        machine: where.
        work: the step.
        kind: of layers.
    """
    shared = getattr(kind.feed_forward, "shared_experts", None)
    if shared is None:
        return None
    rank = _Rank(machine, spread, work, DenseRule(model, config, spread), False)
    us, bound, count = _linears(rank, shared, "mlp", work.tokens)
    return PartTime(
        kind=kind.name,
        name="shared experts",
        count=kind.count,
        us=us,
        bound=bound,
        instructions=count,
    )


def _layer_parts(rank: _Rank, kind: LayerKind, hidden: int) -> list[PartTime]:
    attention, dense = kind.attention, kind.beside
    tokens = rank.work.tokens
    if not isinstance(kind.feed_forward, MoE):
        dense = kind.feed_forward
    halves = sum(part is not None for part in (attention, kind.feed_forward))

    def part(name: str, found: tuple[float, str, int]) -> PartTime:
        us, bound, count = found
        return PartTime(
            kind=kind.name, name=name, count=kind.count, us=us, bound=bound, instructions=count
        )

    found = [part("norms", _norms(rank, hidden, halves))]
    if attention is not None:
        core = _recurrence if attention.reach is None else _attention
        found += [
            part("attention projections", _linears(rank, attention, "self_attn", tokens)),
            part("attention", core(rank, attention)),
        ]
    if dense is not None:
        found.append(part("dense layer", _linears(rank, dense, "mlp", tokens)))
    return found


def _collectives(rank: _Rank, kind: LayerKind, hidden: int) -> list[Collective]:
    work, ranks = rank.work, rank.spread.ranks
    size = work.tokens * hidden * ROW_BYTES
    found: list[Collective] = []
    if kind.attention is not None:
        found = around("attention", rank.machine, size, ranks, is_split=rank.is_split)
    if kind.feed_forward is None:
        return found
    if isinstance(kind.feed_forward, MoE):
        top_k = kind.feed_forward.router.spec.top_k
        return found + around_experts(
            rank.machine, work.tokens, hidden, top_k, ranks, is_split=rank.is_split
        )
    return found + around("dense layer", rank.machine, size, ranks, is_split=rank.is_split)


def _vocabulary(rank: _Rank, model: Any, config: Any) -> list[PartTime]:
    """Return norm and projection of the last token of each sequence."""
    us, bound, count = _products(
        rank,
        rank.work.sequences,
        [(config.hidden_size, ceil(config.vocab_size / rank.spread.dense))],
        model.lm_head.weight.element_size(),
    )
    return [PartTime(kind="", name="vocabulary", count=1, us=us, bound=bound, instructions=count)]


def _linears(rank: _Rank, module: nn.Module, where: str, tokens: int) -> tuple[float, str, int]:
    """Return time, bound and instructions of all linear layers of a module."""
    shapes = []
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear):
            outputs, inputs = rank.rule.shape(module, each.weight, f"{where}.{name}.weight")
            shapes.append((inputs, outputs))
    return _products(rank, tokens, shapes, ROW_BYTES)


def _products(
    rank: _Rank, tokens: int, shapes: Iterable[tuple[int, int]], item_bytes: int
) -> tuple[float, str, int]:
    """Return time, bound and instructions of [T, in] @ [in, out] for each (in, out)."""
    machine, cycles, moved, count = rank.machine, 0.0, 0, 0
    for inputs, outputs in shapes:
        cycles += matmul_cycles(tokens, inputs, outputs)
        moved += inputs * outputs * item_bytes + tokens * (inputs + outputs) * ROW_BYTES
        count += _instructions(tokens, inputs, outputs)
    tensor_ns = cycles / COEFFICIENTS["tensor_clock_ghz"].value / machine.lnc
    return (*_longest({"tensor engine": tensor_ns, "HBM": moved / machine.hbm_bytes_per_ns}), count)


def _instructions(tokens: int, inputs: int, outputs: int) -> int:
    """Estimate the instructions of a product: matmuls of whole tiles, and what empties PSUM."""
    tile = int(COEFFICIENTS["tile_rows"].value)
    deep = ceil(inputs / tile)
    few = min(
        ceil(tokens / _MOVING) * ceil(outputs / tile), ceil(outputs / _MOVING) * ceil(tokens / tile)
    )
    return few * (deep + 1)


def _attention(rank: _Rank, attention: Any) -> tuple[float, str, int]:
    """Return time, bound and instructions of softmax(Q K^T) V."""
    work, machine, ranks = rank.work, rank.machine, rank.spread.dense
    chip, tile = machine.instance.chip, COEFFICIENTS["tile_rows"].value
    core = attention.core_sizes(work.new_tokens)
    queries, keys = ceil(core.query_heads / ranks), ceil(core.kv_heads / ranks)
    attended, scored = attention.entries(work.context) if hasattr(attention, "pools") else (0, 0)
    seen = _positions_seen(attention.reach, work) + attended
    columns = max(work.new_tokens * ceil(queries / keys), COEFFICIENTS["least_columns"].value)
    deep = ceil(core.key_size / tile) + ceil(core.value_size / tile)
    tiles = work.sequences * keys * ceil(seen / tile) * deep
    logits = work.sequences * queries * work.new_tokens * seen
    kept = sum(ceil(heads / ranks) * size for heads, size in attention.cache_shape)
    last = min(work.context, _last_seen(attention.reach, work)) + attended
    cycles, moved = tiles * columns, work.sequences * last * kept * ROW_BYTES
    if scored:  # by every rank
        index, rows = attention.indexer, work.sequences * ceil(scored / tile)
        cycles += rows * ceil(index.size / tile) * work.new_tokens * index.heads
        logits += work.sequences * index.heads * work.new_tokens * scored
        moved += work.sequences * scored * index.size * ROW_BYTES
    times = {
        "tensor engine": cycles / COEFFICIENTS["tensor_clock_ghz"].value / machine.lnc,
        "scalar engine": logits / chip.partitions / chip.scalar_clock_ghz / machine.lnc,
        "HBM": moved / machine.hbm_bytes_per_ns,
    }
    return (*_longest(times), ceil(tiles * ceil(columns / _MOVING) * 1.5))


def _positions_seen(reach: Reach, work: StepWork) -> float:
    """Return how many positions a new token sees, on average."""
    seen = work.context - (work.new_tokens - 1) / 2
    if reach.window is not None:
        seen = min(seen, float(reach.window))
    if reach.chunk is not None and work.context > reach.chunk:
        seen = min(seen, (reach.chunk + 1) / 2)
    return seen


def _last_seen(reach: Reach, work: StepWork) -> int:
    """Return how many positions back the first of the new tokens sees, and what is new."""
    limits = [limit for limit in reach if limit is not None]
    return min(limits) + work.new_tokens if limits else work.context


def _recurrence(rank: _Rank, layer: Any) -> tuple[float, str, int]:
    """Return time, bound and instructions of a memory of the sequence, in chunks or by token."""
    work, machine = rank.work, rank.machine
    memory = max(layer.state_shapes, key=lambda shape: prod(shape.sizes))
    size = ceil(prod(memory.sizes) / rank.spread.dense)
    cells = COEFFICIENTS["tile_rows"].value * COEFFICIENTS["tile_columns"].value
    columns = max(work.new_tokens, COEFFICIENTS["least_columns"].value)
    cycles = work.sequences * columns * _STATE_PRODUCTS * size / cells
    moved = 2 * work.sequences * size * (memory.dtype.itemsize if memory.dtype else ROW_BYTES)
    times = {
        "tensor engine": cycles / COEFFICIENTS["tensor_clock_ghz"].value / machine.lnc,
        "HBM": moved / machine.hbm_bytes_per_ns,
    }
    return (*_longest(times), ceil(cycles / min(columns, _MOVING)))


def _norms(rank: _Rank, hidden: int, count: int) -> tuple[float, str, int]:
    """Return time, bound and instructions of the norms of a layer, and of as many residual sums."""
    chip, machine, tokens = rank.machine.instance.chip, rank.machine, rank.own_tokens
    tiles = count * ceil(tokens / chip.partitions) * (_NORM_PASSES + 1)
    vector_ns = tiles * hidden / chip.vector_clock_ghz / machine.lnc
    moved = count * 3 * tokens * hidden * ROW_BYTES
    times = {"vector engine": vector_ns, "HBM": moved / machine.hbm_bytes_per_ns}
    return (*_longest(times), tiles)


def _longest(times_ns: dict[str, float]) -> tuple[float, str]:
    """Return the longest time in microseconds, and whose it is."""
    bound = max(times_ns, key=lambda name: times_ns[name])
    return times_ns[bound] / 1e3, bound
