"""Prefill on the kernels: experts whose choices are made, in one launch (prefill_layer) or in three
(index_blocks, blockwise_moe, combine).

Axes: T tokens, K choices, N blocks of B slots, P partial sums, H hidden.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import nki.language as nl
import torch
from torch import Tensor

from neuron_moe.backends.nki import features
from neuron_moe.backends.nki.launch import Input, Launch, check_call, run
from neuron_moe.backends.nki.operands import (
    Operands,
    check_weights,
    format_note,
    kernel_formula,
    matrices_of,
    operands_of,
    weight_format,
)
from neuron_moe.backends.nki.routed_plan import RoutedPlan
from neuron_moe.blocks import NO_EXPERT, num_blocks
from neuron_moe.device import can_look, is_traced
from neuron_moe.plan import LayerParts, Step
from neuron_moe.tuned import TunedPrefill
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.narrow import NarrowMatrices
from nki_kernels.combine import CombineDims, check_combine, combine
from nki_kernels.common.chip import cached_by_chip
from nki_kernels.common.formula import ExpertFormula, num_projections
from nki_kernels.common.weight_formats import bias_terms, three_terms
from nki_kernels.index import BlockDims, check_index_blocks, index_blocks
from nki_kernels.layer import (
    GivenChoices,
    PrefillLayerConfig,
    check_prefill_layer,
    prefill_layer,
)
from nki_kernels.prefill import (
    Candidate,
    Expected,
    ExpertSizes,
    LoopFit,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    Search,
    best_parts,
    best_sum,
    blockwise_moe,
    largest_work_tile_of,
    make_config,
    output_tiles,
    rank_candidates,
    work_tile_dims,
)

_WORTH_A_COPY = 0.05  # of the time with plain weights; estimates are no closer than that
_OVERFLOW = (
    "a token whose expert overflows bfloat16 makes NaN of the up to 127 others that combine adds up"
    " with it: no clamp of the formula excludes that"
)


@dataclass(frozen=True, eq=False)
class Compiled:
    """What index, experts and combine of a step are compiled for, in one launch or three.

    Attributes:
        config: of blockwise_moe.
        dims: of index_blocks.
        work_tiles: of the lists of work tiles that index_blocks makes.
        out: of combine.
    """

    config: Any
    dims: Any
    work_tiles: Any
    out: Any


@dataclass(frozen=True, eq=False)
class PrefillPlan(RoutedPlan):
    """Many tokens, rows sorted by expert: norm and router in a launch in front, if they are there.

    Attributes:
        apart: why router and experts are separate launches, for the notes; '' for experts alone.
    """

    apart: str = ""

    @property
    def suggests_block_size(self) -> bool:
        """Whether a better block size by rows alone is worth a note: the cost model knows more."""
        return False

    @cached_property
    def _compiled(self) -> Compiled:
        return compile_for(self)

    @cached_property
    def given_config(self) -> Any:
        """What prefill_layer is compiled for, with choices that are given; None where each stage of
        the experts is a launch of its own.
        """
        parts = self.parts
        if parts.fuses_decode is False:
            return None
        try:
            made = self._compiled
        except ValueError:  # raised again by whoever prepares the plan
            return None
        given = GivenChoices(parts.spec.top_k, _chosen_among(parts, self.step))
        out = replace(made.out, has_spoils=True)
        columns = columns_of(parts, self.step, made.config)
        config = PrefillLayerConfig(
            None, made.dims, made.work_tiles, made.config, out, given=given, columns=columns
        )
        try:
            check_prefill_layer(config)
        except ValueError:
            return None
        return config

    @cached_property
    def operands(self) -> Operands:
        """Expert weights in the form that the kernels take.

        Raises:
            ValueError: weights that they do not take.
        """
        operands, copy = operands_of(self.parts), self.parts.weights.prefill_copy
        if copy is not None and self._compiled.config.loop.by_parts:
            return operands.laid_out(copy)
        return operands

    @property
    def matrices(self) -> dict[str, Tensor | None]:
        """The experts' matrices by the names of the kernels' parameters."""
        return {"gate_up": self.operands.gate_up_EHI, "down": self.operands.down_EIH}

    @property
    def beside(self) -> dict[str, Tensor | None]:
        """Biases and scales of the experts, likewise."""
        make = partial(_beside, self.operands, self._compiled.config.H)
        return self.parts.expert_form("prefill beside", make)

    @cached_property
    def _expert_launches(self) -> tuple[Launch, ...]:
        return (self._given(),) if self.given_config is not None else self._stages()

    def expert_launches(self) -> tuple[Launch, ...]:
        """Return the launch of prefill_layer, or those of index, experts and combine."""
        return self._expert_launches

    def _given(self) -> Launch:
        """Return the launch that computes the experts at once, with choices that are given."""
        operands = {
            **self.matrices,
            **self.beside,
            "hidden": self._hidden,
            "index": Input("index", self._choices, "int32"),
            "affinities": Input("affinities", self._choices, "float32"),
        }
        records = {"config": self.given_config}
        return Launch(prefill_layer, self.parts.tuning.num_cores, records, operands)

    def _stages(self) -> tuple[Launch, ...]:
        """Return the launches of index, experts and combine."""
        made, num_cores = self._compiled, self.parts.tuning.num_cores
        dims, config = made.dims, made.config
        index = Launch(
            index_blocks,
            num_cores,
            {"dims": dims, "work_tiles": made.work_tiles},
            {"index_TK": Input("index", self._choices, "int32")},
            (
                "slots",
                "pairs",
                "block_to_expert",
                "num_valid_blocks",
                "tokens_per_expert",
                "slot_of_pair",
                "work_expert",
                "work_row_tiles",
                "class_iterations",
            ),
        )
        num_slots = dims.num_blocks * dims.block_size
        lists = {
            name: Input(name, output.shape, output.dtype)
            for name, output in zip(index.outputs, index.specs, strict=True)
        }
        scale = Input("slot_scale", (num_slots,), "float32") if config.scaling == "pre" else None
        experts = Launch(
            blockwise_moe,
            num_cores,
            {"config": config},
            {
                **self.matrices,
                **self.beside,
                **{name: lists[name] for name in ("slots", *index.outputs[-3:])},
                "hidden": self._hidden,
                "slot_scale": scale,
            },
            ("slots_PSH",),
        )
        rows = experts.specs[0]
        summed = Launch(
            combine,
            num_cores,
            {"dims": made.out},
            {
                "slots_PSH": Input("slots_PSH", rows.shape, rows.dtype),
                "slot_of_pair_TK": lists["slot_of_pair"],
                "affinities_TK": Input("affinities", self._choices, "float32"),
            },
        )
        return index, experts, summed

    @property
    def _hidden(self) -> Input:
        config = self._compiled.config
        return Input("hidden", (config.num_tokens, config.H), "bfloat16")

    @property
    def _choices(self) -> tuple[int, int]:
        return self._compiled.config.num_tokens, self.parts.spec.top_k

    def experts(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Index, experts, combine; return [N, H] bfloat16."""
        check_call(hidden_NH)
        if self.given_config is not None:
            return self._at_once(hidden_NH, routing)
        return self._in_stages(hidden_NH, routing)

    def _at_once(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Compute the experts in one launch, which takes out tokens that a router has marked."""
        affinities_TK = routing.expert_affinities_TK
        if self.parts.router is None:
            is_broken_T1 = _broken_tokens(hidden_NH, affinities_TK)
            if is_broken_T1 is not None:
                affinities_TK = torch.where(is_broken_T1, torch.nan, affinities_TK)
        (launch,) = self._expert_launches
        index_TK = routing.expert_index_TK.to(torch.int32)
        (output_NH,) = run(launch, hidden=hidden_NH, index=index_TK, affinities=affinities_TK)
        return output_NH

    def _in_stages(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Compute the experts in three launches."""
        index_TK, affinities_TK = routing.expert_index_TK, routing.expert_affinities_TK
        looked_at = [affinities_TK]
        if self.parts.router is None:
            looked_at.append(hidden_NH)
        is_broken_T1 = _broken_tokens(*looked_at)
        if is_broken_T1 is not None:
            index_TK = torch.where(is_broken_T1, NO_EXPERT, index_TK)
            affinities_TK = torch.where(is_broken_T1, 0.0, affinities_TK)
        index, experts, summed = self._expert_launches
        step: dict[str, Tensor | None] = {"hidden": hidden_NH}
        lists = dict(zip(index.outputs, run(index, index=index_TK.to(torch.int32)), strict=True))
        step |= lists
        if routing.scales_input:
            step["slot_scale"] = _slot_scale(affinities_TK, lists["pairs"])
            affinities_TK = torch.ones_like(affinities_TK)
        (step["slots_PSH"],) = run(experts, **step)
        (output_TH,) = run(summed, affinities=affinities_TK, **step)
        if is_broken_T1 is None:
            return output_TH
        return torch.where(is_broken_T1, torch.nan, output_TH)

    def _tuned(self) -> TunedPrefill:
        return tuned_of(self._compiled.config, self.step.tokens, self.decision.work.block_size)

    def chosen(self) -> dict[str, Any]:
        """Return what runs, in the words of a tuned plan."""
        return self._tuned().to_dict()

    def notes(self) -> tuple[str, ...]:
        """Say which plan runs, and what a better block size would give."""
        parts, work = self.parts, self.decision.work
        tuned = parts.tuning.tuned.for_prefill(work.tokens)
        plan = f"plan: {self._tuned()}"
        better: tuple[str, ...] = ()
        if tuned is not None:
            plan += f"; tuned for up to {tuned.tokens} tokens"
        elif parts.tuning.shard_plan == "auto":
            plan += _estimated(rank(parts, self.step, work.block_size))
            best = rank(parts, self.step)[0]
            if best.block_size != work.block_size:
                better = (
                    f"block_size={best.block_size} would take {best.estimated_us:.0f} us"
                    " [estimated]",
                )
        overflow = () if _is_clamped(parts.weights.formula) else (_OVERFLOW,)
        safe = features.prefill_notes(self._compiled.config)
        return (plan, *self._around(), format_note(parts.weights), *safe, *better, *overflow)

    def _around(self) -> tuple[str, ...]:
        """Say which kernels compute what is around the experts."""
        parts = self.parts
        around = "kernels: router_topk, index_blocks, combine around it"
        if self.given_config is not None:
            front = "rmsnorm, router; " if self.has_norm else "router; "
            front = "" if parts.router is None else front
            number = "one kernel" if parts.router is None else "two kernels"
            around = f"{number}: {front}index, routed experts, combine"
        return (around, f"not fused: {self.apart}") if self.apart else (around,)

    def changes(self) -> tuple[str, ...]:
        """Say how to get another block size or plan."""
        return (
            "block size: BlockwiseMatmulConfig(block_size=128), or Tuning(block_size=128)",
            "plan: a file of `neuron-moe tune` (BlockwiseMatmulConfig.from_tuned(file)), or"
            " Tuning(shard_plan=...)",
        )


def _broken_tokens(*rows: Tensor) -> Tensor | None:
    """Say which tokens are not finite, [N, 1]; None where the host sees at once that all are.

    Such a token would spread to those it shares a matrix tile with.

    Args:
        rows: what to look at, [N, n] each: hidden states and affinities, as those of a sigmoid are
            finite all the same; affinities alone where a router has marked such tokens in them.
    """
    # A sum is finite only if all its terms are; a device must not wait for a look at one.
    is_cheap = rows[0].device.type == "cpu" and can_look(rows[0])
    if is_cheap and all(math.isfinite(float(each.sum())) for each in rows):
        return None
    are_finite = torch.stack([_are_finite(each) for each in rows]).all(0)
    return ~are_finite.unsqueeze(1)


def _are_finite(rows_Tn: Tensor) -> Tensor:
    """Say whether all numbers of a row are finite, [T]; an eighth of the time of isfinite."""
    return rows_Tn.abs().amax(1) < torch.inf


def compile_for(plan: PrefillPlan) -> Compiled:
    """Choose what the kernels of a step are compiled for; needs shapes of weights, no numbers.

    Raises:
        ValueError: sizes or a formula that the kernels do not take.
    """
    parts, weights, tuning = plan.parts, plan.parts.weights, plan.parts.tuning
    num_tokens, top_k = plan.step.rows or plan.step.tokens, parts.spec.top_k
    block_size = plan.decision.work.block_size
    request = _request(plan)
    is_even = tuning.pad_num_blocks_to_even
    blocks = num_blocks(num_tokens, top_k, weights.num_experts, block_size, pad_to_even=is_even)
    num_slots, scaling = blocks * block_size, _scaling(parts)
    work = PrefillWork(block_size, num_slots, num_tokens, tuning.num_cores, scaling)
    config = _fitting_config(plan, work, request)
    dims, work_tiles = BlockDims(weights.num_experts, block_size, blocks), work_tile_dims(config)
    check_index_blocks(num_tokens, top_k, dims, tuning.num_cores, work_tiles)
    num_partials = tuning.num_cores if config.shard.splits_i else 1
    stored_slots = output_tiles(config) * config.tile_rows
    check_combine(num_tokens, top_k, config.H, stored_slots, num_partials)
    return Compiled(config, dims, work_tiles, CombineDims(nl.bfloat16, True, request.missing))


def _fitting_config(plan: PrefillPlan, work: PrefillWork, request: PlanRequest) -> PrefillConfig:
    """Return what a request is compiled to.

    The cost model looks at the rows that a rank of experts expects. All that may come want longer
    tables: where these leave no room for the loop it found, the best one beside them is taken.
    """
    weights, tuned = plan.parts.weights, plan.parts.tuning.tuned
    formula, sizes = kernel_formula(weights), expert_sizes(weights)
    try:
        return make_config(formula, sizes, work, request)
    except ValueError:
        if request.fit is None or tuned.for_prefill(plan.step.tokens) is not None:
            raise
    return make_config(formula, sizes, work, replace(request, fit=None))


def _request(plan: PrefillPlan) -> PlanRequest:
    """Return the plan that was requested or tuned, or the cost model's."""
    parts, tuning = plan.parts, plan.parts.tuning
    tuned = tuning.tuned.for_prefill(plan.step.tokens)
    if tuned is not None:
        return _tuned_request(parts, tuned)
    asked = features.prefill_request(tuning)
    request = replace(asked, shard_plan=tuning.shard_plan)
    if tuning.shard_plan == "auto":
        request = rank(parts, plan.step, plan.decision.work.block_size)[0].request
    return replace(
        request,
        loop_plan=asked.loop_plan,
        in_halves=tuning.in_halves,
        skip_weights=tuning.skip_weights,
    )


def _tuned_request(parts: LayerParts, tuned: TunedPrefill) -> PlanRequest:
    """Return a tuned plan in the words of the kernel.

    Raises:
        ValueError: it reads weights that are not laid out so.
    """
    weight_parts, copy = None, parts.weights.prefill_copy
    loaded = tuned.loaded_parts
    if tuned.weights == "by parts":
        if copy is None:
            raise ValueError(
                f"plan tuned for {tuned.tokens} tokens: reads weights by parts, and they are plain."
                " Call pack_weights(for_prefill=True), or tune with --weights plain."
            )
        weight_parts = copy.parts
    return replace(
        features.prefill_request(parts.tuning),
        shard_plan=tuned.shard_plan,
        loop_plan=tuned.loop_plan,
        weight_parts=weight_parts,
        largest_work_tile=tuned.work_tile,
        fit=LoopFit(
            tuned.work_tile,
            *loaded,
            tuned.weight_buffers,
            tuned.hidden_parts,
        ),
    )


def tuned_of(config: Any, tokens: int, block_size: int) -> TunedPrefill:
    """Return what a configuration does, in the words of a tuned plan."""
    loop, shard = config.loop, config.shard
    shard_plan = "balanced" if loop.is_sorted else "block"
    if shard.splits_i or shard.splits_h:
        shard_plan = "intermediate" if shard.splits_i else "hidden"
    return TunedPrefill(
        tokens=tokens,
        block_size=block_size,
        shard_plan=shard_plan,
        loop_plan="sorted" if loop.is_sorted else "dynamic" if loop.is_dynamic else "static",
        work_tile=largest_work_tile_of(config),
        loaded_parts=(loop.in_parts, loop.out_parts),
        weight_buffers=loop.weight_buffers,
        weights="by parts" if loop.by_parts else "plain",
        hidden_parts=loop.h_parts,
    )


def _beside(operands: Operands, hidden_size: int) -> dict[str, Any]:
    """Return biases and scales as blockwise_moe reads them."""
    down_bias, down_scale_En, terms_E3H = operands.down_bias_EH, operands.down_scale_En, None
    if down_scale_En is not None:
        terms_E3H = _as_bfloat16(three_terms, down_scale_En.expand(-1, hidden_size))
        if down_bias is not None:
            down_bias = _as_bfloat16(bias_terms, down_bias.float(), down_scale_En.float())
    elif down_bias is not None:
        down_bias = down_bias.to(torch.bfloat16)
    return {
        "gate_up_bias": operands.gate_up_bias_EI,
        "down_bias": down_bias,
        "gate_up_scale": operands.gate_up_scale_EI,
        "down_scale": terms_E3H,
    }


def _as_bfloat16(make: Any, *values: Tensor) -> Tensor:
    """Apply a function of [E, H] NumPy arrays that returns three bfloat16 terms of each number."""
    if values[0].is_meta:
        experts, hidden_size = values[0].shape
        return values[0].new_empty((experts, 3, hidden_size), dtype=torch.bfloat16)
    if is_traced(values[0]):
        return _traced_terms(*values)
    terms = make(*(value.cpu().numpy() for value in values))
    return torch.from_numpy(terms.view("int16")).view(torch.bfloat16).to(values[0].device)


def _traced_terms(value_EH: Tensor, scale_EH: Tensor | None = None) -> Tensor:
    """Return what `three_terms`, or with a scale `bias_terms`, does: in a graph, unchecked.

    A compiler that folds the casts there and back keeps the first term, a bfloat16 number.
    """
    rest_EH = value_EH.float()
    if scale_EH is not None:
        rest_EH = rest_EH / torch.where(scale_EH == 0, 1.0, scale_EH)
        rest_EH = torch.where(rest_EH.abs() < 2.0**-100, 0.0, rest_EH)
    terms = []
    for _ in range(3):
        terms.append(rest_EH.to(torch.bfloat16))
        rest_EH = rest_EH - terms[-1].float()
    return torch.stack(terms, dim=1)


def _slot_scale(affinities_TK: Tensor, pair_of_slot: Tensor) -> Tensor:
    """Return [N * B] float32: the affinity of the pair in each slot, 0 for padding."""
    pair = pair_of_slot.to(torch.int64)
    scale = affinities_TK.reshape(-1)[pair.clamp(min=0)]
    return torch.where(pair >= 0, scale, 0.0)


def _chosen_among(parts: LayerParts, step: Step) -> int:
    """Return among how many experts a row chooses: of all ranks; fewer where an all-to-all sends
    only rows that chose one of this rank, each of which so gets more of them.
    """
    rows = step.rows or step.tokens
    return max(parts.weights.num_experts, -(-parts.num_experts * rows // step.tokens))


def _expected(parts: LayerParts, step: Step) -> Expected:
    """Return what comes to this rank's experts."""
    experts = parts.weights.num_experts
    return Expected(
        num_tokens=step.rows or step.tokens,
        top_k=parts.spec.top_k,
        share=experts / _chosen_among(parts, step),
        num_cores=parts.tuning.num_cores,
        scaling=_scaling(parts),
        chance=experts / parts.num_experts,
    )


def columns_of(parts: LayerParts, step: Step, config: PrefillConfig) -> int:
    """Return the columns of the sum over a token's pairs in a launch of the layer."""
    return best_sum(config, _expected(parts, step).spread)[0]


def rank(parts: LayerParts, step: Step, *block_sizes: int) -> list[Candidate]:
    """Return the candidates of the cost model, the fastest first; their requests name the parts
    weights are in where they read the copy for prefill.

    Args:
        parts: of the layer.
        step: tokens, and rows where an all-to-all sends them.
        block_sizes: those to choose from; none: those the cost model likes.

    Raises:
        ValueError: nothing fits.
    """
    weights = parts.weights
    expected = _expected(parts, step)
    search = Search(block_sizes=block_sizes) if block_sizes else Search()
    plain = features.prefill_request(parts.tuning)
    requests = [plain]
    if weights.prefill_copy is not None:
        requests.append(replace(plain, weight_parts=weights.prefill_copy.parts))
    formula, sizes = kernel_formula(weights), expert_sizes(weights)
    ranked = [
        candidate
        for request in requests
        for candidate in _rank(formula, sizes, expected, request, search)
    ]
    return sorted(ranked, key=lambda each: each.estimated_us)


@cached_by_chip
def _rank(
    formula: ExpertFormula,
    sizes: ExpertSizes,
    expected: Expected,
    request: PlanRequest,
    search: Search,
) -> tuple[Candidate, ...]:
    return tuple(rank_candidates(formula, sizes, expected, request, search))


def lay_out(parts: LayerParts) -> LaidOut | None:
    """Return experts by the parts in which blockwise_moe loads them; None if plain ones are about
    as fast.

    Raises:
        ValueError: a plan was requested that reads plain weights.
    """
    tuning, weights = parts.tuning, parts.weights
    if tuning.shard_plan != "auto":
        raise ValueError(
            f"for_prefill=True: the plan requested ({tuning}) reads plain weights. Leave the"
            " use_* switches of BlockwiseMatmulConfig False."
        )
    check_weights(weights)
    # The parts do not depend on the tokens: as many as give each expert one row tile.
    tokens = 128 * weights.num_experts
    work = PrefillWork(128, tokens, tokens, tuning.num_cores)
    request = features.prefill_request(tuning)
    config = make_config(kernel_formula(weights), expert_sizes(weights), work, request)
    in_parts, out_parts = best_parts(config, _WORTH_A_COPY)
    if (in_parts, out_parts) == (1, 1):
        return None
    gate_up, down = matrices_of(weights)
    return LaidOut(
        by_parts(gate_up, in_parts, num_projections(weights.formula)),
        by_parts(down, out_parts, 1),
        (in_parts, out_parts),
    )


def by_parts(weight_EXY: Tensor, parts: int, halves: int) -> Tensor:
    """Return [E, parts, X, Y / parts]: columns of a part together, of both halves."""
    experts, rows, columns = weight_EXY.shape
    cut = weight_EXY.detach().view(experts, rows, halves, parts, columns // (halves * parts))
    return cut.permute(0, 3, 1, 2, 4).reshape(experts, parts, rows, columns // parts)


def _is_clamped(formula: ExpertFormula) -> bool:
    """Say whether clamps keep what goes into the down projection far below an overflow."""
    up, gate = formula.up_limits, formula.gate_limits
    return up.has_upper and up.has_lower and (gate.has_upper or not formula.has_gate)


def _estimated(ranked: list[Candidate]) -> str:
    """Return what `MoE.explain` adds to the plan of the first of some candidates."""
    best, *others = ranked
    unlike = [other for other in others if other.request.shard_plan != best.request.shard_plan]
    other = ""
    if unlike:
        other = f", {unlike[0].request.shard_plan} {unlike[0].estimated_us:.0f} us"
    return (
        f"; the cost model's choice: experts and combine {best.estimated_us:.0f} us{other}"
        " [estimated]"
    )


def expert_sizes(weights: ExpertWeights) -> ExpertSizes:
    """Return the sizes of this rank's experts."""
    experts, width, hidden_size = weights.down_proj_EIH.shape
    is_narrow = isinstance(weights.packed_down, NarrowMatrices)
    return ExpertSizes(hidden_size, width, experts, weight_format(weights), is_narrow)


def _scaling(parts: LayerParts) -> str:
    return "pre" if parts.spec.scales_input else "none"
