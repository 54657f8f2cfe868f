"""The hand-over to NxDI: its application classes compile and load, with our layer inside.

Everything of the SDK is imported when it is needed. NxDI holds routed experts in bfloat16, as its
sharder drops the scales of modules that are not NxD's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from neuron_moe import nxd_compat
from neuron_moe.models.deployment import Deployment, DoesNotFit
from nki_kernels import IS_SIMULATED

_PACKAGES = {
    "torch_neuronx": "what lowers torch to the chip",
    "neuronx_distributed": "NxD",
    "neuronx_distributed_inference": "NxDI",
}
# What a vision tower beside the text model is not given: it sees one image at a time.
_TEXT_SETTINGS = (
    "batch_size",
    "ctx_batch_size",
    "enable_bucketing",
    "context_encoding_buckets",
    "token_generation_buckets",
    "sequence_parallel_enabled",
)
_COMPILER = "neuronx-cc"
_CORES_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
_WORK_VARIABLE = "BASE_COMPILE_WORK_DIR"


def find_missing(folder: Path | None) -> list[str]:
    """Return what keeps a deployment from being compiled for the chip; nothing if it can be.

    Args:
        folder: of the checkpoint, None where there is none.
    """
    missing = [
        f"package {name} ({what})"
        for name, what in _PACKAGES.items()
        if importlib.util.find_spec(name) is None
    ]
    if shutil.which(_COMPILER) is None:
        missing.append(f"command {_COMPILER} (the compiler)")
    if IS_SIMULATED:
        missing.append("package nki (the kernel language; the simulator stands in for it)")
    if folder is None or not any(folder.glob("*.safetensors")):
        missing.append("weights (give --model the folder of a checkpoint)")
    return missing


def neuron_settings(deployment: Deployment) -> dict[str, Any]:
    """Return the arguments of NxDI's MoENeuronConfig, as plain values."""
    lengths = [bucket.tokens for bucket in deployment.buckets]
    return {
        "tp_degree": deployment.tp * deployment.ep,
        "moe_tp_degree": deployment.tp,
        "moe_ep_degree": deployment.ep,
        "batch_size": deployment.batch,
        "ctx_batch_size": 1,
        "seq_len": deployment.max_length,
        "max_context_length": lengths[-1],
        "torch_dtype": "bfloat16",
        "logical_nc_config": deployment.lnc,
        "sequence_parallel_enabled": deployment.sp,
        "enable_bucketing": True,
        "context_encoding_buckets": lengths,
        "token_generation_buckets": sorted({*lengths, deployment.max_length}),
        "save_sharded_checkpoint": True,
        "blockwise_matmul_config": _blockwise_settings(deployment),
    }


def _blockwise_settings(deployment: Deployment) -> dict[str, Any]:
    """Return the arguments of BlockwiseMatmulConfig, which NxDI has one of for all buckets."""
    settings: dict[str, Any] = {"block_size": deployment.buckets[-1].block_size}
    if deployment.tuning.tuned.prefill:  # with a plan, and so a block size, for each bucket
        settings["tuned"] = deployment.tuning.tuned.to_dict()
    return settings


def block_size_remark(deployment: Deployment) -> str:
    """Say which buckets run with another block size than they were planned with; '' if none."""
    if deployment.tuning.tuned.prefill:
        return ""
    used = deployment.buckets[-1].block_size
    other = [bucket for bucket in deployment.buckets if bucket.block_size != used]
    if not other:
        return ""
    planned = ", ".join(f"{bucket.tokens} tokens with {bucket.block_size}" for bucket in other)
    return (
        f"NxDI takes one block size, {used}, for all buckets; planned were {planned}. A file of"
        " neuron-moe tune has a plan for each."
    )


def check_fits(deployment: Deployment) -> None:
    """Raise DoesNotFit unless the machine holds the experts as NxDI keeps them, in bfloat16."""
    try:
        replace(deployment, quantization="bf16")
    except DoesNotFit as error:
        needed, allowed = (size / 2**30 for size in (error.memory.needed, error.memory.allowed))
        raise DoesNotFit(
            error.memory,
            f"quantization={deployment.quantization!r}: NxDI keeps routed experts in bfloat16, with"
            f" which a rank needs {needed:.1f} GiB, must be at most {allowed:.1f}. Use more ranks,"
            " or lower batch and max_length.",
        ) from error


def hand_over(
    deployment: Deployment, model_type: str, folder: Path, out: Path, *, loads: bool = True
) -> list[str]:
    """Let NxDI compile and load a deployment, with our layer in its models.

    Args:
        deployment: how it is served.
        model_type: of config.json.
        folder: of the checkpoint.
        out: folder for what NxDI writes.
        loads: also load what was compiled.

    Returns:
        What was done, a line each.

    Raises:
        ValueError: NxDI has no application for the model, the environment contradicts the
            deployment, or a rank does not hold experts in bfloat16.
    """
    check_fits(deployment)
    _check_environment(deployment)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(_WORK_VARIABLE, str(out / "compiler_work"))
    kind = _application(model_type)
    lines = [str(each) for each in nxd_compat.install(backend="nki")]
    lines += filter(None, [block_size_remark(deployment)])
    try:
        app = _build(kind, deployment, folder)
        compiled = str(out / "compiled")
        app.compile(compiled)
        lines.append(f"{kind.__name__}.compile wrote {compiled}")
        if loads:
            app.load(compiled)
            lines.append(f"{kind.__name__}.load read it back")
    finally:
        nxd_compat.uninstall()
    return lines


def _build(kind: Any, deployment: Deployment, folder: Path) -> Any:
    """Return NxDI's application object for a deployment."""
    adapter = importlib.import_module("neuronx_distributed_inference.utils.hf_adapter")
    config_kind = kind.get_config_cls()
    settings = neuron_settings(deployment)
    blockwise = nxd_compat.BlockwiseMatmulConfig.from_kwargs(**settings["blockwise_matmul_config"])
    settings |= {"torch_dtype": torch.bfloat16, "blockwise_matmul_config": blockwise}
    neuron_kind = config_kind.get_neuron_config_cls()
    neuron = [neuron_kind(**settings)]
    if "vision_neuron_config" in inspect.signature(config_kind).parameters:
        vision = {key: value for key, value in settings.items() if key not in _TEXT_SETTINGS}
        neuron.append(neuron_kind(**vision, batch_size=1, enable_bucketing=False))
    config = config_kind(*neuron, load_config=adapter.load_pretrained_config(str(folder)))
    return kind(str(folder), config)


def _application(model_type: str) -> Any:
    """Return NxDI's application class of a model type."""
    constants = importlib.import_module("neuronx_distributed_inference.utils.constants")
    kinds: Mapping[str, Mapping[str, Any]] = constants.MODEL_TYPES
    if "causal-lm" not in kinds.get(model_type, {}):
        raise ValueError(
            f"model_type={model_type!r}: NxDI has no application for it, but for"
            f" {', '.join(kinds)}. Use the plan with modeling code of your own."
        )
    return kinds[model_type]["causal-lm"]


def _check_environment(deployment: Deployment) -> None:
    """Refuse an environment that would override the deployment without a word."""
    cores = os.environ.get(_CORES_VARIABLE)
    if cores is not None and cores != str(deployment.lnc):
        raise ValueError(
            f"{_CORES_VARIABLE}={cores}: overrides lnc={deployment.lnc} of the deployment. Unset"
            " it, or set lnc to the same."
        )
