"""RMSNorm kernels of decode, and RMSNorm with fp8 quantisation."""

from typing import Any

import numpy as np

from lab.check.vendor_cases.case import Case, Job, Limits, scaled_note, seed_of
from lab.check.vendor_cases.inputs import Draw, dtype_of
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.references import run_reference

FP8_LARGEST = 240.0
MAX_QUANTISED_ROWS = 512


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build a norm case."""
    return _rmsnorm_quant(case, library) if "quant" in case.kernel else _rmsnorm(case, library)


def _rmsnorm(case: Case, library: VendorLibrary) -> Job:
    batch, S, H = case.need("batch"), case.get("seqlen", 1), case.need("hidden")
    cores, dtype = case.cores(), dtype_of(case.get("dtype", "float16"))
    transposed = bool(case.get("hidden_dim_tp"))
    draw = Draw(seed_of(case))
    inputs: dict[str, Any] = {
        "input": draw.normal((batch, S, H), dtype),
        "gamma": draw.normal((1, H), dtype),
        "output": np.zeros((128, batch * S, H // 128), dtype=dtype),
        "hidden_actual": case.get("hidden_actual"),
        "hidden_dim_tp": transposed,
        "shard_on_h": bool(case.get("shard_on_h")),
    }
    name = (
        "rmsnorm_tkg_torch_ref" if cores == 2 and not transposed else "rmsnorm_tkg_torch_ref_lnc1"
    )
    reference = library.get("core.subkernels.rmsnorm_torch", name)
    kernel = library.get("core.subkernels.rmsnorm_tkg", "rmsnorm_tkg")

    def rmsnorm(input: Any, gamma: Any, output: Any, **rest: Any) -> Any:
        result = kernel(input, gamma, output, **rest)
        return output if result is None else result

    return Job(
        kernel=rmsnorm,
        cores=cores,
        inputs=inputs,
        reference=lambda: run_reference(reference, inputs),
        outputs=("out",),
    )


def _rmsnorm_quant(case: Case, library: VendorLibrary) -> Job:
    """Build a quantising norm; its reference is the vendor's norm followed by the documented fp8
    rule.
    """
    batch, H = case.get("batch", 1), case.need("hidden")
    wanted = case.need("seqlen")
    S = min(wanted, MAX_QUANTISED_ROWS)
    cores = case.cores()
    dtype = dtype_of(case.get("dtype", "bfloat16"))
    static = case.get("quant_type", "ROW") == "STATIC"
    lower_bound, quant_only = float(case.get("lower_bound", 0.0)), bool(case.get("quant_only"))
    draw = Draw(seed_of(case))
    hidden = draw.normal((batch, S, H), dtype)
    gamma = draw.normal((1, H) if cores > 1 else (H,), dtype)
    scale = np.full((128, 1), draw.rng.normal(0.5, 0.1), dtype=np.float32) if static else None
    module = "core.rmsnorm.rmsnorm_quant"
    arguments = library.get(module, "RmsNormQuantKernelArgs")(
        lower_bound=lower_bound,
        norm_type=library.enum("NormType", "NO_NORM" if quant_only else "RMS_NORM"),
        quantization_type=library.enum("QuantizationType", "STATIC" if static else "ROW"),
        eps=1e-6,
    )
    inputs: dict[str, Any] = {"hidden": hidden, "ln_w": gamma, "kargs": arguments}
    if scale is not None:
        inputs["input_dequant_scale"] = scale
    norm = library.get("core.subkernels.rmsnorm_torch", "rms_norm_torch_ref")

    def reference() -> dict[str, np.ndarray]:
        rows = hidden.astype(np.float32)
        if not quant_only:
            rows = run_reference(norm, {"hidden": hidden, "gamma": gamma.reshape(-1)})["out"]
        if scale is not None:
            return {"out": np.clip(rows / scale[0, 0], -FP8_LARGEST, FP8_LARGEST)}
        largest = np.abs(rows).max(axis=-1, keepdims=True)
        if lower_bound > 0:
            largest = np.minimum(largest, lower_bound)
            rows = np.clip(rows, -lower_bound, lower_bound)
        return {"out": rows * (FP8_LARGEST / largest), "scale": largest / FP8_LARGEST}

    return Job(
        kernel=library.get(module, "rmsnorm_quant_kernel"),
        cores=cores,
        inputs=inputs,
        reference=reference,
        outputs=("out",),
        split=None if static else _split_row_scale,
        note=scaled_note("seqlen", wanted, S),
    )


def _split_row_scale(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Cut the four trailing bytes of each fp8 row off: they are the row's float32 scale."""
    rows = outputs["out"]
    return {"out": rows[..., :-4], "scale": np.ascontiguousarray(rows[..., -4:]).view(np.float32)}
