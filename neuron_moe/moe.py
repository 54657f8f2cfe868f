"""MoE: a router, routed experts, and shared experts beside them."""

import itertools
import zlib
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import astuple, fields, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from neuron_moe.blocks import NO_EXPERT
from neuron_moe.choices import check_mask_values, drop_padding
from neuron_moe.device import is_traced
from neuron_moe.dispatch import (
    Beside,
    Dispatch,
    Entered,
    Own,
    Rows,
    TokenBatch,
    build_dispatches,
    build_shuffle,
)
from neuron_moe.errors import (
    WeightError,
    check_choice,
    check_instance,
    names_its_keys,
)
from neuron_moe.experts import RoutedExperts
from neuron_moe.explain import Explanation
from neuron_moe.fused_decode import MoEFusedTKGConfig
from neuron_moe.latent import BesideLatents, Identities, Latent
from neuron_moe.layer_checks import (
    check_group,
    check_parts,
    check_sequence_dimension,
    check_sequences,
    remarks_of,
)
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import Collectives, as_collectives
from neuron_moe.parallel.groups import ExpertGroups
from neuron_moe.passes import OwedLosses
from neuron_moe.paths import DECODE_PHASES, PHASES
from neuron_moe.plan import Forms, LayerParts, Plan, PlannedModule, Step, phase_of
from neuron_moe.router import Router, Routing
from neuron_moe.router_losses import LossTokens, RouterLosses, router_losses
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.weights.checks import before_load


class MoEOutput(NamedTuple):
    """What `MoE.forward` returns: a tuple of what was requested, in this order, as NxD's is.

    Every field is an attribute too; one that was not requested is None and no item of the tuple.

    Attributes:
        output: the shape and dtype of the input.
        router_logits: [T, E] float32, if the layer was built with return_router_logits.
        expert_index: [T, K] int64, if built with return_expert_index.
        residual: input + residual, if a residual was passed.
    """

    output: Tensor
    router_logits: Tensor | None = None
    expert_index: Tensor | None = None
    residual: Tensor | None = None


def _output_type(fields: tuple[str, ...]) -> Any:
    """Return MoEOutput of some fields; torch.export takes named tuples of this plain form.

    Registered, so that a captured graph that returns one can be saved.
    """
    kind: Any = namedtuple("MoEOutput", fields)  # type: ignore[misc]
    for name in MoEOutput._fields:
        if name not in fields:
            setattr(kind, name, None)
    pytree._register_namedtuple(kind, serialized_type_name=f"neuron_moe.{'.'.join(fields)}")
    return kind


_OPTIONAL = MoEOutput._fields[1:]
_OUTPUT_TYPES = {
    names: _output_type(names)
    for count in range(len(_OPTIONAL) + 1)
    for more in itertools.combinations(_OPTIONAL, count)
    if (names := ("output", *more))
}


_Output = tuple[Tensor, Tensor | None, Tensor | None]
"""Output, logits and choices of the tokens that this rank was given."""


@names_its_keys
class MoE(PlannedModule):
    """One MoE layer, as one rank holds it; the arguments are NxD's.

    Args:
        router: chooses experts for each token.
        expert_mlps: the routed experts.
        shared_experts: experts every token takes, or None.
        rmsnorm: norm in front of router and experts, or None; see `take_frame`.
        sequence_parallel_enabled: the input is this rank's part of each sequence, parts of
            different length allowed; the router sees the own tokens only.
        sequence_dimension: axis that sequence parallelism splits (default 1 of [B, S, H]; 0 for
            [S, B, H]).
        return_router_logits: return the logits.
        return_expert_index: return the choices.
        token_shuffle_group_size: ranks that exchange tokens at random first, and back at the end;
            1 is none.
        token_shuffle_seed: seed of that exchange.
        tensor_model_parallel_group: ranks over which outputs are summed, all that hold experts;
            default: those of the experts.
        init_tkg_module: NxD's fused decode module, which takes a tkg_config; here fused decode is
            one plan of the layer.
        tkg_config: its switches.
        reduce_dtype: dtype of the sum over ranks; None is that of the hidden states.
        latent: projections around the routed experts, or None.

    Attributes:
        losses: values of the router's auxiliary losses in the last step, see `use_router_losses`.
        owed_losses: their sums that `auxiliary_loss` has still to take.
        adds_input: the input, before its norm, is added to the output, see `take_frame`.
        must_load: a state dict that lacks a weight is refused also with strict=False.
        remarks: sentences for `explain()` about what was requested and changes nothing.
        moe_fused_tkg: None; fused decode is one plan of this layer.
        shuffle_permutation: None; the exchange of tokens keeps its own.

    Raises:
        ValueError: router and experts disagree on a size, or groups do not fit together.
    """

    adds_input: bool = False
    must_load: bool = False
    moe_fused_tkg = None
    shuffle_permutation = None

    def __init__(
        self,
        router: Router,
        expert_mlps: RoutedExperts,
        shared_experts: SharedExperts | None = None,
        rmsnorm: nn.Module | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
        token_shuffle_group_size: int = 1,
        token_shuffle_seed: int | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        init_tkg_module: bool = False,
        tkg_config: MoEFusedTKGConfig | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        latent: Latent | None = None,
    ) -> None:
        super().__init__()
        check_instance("router", router, Router)
        check_instance("expert_mlps", expert_mlps, RoutedExperts)
        if router.spec.table_size and token_shuffle_group_size > 1:
            raise ValueError(
                f"table_size={router.spec.table_size}: a table of token ids chooses, which are not"
                " shuffled with the tokens. Use token_shuffle_group_size=1."
            )
        expert_mlps.backend.check(expert_mlps.spec, router.spec)
        self.router = router
        self.expert_mlps = expert_mlps
        self.shared_experts = shared_experts
        self.rmsnorm = rmsnorm
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.return_router_logits = return_router_logits
        self.return_expert_index = return_expert_index
        self.token_shuffle_group_size = token_shuffle_group_size
        self.token_shuffle_seed = token_shuffle_seed
        self.tensor_model_parallel_group = tensor_model_parallel_group
        self.init_tkg_module = init_tkg_module
        self.tkg_config = None if tkg_config is None else MoEFusedTKGConfig.of(tkg_config)
        self.reduce_dtype = reduce_dtype
        self.latent = latent
        check_parts(router, expert_mlps, shared_experts, latent)
        check_sequences(
            router,
            expert_mlps,
            is_parallel=sequence_parallel_enabled,
            axis=self.sequence_axis,
        )
        self.remarks = remarks_of(
            router,
            shared_experts,
            self.tkg_config,
            expert_mlps.backend.name,
            init_tkg_module=init_tkg_module,
            unused_seed=token_shuffle_seed if token_shuffle_group_size == 1 else None,
        )
        self.shuffle = build_shuffle(token_shuffle_group_size, token_shuffle_seed)
        group = tensor_model_parallel_group
        model = None if group is None else as_collectives(group, "model")
        self.use_groups(
            {phase: each.summed_over(model) for phase, each in expert_mlps.groups.items()}
        )
        check_group(router, self.groups["prefill"].model)
        if self.tkg_config is not None and expert_mlps.backend.name == "nki":
            normalizes = router.spec.formula.renormalize or expert_mlps.spec.normalizes_affinities
            self.tkg_config.check(has_shared=shared_experts is not None, normalizes=normalizes)
        self.router_losses: RouterLosses | None = None
        self.losses: dict[str, Tensor] = {}
        self.owed_losses = OwedLosses()
        before_load(self, _before_load)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set; what says how sequences come in is checked."""
        if name == "sequence_dimension":
            check_sequence_dimension(value)
        super().__setattr__(name, value)

    @property
    def sequence_axis(self) -> int:
        """The axis that sequence parallelism splits."""
        return 1 if self.sequence_dimension is None else self.sequence_dimension

    @property
    def ep_enabled(self) -> bool:
        """Whether the model's experts are split by its main groups."""
        return parallel_state.get_expert_model_parallel_size() > 1

    @property
    def tensor_parallel_group(self) -> ProcessGroup | None:
        """The ranks over which outputs are summed; None for one rank."""
        given = self.tensor_model_parallel_group
        return parallel_state.get_world_group() if given is None else given

    @property
    def presharded(self) -> bool | None:
        """What a state dict that NxD's preshard hooks have rewritten is, see `ExpertMLPsV2`."""
        found: bool | None = getattr(self.expert_mlps, "presharded", None)
        return found

    @presharded.setter
    def presharded(self, undo: bool | None) -> None:
        for part in (self.expert_mlps, self.shared_experts):
            if part is not None:
                part.presharded = undo

    def use_groups(self, groups: Mapping[str, ExpertGroups]) -> None:
        """Communicate through these groups of the layer's ranks, for 'prefill' and 'decode'.

        Raises:
            ValueError: the shared experts' group does not fit them.
        """
        self.groups = dict(groups)
        self._dispatches = build_dispatches(
            self.groups,
            self.expert_mlps.num_physical,
            self.shared_experts,
            self.reduce_dtype,
            self.shuffle,
        )

    def dispatch(self, phase: str, is_part: bool) -> Dispatch:
        """Return how tokens reach experts in a phase, of which they are a part or all."""
        return self._dispatches[
            "part" if is_part else "decode" if phase in DECODE_PHASES else "prefill"
        ]

    def use_router_losses(self, weights: RouterLosses | None) -> None:
        """Compute auxiliary losses while training; None: no more.

        `neuron_moe.router_losses.auxiliary_loss` returns them for the loss to add: only who divides
        and scales the loss can weigh them right. Their values of the last step, this rank's parts
        without gradient, are in `losses`.

        Raises:
            ValueError: the loss of sequences is requested where tokens are of no sequence.
        """
        is_mixed = self.shuffle is not None or self.sequence_axis == 0
        if weights is not None and weights.sequence and is_mixed:
            raise ValueError(
                f"sequence={weights.sequence:g}: this layer shuffles tokens or takes them as [S, B,"
                " H], where sequences are not distinguished. Use balance, or [B, S, H] unshuffled."
            )
        self.router_losses = weights if weights is None or any(astuple(weights)) else None
        self.losses.clear()
        self.owed_losses.clear()

    def forward(
        self,
        hidden_states: Tensor,
        padding_mask: Tensor | None = None,
        is_speculative_decoding: bool = False,
        residual: Tensor | None = None,
        *,
        phase: str | None = None,
        token_ids: Tensor | None = None,
    ) -> MoEOutput:
        """Compute the layer.

        Args:
            hidden_states: [B, S, H]; S = 1 is decode.
            padding_mask: [B, S] whatever the order of hidden_states, nonzero for real tokens; the
                others get no routed expert. With sequence parallelism the own part or all of it.
            is_speculative_decoding: S > 1 tokens of a verification window, dispatched like decode.
            residual: [B, S, H] added to the input first; the sum is returned as the last field.
            phase: 'decode' says to a sequence parallel layer: these are tokens of a decode step,
                not its part of a prompt; None decides by S.
            token_ids: [B, S], in the order of hidden_states, for a router with a table of them.
        """
        hidden_states, residual = _add_residual(
            hidden_states, residual, self.router.spec.hidden_size
        )
        phase = "speculation" if is_speculative_decoding else phase
        batch = self._batch(hidden_states, padding_mask, phase)
        if token_ids is not None and self.router.spec.table_size:
            batch = batch._replace(token_ids=token_ids.reshape(-1))
        dispatch = self.dispatch(batch.phase, batch.is_sequence_part)
        batch = dispatch.tokens(batch, self._settings)
        plan, num_tokens = None, sum(batch.lengths)
        if num_tokens:
            has_padding = padding_mask is not None
            plan = self.plan(Step(batch.phase, num_tokens, has_padding, batch.is_sequence_part))
        run = self._run_fused if plan is not None and plan.is_fused else self._run
        output_TH, logits_TE, index_TK = run(plan, dispatch, batch)
        output = output_TH.view(hidden_states.shape)
        if self.adds_input and (plan is None or not plan.adds_input):
            output = hidden_states + output
        return self._result(output, logits_TE, index_TK, residual)

    def take_frame(self, norm: nn.Module) -> None:
        """Compute the norm in front and the residual around it too, where they can be fused.

        From then on the residual stream of a decoder layer goes in and comes out.

        Args:
            norm: stays a part of the module that it belongs to: this one does not list it.
        """
        self.__dict__["rmsnorm"] = norm
        self.adds_input = True

    def _result(
        self,
        output: Tensor,
        logits_TE: Tensor | None,
        index_TK: Tensor | None,
        residual: Tensor | None,
    ) -> MoEOutput:
        """Return the tuple of what was requested."""
        fields = {"output": output}
        if self.return_router_logits and logits_TE is not None:
            fields["router_logits"] = logits_TE
        if self.return_expert_index and index_TK is not None:
            fields["expert_index"] = index_TK.to(torch.int64)
        if residual is not None:
            fields["residual"] = residual
        return cast(MoEOutput, _OUTPUT_TYPES[tuple(fields)](**fields))

    def _run(self, plan: Plan | None, dispatch: Dispatch, batch: TokenBatch) -> _Output:
        """Norm and route, dispatch, experts, combine."""
        entered = dispatch.enter(batch, partial(self._choose, plan, dispatch, batch))
        assert entered.rows is not None
        num_rows = entered.rows.hidden_TH.shape[0]
        if plan is not None and num_rows not in (0, plan.step.tokens):
            plan = self.plan(plan.step._replace(rows=num_rows))
        rows, latent = entered.rows, self.latent
        if latent is not None:
            rows = rows._replace(hidden_TH=latent.enter(rows.hidden_TH))
        partial_NH = self.expert_mlps.compute(plan, *rows)
        beside: Beside | None = self.shared_experts
        if self.router.spec.num_identity:
            assert entered.routing is not None
            beside = Identities(self._identity_factors(entered.routing))
        if latent is None:
            output_TH, routing = dispatch.leave(partial_NH, entered, beside)
        else:
            width = latent.spec.latent_size
            if beside is not None:  # one sum over ranks for both
                beside = BesideLatents(beside, width)
                partial_NH = nn.functional.pad(partial_NH, (0, latent.spec.hidden_size))
            both, routing = dispatch.leave(partial_NH, entered, beside)
            output_TH = latent.leave(both[:, :width])
            if beside is not None:
                output_TH = output_TH + both[:, width:]
        assert routing is not None
        return output_TH, routing.router_logits_TE, routing.expert_index_TK

    def _identity_factors(self, routing: Routing) -> Tensor:
        """Return the sum of the affinities of each token's identities, [t, 1]."""
        is_identity_TK = routing.expert_index_TK >= self.router.spec.num_experts
        factor_T1: Tensor = (routing.expert_affinities_TK * is_identity_TK).sum(1, keepdim=True)
        return factor_T1

    def _choose(
        self, plan: Plan | None, dispatch: Dispatch, batch: TokenBatch, own: Own
    ) -> tuple[Rows, Routing]:
        """Choose experts for the tokens that this rank routes; return them as experts take them."""
        experts, own_TH, mask = self.expert_mlps, own.hidden_TH, own.padding_mask
        if mask is not None and self.training and torch.is_grad_enabled():
            own_TH = own_TH.where(mask.reshape(-1, 1) != 0, 0.0)  # 0 * NaN would reach weights
        own_TH = self._normed(plan, own_TH)
        spec = self.router.spec
        if spec.table_size:
            routing = self.router(own_TH, token_ids=own.token_ids)
        elif plan is None or plan.parts.router is None:
            routing = self.router(own_TH)
        else:
            own_TH, routing = plan.enter(own_TH)
        if self.router_losses is not None and self.training:
            self._owe_losses(routing, mask, dispatch.loss_tokens(batch))
        if self.latent is None:
            experts.check_hidden(own_TH)
        index_TK = routing.expert_index_TK
        if spec.num_identity:
            index_TK = index_TK.masked_fill(index_TK >= spec.num_experts, NO_EXPERT)
        chosen = experts.select(
            routing.expert_affinities_TK,
            index_TK,
            mask,
            drops=plan is not None and plan.path == "capacity",
            first_token=own.first_token,
            over_all_tokens=own.over_all,
        )
        return Rows(own_TH, *chosen), routing

    def _normed(self, plan: Plan | None, hidden_TH: Tensor) -> Tensor:
        """Return tokens as the plan takes them: it may compute the norm itself."""
        if self.rmsnorm is None or (plan is not None and plan.has_norm):
            return hidden_TH
        normed_TH: Tensor = self.rmsnorm(hidden_TH.unsqueeze(0)).squeeze(0)
        return normed_TH

    def _owe_losses(self, routing: Routing, mask: Tensor | None, tokens: LossTokens) -> None:
        """Compute the auxiliary losses of own tokens, and keep them for `auxiliary_loss`."""
        assert self.router_losses is not None
        logits_TE, affinities_TK, index_TK = routing
        real_TK, _ = drop_padding(index_TK, affinities_TK, mask)
        found = router_losses(
            Routing(logits_TE, affinities_TK, real_TK),
            self.router.act_fn,
            self.router_losses,
            tokens,
        )
        self.losses.clear()
        self.losses.update({name: loss.detach() for name, loss in found.items()})
        self.owed_losses.add(tokens.share(torch.stack([*found.values()]).sum()), affinities_TK)

    def _run_fused(self, plan: Plan | None, dispatch: Dispatch, batch: TokenBatch) -> _Output:
        """Compute the whole layer in one launch, and sum over ranks."""
        assert plan is not None
        experts, mask = self.expert_mlps, batch.padding_mask
        hidden_TH = self._normed(plan, batch.hidden_TH)
        experts.check_mode()
        experts.check_hidden(hidden_TH)
        is_real_T = None if mask is None else mask != 0
        partial_TH, index_TK = plan.layer(hidden_TH, is_real_T)
        if index_TK is not None:
            counted_TK = index_TK
            if is_real_T is not None:
                counted_TK = torch.where(is_real_T.unsqueeze(1), index_TK, NO_EXPERT)
            experts.record_load(counted_TK)
        output_TH, _ = dispatch.leave(partial_TH.to(hidden_TH.dtype), Entered(batch), None)
        return output_TH, None, index_TK

    def _batch(
        self, hidden_states: Tensor, padding_mask: Tensor | None, phase: str | None
    ) -> TokenBatch:
        """Return the tokens this rank was given, checked."""
        is_part = self.sequence_parallel_enabled and phase is None
        axis = self.sequence_axis if is_part else 1
        if padding_mask is not None:
            padding_mask = _check_mask(padding_mask, hidden_states, axis, is_part=is_part)
        # Parts of [S, B, H] are whole runs of tokens already; shuffled tokens are of no sequence.
        batch_size = 1 if axis == 0 or self.shuffle is not None else hidden_states.shape[0]
        hidden_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        num_tokens = hidden_TH.shape[0]
        if phase is None:
            phase = phase_of(num_tokens, batch_size)
        else:
            check_choice("phase", phase, PHASES)
        return TokenBatch(hidden_TH, batch_size, padding_mask, phase, is_part, (num_tokens,))

    @property
    def _plans_ahead(self) -> bool:
        return self.expert_mlps.backend.plans_ahead

    def _settings_of_plans(self) -> object:
        return self.num_changes, self.expert_mlps.num_changes, _epsilon(self.rmsnorm)

    def _planned_with(self) -> tuple[nn.Module | None, ...]:
        return self.router, self.expert_mlps, self.shared_experts, self.rmsnorm

    def _make(self, step: Step, forms: Forms) -> Plan:
        return self.expert_mlps.backend.plan(self.parts(step, forms), step)

    def prepare(self, phase: str, tokens: int, *, has_padding: bool = False) -> None:
        """Lay weights out for a step now, not when it first runs; a captured graph needs that.

        Args:
            phase: 'prefill', 'decode' or 'speculation'.
            tokens: T.
            has_padding: a padding mask will be given.
        """
        check_choice("phase", phase, PHASES)
        self._make_ready(*Step(phase, tokens, has_padding, self._is_part(phase)))

    @property
    def _fuses_decode(self) -> bool | None:
        """False: decode is never one launch; True: a step that cannot be is refused."""
        return None if self.tkg_config is None else self.tkg_config.moe_fused_kernel_enabled

    def _is_part(self, phase: str) -> bool:
        """Say whether tokens of a phase come as this rank's part of a sequence."""
        return self.sequence_parallel_enabled and phase == "prefill"

    def parts(self, step: Step, forms: Forms | None = None) -> LayerParts:
        """Return what a backend plans with."""
        experts = self.expert_mlps
        return replace(
            experts.parts(step.phase, forms),
            router=None if self.router.spec.why_torch else self.router,
            norm=None if self.router.spec.why_torch else self.rmsnorm,
            shared=self.shared_experts,
            returns_routing=self.return_expert_index or experts.expert_load_E is not None,
            why_apart=self._why_apart(step),
            fuses_decode=self._fuses_decode,
            needs_quantized=self.tkg_config is not None and self.tkg_config.quantized,
            adds_input=self.adds_input and self._model(step).size == 1,
            remarks=self.remarks + self._by_torch(),
        )

    def _by_torch(self) -> tuple[str, ...]:
        """Return a sentence for each part that torch computes whatever the back end."""
        spec, latent = self.router.spec, self.latent
        cases = (
            (spec.why_torch, f"router: torch, which {spec.why_torch}"),
            (spec.num_identity, f"{spec.num_identity} identity experts: torch, behind the others"),
            (latent is not None, "latents of the experts: torch projects into and out of them"),
        )
        return tuple(text for applies, text in cases if applies)

    def _model(self, step: Step) -> Collectives:
        """Return the ranks over which the output of a step is summed."""
        decodes = step.phase in DECODE_PHASES and not step.is_part
        return self.groups["decode" if decodes else "prefill"].model

    def _why_apart(self, step: Step) -> str:
        """Say why router and experts of a step cannot be one launch; '' if they can."""
        experts, shared = self.expert_mlps, self.shared_experts
        why_apart = self.dispatch(step.phase, step.is_part).why_apart
        refused = (
            (bool(why_apart), why_apart),
            (
                shared is not None and is_traced(experts.mlp_op.down_proj.weight),
                "shared experts would be laid out anew in every step of the traced graph",
            ),
            (experts.placement is not None, "experts are placed or replicated by load"),
            (bool(self._by_torch()), "; ".join(self._by_torch())),
            (
                experts.spec.normalizes_affinities,
                "affinities are normalised after routing; RouterTopK(renormalize=True) in place of"
                " normalize_top_k_affinities does it in the router",
            ),
            (self.return_router_logits, "logits are returned, which it keeps on chip"),
            (
                shared is not None
                and (shared.whole_on_each_rank or shared.group.size != self._model(step).size),
                "shared experts are not split over all ranks that are summed; give them"
                " tensor_model_parallel_group=parallel_state.get_world_group()",
            ),
        )
        return next((why for is_refused, why in refused if is_refused), "")

    def _settings(self) -> dict[str, object]:
        """Return what must agree between ranks."""
        experts, shared, norm = self.expert_mlps, self.shared_experts, self.rmsnorm
        return {
            "router": self.router.spec,
            "weights of the router": _digest(self.router),
            **{field.name: getattr(experts.spec, field.name) for field in fields(experts.spec)},
            "expert_placement": experts.placement,
            "shared_experts": None if shared is None else shared.describe(),
            "rmsnorm": norm,
            "weights of the rmsnorm": None if norm is None else _digest(norm),
            "rmsnorm_eps": _epsilon(norm),
            "reduce_dtype": self.reduce_dtype,
            "sequence_dimension": self.sequence_axis,
            "fuses_decode": self._fuses_decode,
            "adds_input": self.adds_input,
            "token_shuffle": None if self.shuffle is None else self.shuffle.group.size,
            "backend": experts.backend.name,
            "compat": experts.compat,
            "tuning": replace(experts.tuning, remarks=()),
        }

    def weights_changed(self) -> None:
        """Say that weights were changed through `.data`; see `RoutedExperts.weights_changed`."""
        self._plans.clear()
        self.expert_mlps.weights_changed()

    def enable_load_counters(self, enabled: bool = True, *, training_only: bool = False) -> None:
        """Count tokens per expert from now on; see `RoutedExperts.enable_load_counters`."""
        self.expert_mlps.enable_load_counters(enabled, training_only=training_only)

    @property
    def expert_load(self) -> Tensor | None:
        """[E] int64 tokens each expert got since the counters were enabled, or None."""
        load_E = self.expert_mlps.expert_load_E
        return None if load_E is None else load_E.clone()

    def explain(
        self, phase: str, tokens: int, *, tokens_per_expert: list[int] | None = None
    ) -> Explanation:
        """Say which path would run, why, and what its padding costs.

        Args:
            phase: 'prefill', 'decode' or 'speculation'.
            tokens: T.
            tokens_per_expert: load of each expert of this rank, for the actual padding; default:
                the counters, if enabled. An empty list leaves it out.

        Returns:
            An explanation of the plan that `forward` runs; print it, or read its fields.
        """
        check_choice("phase", phase, PHASES)
        experts = self.expert_mlps
        num_local = len(experts.local_experts(phase))
        if tokens_per_expert and (
            len(tokens_per_expert) != num_local or min(tokens_per_expert) < 0
        ):
            raise ValueError(
                f"tokens_per_expert: {len(tokens_per_expert)} counts from {min(tokens_per_expert)}"
                f" on, must be {num_local}, one for each expert of this rank, and none negative."
                " Pass what `expert_load` counted."
            )
        plan = self.plan(Step(phase, tokens, is_part=self._is_part(phase)))
        if tokens_per_expert is None:
            tokens_per_expert = experts.local_load(phase)
        return plan.explain(tokens_per_expert)


def _epsilon(norm: nn.Module | None) -> float | None:
    """Return the epsilon of a norm under either of its names."""
    if norm is None:
        return None
    found: float | None = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    return found


def _digest(module: nn.Module) -> str:
    """Return a checksum of weights that every rank holds alike."""
    checksum = 0
    for weight in (*module.parameters(), *module.buffers()):
        # A copy: memory that NumPy has seen cannot be given back, which FSDP does.
        data = weight.detach().cpu().clone(memory_format=torch.contiguous_format)
        data = data.view(-1).view(torch.uint8)
        checksum = zlib.crc32(data.numpy().tobytes(), checksum)
    return f"crc32 {checksum:08x}"


def _add_residual(
    hidden_states: Tensor, residual: Tensor | None, hidden_size: int
) -> tuple[Tensor, Tensor | None]:
    """Check the input; return it with the residual added, and a copy of that sum to return."""
    if not isinstance(hidden_states, Tensor):
        check_instance("hidden_states", hidden_states, Tensor)
    shape = tuple(hidden_states.shape)
    if len(shape) != 3 or shape[-1] != hidden_size:
        way_out = "Add the batch axis" if shape[-1:] == (hidden_size,) else "Check what comes in"
        raise ValueError(
            f"hidden_states: shape {shape} must be [B, S, H] with"
            f" hidden_size={hidden_size}. {way_out}."
        )
    if residual is None:
        return hidden_states, None
    if check_instance("residual", residual, Tensor).shape != hidden_states.shape:
        raise ValueError(
            f"residual: shape {tuple(residual.shape)} must be that of hidden_states,"
            f" {tuple(hidden_states.shape)}. Expand it first if that is meant."
        )
    total = hidden_states + residual
    return total, total.clone()


def _check_mask(mask: Tensor, hidden_states: Tensor, axis: int, *, is_part: bool) -> Tensor:
    """Return a padding mask [B, S] with its entries in the order of the tokens.

    Raises:
        ValueError: it is not of these sequences.
    """
    check_mask_values(check_instance("padding_mask", mask, Tensor))
    batch = hidden_states.shape[1 - axis]
    if is_part:
        # Its second axis may be the own part or all of the sequence; that is checked later.
        fits = mask.shape[0] == batch if mask.ndim == 2 else axis == 1 or batch == 1
    else:
        fits = mask.shape[1:] == hidden_states.shape[1:2]
    if not fits:
        order = "[S, B, H]" if axis == 0 else "[B, S, H]"
        raise ValueError(
            f"padding_mask: shape {tuple(mask.shape)} must be [B, S] of hidden_states"
            f" {tuple(hidden_states.shape)}, which are {order}. Reshape or transpose it."
        )
    return mask.t() if axis == 0 and mask.ndim == 2 else mask


def _before_load(layer: MoE, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drop what NxD's fused decode adds; refuse a state dict that would leave a weight random."""
    copies = f"{prefix}moe_fused_tkg."  # the same weights again
    for name in [name for name in state_dict if name.startswith(copies)]:
        del state_dict[name]
    state_dict.pop(f"{prefix}router.weight_T", None)
    parts = ("router.", "expert_mlps.", "shared_experts.")
    names = [prefix + name for name in layer.state_dict() if name.startswith(parts)]
    missing = [name for name in names if name not in state_dict] if layer.must_load else []
    if missing:
        raise WeightError(
            f"{missing[0]}: is not in the state dict, nor are {len(missing) - 1} others of this"
            " layer, which would stay random. Check the names of the checkpoint's tensors."
        )
