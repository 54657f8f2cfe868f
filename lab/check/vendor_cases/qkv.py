"""The fused QKV projection: decode form for few tokens, prefill form above; the kernel chooses."""

from typing import Any

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
    """Build a QKV case without quantisation, rotary embedding or cache."""
    if case.get("quantization_type", "NONE") != "NONE":
        raise Skipped("qkv: quantised cases have no adapter")
    if case.get("fused_rope"):
        raise Skipped("qkv: cases with rotary embedding have no adapter")
    batch, wanted, H = (
        case.need("batch"),
        case.get("seqlen", 1),
        case.get("hidden_dim") or case.need("hidden"),
    )
    heads, kv_heads, d = (case.get(name) for name in ("n_q_heads", "n_kv_heads", "d_head"))
    width = case.get("fused_qkv_dim") or (heads + 2 * kv_heads) * d
    S = limits.tokens(
        wanted, lambda rows: 1.0 * batch * rows * H * width, step=128, least=min(wanted, 128)
    )
    dtype = dtype_of(case.get("dtype", "bfloat16"))
    norm, fused_add = case.get("norm_type", "NO_NORM"), bool(case.get("fused_add"))
    draw = Draw(seed_of(case))
    hidden, weights = draw.normal((batch, S, H), dtype), draw.normal((H, width), dtype)
    gamma = draw.normal((1, H), dtype) if norm in ("RMS_NORM", "LAYER_NORM") else None
    bias = draw.normal((1, width), dtype) if case.get("add_bias", case.get("bias")) else None
    norm_bias = draw.normal((1, H), dtype) if case.get("norm_bias") else None
    added = [draw.normal((batch, S, H), dtype) for _ in range(2)] if fused_add else [None, None]
    layout = library.enum("QKVOutputLayout", case.get("output_layout", "BSD"))
    eps = float(case.get("eps", 1e-6))
    shared: dict[str, Any] = {
        "output_layout": layout,
        "d_head": d,
        "num_q_heads": heads,
        "num_kv_heads": kv_heads,
    }
    inputs: dict[str, Any] = {
        "input": hidden,
        "fused_qkv_weights": weights,
        "bias": bias,
        "fused_residual_add": fused_add,
        "mlp_prev": added[0],
        "attention_prev": added[1],
        "fused_norm_type": library.enum("NormType", norm),
        "gamma_norm_weights": gamma,
        "layer_norm_bias": norm_bias,
        "norm_eps": eps,
        "hidden_actual": case.get("hidden_actual"),
        "load_input_with_DMA_transpose": bool(case.get("use_dma_transpose", True)),
        **shared,
    }
    reference_inputs = {
        "hidden": hidden,
        "qkv_w": weights,
        "norm_w": gamma,
        "fused_add": fused_add,
        "mlp_prev": added[0],
        "attn_prev": added[1],
        "eps": eps,
        "norm_type": library.enum("NormType", norm),
        "qkv_bias": bias,
        "norm_bias": norm_bias,
        "hidden_actual": case.get("hidden_actual"),
        **shared,
    }
    reference = library.get("core.qkv.qkv_tkg_torch", "qkv_tkg_torch_ref")
    return Job(
        kernel=library.get("core.qkv.qkv", "qkv"),
        cores=case.cores(),
        inputs={name: value for name, value in inputs.items() if value is not None},
        reference=lambda: run_reference(reference, reference_inputs),
        outputs=("out", "fused_hidden") if fused_add else ("out",),
        note=scaled_note("seqlen", wanted, S),
    )
