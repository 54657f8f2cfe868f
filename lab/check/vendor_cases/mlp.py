"""The dense MLP: decode form up to 96 tokens, prefill form above; the kernel chooses."""

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
from lab.check.vendor_cases.references import as_array, as_tensor

OPTIONS = (
    "use_tkg_gate_up_proj_column_tiling",
    "use_tkg_down_proj_column_tiling",
    "force_cte_mode",
)


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build an MLP case without quantisation."""
    if case.get("quant_type", "NONE") != "NONE" or case.get("quant_dtype"):
        raise Skipped("mlp: quantised cases have no adapter")
    if case.get("skip_gate"):
        raise Skipped("mlp: cases without a gate have no adapter")
    batch, H, width = case.need("batch"), case.need("hidden"), case.need("intermediate")
    wanted = case.get("seqlen", 1)
    S = limits.tokens(
        wanted, lambda rows: 3.0 * batch * rows * H * width, step=128, least=min(wanted, 128)
    )
    dtype = dtype_of(case.get("dtype", "bfloat16"))
    norm, act = case.get("norm_type", "NO_NORM"), case.get("act_fn", "SiLU")
    draw = Draw(seed_of(case))
    inputs: dict[str, Any] = {
        "hidden_tensor": draw.normal((batch, S, H), dtype),
        "gate_proj_weights_tensor": draw.normal((H, width), dtype),
        "up_proj_weights_tensor": draw.normal((H, width), dtype),
        "down_proj_weights_tensor": draw.normal((width, H), dtype),
    }
    if norm in ("RMS_NORM", "LAYER_NORM"):
        inputs["normalization_weights_tensor"] = draw.uniform((1, H), -0.1, 0.1, dtype)
    if case.get("norm_bias"):
        inputs["normalization_bias_tensor"] = draw.normal((1, H), dtype)
    for side, size in (("gate", width), ("up", width), ("down", H)):
        if case.get(f"{side}_bias", case.get("bias")):
            inputs[f"{side}_proj_bias_tensor"] = draw.normal((1, size), dtype)
    if case.get("fused_add"):
        inputs["fused_add_tensor"] = draw.normal((batch, S, H), dtype)
        inputs["store_fused_add_result"] = bool(case.get("store_add"))
    arguments = {
        **inputs,
        "activation_fn": library.enum("ActFnType", act),
        "normalization_type": library.enum("NormType", norm),
        **{name: case.get(name) for name in OPTIONS if case.get(name) is not None},
    }
    stores = bool(inputs.get("store_fused_add_result"))
    return Job(
        kernel=mlp_kernel(library),
        cores=case.cores(),
        inputs=arguments,
        reference=lambda: _reference(library, inputs, norm, act),
        outputs=("out", "added") if stores else ("out",),
        note=scaled_note("seqlen", wanted, S),
    )


def mlp_kernel(library: VendorLibrary) -> Any:
    """Return the library's entry point or, where that file does not compile, what it would do.

    The release of April 2026 has an indentation error in core/mlp/mlp.py; the two kernels behind it
    are intact.
    """
    try:
        return library.get("core.mlp.mlp", "mlp")
    except SyntaxError:
        pass
    nl = library.nl
    parameters = "core.mlp.mlp_parameters"
    make = library.get(parameters, "MLPParameters")
    validate = library.get(parameters, "validate_mlp_arguments")
    is_decode = library.get(parameters, "is_mlp_tkg")
    decode = library.get("core.mlp.mlp_tkg.mlp_tkg", "mlp_tkg")
    prefill = library.get("core.mlp.mlp_cte.mlp_cte", "mlp_cte")
    manager = library.get("core.utils.allocator", "SbufManager")
    logger = library.get("core.utils.logging", "Logger")

    def mlp(hidden_tensor: Any, store_fused_add_result: bool = False, **rest: Any) -> Any:
        tiling = dict.fromkeys(OPTIONS[:2], True)
        params = make(
            hidden_tensor=hidden_tensor,
            store_fused_add_result=store_fused_add_result,
            **(tiling | rest),
        )
        validate(params)
        sbm = manager(0, 200 * 1024, logger("mlp"))
        sbm.set_name_prefix("mlp_")
        names = ["output_tensor_hbm", "output_stored_add_tensor_hbm"][: 1 + store_fused_add_result]
        shape, dtype = hidden_tensor.shape, hidden_tensor.dtype
        outs = [nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm, name=name) for name in names]
        added = outs[1] if store_fused_add_result else None
        if is_decode(params):
            return decode(params, outs[0], added, sbm=sbm)
        prefill(params, outs[0], added)
        return outs

    return mlp


def _reference(
    library: VendorLibrary, inputs: dict[str, Any], norm: str, act: str
) -> dict[str, np.ndarray]:
    """Compose the vendor's torch norm and torch expert MLP; a dense MLP is one expert."""
    subkernels = "core.subkernels"
    tensors = {name: as_tensor(value) for name, value in inputs.items()}
    hidden = tensors["hidden_tensor"]
    if "fused_add_tensor" in tensors:
        hidden = hidden + tensors["fused_add_tensor"]
    added = hidden
    gamma = tensors.get("normalization_weights_tensor")
    if norm in ("RMS_NORM", "RMS_NORM_SKIP_GAMMA"):
        hidden = library.get(f"{subkernels}.rmsnorm_torch", "rms_norm_torch_ref")(hidden, gamma)
    elif norm == "LAYER_NORM":
        normalise = library.get(f"{subkernels}.layernorm_torch", "layer_norm_torch_ref")
        hidden = normalise(hidden, gamma, norm_b=tensors.get("normalization_bias_tensor"))
    import torch

    gate_up = torch.stack(
        [tensors["gate_proj_weights_tensor"], tensors["up_proj_weights_tensor"]], dim=1
    )
    bias = None
    if "gate_proj_bias_tensor" in tensors or "up_proj_bias_tensor" in tensors:
        zeros = torch.zeros(1, gate_up.shape[-1])
        bias = torch.cat(
            [tensors.get(f"{side}_proj_bias_tensor", zeros) for side in ("gate", "up")]
        )
    expert = library.get("core.moe.moe_tkg.moe_tkg_torch", "_compute_expert_mlp")
    names = {"SiLU": "silu", "Swish": "swish", "GELU": "gelu", "GELU_Tanh_Approx": "gelu_tanh"}
    out = expert(
        hidden.reshape(-1, hidden.shape[-1]),
        gate_up,
        tensors["down_proj_weights_tensor"],
        bias,
        tensors.get("down_proj_bias_tensor"),
        names[act],
        None,
        None,
        None,
    )
    return {"out": as_array(out.reshape(hidden.shape)), "added": as_array(added)}
