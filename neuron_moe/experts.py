"""Routed experts: one class owns the weights and their spread over ranks, a backend computes.

Axes: T tokens, K choices, E experts (of the model, or of this rank where said), H hidden, I
intermediate of this rank.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from neuron_moe.backends import Backend, get_backend
from neuron_moe.blocks import NO_EXPERT
from neuron_moe.choices import (
    check_choices,
    check_mask_values,
    check_no_repeats,
    check_one_reading,
    choice_affinities,
    drop_padding,
    fits_capacity,
    from_dense,
)
from neuron_moe.device import is_exporting, is_traced
from neuron_moe.errors import check_instance, check_positive_int
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.groups import ExpertGroups
from neuron_moe.parallel.hybrid import PhaseShards
from neuron_moe.parallel.placement import ExpertPlacement
from neuron_moe.parallel.shard import ExpertShard
from neuron_moe.passes import count_load
from neuron_moe.paths import DECODE_PHASES, Decision, check_compat
from neuron_moe.plan import Forms, LayerParts, Plan, PlannedModule, Step
from neuron_moe.spec import ExpertSpec, InitMethods, Tuning
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting, refuse_gradient
from neuron_moe.weights.experts import Experts
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.product_forms import MEASURED

_SMALLEST_SUM = 1e-12  # a token whose choices all dropped out has affinity sum 0
OverAllTokens = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Applies a function of all T tokens' choices to those of the tokens of this rank."""


class RoutedExperts(PlannedModule):
    """The routed experts of one layer, as one rank holds them.

    State dict: `mlp_op.gate_up_proj.weight` [E, H, 2I] (gate columns first; `mlp_op.up_proj` [E, H,
    I] without a gate), `mlp_op.down_proj.weight` [E, I, H], and biases [E, 2I], [E, H] as in the
    checkpoint.

    Args:
        spec: sizes and formula.
        tuning: how kernels go about it.
        backend: name of the backend, or a backend.
        compat: None for our dispatch rules, 'nxd' for NxD's.
        groups: ranks that share the experts, for 'prefill' and 'decode'; default: those of
            `parallel_state`.
        placement: which expert sits where, with replicas; default: equal runs, and replicas of the
            first experts where they do not divide by the ranks.
        shares_phases: let one phase compute with a part of what the other stores; without groups
            as they were planned.
        dtype: dtype of the weights.
        device: where they live.
        init_methods: how the first and the down projections are drawn.
    """

    mlp_op: Experts
    mlp_op_tkg: Experts
    _unplanned = frozenset({"expert_load_E"})

    def __init__(
        self,
        spec: ExpertSpec,
        tuning: Tuning | None = None,
        *,
        backend: str | Backend = "torch",
        compat: str | None = None,
        groups: Mapping[str, ExpertGroups] | None = None,
        placement: ExpertPlacement | None = None,
        shares_phases: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_methods: InitMethods = (None, None),
    ) -> None:
        super().__init__()
        check_compat(compat)
        self.spec = spec
        self.tuning = tuning or Tuning()
        self.dtype = dtype
        self.backend: Backend = get_backend(backend)
        self.compat = compat
        if groups is None:
            shares_phases = parallel_state.phases_share_weights()
            groups = {
                phase: parallel_state.resolve_expert_groups(None, None, phase, None)
                for phase in ("prefill", "decode")
            }
        self.groups = dict(groups)
        num_ranks = math.lcm(*(each.ep.size for each in self.groups.values()))
        if placement is None and spec.num_experts % num_ranks:
            placement = ExpertPlacement.contiguous(spec.num_experts, num_ranks)
        self.placement = placement
        _check_placement(placement, spec, self.groups)
        self.num_physical = placement.num_physical if placement else spec.num_experts
        self.shards = PhaseShards.settle(
            self.groups["prefill"].shard,
            self.groups["decode"].shard,
            self.num_physical,
            may_share=shares_phases,
        )
        for name, shard in (("mlp_op", self.shards.stored), ("mlp_op_tkg", self.shards.second)):
            if shard is not None:
                experts = Experts(
                    spec,
                    shard,
                    dtype=dtype,
                    device=device,
                    num_physical=self.num_physical,
                    init_methods=init_methods,
                )
                self.add_module(name, experts)
        # No buffer: each rank counts its own, over which DDP would copy those of its first.
        self.expert_load_E: Tensor | None = None
        self._counts_training_alone = False

    @property
    def shard(self) -> ExpertShard:
        """What this rank holds of the experts in prefill."""
        return self.shards.prefill

    @property
    def is_traced(self) -> bool:
        """Whether one process stands for all ranks."""
        return any(groups.is_traced for groups in self.groups.values())

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank in prefill, replicas counted."""
        return self.num_physical // self.shards.prefill.ep_size

    def local_experts(self, phase: str = "prefill") -> tuple[int, ...]:
        """Return the model's number of each expert this rank computes in a phase."""
        here = self.shards.of(phase).local_experts(self.num_physical)
        if self.placement is None:
            return tuple(here)
        return self.placement.physical[here.start : here.stop]

    def first_expert(self, phase: str) -> int | Tensor:
        """Return the number, of all physical experts, of this rank's first; as data ([] int32)
        where one graph serves all ranks.

        Raises:
            ValueError: it does, and no weight says which rank this is.
        """
        if self.groups["decode" if phase in DECODE_PHASES else "prefill"].ep.is_traced:
            raise ValueError(
                "experts split over ranks in one graph for all ranks: which rank has which must"
                " come from data. Build them with ExpertMLPsV2."
            )
        return self.shards.of(phase).local_experts(self.num_physical).start

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

    def enable_load_counters(self, enabled: bool = True, *, training_only: bool = False) -> None:
        """Count the tokens of each expert from now on, in `expert_load_E` [E] int64; starts at
        zero.

        Real tokens count, once each: not where activation checkpointing computes them again. The
        counts are this rank's, whatever casts or copies the module, and no part of the state dict.

        Args:
            enabled: False stops counting.
            training_only: leave out tokens of a module in evaluation.
        """
        before = self.expert_load_E is not None, self._counts_training_alone
        if before != (enabled, training_only):  # else plans and graphs need not be made anew
            self._counts_training_alone = training_only
        device = self.mlp_op.down_proj.device
        with torch.inference_mode(False):  # so that any pass may count in place
            zeros_E = torch.zeros(self.spec.num_experts, dtype=torch.int64, device=device)
        self.expert_load_E = zeros_E if enabled else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RoutedExperts":
        """Move and cast as torch does; counters move along."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.expert_load_E is not None:
            load_E, device = self.expert_load_E, self.mlp_op.down_proj.device
            is_new = load_E.is_meta  # nothing was counted there
            self.expert_load_E = (
                torch.zeros_like(load_E, device=device) if is_new else load_E.to(device)
            )
        return self

    def pack_weights(self, *, for_decode: bool = False, for_prefill: bool = False) -> None:
        """Keep the weights in the form the backend likes best; the same numbers.

        torch: laid out for fast CPU inference. nki: as fp8 codes, where that loses no bit of any
        weight (MXFP4 checkpoints); otherwise they stay, which a log line and `MoE.explain` say.
        cuda: as MXFP4 codes, on the same condition.
        The Parameters stay, with one NaN for all numbers: writing to them raises until
        `unpack_weights`, requesting their gradient too (inputs have one, on torch), and no graph is
        captured. The state dict is unchanged; loading one unpacks, as does giving a weight other
        `data`. Call it again after a change of the weights.

        Args:
            for_decode: also keep a copy in the order of nki's decode kernel, as much memory again.
            for_prefill: the same for its prefill kernel, if experts do not fit on chip; where they
                do, there is nothing to gain and no copy is made.

        Raises:
            ValueError: the backend cannot.
        """
        self.weights_changed()
        for experts in self._stored():
            experts.pack(self.backend.pack)
        wanted = {"decode": for_decode, "prefill": for_prefill}
        for phase in (phase for phase in wanted if wanted[phase]):
            self._experts_of(phase).lay_out(phase, partial(self._lay_out, phase))
        self.num_changes += 1

    def settle_forms(self, form: str = MEASURED) -> None:
        """Choose how a CPU multiplies with the experts in steps of each size; the same numbers up
        to rounding.

        Measured once for a machine, number of threads and layer, within about 10 s, and kept in
        `neuron-moe/product_forms.json` of the user's cache folder. `MoE.explain` names the choice.
        Where some steps are half as fast again with packed matrices and some with others, both are
        kept if half of the machine's memory stays free. Where a gradient is recorded, plain
        matrices are multiplied; where packed ones alone are kept, it is as with `pack_weights`. The
        state dict is unchanged; loading one or moving the module drops the choice. Backends with
        kernels of their own have nothing to choose.

        Args:
            form: 'measured', or one of `product_forms.FORMS` for every step, whatever the machine.

        Raises:
            ValueError: an unknown form, or one that cannot be here.
        """
        self.weights_changed()
        for experts in self._stored():
            experts.unsettle_forms()
            parts = replace(self.parts("prefill"), weights=experts.weights())
            forms = self.backend.settle_forms(parts, form)
            if forms is not None:
                experts.settle_forms(forms)
        self.num_changes += 1

    def unpack_weights(self) -> None:
        """Undo `pack_weights` and `settle_forms`: the same Parameters hold their numbers again."""
        self._plans.clear()
        self.num_changes += 1
        for experts in self._stored():
            experts.unpack()

    def _lay_out(self, phase: str, weights: ExpertWeights) -> LaidOut | None:
        return self.backend.lay_out(replace(self.parts(phase), weights=weights), phase)

    def weights_changed(self) -> None:
        """Forget forms of the weights that were kept, laid out copies among them.

        Needed after writing to `weight.data`, which nobody else can see; changes of the parameters
        themselves and `load_state_dict` are seen.

        Raises:
            WeightError: the numbers of the weight are packed, so what was written is lost.
        """
        self._plans.clear()
        self.num_changes += 1
        for experts in self._stored():
            experts.forget_forms()

    def _stored(self) -> list[Experts]:
        return [module for module in self.children() if isinstance(module, Experts)]

    def _experts_of(self, phase: str) -> Experts:
        has_own = self.shards.second is not None and phase in DECODE_PHASES
        return self.mlp_op_tkg if has_own else self.mlp_op

    def weights(self, phase: str = "prefill") -> ExpertWeights:
        """Return the weights this rank computes with in a phase; a view where phases share them."""
        weights = self._experts_of(phase).weights()
        if self.shards.second is not None:
            return weights
        run = self.shards.run_of(phase, self.num_physical)
        return weights if run is None else weights.run(run)

    def parts(self, phase: str, forms: Forms | None = None) -> LayerParts:
        """Return what a backend plans with, the experts on their own."""
        return LayerParts(
            spec=self.spec,
            weights=self.weights(phase),
            tuning=self.tuning,
            num_experts=self.num_physical,
            first_expert=self.first_expert(phase),
            compat=self.compat,
            forms=forms or Forms(),
        )

    @property
    def _plans_ahead(self) -> bool:
        return self.backend.plans_ahead

    def _make(self, step: Step, forms: Forms) -> Plan:
        return self.backend.plan(self.parts(step.phase, forms), step)

    def choose_path(self, phase: str, tokens: int) -> Decision:
        """Decide how `tokens` tokens are computed; see `neuron_moe.paths`."""
        return self.plan(Step(phase, tokens)).decision

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
            expert_affinities: [T, K] affinities in the order of the choices, or NxD's dense [T, E]
                where E > K; where E == K both look alike, so [T, K] is taken only with the choices
                in the order 0 to K - 1, and dense ones as expert_affinities_masked_full.
            expert_index: [T, K] different experts of the model; -1 for none.
            seq_len: 1 is decode, more is prefill.
            padding_mask: [B, S] or [T], nonzero for real tokens; the others get no expert.
            expert_affinities_masked_full: NxD's masked dense affinities [T, E], if already
                computed; always read as dense, and instead of expert_affinities.
            phase: overrides what `seq_len` says, for speculation windows.

        Returns:
            [T, H] in the dtype of the hidden states; a partial sum under tensor or expert
            parallelism.
        """
        check_positive_int("seq_len", seq_len)
        phase = phase or ("decode" if seq_len == 1 else "prefill")
        self.check_hidden(hidden_states)
        num_tokens = hidden_states.shape[0]
        check_choices(expert_index, num_tokens, self.spec.num_experts)
        if padding_mask is not None:
            check_mask_values(padding_mask)
        check_no_repeats(expert_index, padding_mask)
        if expert_affinities_masked_full is not None:
            self._check_width(expert_index, num_tokens)
            expert_affinities = from_dense(
                expert_affinities_masked_full, expert_index, self.spec.num_experts
            )
        else:
            check_instance("expert_affinities", expert_affinities, Tensor)
            check_one_reading(expert_affinities, expert_index, self.spec.num_experts, padding_mask)
        step = Step(phase, num_tokens, has_padding=padding_mask is not None)
        plan = self.plan(step) if num_tokens else None
        drops = plan is not None and plan.path == "capacity"
        index_TK, affinities_TK = self.select(
            expert_affinities, expert_index, padding_mask, drops=drops
        )
        return self.compute(plan, hidden_states, index_TK, affinities_TK)

    def select(
        self,
        expert_affinities: Tensor,
        expert_index: Tensor,
        padding_mask: Tensor | None,
        *,
        drops: bool,
        first_token: int = 0,
        over_all_tokens: OverAllTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Settle what each token gets: padding, capacity, normalisation, and the expert's place.

        Args:
            expert_affinities: [t, K] in the order of the choices, or NxD's dense [t, E], E > K.
            expert_index: [t, K] experts of the model; -1 for none.
            padding_mask: nonzero for real tokens.
            drops: choices beyond the capacity of an expert are dropped.
            first_token: number of the first of these t tokens among all.
            over_all_tokens: needed where tokens are spread over ranks.

        Returns:
            [t, K] int32 physical experts of the model, and [t, K] float32 affinities.
        """
        self._check_width(expert_index, expert_affinities.shape[0])
        index_TK = expert_index.to(torch.int32)
        affinities_TK = choice_affinities(expert_affinities, index_TK, self.spec.num_experts)
        index_TK, affinities_TK = drop_padding(index_TK, affinities_TK, padding_mask)
        if drops:
            factor = self.spec.capacity_factor or 0.0
            rule = partial(fits_capacity, num_experts=self.spec.num_experts, factor=factor)
            fits_TK = rule(index_TK) if over_all_tokens is None else over_all_tokens(rule, index_TK)
            index_TK = torch.where(fits_TK, index_TK, NO_EXPERT)
            affinities_TK = torch.where(fits_TK, affinities_TK, 0.0)
        if self.spec.normalizes_affinities:
            total_T1 = affinities_TK.sum(-1, keepdim=True)
            affinities_TK = affinities_TK / total_T1.clamp(min=_SMALLEST_SUM)
        self.record_load(index_TK)
        if self.placement is not None:
            index_TK = self.placement.to_physical(index_TK, first_token)
        return index_TK, affinities_TK

    def _check_width(self, expert_index: Tensor, num_tokens: int) -> None:
        """Raise ValueError unless every token has top_k choices."""
        expected = (num_tokens, self.spec.top_k)
        if tuple(expert_index.shape) != expected:
            raise ValueError(
                f"expert_index: shape {tuple(expert_index.shape)} must be {expected}, [T, top_k]."
            )

    def compute(
        self, plan: Plan | None, hidden_TH: Tensor, index_TK: Tensor, affinities_TK: Tensor
    ) -> Tensor:
        """Run this rank's experts.

        Args:
            plan: of the step; None where the rank got no token.
            hidden_TH: [N, H] rows that reached this rank.
            index_TK: [N, K] physical experts of the model; those of other ranks are skipped.
            affinities_TK: [N, K] float32.

        Returns:
            [N, H], a partial sum over this rank's experts and slices.
        """
        self.check_mode()
        stored = self.mlp_op if plan is None else self._experts_of(plan.step.phase)
        if plan is None or hidden_TH.shape[0] == 0:
            output_NH = torch.zeros_like(hidden_TH)
        else:
            routing = _localized(plan.parts, index_TK, affinities_TK)
            output_NH = plan.experts(hidden_TH, routing).to(hidden_TH.dtype)
            if torch.is_grad_enabled():
                output_NH = refuse_gradient(output_NH, plan.parts.weights)
        return _tied(output_NH, (hidden_TH, affinities_TK), stored)

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
        if hidden_TH.ndim != 2 or hidden_TH.shape[1] != self.spec.hidden_size:
            raise ValueError(
                f"hidden_states: shape {tuple(hidden_TH.shape)} must be [T,"
                f" {self.spec.hidden_size}]"
                " (hidden_size of the experts). Flatten batch and sequence first."
            )
        down = self.mlp_op.down_proj
        if hidden_TH.dtype != down.weight.dtype and hidden_TH.dtype != down.matrices.dtype:
            raise ValueError(
                f"hidden_states: dtype {hidden_TH.dtype} must be that of the expert weights,"
                f" {down.matrices.dtype}. Cast the input, or the module with .to()."
            )

    def record_load(self, index_TK: Tensor) -> None:
        """Count the tokens of each expert, if counters are enabled; exported and traced graphs do
        not.
        """
        if self.expert_load_E is None or is_exporting() or is_traced(index_TK):
            return
        if self._counts_training_alone and not self.training:
            return
        count_load(self.expert_load_E, index_TK)


def _localized(parts: LayerParts, index_TK: Tensor, affinities_TK: Tensor) -> LocalRouting:
    """Number the experts of this rank from 0; choices of other ranks become none."""
    first, count = parts.first_expert, parts.weights.down_proj_EIH.shape[0]
    scales_input = parts.spec.scales_input
    if count == parts.num_experts:
        return LocalRouting(index_TK, affinities_TK, scales_input)
    is_here = (index_TK >= first) & (index_TK < first + count)
    return LocalRouting(
        torch.where(is_here, index_TK - first, NO_EXPERT),
        torch.where(is_here, affinities_TK, 0.0),
        scales_input,
        index_TK,
    )


def _tied(output_NH: Tensor, inputs: tuple[Tensor, ...], experts: nn.Module) -> Tensor:
    """Return an output that has a gradient, zero at least, if inputs or weights have one.

    A rank whose experts nobody chose takes part in the collectives of the way back like any other,
    and gives its weights zeros, for which DDP and FSDP wait.
    """
    if output_NH.requires_grad or not torch.is_grad_enabled():
        return output_NH
    for each in (*inputs, *experts.parameters()):
        if each.requires_grad:
            output_NH = output_NH + each[:0].sum().to(output_NH.dtype)
    return output_NH


def _check_placement(
    placement: ExpertPlacement | None, spec: ExpertSpec, groups: Mapping[str, ExpertGroups]
) -> None:
    """Raise ValueError unless a placement is of this model and these ranks."""
    if placement is None:
        return
    if placement.num_experts != spec.num_experts:
        raise ValueError(
            f"placement: places {placement.num_experts} experts, must place"
            f" num_experts={spec.num_experts}. Compute it from a trace of this model."
        )
    for phase, group in groups.items():
        if placement.num_ranks % group.ep.size:
            raise ValueError(
                f"placement: made for {placement.num_ranks} expert-parallel ranks, which"
                f" {group.ep.size} ({phase}) must divide. Place the experts again."
            )
