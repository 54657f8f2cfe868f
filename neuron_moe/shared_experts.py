"""Shared experts: the dense MLP every token takes.

Axes: H hidden, I intermediate of all shared experts together.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from neuron_moe.activations import ACT2FN
from neuron_moe.config import HIDDEN_ACTIVATIONS
from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.parallel.shard import ExpertShard


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
        dtype: dtype of the weights.
        tensor_model_parallel_group: ranks that split I; the output is then a partial sum.
        reduce_dtype: accepted for NxD; the sum over ranks is the layer's.
        fused_gate_up_projection: one matrix for gate and up.
        sequence_parallel_enabled: weights are replicated and each rank computes its own tokens in
            prefill.
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
        dtype: torch.dtype = torch.float32,
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
        group = None if sequence_parallel_enabled else tensor_model_parallel_group
        self.shard = ExpertShard.from_groups(group, None)
        width = intermediate_size * num_shared_experts
        self.shard.check(1, width)
        width //= self.shard.tp_size

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        if fused_gate_up_projection:
            self.gate_up_proj = linear(hidden_size, 2 * width)
        else:
            self.gate_proj = linear(hidden_size, width)
            self.up_proj = linear(hidden_size, width)
        self.down_proj = linear(width, hidden_size)
        self.shared_expert_gate = linear(hidden_size, 1) if is_gated else None

    def forward(self, x: Tensor, seq_len: int = 0) -> Tensor:
        """Compute [.., H] for [.., H] hidden states; `seq_len` is NxD's argument and not needed
        here.
        """
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x: shape {tuple(x.shape)} must end in hidden_size={self.hidden_size} of the"
                f" shared experts."
            )
        if self.fused_gate_up_projection:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        activated = ACT2FN[self.hidden_act](gate.float()) * up.float()
        output: Tensor = self.down_proj(activated.to(x.dtype))
        if self.shared_expert_gate is not None:
            scale = torch.sigmoid(F.linear(x.float(), self.shared_expert_gate.weight.float()))
            output = (output.float() * scale).to(x.dtype)
        return output
