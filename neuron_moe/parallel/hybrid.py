"""Prefill and decode may cut the experts differently; what one rank keeps for both.

Both phases share one copy of the weights where one phase's part is a run of the other's experts
with the same slice of the intermediate axis: the smaller part is then a view. Otherwise the rank
keeps two copies (`mlp_op` and `mlp_op_tkg`, NxD's names).
"""

from dataclasses import dataclass

from neuron_moe.parallel.shard import ExpertShard
from neuron_moe.paths import DECODE_PHASES


@dataclass(frozen=True, slots=True)
class PhaseShards:
    """The parts of the experts that one rank needs.

    Args:
        prefill: its part in prefill.
        decode: its part in decode.
        stored: the part in `mlp_op`.
        second: the part in `mlp_op_tkg`, if decode needs a copy of its own.
    """

    prefill: ExpertShard
    decode: ExpertShard
    stored: ExpertShard
    second: ExpertShard | None

    @classmethod
    def settle(
        cls, prefill: ExpertShard, decode: ExpertShard, num_physical: int, *, may_share: bool = True
    ) -> "PhaseShards":
        """Decide what to store.

        Args:
            prefill: this rank's part in prefill.
            decode: this rank's part in decode.
            num_physical: physical experts of all ranks.
            may_share: let one phase compute with a part of what the other stores; equal parts are
                shared in any case.
        """
        if prefill != decode and not may_share:
            return cls(prefill, decode, prefill, decode)
        if _contains(prefill, decode, num_physical):
            return cls(prefill, decode, prefill, None)
        if _contains(decode, prefill, num_physical):
            return cls(prefill, decode, decode, None)
        return cls(prefill, decode, prefill, decode)

    def of(self, phase: str) -> ExpertShard:
        """Return the part of a phase; speculation windows are decoded."""
        return self.decode if phase in DECODE_PHASES else self.prefill

    def run_of(self, phase: str, num_physical: int) -> slice | None:
        """Return which of the stored experts a phase computes with; None: all."""
        wanted = self.of(phase)
        if wanted == self.stored:
            return None
        have, want = self.stored.local_experts(num_physical), wanted.local_experts(num_physical)
        return slice(want.start - have.start, want.stop - have.start)


def _contains(outer: ExpertShard, inner: ExpertShard, num_physical: int) -> bool:
    """Say whether `inner` is a run of the experts of `outer`, with the same slice of each."""
    if (outer.tp_rank, outer.tp_size) != (inner.tp_rank, inner.tp_size):
        return False
    have, want = outer.local_experts(num_physical), inner.local_experts(num_physical)
    return have.start <= want.start and want.stop <= have.stop
