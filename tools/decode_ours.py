"""Our decode kernels on a benchmark's case, floating point without values."""

from __future__ import annotations

from typing import Any

import numpy as np

import nki_sim
from neuron_moe.tools.decode_cases import ROUTERS, DecodeCase
from neuron_moe.tools.decode_router import RouterInputs
from nki_kernels.decode_block import decode_block
from nki_kernels.decode_block_config import make_block_config
from nki_kernels.decode_config import DecodeConfig
from nki_kernels.decode_moe import decode_moe
from nki_kernels.decode_options import make_decode_config
from nki_kernels.decode_router import pack_router_weight
from nki_kernels.router_choice import RouterFormula
from nki_sim import SimOptions, TensorSpec

CORES = 2


def launch_ours(
    case: DecodeCase, options: SimOptions, mode: str = "auto"
) -> tuple[nki_sim.Run, DecodeConfig]:
    """Simulate our kernel; return the run and what the experts were compiled for.

    Args:
        case: what to compute.
        options: of the simulator.
        mode: selective, all, or auto for what the cost model takes.
    """
    sizes = _sizes(case, mode)
    index_TK = case.expert_index()
    first = np.zeros((1, 1), np.int32)
    if case.kernel == "decode_block":
        return _launch_block(case, sizes, first, options)
    config = make_decode_config(K=case.model.K, **sizes)
    operands = _experts(case, config)
    run = nki_sim.run(
        decode_moe, TensorSpec((case.B, case.model.H), "bfloat16"), operands.pop("gate_up"),
        operands.pop("down"), index_TK, TensorSpec(index_TK.shape, "float32"), first, config,
        lnc=CORES, options=options, **operands,
    )  # fmt: skip
    return run, config


def _launch_block(
    case: DecodeCase, sizes: dict[str, Any], first: Any, options: SimOptions
) -> tuple[nki_sim.Run, DecodeConfig]:
    front = RouterInputs.of(case, case.model.H)
    formula = RouterFormula(top_k=case.model.K, has_norm=True, **ROUTERS[case.model.name])
    config = make_block_config(formula, **sizes)
    operands = _experts(case, config.moe)
    run = nki_sim.run(
        decode_block, front.hidden_TH, pack_router_weight(front.weight_EH),
        operands.pop("gate_up"), operands.pop("down"), first, config, lnc=CORES,
        options=options, norm_weight=front.norm_1H, router_bias=front.bias_1E, **operands,
    )  # fmt: skip
    return run, config.moe


def _sizes(case: DecodeCase, mode: str) -> dict[str, Any]:
    """Return what the configuration is made of, without K."""
    model = case.model
    options = {"scaling": "post", **model.options}
    return {
        "T": case.B,
        "H": model.H,
        "I": model.I,
        "E": model.E,
        "num_experts": model.E,
        "num_cores": CORES,
        "mode": mode,
        "weight_format": case.weight_format,
        "has_scales": case.format == "fp8",
        "down_scale": case.down_scale,
        "output_dtype": "bfloat16",
        **options,
    }


def _experts(case: DecodeCase, config: DecodeConfig) -> dict[str, Any]:
    """Return the experts' operands."""
    E, H, I = case.model.E, case.model.H, case.model.I  # noqa: E741  the axis letters
    found: dict[str, Any] = {
        "gate_up": TensorSpec((E, H, 2 * I), case.weight_format),
        "down": TensorSpec((E, I, H), case.weight_format),
    }
    if config.has_gate_up_bias:
        found["gate_up_bias"] = TensorSpec((E, 2 * I), "float32")
    if config.has_down_bias:
        found["down_bias"] = TensorSpec((E, H), "bfloat16")
    if config.has_scales:
        found["gate_up_scale"] = TensorSpec((E, 2 * I), "float32")
    if config.down_scale != "none":
        found["down_scale"] = TensorSpec((E, H if config.down_scale == "channel" else 1), "float32")
    return found
