"""MoE prefill kernels with packed mx weights (trn3): sharded on block, or on I, or on I with
dynamic blocks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from neuron_moe.tools.check.vendor_cases import mx
from neuron_moe.tools.check.vendor_cases.block_plan import num_blocks, plan_blocks
from neuron_moe.tools.check.vendor_cases.case import (
    Case,
    Job,
    Limits,
    Skipped,
    scaled_note,
    seed_of,
)
from neuron_moe.tools.check.vendor_cases.inputs import Draw, dtype_of
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary

KERNELS = {
    "shard_on_block_mx": ("core.moe.moe_cte.bwmm_shard_on_block_mx", "bwmm_shard_on_block_mx"),
    "shard_on_i_mx": ("core.moe.moe_cte.bwmm_shard_on_I_mx", "blockwise_mm_shard_intermediate_mx"),
    "shard_on_i_mx_hybrid": (
        "core.moe.moe_cte.bwmm_shard_on_I_mx",
        "blockwise_mm_shard_intermediate_mx_hybrid",
    ),
}
CORES = 2
N_DYNAMIC_BLOCKS = 55


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build an mx prefill case."""
    if case.variant not in KERNELS:
        raise Skipped(
            f"moe_cte variant {case.variant!r}: no adapter; known are {', '.join(KERNELS)}"
        )
    library.use_tables()
    E, K, B = case.need("experts"), case.need("top_k"), case.need("block_size")
    H, width = case.need("hidden"), case.need("intermediate")
    on_block = case.variant == "shard_on_block_mx"
    multiple = CORES if on_block else 1
    T = limits.tokens(
        case.need("tokens"),
        lambda tokens: num_blocks(tokens, K, E, B, multiple) * B * 3.0 * H * width,
        step=256,
        least=min(case.need("tokens"), 512),
    )
    draw = Draw(seed_of(case))
    skip_token = bool(case.get("skip_mode", 0) & 1)
    plan = plan_blocks(draw, T, K, E, B, num_blocks(T, K, E, B, multiple), skip_token)
    dtype = dtype_of(case.get("dtype", "bfloat16"))
    name = case.need("weight_dtype")

    rows = T if skip_token else T + 1
    hidden_TH = mx.draw_stable_hidden(draw, rows, H).astype(dtype)
    affinities_TE = draw.uniform((rows, E), 0.0, 1.0, dtype)
    affinities_TE[:T] *= plan.mask_TE.astype(dtype)
    if not skip_token:
        hidden_TH[T] = 0
        affinities_TE[T] = 0
    weights = mx.draw_experts(draw, E, H, width, name)
    p, tiles = mx.intermediate_partitions(width), -(-width // 512)
    bias = down_bias = None
    if case.get("bias"):
        bias = draw.uniform((E, p, 2, tiles, 4), -2.0625, 0.52, dtype)
        down_bias = draw.uniform((E, H), -1.632, 1.4375, dtype)

    raw = bool(case.get("use_uint_weights")) and on_block
    packed: Callable[[np.ndarray], np.ndarray] = (
        (lambda words: words) if raw else (lambda words: mx.for_kernel(words, name))
    )
    module, kernel = KERNELS[case.variant]
    inputs: dict[str, Any] = {
        "hidden_states": hidden_TH,
        "expert_affinities_masked": affinities_TE.reshape(-1, 1),
        "gate_up_proj_weight": packed(weights.gate_up),
        "down_proj_weight": packed(weights.down),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "gate_and_up_proj_bias": bias,
        "down_proj_bias": down_bias,
        "gate_up_proj_scale": weights.gate_up_scale,
        "down_proj_scale": weights.down_scale,
        "block_size": B,
        "activation_function": library.enum("ActFnType", case.get("act_fn", "SiLU")),
        "skip_dma": library.get("core.moe.moe_cte.moe_cte_utils", "SkipMode")(
            skip_token, bool(case.get("skip_mode", 0) & 2)
        ),
        "compute_dtype": getattr(library.nl, case.get("dtype", "bfloat16")),
        "weight_dtype": getattr(library.nl, name),
        "is_tensor_update_accumulating": K != 1,
        "expert_affinities_scaling_mode": library.enum("ExpertAffinityScaleMode", "POST_SCALE"),
    }
    for side in ("gate", "up"):
        for bound in ("upper", "lower"):
            if case.get(f"{side}_clamp_{bound}") is not None:
                inputs[f"{side}_clamp_{bound}_limit"] = float(case.get(f"{side}_clamp_{bound}"))
    if case.get("is_dynamic"):
        inputs["conditions"] = plan.conditions(extra=2 if on_block else 1)
    static = case.get("n_static_blocks")
    if on_block:
        if case.get("is_dynamic"):
            inputs["n_dynamic_blocks"] = N_DYNAMIC_BLOCKS
        if static is not None:
            inputs["n_static_blocks"] = static
    elif static is not None and case.variant == "shard_on_i_mx_hybrid":
        inputs["num_static_block"] = static

    def reference() -> dict[str, np.ndarray]:
        out_TH = _reference(
            case, library, hidden_TH[:T], affinities_TE[:T], weights, name, bias, down_bias
        )
        if on_block and K != 1:
            out_TH = np.stack([out_TH, np.zeros_like(out_TH)])
        return {"output": out_TH}

    tokens_axis = 1 if on_block and K != 1 else 0
    return Job(
        kernel=library.get(module, kernel),
        cores=CORES,
        mx_headroom=library.mx_headroom(),
        inputs=inputs,
        reference=reference,
        select={"output": lambda out: np.take(out, range(T), axis=tokens_axis)},
        note=scaled_note("T", case.need("tokens"), T),
    )


def _reference(
    case: Case,
    library: VendorLibrary,
    hidden_TH: np.ndarray,
    affinities_TE: np.ndarray,
    weights: mx.ExpertWeights,
    name: str,
    bias: np.ndarray | None,
    down_bias: np.ndarray | None,
) -> np.ndarray:
    """Run the vendor's torch mx projections on each expert's tokens; sum the bf16-rounded results
    by affinity.
    """
    common, projections = "core.utils.mx_torch_common", "core.mlp.mlp_tkg.mlp_proj_mxfp4_torch"
    quantize = library.get(common, "quantize_to_mx")
    unpackers = {
        "float4_e2m1fn_x4": library.get(common, "unpack_float4_x4"),
        "float8_e4m3fn_x4": library.get(common, "unpack_float8_e4m3fn_x4"),
        "float8_e5m2_x4": library.get(common, "unpack_float8_e5m2_x4"),
    }
    project, project_down = (
        library.get(projections, f"{side}_proj_mxfp4_torch_ref") for side in ("gate_up", "down")
    )
    activate = library.get("core.moe.moe_cte.moe_cte_torch_utils", "torch_act_fn")
    act_fn = library.enum("ActFnType", case.get("act_fn", "SiLU"))
    T, H = hidden_TH.shape
    width = weights.gate_up.shape[-1]
    out_TH = np.zeros((T, H), dtype=np.float32)
    for expert in range(weights.gate_up.shape[0]):
        members = np.flatnonzero(affinities_TE[:, expert].astype(np.float32))
        if not members.size:
            continue
        n = members.size
        tile = (
            hidden_TH[members].astype(np.float32).reshape(n, 4, H // 512, 128).transpose(3, 2, 0, 1)
        )
        codes, scale = quantize(
            np.ascontiguousarray(tile).reshape(128, -1), library.nl.float8_e4m3fn_x4
        )
        sides = []
        for side in range(2):
            side_bias = (
                None if bias is None else torch.from_numpy(bias[expert, :, side].astype(np.float32))
            )
            sides.append(
                project(
                    codes.reshape(128, H // 512, n),
                    torch.from_numpy(scale.reshape(16, H // 512, n)),
                    mx.for_reference(weights.gate_up[expert, :, side], name),
                    torch.from_numpy(np.ascontiguousarray(weights.gate_up_scale[expert, :, side])),
                    side_bias,
                    H,
                    width,
                    n,
                    hidden_unpack_fn=unpackers["float8_e4m3fn_x4"],
                    weight_unpack_fn=unpackers[name],
                )["out"]
            )
        gate, up = (
            torch.clamp(value, case.get(f"{side}_clamp_lower"), case.get(f"{side}_clamp_upper"))
            if case.get(f"{side}_clamp_lower") is not None
            or case.get(f"{side}_clamp_upper") is not None
            else value
            for side, value in zip(("gate", "up"), sides, strict=True)
        )
        down = project_down(
            activate(gate, act_fn) * up,
            mx.for_reference(weights.down[expert], name),
            torch.from_numpy(weights.down_scale[expert]),
            None if down_bias is None else torch.from_numpy(down_bias[expert].astype(np.float32)),
            H,
            width,
            n,
            weight_unpack_fn=unpackers[name],
        )["out"].numpy()
        scaled = down * affinities_TE[members, expert].astype(np.float32)[:, None]
        out_TH[members] += torch.from_numpy(scaled).to(torch.bfloat16).float().numpy()
    return out_TH
