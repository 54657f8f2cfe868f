"""Prefill on the kernels: index_blocks, blockwise_moe, combine.

Axes: T tokens, K choices, N blocks of B slots, P partial sums, H hidden.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends import BlockPlan, ExpertWeights, LocalRouting
from neuron_moe.backends.laid_out import LaidOut
from neuron_moe.backends.narrow import NarrowMatrices
from neuron_moe.backends.nki_launch import Launch
from neuron_moe.backends.nki_plan import PrefillPlan
from neuron_moe.backends.nki_weights import KernelWeights, expert_formula, kernel_weights
from neuron_moe.blocks import BlockMapping, num_blocks


def block_dims(expert_index_TK: Tensor, num_experts: int, plan: BlockPlan) -> Any:
    """Return what index_blocks is compiled for."""
    from nki_kernels.index import BlockDims

    num_tokens, top_k = expert_index_TK.shape
    blocks = num_blocks(
        num_tokens,
        top_k,
        num_experts,
        plan.block_size,
        pad_to_even=plan.pad_num_blocks_to_even,
    )
    return BlockDims(num_experts, plan.block_size, blocks)


def index(
    launch: Launch, expert_index_TK: Tensor, dims: Any, num_cores: int, *visits: Any
) -> tuple[BlockMapping, Tensor, tuple[Tensor, ...]]:
    """Place pairs in slots.

    Args:
        launch: starts the kernel.
        expert_index_TK: [T, K] experts of this rank, -1 for none.
        dims: from `block_dims`.
        num_cores: physical cores of the launch.
        visits: `visit_dims` of the prefill's configuration, if its lists are wanted.

    Returns:
        The block mapping, the slot of each pair [T, K] int32, and the lists of visits.
    """
    from nki_kernels.index import check_index_blocks, index_blocks

    num_tokens, top_k = expert_index_TK.shape
    check_index_blocks(num_tokens, top_k, dims, num_cores, *visits)
    token, pair, expert, valid, counts, slot_of_pair_TK, *lists = launch(
        index_blocks, expert_index_TK.to(torch.int32), dims, *visits
    )
    mapping = BlockMapping(token, pair, expert, valid.view(()), counts.to(torch.int64))
    return mapping, slot_of_pair_TK, tuple(lists)


def compute(
    launch: Launch,
    hidden_TH: Tensor,
    routing: LocalRouting,
    weights: ExpertWeights,
    plan: BlockPlan,
    prefill: PrefillPlan,
) -> Tensor:
    """Compute many tokens, rows sorted by expert; return [T, H] float32."""
    import nki.language as nl

    from nki_kernels.combine import CombineDims, check_combine, combine
    from nki_kernels.prefill import PlanRequest, PrefillWork, make_config, visit_dims

    operands = kernel_weights(weights, hidden_TH)
    num_tokens, top_k = routing.expert_index_TK.shape
    request = PlanRequest(
        shard_plan=prefill.shard_plan,
        loop_plan=prefill.loop_plan,
        in_halves=prefill.in_halves,
        skip_weights=prefill.skip_weights,
    )
    if prefill.shard_plan == "auto":
        share = weights.num_experts / (routing.num_experts or weights.num_experts)
        best = rank_plans(
            prefill, weights, routing.scales_input, num_tokens, top_k * share, (plan.block_size,)
        )[0]
        asked = best.request
        request = replace(
            request,
            shard_plan=asked.shard_plan,
            tiles_per_expert=asked.tiles_per_expert,
            largest_visit=asked.largest_visit,
            weight_parts=asked.weight_parts,
        )
    dims = block_dims(routing.expert_index_TK, weights.num_experts, plan)
    work = PrefillWork(
        dims.block_size,
        dims.num_blocks * dims.block_size,
        num_tokens,
        prefill.num_cores,
        _scaling(routing.scales_input),
    )
    config = make_config(expert_formula(weights), _sizes(weights), work, request)
    copy = weights.prefill_copy
    if copy is not None and request.weight_parts is not None:
        operands = replace(operands, gate_up_EHI=copy.gate_up, down_EIH=copy.down)
    mapping, slot_of_pair_TK, visits = index(
        launch, routing.expert_index_TK, dims, prefill.num_cores, visit_dims(config)
    )
    slots_PSH = _experts(launch, hidden_TH, routing, operands, config, mapping, visits)
    affinities_TK = routing.expert_affinities_TK
    if routing.scales_input:
        affinities_TK = torch.ones_like(affinities_TK)
    num_parts, num_slots, hidden_size = slots_PSH.shape
    check_combine(num_tokens, top_k, hidden_size, num_slots, num_parts)
    out = CombineDims(nl.float32, True)
    output_TH: Tensor = launch(combine, slots_PSH, slot_of_pair_TK, affinities_TK, out)
    return output_TH


def rank_plans(
    prefill: PrefillPlan,
    weights: ExpertWeights,
    scales_input: bool,
    num_tokens: int,
    top_k: float,
    block_sizes: tuple[int, ...] = (),
) -> list[Any]:
    """Return the candidates of the cost model, the fastest first; their requests name the parts
    weights lie in where they read the copy for prefill.

    Args:
        prefill: what was asked for.
        weights: of this rank.
        scales_input: affinities multiply the experts' input.
        num_tokens: T.
        top_k: choices of a token among this rank's experts, on average.
        block_sizes: those to choose from; none: those the cost model likes.

    Raises:
        ValueError: nothing fits.
    """
    from nki_kernels.prefill import Expected, PlanRequest, Search

    expected = Expected(
        num_tokens=num_tokens,
        top_k=math.ceil(top_k),
        num_cores=prefill.num_cores,
        scaling=_scaling(scales_input),
    )
    search = Search(block_sizes=block_sizes) if block_sizes else Search()
    requests = [PlanRequest()]
    if weights.prefill_copy is not None:
        requests.append(PlanRequest(weight_parts=weights.prefill_copy.parts))
    formula, sizes = expert_formula(weights), _sizes(weights)
    ranked = [
        candidate
        for request in requests
        for candidate in _rank(formula, sizes, expected, request, search)
    ]
    return sorted(ranked, key=lambda candidate: candidate.estimated_us)


def lay_out(weights: ExpertWeights, prefill: PrefillPlan) -> LaidOut | None:
    """Return experts by the parts in which blockwise_moe loads them; None if it loads them whole.

    Raises:
        ValueError: a plan was asked for that reads plain weights.
    """
    from nki_kernels.common.formula import num_projections
    from nki_kernels.prefill import PrefillWork, best_parts, make_config

    if prefill.shard_plan != "auto":
        raise ValueError(
            f"for_prefill=True: the plan asked for ({prefill}) reads plain weights. Leave the"
            " use_* switches of BlockwiseMatmulConfig False."
        )
    operands = kernel_weights(weights)
    # The parts do not depend on the tokens: as many as give each expert one row tile.
    tokens = 128 * weights.num_experts
    work = PrefillWork(128, tokens, tokens, prefill.num_cores)
    config = make_config(expert_formula(weights), _sizes(weights), work)
    in_parts, out_parts = best_parts(config)
    if (in_parts, out_parts) == (1, 1):
        return None
    halves = num_projections(config.formula)
    return LaidOut(
        _by_parts(operands.gate_up_EHI, in_parts, halves),
        _by_parts(operands.down_EIH, out_parts, 1),
        (in_parts, out_parts),
    )


def _by_parts(weight_EXY: Tensor, parts: int, halves: int) -> Tensor:
    """Return [E, parts, X, Y / parts]: columns of a part together, of both halves."""
    experts, rows, columns = weight_EXY.shape
    cut = weight_EXY.detach().view(experts, rows, halves, parts, columns // (halves * parts))
    return cut.permute(0, 3, 1, 2, 4).reshape(experts, parts, rows, columns // parts)


def describe(ranked: list[Any]) -> str:
    """Return a line for `MoE.explain` about candidates of the cost model."""
    best, *others = ranked
    plan, parts = best.request.shard_plan, best.request.weight_parts
    unlike = [other for other in others if other.request.shard_plan != plan]
    other = ""
    if unlike:
        other = f"; {unlike[0].request.shard_plan} {unlike[0].estimated_us:.0f} us"
    layout = "" if parts is None else f", weights laid out in {parts[0]} and {parts[1]} parts"
    return (
        f"plan: {best.request.loop_plan} loop, {plan} shards{layout}, the cost model's choice:"
        f" experts in {best.estimated_us:.0f} us{other} [estimated]"
    )


@functools.lru_cache(maxsize=256)
def _rank(formula: Any, sizes: Any, expected: Any, request: Any, search: Any) -> tuple[Any, ...]:
    from nki_kernels.prefill import rank_candidates

    return tuple(rank_candidates(formula, sizes, expected, request, search))


def _sizes(weights: ExpertWeights) -> Any:
    """Return the sizes of this rank's experts."""
    from nki_kernels.prefill import ExpertSizes

    experts, width, hidden_size = weights.down_proj_EIH.shape
    down = weights.packed_down
    if isinstance(down, NarrowMatrices):
        return ExpertSizes(hidden_size, width, experts, down.format, True)
    return ExpertSizes(hidden_size, width, experts)


def _scaling(scales_input: bool) -> str:
    return "pre" if scales_input else "none"


def _experts(
    launch: Launch,
    hidden_TH: Tensor,
    routing: LocalRouting,
    operands: KernelWeights,
    config: Any,
    mapping: BlockMapping,
    visits: tuple[Tensor, ...],
) -> Tensor:
    """Return what the experts make of each slot, [P, N * B, H] bfloat16 in P parts."""
    from nki_kernels.prefill import blockwise_moe

    down_bias, down_scale_En = operands.down_bias_EH, operands.down_scale_En
    if down_bias is not None:
        down_bias = down_bias.to(torch.bfloat16)
    terms_E3H = None
    if down_scale_En is not None:
        terms_E3H = _three_terms(down_scale_En.expand(-1, hidden_TH.shape[1]))
        if operands.down_bias_EH is not None:
            down_bias = _bias_terms(operands.down_bias_EH, down_scale_En)
    slots_PSH: Tensor = launch(
        blockwise_moe,
        hidden_TH,
        operands.gate_up_EHI,
        operands.down_EIH,
        mapping.token_position_to_id,
        *visits,
        config,
        gate_up_bias=operands.gate_up_bias_EI,
        down_bias=down_bias,
        gate_up_scale=operands.gate_up_scale_EI,
        down_scale=terms_E3H,
        slot_scale=_slot_scale(routing, mapping) if routing.scales_input else None,
    )
    return slots_PSH


def _three_terms(scale_EH: Tensor) -> Tensor:
    """Return [E, 3, H] bfloat16 terms that add up to float32 scales."""
    from nki_kernels.common.weight_formats import three_terms

    terms = three_terms(scale_EH.cpu().numpy())
    return torch.from_numpy(terms.view("int16")).view(torch.bfloat16).to(scale_EH.device)


def _bias_terms(bias_EH: Tensor, scale_En: Tensor) -> Tensor:
    """Return [E, 3, H] bfloat16 terms of a bias in units of what the scale multiplies."""
    from nki_kernels.common.weight_formats import bias_terms

    terms = bias_terms(bias_EH.float().cpu().numpy(), scale_En.float().cpu().numpy())
    return torch.from_numpy(terms.view("int16")).view(torch.bfloat16).to(bias_EH.device)


def _slot_scale(routing: LocalRouting, mapping: BlockMapping) -> Tensor:
    """Return [N * B] float32: the affinity of the pair in each slot, 0 for padding."""
    pair = mapping.pair_of_slot.to(torch.int64)
    scale = routing.expert_affinities_TK.reshape(-1)[pair.clamp(min=0)]
    return torch.where(pair >= 0, scale, 0.0)
