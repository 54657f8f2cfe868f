"""Shared experts: the dense MLP every token takes.

Axes: H hidden, I intermediate of all shared experts together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.activations import activate_parts, at_least_float32
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import Collectives, SingleRank
from neuron_moe.parallel.shard import ExpertShard
from neuron_moe.spec import SharedSpec
from neuron_moe.weights.checks import refuse_wrong_weights


class SharedExperts(nn.Module):
    """down(inner(gate(x), up(x))), without biases; optionally scaled by a sigmoid gate per token.

    State dict: `gate_proj.weight` [I, H] if the formula has a gate and `up_proj.weight` [I, H], or
    `gate_up_proj.weight` [2I, H] when fused; `down_proj.weight` [H, I]; `shared_expert_gate.weight`
    [1, H] if gated.

    Args:
        spec: sizes and formula.
        group: ranks that split I; the output is then a partial sum. Default: the tensor parallel
            ranks of `parallel_state`.
        whole_on_each_rank: weights are whole on each rank, which computes its own tokens (sequence
            parallelism); ranks with the same tokens compute a slice of I each.
        dtype: dtype of the weights.
        device: where the weights live.

    Attributes:
        read_weights: projections whose weights are always read here, so that they stay plain.
    """

    read_weights = ("shared_expert_gate",)

    def __init__(
        self,
        spec: SharedSpec,
        *,
        group: Collectives | None = None,
        whole_on_each_rank: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.whole_on_each_rank = whole_on_each_rank
        if group is None and (groups := parallel_state.default_groups()) is not None:
            group = groups.tensor
        if group is None or whole_on_each_rank:
            group = SingleRank("shared experts")
        self._take_part(group, dtype, device)
        self.shared_expert_gate = (
            nn.Linear(spec.hidden_size, 1, bias=False, dtype=dtype, device=device)
            if spec.is_gated
            else None
        )
        refuse_wrong_weights(self)

    def split_over(self, group: Collectives) -> None:
        """Make new projections for one of other ranks; weights come after.

        Args:
            group: ranks that split I.
        """
        weight = self.down_proj.weight
        self._take_part(group, weight.dtype, weight.device)

    def _take_part(
        self, group: Collectives, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        spec, self.group = self.spec, group
        self.shard = ExpertShard(group.rank, group.size)
        self.width = width = len(self.shard.columns(spec.intermediate_size))

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        for name in self.first_names:
            halves = 2 if spec.is_fused else 1
            self.add_module(name, linear(spec.hidden_size, halves * width))
        self.down_proj = linear(width, spec.hidden_size)

    @property
    def first_names(self) -> tuple[str, ...]:
        """The projections in front of the activation."""
        if self.spec.is_fused:
            return ("gate_up_proj",)
        return ("gate_proj", "up_proj") if self.spec.formula.has_gate else ("up_proj",)

    def describe(self) -> tuple[object, ...]:
        """Return what must agree between ranks."""
        return self.spec, self.group.size, self.whole_on_each_rank

    def first_weights(self) -> tuple[Tensor, ...]:
        """Return the gate's matrix, if there is one, and the up projection's, [I, H]; views."""
        weights = tuple(getattr(self, name).weight for name in self.first_names)
        return weights[0].chunk(2) if self.spec.is_fused else weights

    def forward(self, x: Tensor, seq_len: int = 0, *, part: tuple[int, int] = (0, 1)) -> Tensor:
        """Compute shared experts.

        Args:
            x: [.., H] hidden states.
            seq_len: NxD's argument, not needed here.
            part: (i, n) computes the i-th of n slices of this rank's I; the n results add up.

        Returns:
            [.., H]; a partial sum if I is split.
        """
        if x.shape[-1] != self.spec.hidden_size:
            raise ValueError(
                f"x: shape {tuple(x.shape)} must end in hidden_size={self.spec.hidden_size} of the"
                " shared experts. Check the layer's input."
            )
        index, parts = part
        if parts > 1 or any(weight.element_size() == 1 for weight in self.parameters()):
            run = slice(self.width * index // parts, self.width * (index + 1) // parts)
            inner = self._activated([F.linear(x, _widen(w[run], x)) for w in self.first_weights()])
            output = F.linear(inner, _widen(self.down_proj.weight[:, run], x))
        else:
            first = tuple(getattr(self, name)(x) for name in self.first_names)
            if self.spec.is_fused:
                first = first[0].chunk(2, dim=-1)
            output = self.down_proj(self._activated(first))
        if self.shared_expert_gate is not None:
            gate_1H = self.shared_expert_gate.weight
            scale = torch.sigmoid(F.linear(at_least_float32(x), at_least_float32(gate_1H)))
            output = (at_least_float32(output) * scale).to(x.dtype)
        return output

    def _activated(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the down projection's input."""
        wide = [at_least_float32(part) for part in parts]
        return activate_parts(wide, self.spec.formula).to(parts[0].dtype)


def _widen(weight: Tensor, x: Tensor) -> Tensor:
    """Return weights of 8 bits in the dtype of what they multiply, others as they are."""
    return weight.to(x.dtype) if weight.element_size() == 1 else weight
