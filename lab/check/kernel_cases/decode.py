"""Decode cases through decode_moe.

Beside the vendor's parameters (tokens, hidden, intermediate, experts, top_k, bias, clamp, act_fn,
affinity_scaling_mode, quant_dtype, ...) a case may have

    routing      uniform (default), balanced, zipf, skewed, one-expert, empty-experts or no-hit
    num_experts  experts of all ranks; `experts` are this rank's (default: the same)
    ep_rank      which rank: it holds experts ep_rank * experts and up (default 0)
    routing_pool how many experts the tokens choose from
    mode         selective, all or auto (default: as the variant says, else auto)
    layout       ehi (default) or packed
    down_scale   channel (default) or expert, of MXFP4 weights
    up_offset    added to the clamped up projection
    out_dtype    bfloat16 (default) or float32
"""

import dataclasses
from typing import Any

import numpy as np
import torch

from lab.check.kernel_cases.decode_weights import (
    fill_clamps,
    narrow_down_scale,
    weights_case,
)
from lab.check.kernel_cases.mx_weights import (
    MxWeights,
    draw_for_chip,
    judge_quantized,
    quantized_formula,
)
from lab.check.kernel_cases.prefill import (
    ACTIVATIONS,
    BF16,
    Problem,
    formula,
)
from lab.check.kernel_cases.prefill_weights import Weights
from lab.check.kernel_cases.routings import draw_routing
from lab.check.kernel_cases.verdict import Verdict, join, judge
from lab.check.launcher import chip
from lab.check.launcher import launch as launch_kernel
from lab.check.vendor_cases.case import Case, Limits, Skipped, scaled_note, seed_of
from lab.check.vendor_cases.inputs import Draw
from neuron_moe.backends.chosen_experts import chosen_experts
from neuron_moe.weights import ExpertWeights, LocalRouting
from nki_kernels.common.formula import ExpertFormula, limits
from nki_kernels.decode import (
    MAX_TOKENS,
    MAX_TOP_K,
    DecodeRequest,
    DecodeSizes,
    WeightForm,
    decode_moe,
    loads_bias,
    make_decode_config,
    mx_form,
    pack_down,
    pack_gate_up,
)
from nki_sim import SimOptions

DEFAULT_OPTIONS = SimOptions()
H_MULTIPLE = 16
# Reading weights is most of a case's cost here too: arithmetic counts for a quarter.
MACS_SHARE = 0.25
SCALINGS = {"POST_SCALE": "post", "PRE_SCALE": "pre", "NO_SCALE": "none"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which of all experts this rank holds.

    Attributes:
        num_experts: experts of all ranks.
        first: global number of local expert 0.
        mode: of the kernel.
        layout: of the weights.
        down_scale: none, expert or channel.
        out_dtype: of the output.
        global_index_TK: [T, K] int32 choices in global numbers.
    """

    num_experts: int
    first: int
    mode: str
    layout: str
    down_scale: str
    out_dtype: str
    global_index_TK: np.ndarray


def run(case: Case, limits: Limits) -> Verdict:
    """Compute a decode case."""
    problem, rank, note = build(case, limits)
    actual, simulated_us, mode = launch(problem, rank)
    if isinstance(problem.weights, MxWeights):
        quantized = quantized_formula(problem)
        failure, how = judge_quantized("output", actual, quantized, formula(problem), case)
        note = join(note, how)
    else:
        peer = torch_path(problem, rank.out_dtype)
        failure = judge("output", actual, formula(problem), peer, case)
    if not failure and case.get("core_orders") == 2:
        other, _, _ = launch(problem, rank, SimOptions(start_core=1))
        wrong = int(np.count_nonzero(other != actual))
        failure = f"output: {wrong} elements differ with the other core first" if wrong else ""
    return Verdict(failure=failure, note=join(note, f"mode {mode}"), simulated_us=simulated_us)


def build(case: Case, limits: Limits) -> tuple[Problem, Rank, str]:
    """Draw the inputs of a case; also return what differs from it as listed."""
    H, I, E = case.need("hidden"), case.need("intermediate"), case.need("experts")  # noqa: E741
    num_experts = case.get("num_experts") or E
    first = int(case.get("ep_rank", 0)) * E
    if not 0 <= first <= num_experts - E:
        raise Skipped(f"ep_rank {case.get('ep_rank')}: not a rank of {num_experts} / {E}")
    wanted, K, notes = _tokens_and_choices(case, num_experts)
    if H % H_MULTIPLE:
        notes.append(f"H {H} -> {-(-H // H_MULTIPLE) * H_MULTIPLE}: padded, as users must")
        H = -(-H // H_MULTIPLE) * H_MULTIPLE
    T = fitting_tokens(limits, wanted, K, E, 3 * H * I)
    notes.append(scaled_note("T", wanted, T))
    draw = Draw(seed_of(case))
    index_TK = draw_choices(case, draw, T, num_experts, K, first, E)
    local_TK = np.where((index_TK >= first) & (index_TK < first + E), index_TK - first, -1)
    touched = np.unique(local_TK[local_TK >= 0]).tolist()
    weights, how = draw_for_chip(weights_case(case), draw, E, H, I, touched)
    notes.append(how)
    affinities_TK = draw.uniform((T, K), 0.0, 1.0, np.float32)
    affinities_TK[int(T * case.get("routed_token_ratio", 1.0)) :] = 0
    problem = Problem(
        hidden_TH=draw.normal((T, H), BF16),
        index_TK=local_TK.astype(np.int32),
        affinities_TK=affinities_TK * (local_TK >= 0),
        weights=weights,
        scaling=str(case.get("affinity_scaling_mode", "POST_SCALE")),
        block_size=128,
        num_cores=case.cores(),
        formula=formula_of(case, weights),
    )
    if problem.scaling not in SCALINGS:
        raise Skipped(f"affinity_scaling_mode {problem.scaling!r}: known are {', '.join(SCALINGS)}")
    down_scale = narrow_down_scale(weights, str(case.get("down_scale", "channel")))
    rank = Rank(
        num_experts=num_experts,
        first=first,
        mode=mode_of(case),
        layout=str(case.get("layout", "ehi")),
        down_scale=down_scale,
        out_dtype=str(case.get("out_dtype", "bfloat16")),
        global_index_TK=index_TK,
    )
    return problem, rank, join(*notes)


def fitting_tokens(limits: Limits, wanted: int, K: int, E: int, weights_each: int) -> int:
    """Return how many tokens the kernel takes and the limits allow.

    Args:
        limits: of a case.
        wanted: tokens as listed.
        K: choices of a token.
        E: local experts.
        weights_each: elements of an expert.
    """

    def touched(tokens: int) -> int:
        return min(E, tokens * K) * weights_each

    return limits.tokens(
        min(wanted, MAX_TOKENS),
        lambda tokens: MACS_SHARE * touched(tokens) * tokens,
        input_bytes=lambda tokens: 2.0 * touched(tokens),
    )


def _tokens_and_choices(case: Case, num_experts: int) -> tuple[int, int, list[str]]:
    """Return T as wanted, K, and notes on what the kernel does not take."""
    notes = []
    if case.get("dtype", case.get("in_dtype", "bfloat16")) == "float16":
        notes.append("float16 -> bfloat16")
    K = case.get("top_k") or num_experts
    if K > MAX_TOP_K:
        notes.append(f"K {K} -> {MAX_TOP_K}")
    return case.need("tokens"), min(K, MAX_TOP_K, num_experts), notes


def draw_choices(
    case: Case, draw: Draw, T: int, num_experts: int, K: int, first: int, here: int
) -> np.ndarray:
    """Return [T, K] int32 experts of all ranks."""
    pool = case.get("routing_pool")
    if pool is not None:
        draw = Draw(0)  # choices of a case made from a model fall where it was made for
    name = str(case.get("routing", "uniform"))
    if name != "no-hit":
        return draw_routing(draw, name, T, num_experts, K, pool)
    if num_experts - here < K:
        raise Skipped(f"routing 'no-hit': the other ranks have fewer than {K} experts")
    others_TK = draw_routing(draw, "uniform", T, num_experts - here, K, pool)
    return np.where(others_TK >= first, others_TK + here, others_TK).astype(np.int32)


def formula_of(case: Case, weights: Weights) -> ExpertFormula:
    """Return what an expert of a case computes."""
    activation = str(case.get("act_fn", "SiLU")).lower().replace("_approx", "")
    if activation not in ACTIVATIONS:
        raise Skipped(f"act_fn {case.get('act_fn')!r}: known are {', '.join(ACTIVATIONS)}")
    gate_limits, up_limits = fill_clamps(case)
    return ExpertFormula(
        **ACTIVATIONS[activation],
        gate_limits=limits(*gate_limits),
        up_limits=limits(*up_limits),
        up_offset=float(case.get("up_offset", 0.0)),
        has_gate_up_bias=weights.gate_up_bias is not None,
        has_down_bias=weights.down_bias is not None,
    )


def mode_of(case: Case) -> str:
    """Return the kernel's mode that a case requests."""
    if "mode" in case.params:
        return str(case.params["mode"])
    if case.get("all_expert", case.get("is_all_expert", "all_expert" in case.variant)):
        return "all"
    return "selective" if "selective" in case.variant else "auto"


def launch(
    problem: Problem, rank: Rank, options: SimOptions = DEFAULT_OPTIONS
) -> tuple[np.ndarray, float, str]:
    """Run the kernel.

    Returns:
        [T, H], the simulated time in microseconds, and the mode it ran in.
    """
    p, weights = problem, problem.weights
    T, K = p.index_TK.shape
    E, I, H = weights.down.shape  # noqa: E741  the axis letters
    config = make_decode_config(
        DecodeSizes(T, H, I, E, K, rank.num_experts, p.num_cores),
        p.formula,
        weight_form(weights, rank.layout, rank.down_scale),
        DecodeRequest(
            mode=rank.mode,
            scaling=SCALINGS[p.scaling],
            output_dtype=rank.out_dtype,
            chip=chip(),
        ),
    )
    gate_up, down, optional = operands_of(weights, config)
    result = launch_kernel(
        decode_moe,
        p.hidden_TH,
        gate_up,
        down,
        rank.global_index_TK,
        p.affinities_TK,
        np.array([[rank.first]], np.int32),
        config,
        lnc=p.num_cores,
        options=options,
        **optional,
    )
    return np.asarray(result.outputs), result.us, config.mode


def weight_form(weights: Weights, layout: str, down_scale: str) -> WeightForm:
    """Return how the kernel takes the weights."""
    if isinstance(weights, MxWeights):
        return WeightForm(weights.format, "packed")
    return WeightForm(weights.format, layout, weights.gate_up_scale is not None, down_scale)


def operands_of(weights: Weights, config: Any) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Return gate_up, down, and the optional operands by name."""
    found: dict[str, Any] = {}
    if isinstance(weights, MxWeights):
        gate_up, down = weights.packed(mx_form(config))
        if weights.down_bias is not None:
            found["down_bias"] = weights.down_bias
        return gate_up, down, found
    if weights.gate_up_bias is not None:
        found["gate_up_bias"] = weights.gate_up_bias.astype(np.float32)
    if weights.gate_up_scale is not None:
        found["gate_up_scale"] = weights.gate_up_scale
    if weights.down_scale is not None:
        one = config.weights.down_scale == "expert"
        found["down_scale"] = weights.down_scale[:, :1] if one else weights.down_scale
    gate_up, down = weights.gate_up, weights.down
    if config.weights.layout == "packed":
        names = ("gate_up_bias", "gate_up_scale", "down_scale")
        gate_up = pack_gate_up(config, gate_up, *(found.pop(name, None) for name in names))
        down = pack_down(config, down, weights.down_bias)
    if loads_bias(config):
        found["down_bias"] = weights.down_bias
    return gate_up, down, found


def torch_path(problem: Problem, out_dtype: str) -> np.ndarray:
    """Return [T, H] as the torch backend computes few tokens in bfloat16."""
    p = problem
    weights = torch_weights(p)
    routing = LocalRouting(
        torch.from_numpy(p.index_TK),
        torch.from_numpy(p.affinities_TK if p.scaling != "NO_SCALE" else p.output_weights_TK),
        p.scaling == "PRE_SCALE",
    )
    hidden_TH = torch.from_numpy(p.hidden_TH.view(np.int16)).view(torch.bfloat16)
    with torch.no_grad():
        result = chosen_experts(hidden_TH, routing, weights)
    if out_dtype == "bfloat16":
        result = result.bfloat16().float()
    return np.asarray(result.numpy())


def torch_weights(problem: Problem) -> ExpertWeights:
    """Return the weights as the torch backend takes them."""
    p = problem
    return ExpertWeights(*p.weights.rounded(), p.formula)
