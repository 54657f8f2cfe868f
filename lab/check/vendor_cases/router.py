"""The top-k router, with its input in HBM or SBUF and its outputs in either."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lab.check.vendor_cases.case import Case, Job, Limits, seed_of
from lab.check.vendor_cases.inputs import Draw, dtype_of
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.references import run_reference

HBM_LAYOUTS = {"H_T": 0, "T_H": 1}
SBUF_LAYOUTS = {"tp102": 0, "tp2013": 1, "tp201": 2}


def chosen_experts(logits_TE: np.ndarray, top_k: int) -> np.ndarray:
    """Return the [T, K] experts with the largest logits."""
    return np.argpartition(-logits_TE, top_k - 1, axis=1)[:, :top_k]


def separate_logits(
    draw_rows: Callable[[int], np.ndarray],
    logits_of: Callable[[np.ndarray], np.ndarray],
    rows: int,
    top_k: int,
    margin: float,
) -> np.ndarray:
    """Return rows whose k+1 largest logits differ by at least a margin, in units of each row's
    spread.

    Where two logits tie to within rounding, a kernel and its reference may rightly choose
    different experts.
    """
    out = draw_rows(rows)
    for _ in range(200):
        top = -np.sort(-logits_of(out), axis=1)
        gaps = top[:, :top_k] - top[:, 1 : top_k + 1]
        close = np.flatnonzero(gaps.min(axis=1) < margin * top.std(axis=1))
        if not close.size:
            break
        out[close] = draw_rows(close.size)
    return out


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build a router case."""
    T, H, E, k = (case.need(name) for name in ("T", "H", "E", "k"))
    in_sbuf, out_sbuf = bool(case.get("x_input_in_sbuf")), bool(case.get("output_in_sbuf"))
    dtype = dtype_of(case.get("dtype", "bfloat16"))
    draw = Draw(seed_of(case))
    w_HE = draw.uniform((H, E), -0.1, 0.1, dtype)
    bias = draw.uniform((1, E), -0.1, 0.1, dtype) if case.get("has_bias") else None

    def logits(x_TH: np.ndarray) -> np.ndarray:
        out = x_TH.astype(np.float32) @ w_HE.astype(np.float32)
        return out if bias is None else out + bias.astype(np.float32)

    x_TH = separate_logits(
        lambda rows: draw.uniform((rows, H), -0.1, 0.1, dtype), logits, T, k, margin=1e-3
    )
    layout = HBM_LAYOUTS[case.get("x_hbm_layout", "H_T")]
    inputs: dict[str, Any] = {
        "x": x_TH if in_sbuf or layout == HBM_LAYOUTS["T_H"] else np.ascontiguousarray(x_TH.T),
        "w": w_HE,
        "w_bias": bias,
        "router_logits": np.zeros((T, E), dtype=dtype),
        "expert_affinities": np.zeros((T, E), dtype=np.float32 if out_sbuf else dtype),
        "expert_index": np.zeros((T, k), dtype=np.uint32),
        "act_fn": library.enum("RouterActFnType", case.get("act_fn", "SOFTMAX")),
        "k": k,
        "x_hbm_layout": layout,
        "x_sb_layout": SBUF_LAYOUTS[case.get("x_sb_layout", "tp102")],
        "router_pre_norm": bool(case.get("router_pre_norm")),
        "norm_topk_prob": bool(case.get("norm_topk_prob")),
        "use_column_tiling": bool(case.get("use_column_tiling")),
        "use_indirect_dma_scatter": bool(case.get("use_indirect_dma_scatter")),
        "use_PE_broadcast_w_bias": bool(case.get("use_PE_broadcast_w_bias")),
        "shard_on_tokens": bool(case.get("shard_on_tokens")),
    }

    def reference() -> dict[str, np.ndarray]:
        function = library.get("core.router_topk.router_topk_torch", "router_topk_torch_ref")
        return run_reference(function, {**inputs, "x_input_in_sbuf": in_sbuf})

    return Job(
        kernel=_router(library, in_sbuf, out_sbuf),
        cores=case.cores(),
        inputs=inputs,
        reference=reference,
        outputs=("router_logits", "expert_index", "expert_affinities"),
    )


def _router(library: VendorLibrary, in_sbuf: bool, out_sbuf: bool) -> Any:
    """Return a kernel that calls the router with input and outputs where the case wants them."""
    nisa, nl = library.nki.isa, library.nl
    kernel = library.get("core.router_topk.router_topk", "router_topk")
    load = library.get("core.router_topk.router_topk", "router_topk_input_x_load")

    def router(
        x: Any,
        w: Any,
        w_bias: Any,
        router_logits: Any,
        expert_affinities: Any,
        expert_index: Any,
        x_sb_layout: int,
        k: int,
        **rest: Any,
    ) -> Any:
        source = load(x, hbm_layout=HBM_LAYOUTS["T_H"], sb_layout=x_sb_layout) if in_sbuf else x
        index, affinities = expert_index, expert_affinities
        if out_sbuf:
            index = nl.ndarray(expert_index.shape, dtype=nl.uint32, buffer=nl.sbuf)
            affinities = nl.ndarray(expert_affinities.shape, dtype=nl.float32, buffer=nl.sbuf)
        kernel(
            x=source,
            w=w,
            w_bias=w_bias,
            router_logits=router_logits,
            expert_affinities=affinities,
            expert_index=index,
            x_sb_layout=x_sb_layout,
            k=k,
            **rest,
        )
        if out_sbuf:
            nisa.dma_copy(dst=expert_index, src=index)
            nisa.dma_copy(dst=expert_affinities, src=affinities)
        return router_logits, expert_index, expert_affinities

    return router
