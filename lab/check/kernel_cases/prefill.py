"""Prefill cases through index_blocks, blockwise_moe and combine."""

import dataclasses
from typing import Any

import ml_dtypes
import nki.language as nl
import numpy as np
import torch

from lab.check.kernel_cases.mx_weights import (
    MxWeights,
    draw_for_chip,
    is_native,
    judge_quantized,
)
from lab.check.kernel_cases.prefill_weights import Weights
from lab.check.kernel_cases.routings import draw_routing
from lab.check.kernel_cases.verdict import Verdict, join, judge
from lab.check.launcher import chip
from lab.check.launcher import launch as launch_kernel
from lab.check.vendor_cases.case import Case, Limits, Skipped, scaled_note, seed_of
from lab.check.vendor_cases.inputs import Draw
from neuron_moe.backends.chosen_experts import chosen_experts
from neuron_moe.blocks import num_blocks
from neuron_moe.weights import ExpertWeights, LocalRouting
from nki_kernels.combine import CombineDims, check_combine, combine
from nki_kernels.common.formula import ExpertFormula, limits
from nki_kernels.index import BlockDims, check_index_blocks, index_blocks
from nki_kernels.prefill import (
    BLOCK_SIZES,
    ExpertSizes,
    PlanRequest,
    PrefillWork,
    blockwise_moe,
    blockwise_moe_ref,
    make_config,
    mx_form,
    work_tiles_of,
)
from nki_sim import SimOptions

BF16 = ml_dtypes.bfloat16
# By the vendor's names of activations: its Swish is x * sigmoid(1.702 x).
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {},
    "swish": {"activation": "sigmoid", "scale": 1.702, "gates_itself": True},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
}
SHARDS = {"shard_on_block": "block", "shard_on_i": "intermediate"}
DEFAULT_PLANS = ("balanced", "sorted")
TILE_ROWS = 128
CORES = 2
DEFAULT_OPTIONS = SimOptions()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What one case computes.

    Attributes:
        hidden_TH: [T, H] bfloat16.
        index_TK: [T, K] int32, -1 for none.
        affinities_TK: [T, K] float32.
        weights: of all experts; those nobody chose are zeros.
        formula: what an expert computes.
        scaling: 'POST_SCALE', 'PRE_SCALE' or 'NO_SCALE'.
        block_size: B.
        num_cores: physical cores.
    """

    hidden_TH: np.ndarray
    index_TK: np.ndarray
    affinities_TK: np.ndarray
    weights: Weights
    formula: ExpertFormula
    scaling: str
    block_size: int
    num_cores: int

    @property
    def weighs_output(self) -> bool:
        """Whether affinities multiply the experts' outputs."""
        return self.scaling == "POST_SCALE"

    @property
    def output_weights_TK(self) -> np.ndarray:
        """[T, K] float32 factors of the experts' outputs."""
        return self.affinities_TK if self.weighs_output else np.ones_like(self.affinities_TK)


def run(case: Case, limits: Limits) -> Verdict:
    """Compute a prefill case."""
    problem, note = build(case, limits)
    options = SimOptions(start_core=case.get("start_core", 0))
    actual, simulated_us = launch(problem, _request(case), options)
    if isinstance(problem.weights, MxWeights):
        quantized = formula(problem, in_words=True)
        failure, how = judge_quantized("output", actual, quantized, formula(problem), case)
        note = join(note, how)
    else:
        failure = judge("output", actual, formula(problem), torch_path(problem), case)
    if not failure and case.get("core_orders") == CORES:
        other, _ = launch(problem, _request(case), SimOptions(start_core=1))
        wrong = int(np.count_nonzero(other.view(np.int32) != actual.view(np.int32)))
        failure = f"output: {wrong} elements differ with the other core first" if wrong else ""
    return Verdict(failure=failure, note=note, simulated_us=simulated_us)


def build(case: Case, limits: Limits) -> tuple[Problem, str]:
    """Draw the inputs of a case; also return what differs from it as listed."""
    if case.get("dtype", "bfloat16") != "bfloat16":
        raise Skipped(f"dtype {case.get('dtype')!r}: blockwise_moe computes bfloat16 only")
    H, I, E = case.need("hidden"), case.need("intermediate"), case.need("experts")  # noqa: E741
    wanted, K = case.need("tokens"), min(case.need("top_k"), E)
    first, here = case.get("E_offset", 0), case.get("E_local", E)
    block_size = case.need("block_size")
    notes = []
    if block_size not in BLOCK_SIZES:
        notes.append(f"block_size {block_size} -> {max(BLOCK_SIZES)}")
        block_size = max(BLOCK_SIZES)

    def macs(tokens: int) -> float:
        tiles = min(here, tokens * K) + tokens * K * here // E // TILE_ROWS
        return float(tiles * min(block_size, TILE_ROWS) * 3 * H * I)

    def weight_bytes(tokens: int) -> float:
        return float(min(here, tokens * K) * 3 * H * I * 2)

    T = limits.tokens(wanted, macs, input_bytes=weight_bytes)
    notes.append(scaled_note("T", wanted, T))
    draw = Draw(seed_of(case))
    index_TK = choices(case, T, E, K, draw) - first
    index_TK = np.where((index_TK >= 0) & (index_TK < here), index_TK, -1).astype(np.int32)
    touched = np.unique(index_TK[index_TK >= 0]).tolist()
    weights, how = draw_for_chip(case, draw, here, H, I, touched)
    notes.append(how)
    if case.get("training") or case.get("checkpoint_activation"):
        notes.append("activations are not kept for training")
    problem = Problem(
        hidden_TH=draw.uniform((T, H), 0.0, 1.0, BF16),
        index_TK=index_TK,
        affinities_TK=draw.uniform((T, K), 0.0, 1.0, np.float32) * (index_TK >= 0),
        weights=weights,
        formula=_formula_of(case, weights),
        scaling=str(case.get("affinity_scaling_mode", "POST_SCALE")),
        block_size=block_size,
        num_cores=case.cores(),
    )
    return problem, join(*notes)


def _formula_of(case: Case, weights: Weights) -> ExpertFormula:
    """Return what an expert of a case computes."""
    activation = str(case.get("act_fn", "SiLU")).lower()
    if activation not in ACTIVATIONS:
        raise Skipped(f"act_fn {case.get('act_fn')!r}: known are {', '.join(ACTIVATIONS)}")
    return ExpertFormula(
        **ACTIVATIONS[activation],
        gate_limits=limits(*_clamp(case, "gate")),
        up_limits=limits(*_clamp(case, "up")),
        up_offset=float(case.get("up_offset", 0.0)),
        has_gate_up_bias=weights.gate_up_bias is not None,
        has_down_bias=weights.down_bias is not None,
    )


def choices(case: Case, T: int, E: int, K: int, draw: Draw | None = None) -> np.ndarray:
    """Return [T, K] experts; those of a case made from a model must fall where it was made for."""
    pool = case.get("routing_pool")
    chooser = draw if draw is not None and pool is None else Draw(0)
    return draw_routing(chooser, str(case.get("routing", "uniform")), T, E, K, pool)


def _clamp(case: Case, side: str) -> tuple[float | None, float | None]:
    lower, upper = (case.get(f"{side}_clamp_{bound}") for bound in ("lower", "upper"))
    return (
        None if lower is None else float(lower),
        None if upper is None else float(upper),
    )


def _request(case: Case) -> PlanRequest:
    """Return how to go through a case: as its parameters say, else closest to its variant."""
    shard_plan, loop_plan = _plans(case)
    if is_native(case) and shard_plan == "intermediate":
        shard_plan = "balanced"  # words are multiplied with whole experts
    return PlanRequest(
        chip=chip(),
        shard_plan=case.get("shard_plan", shard_plan),
        loop_plan=case.get("loop_plan", loop_plan),
        missing=case.get("missing", "skip"),
        iterations=case.get("iterations", "ahead"),
    )


def _plans(case: Case) -> tuple[str, str]:
    """Return shard and loop plan closest to a variant of the vendor, or the default."""
    base = case.variant.removesuffix("_mx")
    is_dynamic = bool(case.get("is_dynamic")) or "hybrid" in base
    shard = SHARDS.get(base.removesuffix("_mx_hybrid").removesuffix("_hybrid"))
    if shard is None:
        return DEFAULT_PLANS
    splits = shard != "intermediate" or case.need("intermediate") % (4 * case.cores()) == 0
    if not splits or case.cores() == 1:
        return DEFAULT_PLANS
    return shard, "dynamic" if is_dynamic else "static"


def launch(
    problem: Problem, request: PlanRequest, options: SimOptions = DEFAULT_OPTIONS
) -> tuple[np.ndarray, float]:
    """Run the three kernels as a request asks.

    Returns:
        [T, H] float32, and the simulated time of the three in microseconds.
    """
    p, weights = problem, problem.weights
    T, K = p.index_TK.shape
    num_experts, I, H = weights.down.shape  # noqa: E741  the axis letter
    dims = BlockDims(num_experts, p.block_size, num_blocks(T, K, num_experts, p.block_size))
    check_index_blocks(T, K, dims, p.num_cores)
    index = launch_kernel(index_blocks, p.index_TK, dims, lnc=p.num_cores, options=options)
    token_of_slot, pair_of_slot, block_to_expert, _, _, slot_of_pair_TK = index.outputs
    scaling = "pre" if p.scaling == "PRE_SCALE" else "none"
    config = make_config(
        p.formula,
        ExpertSizes(H, I, num_experts, weights.format, weights.gate_up_scale is not None),
        PrefillWork(p.block_size, token_of_slot.size, T, p.num_cores, scaling),
        request,
    )
    work_tiles = work_tiles_of(config, token_of_slot, block_to_expert)
    gate_up, down, optional = weights.gate_up, weights.down, weights.operands()
    if isinstance(weights, MxWeights):
        gate_up, down = weights.packed(mx_form(config))
        optional = {} if weights.down_bias is None else {"down_bias": weights.down_bias}
    if p.scaling == "PRE_SCALE":
        scale = p.affinities_TK.reshape(-1)[np.maximum(pair_of_slot, 0)]
        optional["slot_scale"] = np.where(pair_of_slot >= 0, scale, 0).astype(np.float32)
    experts = launch_kernel(
        blockwise_moe,
        p.hidden_TH,
        gate_up,
        down,
        token_of_slot,
        *work_tiles,
        config,
        lnc=p.num_cores,
        options=options,
        **optional,
    )
    check_combine(T, K, H, experts.outputs.shape[1], experts.outputs.shape[0])
    no_expert = bool((p.index_TK < 0).any())
    total = launch_kernel(
        combine,
        experts.outputs,
        slot_of_pair_TK,
        p.output_weights_TK,
        CombineDims(nl.float32, no_expert, request.missing),
        lnc=p.num_cores,
        options=options,
    )
    return total.outputs, index.us + experts.us + total.us


def formula(problem: Problem, *, in_words: bool = False) -> np.ndarray:
    """Return [T, H] float64; with activations quantised where the kernel does it, if asked."""
    p, weights = problem, problem.weights
    token, choice = np.nonzero(p.index_TK >= 0)
    rows = p.hidden_TH.astype(np.float64)[token]
    if p.scaling == "PRE_SCALE":
        rows *= p.affinities_TK[token, choice, None].astype(np.float64)
    output = np.zeros(p.hidden_TH.shape)
    expert_of_row = p.index_TK[token, choice]
    # One expert at a time: all of them in float64 may not fit.
    for expert in np.unique(expert_of_row):
        mine = expert_of_row == expert
        gate_up, down, gate_up_bias, down_bias = weights.exact(int(expert))
        result = blockwise_moe_ref(
            rows[mine],
            np.zeros(int(mine.sum()), np.int64),
            gate_up[None],
            down[None],
            p.formula,
            gate_up_bias_E2I=None if gate_up_bias is None else gate_up_bias[None],
            down_bias_EH=None if down_bias is None else down_bias[None],
            in_words=in_words,
        )
        factor = p.output_weights_TK[token[mine], choice[mine], None].astype(np.float64)
        np.add.at(output, token[mine], result * factor)
    return output


def torch_path(problem: Problem) -> np.ndarray:
    """Return [T, H] as the torch backend computes it in bfloat16."""
    p = problem
    gate_up, down, gate_up_bias, down_bias = p.weights.rounded()
    weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias, p.formula)
    routing = LocalRouting(
        torch.from_numpy(p.index_TK),
        torch.from_numpy(p.affinities_TK if p.scaling != "NO_SCALE" else p.output_weights_TK),
        p.scaling == "PRE_SCALE",
    )
    hidden_TH = torch.from_numpy(p.hidden_TH.view(np.int16)).view(torch.bfloat16)
    with torch.no_grad():
        result = chosen_experts(hidden_TH, routing, weights)
    return np.asarray(result.float().numpy())
