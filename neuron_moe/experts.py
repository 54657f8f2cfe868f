"""Routed experts: one class owns the weights, a backend does the arithmetic.

Axes: T tokens, K choices, E experts (of the model, or of this rank where said), H hidden, I
intermediate of this rank.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuron_moe.backends import (
    Backend,
    BlockPlan,
    ChoosesBlocks,
    ChoosesMode,
    ExpertWeights,
    LaysOut,
    LocalRouting,
    get_backend,
)
from neuron_moe.blocks import NO_EXPERT, sort_pairs
from neuron_moe.choices import check_choices, choice_affinities, drop_padding, fits_capacity
from neuron_moe.config import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig, as_dtype
from neuron_moe.dispatch import (
    DECODE_KERNEL_TOKENS,
    FEW_TOKEN_PATHS,
    Decision,
    Workload,
    check_compat,
    choose_path,
    settle_mode,
)
from neuron_moe.errors import (
    check_choice,
    check_instance,
    check_positive_int,
    names_its_keys,
)
from neuron_moe.expert_linear import ExpertLinear, Experts
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import STRATEGIES
from neuron_moe.parallel.hybrid import DECODE_PHASES, PhaseShards
from neuron_moe.parallel.placement import ExpertPlacement
from neuron_moe.parallel.shard import ExpertShard

__all__ = ["ExpertLinear", "ExpertMLPsV2", "Experts"]

_SMALLEST_SUM = 1e-12  # a token whose choices all dropped out has affinity sum 0


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
        device = self.mlp_op.down_proj.device
        self.expert_load_E = (
            torch.zeros(self.config.num_experts, dtype=torch.int64, device=device)
            if enabled
            else None
        )

    def pack_weights(self, *, for_decode: bool = False, for_prefill: bool = False) -> None:
        """Keep the weights in the form the backend likes best; the same numbers.

        torch: laid out for fast CPU inference. nki: as fp8 codes, where that loses no bit of any
        weight (MXFP4 checkpoints); otherwise they stay, which a log line and `MoE.explain` tell.
        There is no gradient and no graph capture afterwards. The state dict is unchanged; loading
        one unpacks. Call it again after a change of the weights.

        Args:
            for_decode: also keep a copy in the order of nki's decode kernel, as much memory again.
            for_prefill: the same for its prefill kernel, if experts do not fit on chip; where they
                do, there is nothing to gain and no copy is made.

        Raises:
            ValueError: the backend cannot.
        """
        self.weights_changed()
        for experts in self.modules():
            if isinstance(experts, Experts):
                experts.pack(self.backend)
        second = self.shards.second is not None
        for phase, is_wanted, experts in (
            ("decode", for_decode, self.mlp_op_tkg if second else self.mlp_op),
            ("prefill", for_prefill, self.mlp_op),
        ):
            if not is_wanted:
                continue
            if not isinstance(self.backend, LaysOut):
                raise ValueError(
                    f"for_{phase}=True: backend={self.backend.name!r} has one layout for both"
                    " phases. Leave it False, or use backend='nki'."
                )
            experts.lay_out(self.backend, phase, self.config.top_k)

    def weights_changed(self) -> None:
        """Forget forms of the weights that were kept, laid out copies among them.

        Needed after writing to `weight.data`, which nobody else can see; changes of the parameters
        themselves and `load_state_dict` are seen.
        """
        self.backend.forget_weights()
        for experts in self.modules():
            if isinstance(experts, Experts):
                experts.copies.clear()

    def workload(self, phase: str, tokens: int) -> Workload:
        """Return the sizes that decide how `tokens` tokens are computed."""
        work = Workload(
            phase,
            tokens,
            self.config.top_k,
            self.num_slots,
            self.num_slots // self.shards.of(phase).ep_size,
            self.blockwise_matmul_config.block_size,
            self.config.capacity_factor,
        )
        in_blocks = phase not in DECODE_PHASES or tokens > DECODE_KERNEL_TOKENS
        is_free = self.blockwise_matmul_config.leaves_block_size
        if in_blocks and is_free and isinstance(self.backend, ChoosesBlocks):
            best = self.backend.choose_block_size(work, self.weights(phase), self.scales_input)
            work = replace(work, block_size=best)
        return work

    def choose_path(self, phase: str, tokens: int) -> Decision:
        """Decide how `tokens` tokens are computed; see `neuron_moe.dispatch`."""
        work, decision = self.choose_by_sizes(phase, tokens)
        if (
            decision.path in FEW_TOKEN_PATHS
            and self.compat is None
            and isinstance(self.backend, ChoosesMode)
        ):
            mode, reason = self.backend.choose_mode(work, self.weights(phase), self.scales_input)
            decision = settle_mode(decision, work, mode, reason)
        return decision

    def choose_by_sizes(self, phase: str, tokens: int) -> tuple[Workload, Decision]:
        """Return the sizes of a step and the path that these alone say, without a cost model."""
        work = self.workload(phase, tokens)
        decision = choose_path(
            phase,
            tokens,
            work.top_k,
            work.num_experts,
            num_local_experts=work.num_local_experts,
            block_size=work.block_size,
            capacity_factor=work.capacity_factor,
            backend=self.backend.name,
            compat=self.compat,
        )
        return work, decision

    @property
    def scales_input(self) -> bool:
        """Whether affinities multiply the experts' input instead of their output."""
        return self.config.early_expert_affinity_modulation

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
        check_choices(expert_index, num_tokens, self.config.num_experts)
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
        affinities_TK = choice_affinities(expert_affinities, index_TK, self.config.num_experts)
        index_TK, affinities_TK = drop_padding(index_TK, affinities_TK, padding_mask)
        if num_tokens and self.choose_path(phase, num_tokens).path == "capacity":
            rule = partial(
                fits_capacity,
                num_experts=self.config.num_experts,
                factor=self.config.capacity_factor or 0.0,
            )
            apply = over_all_tokens or _to_these_tokens
            fits_TK = apply(rule, index_TK)
            index_TK = torch.where(fits_TK, index_TK, NO_EXPERT)
            affinities_TK = torch.where(fits_TK, affinities_TK, 0.0)
        if self.config.normalize_top_k_affinities:
            total_T1 = affinities_TK.sum(-1, keepdim=True)
            affinities_TK = affinities_TK / total_T1.clamp(min=_SMALLEST_SUM)
        self.record_load(index_TK)
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
        self.check_mode()
        if hidden_TH.shape[0] == 0:
            return torch.zeros_like(hidden_TH)
        path = self.choose_path(phase, num_tokens).path
        plan = BlockPlan(
            self.workload(phase, num_tokens).block_size,
            self.blockwise_matmul_config.pad_num_blocks_to_even,
        )
        routing = self._localize(index_TK, affinities_TK, phase)
        return self._run(path, hidden_TH, routing, plan, phase)

    def weights(self, phase: str = "prefill") -> ExpertWeights:
        """Return the weights this rank computes with in a phase; a view where phases share them."""
        if self.shards.second is not None and phase in DECODE_PHASES:
            return self.mlp_op_tkg.weights()
        return self.shards.view(self.mlp_op.weights(), phase, self.num_slots)

    def _run(
        self, path: str, hidden_TH: Tensor, routing: LocalRouting, plan: BlockPlan, phase: str
    ) -> Tensor:
        weights = self.weights(phase)
        if path in ("blockwise", "capacity"):
            output_TH = self.backend.blockwise(hidden_TH, routing, weights, plan)
        else:
            output_TH = self.backend.few_tokens(hidden_TH, routing, weights, path)
        return output_TH.to(hidden_TH.dtype)

    def check_mode(self) -> None:
        """Raise ValueError in training with a backend that has no gradient."""
        if not self.training or not torch.is_grad_enabled() or self.backend.has_gradient:
            return
        if any(parameter.requires_grad for parameter in self.parameters()):
            raise ValueError(
                f"training with backend={self.backend.name!r}: it has no gradient. Call eval(), use"
                " torch.no_grad(), or train with backend='torch'."
            )

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

    def _localize(self, index_TK: Tensor, affinities_TK: Tensor, phase: str) -> LocalRouting:
        """Number the experts of this rank from 0; choices of other ranks become none."""
        shard = self.shards.of(phase)
        scales_input = self.scales_input
        if shard.ep_size == 1:
            return LocalRouting(index_TK, affinities_TK, scales_input)
        experts = shard.local_experts(self.num_slots)
        is_here = (index_TK >= experts.start) & (index_TK < experts.stop)
        return LocalRouting(
            torch.where(is_here, index_TK - experts.start, NO_EXPERT),
            torch.where(is_here, affinities_TK, 0.0),
            scales_input,
            index_TK,
            experts.start,
            self.num_slots,
        )

    def record_load(self, index_TK: Tensor) -> None:
        """Count the tokens of each expert, if counters are enabled."""
        if self.expert_load_E is None or torch.compiler.is_compiling():
            return
        with torch.no_grad():
            self.expert_load_E = (
                self.expert_load_E
                + sort_pairs(index_TK, self.config.num_experts).tokens_per_expert_E
            )


def _to_these_tokens(rule: Callable[[Tensor], Tensor], index_TK: Tensor) -> Tensor:
    return rule(index_TK)
