"""Router cases through router_topk."""

from typing import Any

import numpy as np
import torch

from lab.check.kernel_cases.verdict import Verdict, join, judge
from lab.check.launcher import launch
from lab.check.vendor_cases.case import Case, Limits, scaled_note, seed_of
from lab.check.vendor_cases.inputs import Draw, dtype_of, separate_logits
from neuron_moe.router import route as route_with_torch
from nki_kernels.common import router_reference as reference
from nki_kernels.common.formula import RouterFormula
from nki_kernels.route import RouterConfig, check_router_topk, router_topk

FLOAT32_FLOOR = 1e-6  # both paths sum in float32, in different orders


def run(case: Case, limits: Limits) -> Verdict:
    """Route the tokens of a case."""
    wanted, H, E, K = (case.need(name) for name in ("tokens", "hidden", "experts", "top_k"))
    T = limits.tokens(wanted, lambda tokens: float(tokens) * H * E)
    terms = _terms(case, K)
    dtype = dtype_of(case.get("dtype", "bfloat16"))
    weight_dtype = dtype_of(case.get("weight_dtype", case.get("dtype", "bfloat16")))
    draw = Draw(seed_of(case))
    weight_EH = draw.uniform((E, H), -0.1, 0.1, weight_dtype)
    bias_1E = draw.uniform((1, E), -0.1, 0.1, np.float32) if case.get("has_bias") else None
    selection_1E = None
    if case.get("has_selection_bias"):
        selection_1E = draw.uniform((1, E), -0.1, 0.1, np.float32)
    norm_1H = draw.uniform((1, H), 0.9, 1.1, dtype) if case.get("has_norm") else None
    eps = float(case.get("norm_eps", 1e-6))

    def logits_of(x_TH: np.ndarray) -> np.ndarray:
        x = x_TH.astype(np.float64)
        if norm_1H is not None:
            x = reference.rms_norm(x, norm_1H.astype(np.float64), eps)
            x = x.astype(dtype).astype(np.float64)
        return np.asarray(x @ weight_EH.astype(np.float64).T + (0 if bias_1E is None else bias_1E))

    hidden_TH = separate_logits(
        lambda rows: draw.uniform((rows, H), -0.1, 0.1, dtype), logits_of, T, min(K, E - 1), 1e-3
    )
    formula = RouterFormula(
        top_k=K,
        has_bias=bias_1E is not None,
        has_selection_bias=selection_1E is not None,
        **terms,
    )
    config = RouterConfig(
        formula,
        E,
        H,
        has_norm=norm_1H is not None,
        norm_eps=eps,
        hidden_dtype=dtype.name,
        weight_dtype=weight_dtype.name,
        num_cores=case.cores(),
    )
    check_router_topk(config, T)
    launched = launch(
        router_topk,
        hidden_TH,
        weight_EH,
        bias_1E,
        selection_1E,
        norm_1H,
        config,
        lnc=case.cores(),
    )
    logits_TE = logits_of(hidden_TH)
    affinities, index = reference.route(logits_TE, formula, selection_1E)
    selection = None if selection_1E is None else torch.from_numpy(selection_1E[0])
    peer = route_with_torch(torch.from_numpy(logits_TE).float(), formula, selection)
    actual, chosen = launched.outputs[:2]
    wrong = int(np.count_nonzero((chosen != index).any(1)))
    failure = f"index: {wrong} of {T} tokens choose other experts" if wrong else ""
    if not failure:
        floor = 1e-3 if norm_1H is not None else FLOAT32_FLOOR
        failure = judge(
            "affinities", actual, affinities, peer.expert_affinities_TK.numpy(), case, floor
        )
    return Verdict(
        failure=failure,
        note=join(scaled_note("T", wanted, T)),
        simulated_us=launched.us,
    )


def _terms(case: Case, top_k: int) -> dict[str, Any]:
    """Return what the formula, the reference and torch call by the same names."""
    is_grouped = int(case.get("n_group", 1)) > 1
    ranks_scores = is_grouped or bool(case.get("has_selection_bias"))
    fill = case.get("out_of_group_fill", float("-inf"))
    return {
        "act_fn": str(case.get("act_fn", "SOFTMAX")).lower(),
        "act_over_topk": not case.get("router_pre_norm", ranks_scores),
        "n_group": int(case.get("n_group", 1)),
        "topk_group": int(case.get("topk_group", 1)),
        "out_of_group_fill": float(fill),
        "renormalize": bool(case.get("norm_topk_prob")) and top_k > 1,
        "routed_scaling_factor": float(case.get("routed_scaling_factor", 1.0)),
    }
