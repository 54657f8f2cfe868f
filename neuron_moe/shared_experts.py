"""Shared experts: the dense MLP every token takes.

Axes: H hidden, I intermediate of all shared experts together.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from neuron_moe.activations import ACT2FN
from neuron_moe.config import HIDDEN_ACTIVATIONS, as_dtype
from neuron_moe.errors import check_choice, check_positive_int, names_its_keys
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import Collectives, SingleRank, as_collectives
from neuron_moe.parallel.shard import ExpertShard
from neuron_moe.state import refuse_wrong_weights


@names_its_keys
class SharedExperts(nn.Module):
    """down(act(gate(x)) * up(x)), without biases; optionally scaled by a sigmoid gate per token.

    State dict: `gate_proj.weight` [I, H] and `up_proj.weight` [I, H], or `gate_up_proj.weight` [2I,
        H] when fused;
    `down_proj.weight` [H, I]; `shared_expert_gate.weight` [1, H] if gated.

    Args:
        hidden_size: H.
        intermediate_size: width of one shared expert.
        num_shared_experts: I = intermediate_size * num_shared_experts.
        hidden_act: one of HIDDEN_ACTIVATIONS.
        dtype: dtype of the weights, or its name.
        tensor_model_parallel_group: ranks that split I; the output is then a partial sum. Default:
            the tensor parallel ranks of `parallel_state`. `parallel_state.get_world_group()` splits
            I over all ranks of the model.
        reduce_dtype: accepted for NxD; the sum over ranks is the layer's.
        fused_gate_up_projection: one matrix for gate and up.
        sequence_parallel_enabled: weights are whole on each rank, which computes its own tokens;
            ranks with the same tokens compute a slice of I each.
        transpose_weights: accepted for NxD's decode kernel layout; the state dict stays as above.
        is_gated: scale each token by sigmoid(shared_expert_gate(x)) (Qwen2-MoE, Qwen3-Next).
        device: where the weights live.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_shared_experts: int,
        hidden_act: str,
        dtype: torch.dtype | str = torch.float32,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        fused_gate_up_projection: bool = False,
        sequence_parallel_enabled: bool = False,
        transpose_weights: bool = False,
        *,
        is_gated: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dtype = as_dtype("dtype", dtype)
        check_positive_int("hidden_size", hidden_size)
        check_positive_int("intermediate_size", intermediate_size)
        check_positive_int("num_shared_experts", num_shared_experts)
        self.hidden_act = check_choice("hidden_act", hidden_act, HIDDEN_ACTIVATIONS)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_shared_experts = num_shared_experts
        self.reduce_dtype = reduce_dtype
        self.fused_gate_up_projection = fused_gate_up_projection
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.transpose_weights = transpose_weights
        self.group = self._settle_group(tensor_model_parallel_group)
        self.shard = ExpertShard(self.group.rank, self.group.size)
        width = intermediate_size * num_shared_experts
        self.shard.check(1, width)
        width //= self.shard.tp_size
        self.width = width

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        if fused_gate_up_projection:
            self.gate_up_proj = linear(hidden_size, 2 * width)
        else:
            self.gate_proj = linear(hidden_size, width)
            self.up_proj = linear(hidden_size, width)
        self.down_proj = linear(width, hidden_size)
        self.shared_expert_gate = linear(hidden_size, 1) if is_gated else None
        refuse_wrong_weights(self)

    def _settle_group(self, given: ProcessGroup | None) -> Collectives:
        """Return the ranks that split I."""
        if self.sequence_parallel_enabled:
            return SingleRank("shared experts")
        groups = parallel_state.get_groups()
        if given is None and groups is not None:
            return groups.tensor
        return as_collectives(given, "shared experts")

    def describe(self) -> tuple[object, ...]:
        """Return what must agree between ranks."""
        return (
            self.hidden_size,
            self.intermediate_size * self.num_shared_experts,
            self.hidden_act,
            self.group.size,
            self.sequence_parallel_enabled,
            self.shared_expert_gate is not None,
        )

    def forward(self, x: Tensor, seq_len: int = 0, *, part: tuple[int, int] = (0, 1)) -> Tensor:
        """Compute shared experts.

        Args:
            x: [.., H] hidden states.
            seq_len: NxD's argument, not needed here.
            part: (i, n) computes the i-th of n slices of this rank's I; the n results add up.

        Returns:
            [.., H]; a partial sum if I is split.
        """
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x: shape {tuple(x.shape)} must end in hidden_size={self.hidden_size} of the"
                f" shared experts."
            )
        index, parts = part
        run = slice(self.width * index // parts, self.width * (index + 1) // parts)
        if self.fused_gate_up_projection:
            gate_weight, up_weight = self.gate_up_proj.weight.chunk(2)
        else:
            gate_weight, up_weight = self.gate_proj.weight, self.up_proj.weight
        gate, up = F.linear(x, gate_weight[run]), F.linear(x, up_weight[run])
        activated = ACT2FN[self.hidden_act](gate.float()) * up.float()
        output = F.linear(activated.to(x.dtype), self.down_proj.weight[:, run])
        if self.shared_expert_gate is not None:
            scale = torch.sigmoid(F.linear(x.float(), self.shared_expert_gate.weight.float()))
            output = (output.float() * scale).to(x.dtype)
        return output
