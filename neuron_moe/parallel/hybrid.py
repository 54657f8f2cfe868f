"""Prefill and decode may cut the experts differently; what one rank keeps for both.

Both phases share one copy of the weights where one phase's part is a run of the other's experts
with the same slice of the intermediate axis: the smaller part is then a view. Otherwise the rank
keeps two copies (`mlp_op` and `mlp_op_tkg`, NxD's names).
"""

from dataclasses import dataclass, replace

from neuron_moe.backends import ExpertWeights
from neuron_moe.parallel.shard import ExpertShard

DECODE_PHASES = ("decode", "speculation")  # a speculation window is decoded


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
    def plan(
        cls, prefill: ExpertShard, decode: ExpertShard, num_slots: int, *, may_share: bool = True
    ) -> "PhaseShards":
        """Decide what to store.

        Args:
            prefill: this rank's part in prefill.
            decode: this rank's part in decode.
            num_slots: experts of the model, replicas counted.
            may_share: let one phase compute with a part of what the other stores; equal parts are
                shared in any case.
        """
        if prefill != decode and not may_share:
            return cls(prefill, decode, prefill, decode)
        if _contains(prefill, decode, num_slots):
            return cls(prefill, decode, prefill, None)
        if _contains(decode, prefill, num_slots):
            return cls(prefill, decode, decode, None)
        return cls(prefill, decode, prefill, decode)

    def of(self, phase: str) -> ExpertShard:
        """Return the part of a phase; speculation windows are decoded."""
        return self.decode if phase in DECODE_PHASES else self.prefill

    def view(self, stored: ExpertWeights, phase: str, num_slots: int) -> ExpertWeights:
        """Return the weights of a phase out of those stored."""
        wanted = self.of(phase)
        if wanted == self.stored:
            return stored
        have = self.stored.local_experts(num_slots)
        want = wanted.local_experts(num_slots)
        run = slice(want.start - have.start, want.stop - have.start)
        gate_up_bias, down_bias = stored.gate_up_bias_EI, stored.down_bias_EH
        packed_gate_up, packed_down = stored.packed_gate_up, stored.packed_down
        decode_copy, prefill_copy = stored.decode_copy, stored.prefill_copy
        return replace(
            stored,
            gate_up_proj_EHI=stored.gate_up_proj_EHI[run],
            down_proj_EIH=stored.down_proj_EIH[run],
            gate_up_bias_EI=None if gate_up_bias is None else gate_up_bias[run],
            down_bias_EH=None if down_bias is None else down_bias[run],
            packed_gate_up=None if packed_gate_up is None else packed_gate_up.run(run),
            packed_down=None if packed_down is None else packed_down.run(run),
            decode_copy=None if decode_copy is None else decode_copy.run(run),
            prefill_copy=None if prefill_copy is None else prefill_copy.run(run),
        )


def _contains(outer: ExpertShard, inner: ExpertShard, num_slots: int) -> bool:
    """Say whether `inner` is a run of the experts of `outer`, with the same slice of each."""
    if (outer.tp_rank, outer.tp_size) != (inner.tp_rank, inner.tp_size):
        return False
    have, want = outer.local_experts(num_slots), inner.local_experts(num_slots)
    return have.start <= want.start and want.stop <= have.stop
