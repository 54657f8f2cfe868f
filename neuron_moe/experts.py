"""Routed experts: one class owns the weights, a backend does the arithmetic.

Axes: T tokens, K choices, E experts (of the model, or of this rank where said), H hidden, I
intermediate of this rank.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuron_moe.activations import ActivationSpec
from neuron_moe.backends import Backend, BlockPlan, ExpertWeights, LocalRouting, get_backend
from neuron_moe.backends.packing import PackedMatrices
from neuron_moe.blocks import NO_EXPERT, sort_pairs
from neuron_moe.config import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig, as_dtype
from neuron_moe.dispatch import Decision, check_compat, choose_path
from neuron_moe.errors import (
    WeightError,
    check_choice,
    check_instance,
    check_positive_int,
    names_its_keys,
)
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import STRATEGIES
from neuron_moe.parallel.hybrid import DECODE_PHASES, PhaseShards
from neuron_moe.parallel.placement import ExpertPlacement
from neuron_moe.parallel.shard import ExpertShard
from neuron_moe.state import check_weight, refuse_wrong_weights

_LARGEST_DRAWN_BYTES = 1 << 30
_SMALLEST_SUM = 1e-12  # a token whose choices all dropped out has affinity sum 0


class ExpertLinear(nn.Module):
    """One matrix (and bias) per expert: weight [E, in, out], bias [E, out].

    A weight of up to 1 GiB starts with random values, a larger one with zeros: real ones come from
    a checkpoint. Biases start as zeros.
    """

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
        weight, is_drawn = _allocate(shape, dtype, device)
        self.shape = shape
        self.weight = nn.Parameter(weight)
        self.packed = None
        if bias:
            self.bias = nn.Parameter(
                torch.zeros((num_experts, output_size), dtype=dtype, device=device)
            )
        else:
            self.register_parameter("bias", None)
        if is_drawn:
            self.reset_parameters(init_method)
        refuse_wrong_weights(self)

    def check(self, name: str) -> None:
        """Raise WeightError if somebody assigned a weight or bias that does not fit."""
        check_weight(f"{name}.weight", self.weight, self.shape)
        if self.bias is not None:
            check_weight(f"{name}.bias", self.bias, self.shape[::2])

    def reset_parameters(self, init_method: Any = None) -> None:
        """Draw each expert's matrix from `init_method`, or kaiming-uniform with a = sqrt(5)."""
        with torch.no_grad():
            for matrix in self.weight:
                if init_method is None:
                    nn.init.kaiming_uniform_(matrix.t(), a=math.sqrt(5))
                else:
                    init_method(matrix)

    def pack(self) -> None:
        """Keep the weight packed for CPU inference; `weight` stays, as a shape without memory."""
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


def _allocate(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str | None
) -> tuple[Tensor, bool]:
    """Return a weight and whether to draw its values; a large CPU weight is zeros, not yet touched.

    Weights of real models come from a checkpoint: drawing gigabytes first costs minutes and memory.
    """
    where = torch.empty(0, device=device).device
    num_bytes = math.prod(shape) * dtype.itemsize
    if where.type == "cpu" and num_bytes > _LARGEST_DRAWN_BYTES:
        untouched = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
        return untouched.view(dtype).view(shape), False
    return torch.empty(shape, dtype=dtype, device=where), where.type != "meta"


class Experts(nn.Module):
    """Gate, up and down projections of the experts of one rank.

    Args:
        config: sizes and activation of the model's experts.
        shard: the part of them this rank owns.
        dtype: dtype of the weights.
        device: where they live.
        num_slots: expert slots of all ranks, if some experts have replicas.
    """

    def __init__(
        self,
        config: RoutedExpertsMLPOpsConfig,
        shard: ExpertShard,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        num_slots: int | None = None,
    ) -> None:
        super().__init__()
        num_slots = num_slots or config.num_experts
        shard.check(num_slots, config.intermediate_size)
        self.activation = ActivationSpec.from_config(config)
        self.shard = shard
        num_experts = num_slots // shard.ep_size
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
        first.check(self.first_name)
        self.down_proj.check("down_proj")
        if first.weight.dtype != self.down_proj.weight.dtype:
            raise WeightError(
                f"{self.first_name}.weight: dtype {first.weight.dtype} must be that of"
                f" down_proj.weight, {self.down_proj.weight.dtype}. Cast the module with .to()."
            )
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


@names_its_keys
class ExpertMLPsV2(nn.Module):
    """The routed experts of one layer, with NxD's constructor arguments.

    State dict: `mlp_op.gate_up_proj.weight` [E, H, 2I] (gate columns first; `mlp_op.up_proj` [E, H,
        I] without GLU),
    `mlp_op.down_proj.weight` [E, I, H], and biases [E, 2I], [E, H] as in the checkpoint.

    Args:
        routed_experts_mlp_config: sizes, activation, affinities, capacity.
        blockwise_matmul_config: tuning of the blockwise path.
        return_bias: not supported, as in NxD.
        dtype: dtype of the weights, or its name.
        sequence_parallel_enabled: the layer's input is this rank's part of the sequence.
        device: where the weights live.
        tensor_model_parallel_group: ranks that split the intermediate axis; default: those of
            `parallel_state`, if it was initialised. The same holds for every group here.
        expert_model_parallel_group: ranks that split the experts.
        tkg_tensor_model_parallel_group: the same for decode, under hybrid sharding.
        tkg_expert_model_parallel_group: the same for decode, under hybrid sharding.
        cte_tensor_model_parallel_group: the same for prefill, under hybrid sharding.
        cte_expert_model_parallel_group: the same for prefill, under hybrid sharding.
        is_prefill: which phase the groups above are for; accepted for NxD.
        enabled_hybrid_sharding: prefill and decode are sharded differently.
        backend: name of the backend, or a backend.
        compat: None for our dispatch rules, 'nxd' for NxD's.
        placement: which expert sits in which slot, with replicas; default: NxD's
            `expert_distribution` of the configuration, or equal runs.
        strategy: 'replicate' or 'all_to_all'; default: what `parallel_state` says.
    """

    expert_load_E: Tensor | None

    def __init__(
        self,
        routed_experts_mlp_config: RoutedExpertsMLPOpsConfig,
        blockwise_matmul_config: BlockwiseMatmulConfig | None = None,
        return_bias: bool = False,
        dtype: torch.dtype | str = torch.float32,
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
        placement: ExpertPlacement | None = None,
        strategy: str | None = None,
    ) -> None:
        super().__init__()
        if return_bias:
            raise NotImplementedError("return_bias=True: not supported, as in NxD. Leave it False.")
        check_instance(
            "routed_experts_mlp_config", routed_experts_mlp_config, RoutedExpertsMLPOpsConfig
        )
        if blockwise_matmul_config is not None:
            check_instance(
                "blockwise_matmul_config", blockwise_matmul_config, BlockwiseMatmulConfig
            )
        check_compat(compat)
        if strategy is not None:
            check_choice("strategy", strategy, STRATEGIES)
        if backend is None:
            raise ValueError("backend=None: must be the name of a backend or one. Use 'torch'.")
        self.config = routed_experts_mlp_config
        self.routed_experts_mlp_config = routed_experts_mlp_config
        self.blockwise_matmul_config = blockwise_matmul_config or BlockwiseMatmulConfig.default()
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.is_prefill = is_prefill
        self.enabled_hybrid_sharding = enabled_hybrid_sharding
        self.dtype = as_dtype("dtype", dtype)
        self.backend = (
            get_backend(backend, self.blockwise_matmul_config)
            if isinstance(backend, str)
            else backend
        )
        self.compat = compat
        main = (tensor_model_parallel_group, expert_model_parallel_group)
        hybrid = {
            "prefill": (cte_tensor_model_parallel_group, cte_expert_model_parallel_group),
            "decode": (tkg_tensor_model_parallel_group, tkg_expert_model_parallel_group),
        }
        self.groups = {
            phase: parallel_state.resolve_expert_groups(
                *(given if enabled_hybrid_sharding else main), phase, strategy
            )
            for phase, given in hybrid.items()
        }
        self.placement = self._settle_placement(placement)
        self.num_slots = self.placement.num_slots if self.placement else self.config.num_experts
        self.shards = PhaseShards.plan(
            self.groups["prefill"].shard,
            self.groups["decode"].shard,
            self.num_slots,
            may_share=parallel_state.phases_share_weights(),
        )
        self.shard = self.shards.prefill
        self.mlp_op = self._build_experts(self.shards.stored, device)
        if self.shards.second is not None:
            self.mlp_op_tkg = self._build_experts(self.shards.second, device)
        self.register_buffer("expert_load_E", None, persistent=False)

    def _build_experts(self, shard: ExpertShard, device: torch.device | str | None) -> Experts:
        return Experts(
            self.config, shard, dtype=self.dtype, device=device, num_slots=self.num_slots
        )

    def _settle_placement(self, given: ExpertPlacement | None) -> ExpertPlacement | None:
        if given is None and self.config.expert_distribution is not None:
            given = ExpertPlacement.from_distribution(self.config.expert_distribution)
        if given is not None and given.num_experts != self.config.num_experts:
            raise ValueError(
                f"placement: places {given.num_experts} experts, must place"
                f" num_experts={self.config.num_experts}. Compute it from a trace of this model."
            )
        for phase, groups in self.groups.items():
            if given is not None and given.num_ranks % groups.ep.size:
                raise ValueError(
                    f"placement: made for {given.num_ranks} expert-parallel ranks, which"
                    f" {groups.ep.size} ({phase}) must divide. Place the experts again."
                )
        return given

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank in prefill, replicas counted."""
        return self.num_slots // self.shard.ep_size

    def local_experts(self, phase: str = "prefill") -> tuple[int, ...]:
        """Return the model's number of each expert this rank computes in a phase."""
        slots = self.shards.of(phase).local_experts(self.num_slots)
        if self.placement is None:
            return tuple(slots)
        return self.placement.slots[slots.start : slots.stop]

    def local_load(self, phase: str = "prefill") -> list[int] | None:
        """Return the tokens counted for each expert of this rank, replicas sharing them alike; None
        without counters.
        """
        if self.expert_load_E is None:
            return None
        load_E = self.expert_load_E
        if self.placement is not None:
            _, replicas_E = self.placement.replica_table()
            load_E = load_E // replicas_E.to(load_E.device)
        counts: list[int] = load_E[list(self.local_experts(phase))].tolist()
        return counts

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
        if self.shards.shares_a_view:
            raise ValueError(
                "pack_weights(): prefill and decode share one copy of the weights, of which one"
                " phase takes a part; packed weights cannot be taken apart. Leave them unpacked."
            )
        for linear in self.modules():
            if isinstance(linear, ExpertLinear):
                linear.pack()

    def choose_path(self, phase: str, tokens: int) -> Decision:
        """Decide how `tokens` tokens are computed; see `neuron_moe.dispatch`."""
        return choose_path(
            phase,
            tokens,
            self.config.top_k,
            self.num_slots,
            num_local_experts=self.num_slots // self.shards.of(phase).ep_size,
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
        check_positive_int("seq_len", seq_len)
        phase = phase or ("decode" if seq_len == 1 else "prefill")
        self.check_hidden(hidden_states)
        if expert_affinities_masked_full is not None:
            expert_affinities = expert_affinities_masked_full
        num_tokens = hidden_states.shape[0]
        _check_choices(expert_index, num_tokens, self.config.num_experts)
        index_TK, affinities_TK = self.select(
            expert_affinities, expert_index, num_tokens, padding_mask, phase
        )
        return self.compute(hidden_states, index_TK, affinities_TK, num_tokens, phase)

    def select(
        self,
        expert_affinities: Tensor,
        expert_index: Tensor,
        num_tokens: int,
        padding_mask: Tensor | None,
        phase: str,
        *,
        first_token: int = 0,
        over_all_tokens: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Settle what each token gets: padding, capacity, normalisation, and the expert's slot.

        Args:
            expert_affinities: [t, K], or NxD's dense [t, E].
            expert_index: [t, K] experts of the model; -1 for none.
            num_tokens: T that the layer computes, on all ranks.
            padding_mask: nonzero for real tokens.
            phase: one of dispatch.PHASES.
            first_token: number of the first of these t tokens.
            over_all_tokens: applies a function of all T tokens' choices to those of the t tokens
                here; needed where tokens are spread over ranks.

        Returns:
            [t, K] int32 expert slots of the model, and [t, K] float32 affinities.
        """
        expected = (expert_affinities.shape[0], self.config.top_k)
        if tuple(expert_index.shape) != expected:
            raise ValueError(
                f"expert_index: shape {tuple(expert_index.shape)} must be {expected}, [T, top_k]."
            )
        index_TK = expert_index.to(torch.int32)
        affinities_TK = _choice_affinities(expert_affinities, index_TK, self.config.num_experts)
        index_TK, affinities_TK = _drop_padding(index_TK, affinities_TK, padding_mask)
        if num_tokens and self.choose_path(phase, num_tokens).path == "capacity":
            if over_all_tokens is None:
                fits_TK = self._fits_capacity(index_TK)
            else:
                fits_TK = over_all_tokens(self._fits_capacity, index_TK)
            index_TK = torch.where(fits_TK, index_TK, NO_EXPERT)
            affinities_TK = torch.where(fits_TK, affinities_TK, 0.0)
        if self.config.normalize_top_k_affinities:
            total_T1 = affinities_TK.sum(-1, keepdim=True)
            affinities_TK = affinities_TK / total_T1.clamp(min=_SMALLEST_SUM)
        self._record_load(index_TK)
        if self.placement is not None:
            index_TK = self.placement.to_physical(index_TK, first_token)
        return index_TK, affinities_TK

    def compute(
        self,
        hidden_TH: Tensor,
        index_TK: Tensor,
        affinities_TK: Tensor,
        num_tokens: int,
        phase: str,
    ) -> Tensor:
        """Run this rank's experts.

        Args:
            hidden_TH: [N, H] rows that reached this rank.
            index_TK: [N, K] expert slots of the model; those of other ranks are skipped.
            affinities_TK: [N, K] float32.
            num_tokens: T of all ranks, which decides the path.
            phase: one of dispatch.PHASES.

        Returns:
            [N, H], a partial sum over this rank's experts and slices.
        """
        if hidden_TH.shape[0] == 0:
            return torch.zeros_like(hidden_TH)
        path = self.choose_path(phase, num_tokens).path
        return self._run(path, hidden_TH, self._localize(index_TK, affinities_TK, phase), phase)

    def weights(self, phase: str = "prefill") -> ExpertWeights:
        """Return the weights this rank computes with in a phase; a view where phases share them."""
        if self.shards.second is not None and phase in DECODE_PHASES:
            return self.mlp_op_tkg.weights()
        return self.shards.view(self.mlp_op.weights(), phase, self.num_slots)

    def _run(self, path: str, hidden_TH: Tensor, routing: LocalRouting, phase: str) -> Tensor:
        weights = self.weights(phase)
        if path in ("blockwise", "capacity"):
            plan = BlockPlan(
                self.blockwise_matmul_config.block_size,
                self.blockwise_matmul_config.pad_num_blocks_to_even,
            )
            output_TH = self.backend.blockwise(hidden_TH, routing, weights, plan)
        else:
            output_TH = self.backend.few_tokens(hidden_TH, routing, weights, path)
        return output_TH.to(hidden_TH.dtype)

    def check_hidden(self, hidden_TH: Tensor) -> None:
        """Raise ValueError unless hidden states fit the weights in width and dtype."""
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

    def _fits_capacity(self, index_TK: Tensor) -> Tensor:
        """Return [T, K] bool: within the first ceil(T * K * capacity_factor / E) of its expert."""
        num_tokens, top_k = index_TK.shape
        factor = self.config.capacity_factor or 0.0
        room = math.ceil(num_tokens * top_k * factor / self.config.num_experts)
        pairs = sort_pairs(index_TK, self.config.num_experts)
        counts_E1 = nn.functional.pad(pairs.tokens_per_expert_E, (0, 1))
        first_E1 = counts_E1.cumsum(0) - counts_E1
        position_P = torch.arange(pairs.order_P.shape[0], device=index_TK.device)
        rank_P = position_P - first_E1[pairs.expert_P]
        fits_P = torch.zeros_like(rank_P, dtype=torch.bool).scatter(0, pairs.order_P, rank_P < room)
        return fits_P.view(num_tokens, top_k)

    def _localize(self, index_TK: Tensor, affinities_TK: Tensor, phase: str) -> LocalRouting:
        """Number the experts of this rank from 0; choices of other ranks become none."""
        shard = self.shards.of(phase)
        if shard.ep_size > 1:
            experts = shard.local_experts(self.num_slots)
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


def _check_choices(expert_index: Tensor, num_tokens: int, num_experts: int) -> None:
    """Refuse choices that are not experts, or of another number of tokens."""
    if expert_index.shape[0] != num_tokens:
        raise ValueError(
            f"expert_index: shape {tuple(expert_index.shape)} must have one row for each of the"
            f" {num_tokens} tokens of hidden_states. Route the same tokens."
        )
    if expert_index.numel() == 0:
        return
    if expert_index.is_floating_point() or expert_index.is_complex():
        raise ValueError(
            f"expert_index: dtype {expert_index.dtype} must be an integer one. Pass the choices,"
            " not the affinities."
        )
    if torch.compiler.is_compiling():
        return  # a graph cannot look at values
    largest = int(expert_index.max())
    if largest >= num_experts:
        raise ValueError(
            f"expert_index: expert {largest} must be below num_experts={num_experts}. Number"
            " experts from 0; -1 is none."
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
