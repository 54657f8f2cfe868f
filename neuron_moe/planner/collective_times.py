"""The collectives around the parts of a layer, what they carry and how long that takes: computed.

Rows of hidden states are bfloat16. Under sequence parallelism a rank holds its part of the tokens
between the parts of a layer; without it, as in decode, every rank holds all of them.
"""

from dataclasses import dataclass

from neuron_moe.dispatch.tokens import AFFINITY_BYTES, INDEX_BYTES
from neuron_moe.planner.coefficients import Machine

ROW_BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a step.

    Attributes:
        part: of the layer it belongs to.
        name: all-gather, reduce-scatter or all-reduce.
        total_bytes: of the result of a gather, of the input of a reduction.
        ranks: that take part.
        us: microseconds.
    """

    part: str
    name: str
    total_bytes: int
    ranks: int
    us: float

    @property
    def wire_bytes(self) -> float:
        """Bytes that reach a rank."""
        passes = 2 if self.name == "all-reduce" else 1
        return passes * self.total_bytes * (self.ranks - 1) / self.ranks


def gather(part: str, machine: Machine, total_bytes: int, ranks: int) -> Collective:
    """Return an all-gather."""
    us = machine.gather_ns(total_bytes, ranks) / 1e3
    return Collective(part=part, name="all-gather", total_bytes=total_bytes, ranks=ranks, us=us)


def around(
    part: str, machine: Machine, hidden_bytes: int, ranks: int, *, is_split: bool
) -> list[Collective]:
    """Return the collectives around a part of a layer that is cut over ranks.

    Args:
        part: its name.
        machine: where.
        hidden_bytes: of the hidden states of all tokens.
        ranks: that share the part.
        is_split: each rank holds its part of the tokens before and after.
    """
    if ranks == 1:
        return []
    us = machine.gather_ns(hidden_bytes, ranks) / 1e3  # of a gather, and of a reduce-scatter
    sizes = {"total_bytes": hidden_bytes, "ranks": ranks}
    if not is_split:
        return [Collective(part=part, name="all-reduce", us=2 * us, **sizes)]
    names = ("all-gather", "reduce-scatter")
    return [Collective(part=part, name=name, us=us, **sizes) for name in names]


def around_experts(
    machine: Machine, tokens: int, hidden_size: int, top_k: int, ranks: int, *, is_split: bool
) -> list[Collective]:
    """Return the collectives of routed experts by replicate-and-reduce.

    Args:
        machine: where.
        tokens: T of all ranks.
        hidden_size: H.
        top_k: K.
        ranks: that hold the experts.
        is_split: each rank holds its part of the tokens; their routing is gathered too.
    """
    found = around("experts", machine, tokens * hidden_size * ROW_BYTES, ranks, is_split=is_split)
    if found and is_split:
        routing = tokens * top_k * (INDEX_BYTES + AFFINITY_BYTES)
        found.append(gather("routing", machine, routing, ranks))
    return found
