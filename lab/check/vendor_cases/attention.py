"""Prefill attention without prefix cache or context parallelism."""

from typing import Any

import numpy as np

from lab.check.vendor_cases.case import (
    Case,
    Job,
    Limits,
    Skipped,
    scaled_note,
    seed_of,
)
from lab.check.vendor_cases.inputs import Draw, dtype_of
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.references import run_reference


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build an attention_cte case."""
    for name in ("seqlen_kv_prior", "cp_degree", "n_packed_sequences"):
        if case.get(name):
            raise Skipped(f"attention_cte: cases with {name} have no adapter")
    batch, d = case.get("bs", case.get("batch", 1)), case.need("d")
    batch_kv = case.get("bs_kv", batch)
    wanted = case.need("seqlen_q")
    longest = case.get("seqlen_kv", wanted)
    S = limits.tokens(
        wanted,
        lambda rows: 2.0 * batch * rows * min(rows, longest) * d,
        step=128,
        least=min(wanted, 128),
    )
    S_kv = min(longest, S) if wanted > S else longest
    dtype = dtype_of(case.get("dtype", "bfloat16"))
    tp_q, tp_k, tp_out = (
        bool(case.get(name, default))
        for name, default in (("tp_q", True), ("tp_k", False), ("tp_out", False))
    )
    draw = Draw(seed_of(case))
    inputs: dict[str, Any] = {
        "q": draw.uniform((batch, S, d) if tp_q else (batch, d, S), 0.0, 1.0, dtype),
        "k": draw.uniform((batch_kv, S_kv, d) if tp_k else (batch_kv, d, S_kv), 0.0, 1.0, dtype),
        "v": draw.uniform((batch_kv, S_kv, d), 0.0, 1.0, dtype),
        "scale": float(case.get("scale", case.get("softmax_scale", 1.0))),
        "causal_mask": bool(case.get("causal_mask", True)),
        "sliding_window": int(case.get("sliding_window") or 0),
        "tp_q": tp_q,
        "tp_k": tp_k,
        "tp_out": tp_out,
        "cache_softmax": bool(case.get("cache_softmax")),
    }
    if case.get("sink"):
        inputs["sink"] = draw.uniform((batch, 1), 15.0, 25.0, np.float32)
    names = ("out", "negative_max", "sum_reciprocal") if inputs["cache_softmax"] else ("out",)
    reference = library.get("core.attention.attention_cte_torch", "attention_cte_torch_ref")
    return Job(
        kernel=library.get("core.attention.attention_cte", "attention_cte"),
        cores=case.cores(),
        inputs=inputs,
        reference=lambda: run_reference(reference, inputs, names),
        outputs=names,
        note=scaled_note("seqlen_q", wanted, S),
    )
