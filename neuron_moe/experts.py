"""Routed experts: one class owns the weights, a backend does the arithmetic.

Axes: T tokens, K choices, E experts (of the model, or of this rank where said), H hidden, I
intermediate of this rank.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuron_moe.activations import ActivationSpec
from neuron_moe.backends import Backend, BlockPlan, ExpertWeights, LocalRouting, get_backend
from neuron_moe.backends.packing import PackedMatrices
from neuron_moe.blocks import NO_EXPERT, sort_pairs
from neuron_moe.config import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig
from neuron_moe.dispatch import Decision, choose_path
from neuron_moe.parallel.shard import ExpertShard

_SMALLEST_SUM = 1e-12  # a token whose choices all dropped out has affinity sum 0


class ExpertLinear(nn.Module):
    """One matrix (and bias) per expert: weight [E, in, out], bias [E, out]."""

    bias: nn.Parameter | None
    packed: PackedMatrices | None

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | None,
        init_method: Any = None,
    ) -> None:
        super().__init__()
        shape = (num_experts, input_size, output_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.packed = None
        if bias:
            self.bias = nn.Parameter(
                torch.zeros((num_experts, output_size), dtype=dtype, device=device)
            )
        else:
            self.register_parameter("bias", None)
        if self.weight.device.type != "meta":
            with torch.no_grad():
                for matrix in self.weight:
                    if init_method is None:
                        nn.init.kaiming_uniform_(matrix.t(), a=math.sqrt(5))
                    else:
                        init_method(matrix)

    def pack(self) -> None:
        """Keep the weight packed for CPU inference; `weight` stays as a shape on the meta device.
        """
        if self.packed is None:
            self.packed = PackedMatrices(self.weight.detach())
            self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def unpack(self) -> None:
        """Undo `pack`."""
        if self.packed is not None:
            self.weight = nn.Parameter(self.packed.unpack())
            self.packed = None

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packed is not None:
            destination[f"{prefix}weight"] = self.packed.unpack()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.unpack()
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """Show the shape in the module's repr."""
        return f"weight={list(self.weight.shape)}, bias={self.bias is not None}"


class Experts(nn.Module):
    """Gate, up and down projections of the experts of one rank.

    Args:
        config: sizes and activation of the model's experts.
        shard: the part of them this rank owns.
        dtype: dtype of the weights.
        device: where they live.
    """

    def __init__(
        self,
        config: RoutedExpertsMLPOpsConfig,
        shard: ExpertShard,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shard.check(config.num_experts, config.intermediate_size)
        self.activation = ActivationSpec.from_config(config)
        self.shard = shard
        num_experts = config.num_experts // shard.ep_size
        width = config.intermediate_size // shard.tp_size
        first_name = "gate_up_proj" if config.glu_mlp else "up_proj"
        self.first_name = first_name
        first = ExpertLinear(
            num_experts,
            config.hidden_size,
            width * self.activation.num_projections,
            bias=config.bias,
            dtype=dtype,
            device=device,
            init_method=config.input_layer_init_method,
        )
        self.add_module(first_name, first)
        self.down_proj = ExpertLinear(
            num_experts,
            width,
            config.hidden_size,
            bias=config.bias,
            dtype=dtype,
            device=device,
            init_method=config.output_layer_init_method,
        )

    def weights(self) -> ExpertWeights:
        """Return the tensors in the form backends take."""
        first: ExpertLinear = getattr(self, self.first_name)
        return ExpertWeights(
            gate_up_proj_EHI=first.weight,
            down_proj_EIH=self.down_proj.weight,
            gate_up_bias_EI=first.bias,
            down_bias_EH=self.down_proj.bias,
            activation=self.activation,
            down_bias_scale=1.0 / self.shard.tp_size,
            packed_gate_up=first.packed,
            packed_down=self.down_proj.packed,
        )

    def forward(self, hidden_states: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """Run experts on rows of their own, without routing.

        Args:
            hidden_states: [E, C, H], or [1, C, H] for the same rows in every expert.
            expert_indices: [E'] experts to run, default all of this rank.

        Returns:
            [E', C, H]; a partial sum under tensor parallelism.
        """
        weights = self.weights()
        first, down = weights.gate_up_proj_EHI, weights.down_proj_EIH
        first_bias, down_bias = weights.gate_up_bias_EI, weights.down_bias_EH
        if expert_indices is not None:
            first, down = first[expert_indices], down[expert_indices]
            first_bias = None if first_bias is None else first_bias[expert_indices]
            down_bias = None if down_bias is None else down_bias[expert_indices]
        projected = hidden_states.expand(first.shape[0], -1, -1) @ first
        if first_bias is not None:
            projected = projected + first_bias.unsqueeze(1)
        output = self.activation(projected) @ down
        return (
            output
            if down_bias is None
            else output + (down_bias * weights.down_bias_scale).unsqueeze(1)
        )


class ExpertMLPsV2(nn.Module):
    """The routed experts of one layer, with NxD's constructor arguments.

    State dict: `mlp_op.gate_up_proj.weight` [E, H, 2I] (gate columns first; `mlp_op.up_proj` [E, H,
        I] without GLU),
    `mlp_op.down_proj.weight` [E, I, H], and biases [E, 2I], [E, H] as in the checkpoint.

    Args:
        routed_experts_mlp_config: sizes, activation, affinities, capacity.
        blockwise_matmul_config: tuning of the blockwise path.
        return_bias: not supported, as in NxD.
        dtype: dtype of the weights.
        sequence_parallel_enabled: the layer's input is this rank's part of the sequence.
        device: where the weights live.
        tensor_model_parallel_group: ranks that split the intermediate axis.
        expert_model_parallel_group: ranks that split the experts.
        tkg_tensor_model_parallel_group: the same for decode, under hybrid sharding.
        tkg_expert_model_parallel_group: the same for decode, under hybrid sharding.
        cte_tensor_model_parallel_group: the same for prefill, under hybrid sharding.
        cte_expert_model_parallel_group: the same for prefill, under hybrid sharding.
        is_prefill: which phase the groups above are for; accepted for NxD.
        enabled_hybrid_sharding: prefill and decode are sharded differently.
        backend: name of the backend, or a backend.
        compat: None for our dispatch rules, 'nxd' for NxD's.
    """

    expert_load_E: Tensor | None

    def __init__(
        self,
        routed_experts_mlp_config: RoutedExpertsMLPOpsConfig,
        blockwise_matmul_config: BlockwiseMatmulConfig | None = None,
        return_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        sequence_parallel_enabled: bool = False,
        device: torch.device | str | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        expert_model_parallel_group: ProcessGroup | None = None,
        tkg_tensor_model_parallel_group: ProcessGroup | None = None,
        tkg_expert_model_parallel_group: ProcessGroup | None = None,
        cte_tensor_model_parallel_group: ProcessGroup | None = None,
        cte_expert_model_parallel_group: ProcessGroup | None = None,
        is_prefill: bool = True,
        enabled_hybrid_sharding: bool = False,
        *,
        backend: str | Backend = "torch",
        compat: str | None = None,
    ) -> None:
        super().__init__()
        if return_bias:
            raise NotImplementedError("return_bias=True: not supported, as in NxD. Leave it False.")
        self.config = routed_experts_mlp_config
        self.routed_experts_mlp_config = routed_experts_mlp_config
        self.blockwise_matmul_config = blockwise_matmul_config or BlockwiseMatmulConfig.default()
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.is_prefill = is_prefill
        self.enabled_hybrid_sharding = enabled_hybrid_sharding
        self.dtype = dtype
        self.backend = get_backend(backend) if isinstance(backend, str) else backend
        self.compat = compat
        self.shard = ExpertShard.from_groups(
            tensor_model_parallel_group, expert_model_parallel_group
        )
        self.mlp_op = Experts(self.config, self.shard, dtype=dtype, device=device)
        self.register_buffer("expert_load_E", None, persistent=False)

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return self.config.num_experts // self.shard.ep_size

    def enable_load_counters(self, enabled: bool = True) -> None:
        """Count the tokens of each expert from now on, in `expert_load_E` [E] int64; starts at
        zero.
        """
        device = self.mlp_op.down_proj.weight.device
        self.expert_load_E = (
            torch.zeros(self.config.num_experts, dtype=torch.int64, device=device)
            if enabled
            else None
        )

    def pack_weights(self) -> None:
        """Lay the weights out for fast CPU inference: no gradient, no graph capture, same numbers.

        The state dict is unchanged; loading one unpacks.
        """
        for linear in self.mlp_op.children():
            if isinstance(linear, ExpertLinear):
                linear.pack()

    def choose_path(self, phase: str, tokens: int) -> Decision:
        """Decide how `tokens` tokens are computed; see `neuron_moe.dispatch`."""
        return choose_path(
            phase,
            tokens,
            self.config.top_k,
            self.config.num_experts,
            num_local_experts=self.num_local_experts,
            block_size=self.blockwise_matmul_config.block_size,
            capacity_factor=self.config.capacity_factor,
            backend=self.backend.name,
            compat=self.compat,
        )

    def forward(
        self,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        seq_len: int,
        padding_mask: Tensor | None = None,
        expert_affinities_masked_full: Tensor | None = None,
        *,
        phase: str | None = None,
    ) -> Tensor:
        """Compute the routed experts of T tokens.

        Args:
            hidden_states: [T, H] in the dtype of the weights.
            expert_affinities: [T, K] affinities of the choices, or NxD's dense [T, E].
            expert_index: [T, K] experts of the model; -1 for none.
            seq_len: 1 is decode, more is prefill.
            padding_mask: [B, S] or [T], nonzero for real tokens; the others get no expert.
            expert_affinities_masked_full: NxD's masked dense affinities [T, E], if already
                computed.
            phase: overrides what `seq_len` says, for speculation windows.

        Returns:
            [T, H] in the dtype of the hidden states; a partial sum under tensor or expert
            parallelism.
        """
        self._check_inputs(hidden_states, expert_index)
        if expert_affinities_masked_full is not None:
            expert_affinities = expert_affinities_masked_full
        if hidden_states.shape[0] == 0:
            return torch.zeros_like(hidden_states)
        index_TK = expert_index.to(torch.int32)
        affinities_TK = _choice_affinities(expert_affinities, index_TK, self.config.num_experts)
        index_TK, affinities_TK = _drop_padding(index_TK, affinities_TK, padding_mask)
        phase = phase or ("decode" if seq_len == 1 else "prefill")
        path = self.choose_path(phase, hidden_states.shape[0]).path
        if path == "capacity":
            index_TK, affinities_TK = self._drop_over_capacity(index_TK, affinities_TK)
        if self.config.normalize_top_k_affinities:
            total_T1 = affinities_TK.sum(-1, keepdim=True)
            affinities_TK = affinities_TK / total_T1.clamp(min=_SMALLEST_SUM)
        self._record_load(index_TK)
        return self._run(path, hidden_states, self._localize(index_TK, affinities_TK))

    def _run(self, path: str, hidden_TH: Tensor, routing: LocalRouting) -> Tensor:
        weights = self.mlp_op.weights()
        if path in ("blockwise", "capacity"):
            plan = BlockPlan(
                self.blockwise_matmul_config.block_size,
                self.blockwise_matmul_config.pad_num_blocks_to_even,
            )
            output_TH = self.backend.blockwise(hidden_TH, routing, weights, plan)
        else:
            output_TH = self.backend.few_tokens(hidden_TH, routing, weights, path)
        return output_TH.to(hidden_TH.dtype)

    def _check_inputs(self, hidden_TH: Tensor, index_TK: Tensor) -> None:
        if hidden_TH.ndim != 2 or hidden_TH.shape[1] != self.config.hidden_size:
            raise ValueError(
                f"hidden_states: shape {tuple(hidden_TH.shape)} must be [T,"
                f" {self.config.hidden_size}]"
                " (hidden_size of the experts). Flatten batch and sequence first."
            )
        weight_dtype = self.mlp_op.down_proj.weight.dtype
        if hidden_TH.dtype != weight_dtype:
            raise ValueError(
                f"hidden_states: dtype {hidden_TH.dtype} must be that of the expert weights,"
                f" {weight_dtype}. Cast the input, or the module with .to()."
            )
        expected = (hidden_TH.shape[0], self.config.top_k)
        if tuple(index_TK.shape) != expected:
            raise ValueError(
                f"expert_index: shape {tuple(index_TK.shape)} must be {expected}, [T, top_k]."
            )

    def _drop_over_capacity(self, index_TK: Tensor, affinities_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Drop the choices of an expert beyond ceil(T * K * capacity_factor / E), in token order.
        """
        num_tokens, top_k = index_TK.shape
        factor = self.config.capacity_factor or 0.0
        room = math.ceil(num_tokens * top_k * factor / self.config.num_experts)
        pairs = sort_pairs(index_TK, self.config.num_experts)
        counts_E1 = nn.functional.pad(pairs.tokens_per_expert_E, (0, 1))
        first_E1 = counts_E1.cumsum(0) - counts_E1
        position_P = torch.arange(pairs.order_P.shape[0], device=index_TK.device)
        rank_P = position_P - first_E1[pairs.expert_P]
        fits_P = torch.zeros_like(rank_P, dtype=torch.bool).scatter(0, pairs.order_P, rank_P < room)
        fits_TK = fits_P.view(num_tokens, top_k)
        return torch.where(fits_TK, index_TK, NO_EXPERT), torch.where(fits_TK, affinities_TK, 0.0)

    def _localize(self, index_TK: Tensor, affinities_TK: Tensor) -> LocalRouting:
        """Number the experts of this rank from 0; choices of other ranks become none."""
        if self.shard.ep_size > 1:
            experts = self.shard.local_experts(self.config.num_experts)
            is_here = (index_TK >= experts.start) & (index_TK < experts.stop)
            index_TK = torch.where(is_here, index_TK - experts.start, NO_EXPERT)
            affinities_TK = torch.where(is_here, affinities_TK, 0.0)
        return LocalRouting(index_TK, affinities_TK, self.config.early_expert_affinity_modulation)

    def _record_load(self, index_TK: Tensor) -> None:
        if self.expert_load_E is None or torch.compiler.is_compiling():
            return
        with torch.no_grad():
            self.expert_load_E = (
                self.expert_load_E
                + sort_pairs(index_TK, self.config.num_experts).tokens_per_expert_E
            )


def _choice_affinities(affinities: Tensor, index_TK: Tensor, num_experts: int) -> Tensor:
    """Return float32 [T, K] affinities from [T, K], or from NxD's dense [T, E]."""
    num_tokens, top_k = index_TK.shape
    if tuple(affinities.shape) == (num_tokens, top_k):
        return affinities.float()
    if tuple(affinities.shape) == (num_tokens, num_experts):
        return affinities.float().gather(1, index_TK.to(torch.int64).clamp(min=0))
    raise ValueError(
        f"expert_affinities: shape {tuple(affinities.shape)} must be [T, top_k] ="
        f" {[num_tokens, top_k]}"
        f" or dense [T, num_experts] = {[num_tokens, num_experts]}."
    )


def _drop_padding(
    index_TK: Tensor, affinities_TK: Tensor, padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Take the experts away from padding tokens; make the affinity of no expert zero."""
    is_real_TK = index_TK >= 0
    if padding_mask is not None:
        if padding_mask.numel() != index_TK.shape[0]:
            raise ValueError(
                f"padding_mask: shape {tuple(padding_mask.shape)} must have one entry for each of"
                f" the"
                f" {index_TK.shape[0]} tokens."
            )
        is_real_TK = is_real_TK & (padding_mask.reshape(-1, 1) != 0)
    return (
        torch.where(is_real_TK, index_TK, NO_EXPERT),
        torch.where(is_real_TK, affinities_TK, 0.0),
    )
