"""Fused decode layer cases through decode_layer.

Beside the vendor's parameters (batch, seqlen, hidden, hidden_actual, intermediate,
num_global_experts, num_local_experts, top_k, router_fn, ...) a case may have ep_rank, mode, layout,
down_scale and up_offset as in decode.py, and

    has_selection_bias, n_group, topk_group, out_of_group_fill, routed_scaling_factor: router
    has_shared_expert, shared_width, has_shared_gate    shared experts and their sigmoid gate
    has_residual                                        whether the input is added at the end

A padded hidden size is not needed here: hidden_actual is computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from lab.check.kernel_cases.decode import (
    SCALINGS,
    fitting_tokens,
    formula_of,
    mode_of,
    operands_of,
    torch_weights,
    weight_form,
)
from lab.check.kernel_cases.decode_weights import narrow_down_scale, weights_case
from lab.check.kernel_cases.mx_weights import (
    MxWeights,
    draw_for_chip,
    judge_quantized,
    quantized_formula,
)
from lab.check.kernel_cases.prefill import BF16, Problem, formula
from lab.check.kernel_cases.verdict import Verdict, join, judge
from lab.check.launcher import chip, launch
from lab.check.vendor_cases.case import Case, Limits, Skipped, scaled_note, seed_of
from lab.check.vendor_cases.inputs import Draw, separate_logits
from neuron_moe.backends.chosen_experts import chosen_experts
from neuron_moe.router import route as route_with_torch
from neuron_moe.weights import LocalRouting
from nki_kernels.common import router_reference as reference
from nki_kernels.common.expert_reference import ACTIVATIONS
from nki_kernels.common.formula import RouterFormula
from nki_kernels.decode import (
    DecodeRequest,
    DecodeSizes,
    LayerForm,
    check_decode_layer,
    decode_layer,
    make_layer_config,
    pack_router_weight,
    pack_shared_experts,
)

EPS = 1e-6
MARGIN = 8e-3  # between a token's choices, over the spread of its best logits
Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What comes before and beside the routed experts.

    Attributes:
        hidden_TH: [T, H] bfloat16.
        norm_1H: [1, H] bfloat16.
        weight_EH: [E, H] bfloat16 router.
        bias_1E, selection_1E: [1, E] float32, or None.
        terms: of the router, by the names that formula, reference and torch share.
        top_k: K.
        shared: gate [Is, H], up [Is, H], down [H, Is] bfloat16, or None.
        shared_gate_1H: [1, H] bfloat16, or None.
        has_residual: whether hidden_TH is added at the end.
    """

    hidden_TH: Array
    norm_1H: Array
    weight_EH: Array
    bias_1E: Array | None
    selection_1E: Array | None
    terms: dict[str, Any]
    top_k: int
    shared: tuple[Array, Array, Array] | None
    shared_gate_1H: Array | None
    has_residual: bool

    def normed(self, rows_TH: Array | None = None) -> Array:
        """Return [T, H] float64 RMSNorm of the tokens."""
        rows = self.hidden_TH if rows_TH is None else rows_TH
        norm_H = self.norm_1H[0].astype(np.float64)
        return reference.rms_norm(rows.astype(np.float64), norm_H, EPS)

    def logits(self, rows_TH: Array | None = None) -> Array:
        """Return [T, E] float64, of the normed tokens as the kernels round them."""
        x_TH = self.normed(rows_TH).astype(BF16).astype(np.float64)
        out_TE = x_TH @ self.weight_EH.astype(np.float64).T
        return out_TE if self.bias_1E is None else out_TE + self.bias_1E


def run(case: Case, limits: Limits) -> Verdict:
    """Compute a decode block case."""
    front, notes = _front(case, limits)
    selection_E = None if front.selection_1E is None else front.selection_1E[0]
    affinities_TK, index_TK = reference.route(front.logits(), _router(front), selection_E)
    E, here = len(front.weight_EH), case.need("num_local_experts")
    first = here * _rank_of(case, index_TK, E, here)
    is_local = (index_TK >= first) & (index_TK < first + here)
    local_TK = np.where(is_local, index_TK - first, -1).astype(np.int32)
    touched = np.unique(local_TK[is_local]).tolist()
    draw = Draw(seed_of(case) + 1)
    H = front.hidden_TH.shape[1]
    weights, how = draw_for_chip(
        weights_case(case), draw, here, H, case.need("intermediate"), touched
    )
    down_scale = narrow_down_scale(weights, str(case.get("down_scale", "channel")))
    problem = Problem(
        hidden_TH=front.normed(),
        index_TK=local_TK,
        affinities_TK=affinities_TK * is_local,
        weights=weights,
        scaling=str(case.get("affinity_scaling_mode", "POST_SCALE")),
        block_size=128,
        num_cores=case.cores(),
        formula=formula_of(case, weights),
    )
    if problem.scaling not in SCALINGS:
        raise Skipped(f"affinity_scaling_mode {problem.scaling!r}: known are {', '.join(SCALINGS)}")
    output, index, simulated_us, mode = _launch(case, front, problem, first, E, down_scale)
    beside = _beside(front, problem.hidden_TH)
    exact = formula(problem) + beside
    wrong = int(np.count_nonzero((index != index_TK).any(1)))
    failure = f"index: {wrong} of {len(index)} tokens choose other experts" if wrong else ""
    if not failure and isinstance(weights, MxWeights):
        quantized = quantized_formula(problem) + beside
        failure, error = judge_quantized("output", output, quantized, exact, case)
        notes.append(error)
    elif not failure:
        peer = _torch_path(front, problem, first, here)
        failure = judge("output", output, exact, peer, case)
    return Verdict(
        failure=failure, note=join(*notes, how, f"mode {mode}"), simulated_us=simulated_us
    )


def _rank_of(case: Case, index_TK: Array, experts: int, here: int) -> int:
    """Return the rank to compute: the one named, else that with the most choices."""
    if case.get("ep_rank") is not None:
        return int(case.get("ep_rank"))
    return int(np.bincount(index_TK.reshape(-1) // here, minlength=experts // here).argmax())


def _front(case: Case, limits: Limits) -> tuple[Front, list[str]]:
    """Draw the tokens, the norm, the router and the shared experts."""
    H, E = case.get("hidden_actual") or case.need("hidden"), case.need("num_global_experts")
    K, I = case.need("top_k"), case.need("intermediate")  # noqa: E741  the axis letter
    wanted = case.need("batch") * case.get("seqlen", 1)
    T = fitting_tokens(limits, wanted, K, case.need("num_local_experts"), 3 * H * I)
    notes = [scaled_note("T", wanted, T)]
    if case.get("dtype") == "float16":
        notes.append("float16 -> bfloat16")
    if case.need("hidden") != H:
        notes.append(f"H {H} as it is, without padding")
    draw = Draw(seed_of(case))
    selection_1E = None
    if case.get("has_selection_bias"):
        selection_1E = draw.uniform((1, E), -0.1, 0.1, np.float32)
    width = int(case.get("shared_width", I)) if case.get("has_shared_expert") else 0
    shared = None
    if width:
        shapes = ((width, H), (width, H), (H, width))
        gate, up, down = (draw.uniform(shape, -0.1, 0.1, BF16) for shape in shapes)
        shared = gate, up, down
    front = Front(
        hidden_TH=np.zeros((0, H), BF16),
        norm_1H=draw.uniform((1, H), 0.9, 1.1, BF16),
        weight_EH=draw.uniform((E, H), -0.1, 0.1, BF16),
        bias_1E=draw.uniform((1, E), -0.1, 0.1, np.float32) if case.get("bias") else None,
        selection_1E=selection_1E,
        terms=_terms(case, K),
        top_k=K,
        shared=shared,
        shared_gate_1H=draw.uniform((1, H), -0.1, 0.1, BF16)
        if case.get("has_shared_gate")
        else None,
        has_residual=bool(case.get("has_residual")),
    )
    hidden_TH = separate_logits(
        lambda rows: draw.uniform((rows, H), -0.1, 0.1, BF16),
        front.logits,
        T,
        min(K, E - 1),
        MARGIN,
    )
    return dataclasses.replace(front, hidden_TH=hidden_TH), notes


def _terms(case: Case, top_k: int) -> dict[str, Any]:
    """Return what formula, reference and torch call by the same names."""
    is_grouped = int(case.get("n_group", 1)) > 1
    ranks_scores = is_grouped or bool(case.get("has_selection_bias"))
    return {
        "act_fn": str(case.get("router_fn", "SOFTMAX")).lower(),
        "act_over_topk": not case.get("router_act_first", ranks_scores),
        "n_group": int(case.get("n_group", 1)),
        "topk_group": int(case.get("topk_group", 1)),
        "out_of_group_fill": float(case.get("out_of_group_fill", float("-inf"))),
        "renormalize": bool(case.get("norm_topk_prob")) and top_k > 1,
        "routed_scaling_factor": float(case.get("routed_scaling_factor", 1.0)),
    }


def _router(front: Front) -> RouterFormula:
    """Return how the layer chooses experts."""
    return RouterFormula(
        top_k=front.top_k,
        has_bias=front.bias_1E is not None,
        has_selection_bias=front.selection_1E is not None,
        **front.terms,
    )


def _launch(
    case: Case, front: Front, problem: Problem, first: int, num_experts: int, down_scale: str
) -> tuple[Array, Array, float, str]:
    """Run the kernel; return output, index, simulated time and mode."""
    p, weights = problem, problem.weights
    E, I, H = weights.down.shape  # noqa: E741  the axis letters
    form = LayerForm(
        has_norm=True,
        norm_eps=EPS,
        returns_routing=True,
        has_residual=front.has_residual,
        has_shared_gate=front.shared_gate_1H is not None,
        shared_width=0 if front.shared is None else len(front.shared[0]),
    )
    config = make_layer_config(
        DecodeSizes(len(p.hidden_TH), H, I, E, front.top_k, num_experts, p.num_cores),
        _router(front),
        p.formula,
        form,
        weight_form(weights, str(case.get("layout", "ehi")), down_scale),
        DecodeRequest(
            mode=mode_of(case),
            scaling=SCALINGS[p.scaling],
            output_dtype="bfloat16",
            chip=chip(),
        ),
    )
    gate_up, down, optional = operands_of(weights, config.moe)
    axis = config.moe.h_axis
    operands = {
        **optional,
        "hidden": front.hidden_TH,
        "gate_up": gate_up,
        "down": down,
        "router_weight": pack_router_weight(front.weight_EH, axis, config.router_parts),
        "first_expert": np.array([[first]], np.int32),
        "norm_weight": front.norm_1H,
        "router_bias": front.bias_1E,
        "selection_bias": front.selection_1E,
    }
    if front.shared is not None:
        packed = pack_shared_experts(config.shared, *front.shared)
        operands["shared_gate_up"], operands["shared_down"] = packed
    if front.shared_gate_1H is not None:
        operands["shared_gate"] = pack_router_weight(front.shared_gate_1H, axis)
    if front.has_residual:
        operands["residual"] = front.hidden_TH
    check_decode_layer(config, operands)
    names = ("hidden", "router_weight", "gate_up", "down", "first_expert")
    leading = [operands.pop(name) for name in names]
    result = launch(decode_layer, *leading, config, lnc=p.num_cores, **operands)
    output, _, index = result.outputs
    return np.asarray(output), np.asarray(index), result.us, config.moe.mode


def _beside(front: Front, x_TH: Array) -> Array:
    """Return [T, H] float64, shared experts and residual."""
    output_TH = np.zeros_like(x_TH)
    if front.shared is not None:
        gate_IH, up_IH, down_HI = (matrix.astype(np.float64) for matrix in front.shared)
        inner_TI = ACTIVATIONS["silu"](x_TH @ gate_IH.T) * (x_TH @ up_IH.T)
        output_TH = inner_TI @ down_HI.T
        if front.shared_gate_1H is not None:
            gate_T1 = x_TH @ front.shared_gate_1H.astype(np.float64).T
            output_TH = output_TH / (1.0 + np.exp(-gate_T1))
    if front.has_residual:
        output_TH = output_TH + front.hidden_TH.astype(np.float64)
    return np.asarray(output_TH)


def _torch_path(front: Front, problem: Problem, first: int, here: int) -> Array:
    """Return [T, H] as the torch backend and torch compute it in bfloat16."""
    hidden_TH = _torch(front.hidden_TH)
    wide_TH = hidden_TH.float()
    scale_T1 = torch.rsqrt(wide_TH.square().mean(1, keepdim=True) + EPS)
    x_TH = (wide_TH * scale_T1 * _torch(front.norm_1H).float()).bfloat16()
    logits_TE = x_TH.float() @ _torch(front.weight_EH).float().T
    if front.bias_1E is not None:
        logits_TE = logits_TE + torch.from_numpy(front.bias_1E)
    selection = None if front.selection_1E is None else torch.from_numpy(front.selection_1E[0])
    routing = route_with_torch(logits_TE, _router(front), selection)
    index_TK = routing.expert_index_TK
    is_local = (index_TK >= first) & (index_TK < first + here)
    affinities_TK = routing.expert_affinities_TK
    if problem.scaling == "NO_SCALE":
        affinities_TK = torch.ones_like(affinities_TK)
    local = LocalRouting(
        torch.where(is_local, index_TK - first, -1).to(torch.int32),
        torch.where(is_local, affinities_TK, 0.0),
        problem.scaling == "PRE_SCALE",
    )
    with torch.no_grad():
        result = chosen_experts(x_TH, local, torch_weights(problem))
        if front.shared is not None:
            gate_IH, up_IH, down_HI = (_torch(matrix) for matrix in front.shared)
            inner_TI = torch.nn.functional.silu(x_TH @ gate_IH.T) * (x_TH @ up_IH.T)
            shared_TH = (inner_TI @ down_HI.T).float()
            if front.shared_gate_1H is not None:
                shared_TH = shared_TH * torch.sigmoid(x_TH @ _torch(front.shared_gate_1H).T).float()
            result = result + shared_TH
        if front.has_residual:
            result = result + wide_TH
    return np.asarray(result.bfloat16().float().numpy())


def _torch(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
