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
from neuron_moe.backends.nki_weights import KernelWeights, kernel_activation, kernel_weights
from neuron_moe.blocks import BlockMapping, num_blocks

Ranked = tuple[Any, tuple[int, int] | None]
"""A PlanChoice of the cost model, and the parts of the weights that it reads."""


def block_dims(expert_index_TK: Tensor, num_experts: int, plan: BlockPlan) -> Any:
    """Return what index_blocks is compiled for."""
    from nki_kernels.index.kernel import BlockDims

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
    from nki_kernels.index.kernel import check_index_blocks, index_blocks

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

    from nki_kernels.combine.kernel import CombineDims, check_combine, combine
    from nki_kernels.prefill.config import visit_dims
    from nki_kernels.prefill.options import make_config

    operands = kernel_weights(weights, hidden_TH)
    num_tokens, top_k = routing.expert_index_TK.shape
    chosen: dict[str, Any] = {"shard_plan": prefill.shard_plan}
    if prefill.shard_plan == "auto":
        share = weights.num_experts / (routing.num_experts or weights.num_experts)
        best, parts = rank_plans(
            prefill, weights, routing.scales_input, num_tokens, top_k * share, (plan.block_size,)
        )[0]
        chosen = {
            "shard_plan": best.shard_plan,
            "tiles_per_expert": best.tiles_per_expert,
            "largest_visit": best.largest_visit,
            "weight_parts": parts,
        }
    dims = block_dims(routing.expert_index_TK, weights.num_experts, plan)
    config = make_config(
        **_arguments(prefill, weights, routing.scales_input),
        block_size=dims.block_size,
        num_slots=dims.num_blocks * dims.block_size,
        num_tokens=num_tokens,
        loop_plan=prefill.loop_plan,
        in_halves=prefill.in_halves,
        skip_weights=prefill.skip_weights,
        **chosen,
    )
    copy = weights.prefill_copy
    if copy is not None and chosen.get("weight_parts") is not None:
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
) -> list[Ranked]:
    """Return the plans of the cost model, the fastest first, and the parts weights lie in if that
    plan reads their copy for prefill.

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
    arguments = _arguments(prefill, weights, scales_input)
    sizes = (num_tokens, math.ceil(top_k), block_sizes)
    ranked: list[Ranked] = [(choice, None) for choice in _rank(*sizes, **arguments)]
    if weights.prefill_copy is not None:
        parts = weights.prefill_copy.parts
        ranked += [(choice, parts) for choice in _rank(*sizes, weight_parts=parts, **arguments)]
    return sorted(ranked, key=lambda pair: pair[0].estimated_us)


def lay_out(weights: ExpertWeights, prefill: PrefillPlan) -> LaidOut | None:
    """Return experts by the parts in which blockwise_moe loads them; None if it loads them whole.

    Raises:
        ValueError: a plan was asked for that reads plain weights.
    """
    from nki_kernels.prefill.options import best_parts, make_config

    if prefill.shard_plan != "auto":
        raise ValueError(
            f"for_prefill=True: the plan asked for ({prefill}) reads plain weights. Leave the"
            " use_* switches of BlockwiseMatmulConfig False."
        )
    operands = kernel_weights(weights)
    # The parts do not depend on the tokens: as many as give each expert one row tile.
    config = make_config(
        **_arguments(prefill, weights, False),
        block_size=128,
        num_slots=128 * weights.num_experts,
        num_tokens=128 * weights.num_experts,
    )
    in_parts, out_parts = best_parts(config)
    if (in_parts, out_parts) == (1, 1):
        return None
    halves = 2 if config.has_gate else 1
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


def describe(ranked: list[Ranked]) -> str:
    """Return a line for `MoE.explain` about plans from the cost model."""
    (best, parts), *others = ranked
    unlike = [other for other, _ in others if other.shard_plan != best.shard_plan]
    other = f"; {unlike[0].shard_plan} {unlike[0].estimated_us:.0f} us" if unlike else ""
    layout = "" if parts is None else f", weights laid out in {parts[0]} and {parts[1]} parts"
    return (
        f"plan: {best.loop_plan} loop, {best.shard_plan} shards{layout}, the cost model's choice:"
        f" experts in {best.estimated_us:.0f} us{other} [estimated]"
    )


@functools.lru_cache(maxsize=256)
def _rank(
    num_tokens: int, top_k: int, block_sizes: tuple[int, ...], **arguments: Any
) -> tuple[Any, ...]:
    from nki_kernels.prefill import choice as blockwise_choice

    return tuple(
        blockwise_choice.rank_plans(
            num_tokens=num_tokens,
            top_k=top_k,
            block_sizes=block_sizes or blockwise_choice.BLOCK_SIZES,
            **arguments,
        )
    )


def _arguments(prefill: PrefillPlan, weights: ExpertWeights, scales_input: bool) -> dict[str, Any]:
    """Return the arguments of make_config that do not depend on tokens or plan."""
    activation = kernel_activation(weights.activation)
    experts, width, hidden_size = weights.down_proj_EIH.shape
    down = weights.packed_down
    return {
        "H": hidden_size,
        "I": width,
        "E": experts,
        "num_cores": prefill.num_cores,
        "weight_format": down.format if isinstance(down, NarrowMatrices) else "bfloat16",
        "activation": activation.name,
        "activation_scale": activation.scale,
        "has_gate": activation.has_gate,
        "gate_limits": activation.gate_limits,
        "up_limits": activation.up_limits,
        "up_offset": activation.up_offset,
        "scaling": "pre" if scales_input else "none",
        "has_gate_up_bias": weights.gate_up_bias_EI is not None,
        "has_down_bias": weights.down_bias_EH is not None,
        "has_scales": isinstance(down, NarrowMatrices),
    }


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
    from nki_kernels.prefill.kernel import blockwise_moe

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
