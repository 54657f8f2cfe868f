"""Our decode kernels on a benchmark's case, floating point without values."""

from __future__ import annotations

from typing import Any

import numpy as np

import nki_sim
from neuron_moe.tools.bench.decode_cases import ROUTERS, DecodeCase
from neuron_moe.tools.bench.decode_router import RouterInputs
from nki_kernels.common.router_choice import RouterFormula
from nki_kernels.decode.config import DecodeConfig, packed_rows, packed_run
from nki_kernels.decode.kernel import decode_moe
from nki_kernels.decode.layer_config import make_layer_config
from nki_kernels.decode.layer_kernel import decode_layer
from nki_kernels.decode.options import make_decode_config
from nki_kernels.decode.router import pack_router_weight
from nki_sim import SimOptions, TensorSpec

CORES = 2


def launch_ours(
    case: DecodeCase, options: SimOptions, mode: str = "auto", layout: str = "packed"
) -> tuple[nki_sim.Run, DecodeConfig]:
    """Simulate our kernel; return the run and what the experts were compiled for.

    Args:
        case: what to compute.
        options: of the simulator.
        mode: selective, all, or auto for what the cost model takes.
        layout: of the weights: packed at load time, or ehi as NxD has them.
    """
    sizes = {**_sizes(case, mode), "weight_layout": layout}
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


def configure(case: DecodeCase, mode: str = "auto", layout: str = "packed") -> DecodeConfig:
    """Return what the experts of a case are compiled for; nothing runs."""
    sizes = {**_sizes(case, mode), "weight_layout": layout}
    if case.kernel == "decode_block":
        return make_layer_config(_formula(case), **sizes).moe
    return make_decode_config(K=case.model.K, **sizes)


def _formula(case: DecodeCase) -> RouterFormula:
    return RouterFormula(top_k=case.model.K, has_norm=True, **ROUTERS[case.model.name])


def _launch_block(
    case: DecodeCase, sizes: dict[str, Any], first: Any, options: SimOptions
) -> tuple[nki_sim.Run, DecodeConfig]:
    front = RouterInputs.of(case, case.model.H)
    config = make_layer_config(_formula(case), **sizes)
    router = pack_router_weight(front.weight_EH, config.moe.h_axis, config.router_parts)
    operands = _experts(case, config.moe)
    run = nki_sim.run(
        decode_layer, front.hidden_TH, router,
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
    found: dict[str, Any] = {}
    if config.has_down_bias:
        found["down_bias"] = TensorSpec((E, H), "bfloat16")
    if config.weight_layout == "packed":  # biases of the projections and scales lie in the runs
        h_axis, size, chunks = config.h_axis, config.i_axis.size, config.chunks
        gate_up = (E, chunks, packed_rows(config), packed_run(config))
        down = (E, chunks, size, h_axis.count * h_axis.rows)
        found["gate_up"] = TensorSpec(gate_up, case.weight_format)
        found["down"] = TensorSpec(down, case.weight_format)
        return found
    found["gate_up"] = TensorSpec((E, H, 2 * I), case.weight_format)
    found["down"] = TensorSpec((E, I, H), case.weight_format)
    if config.has_gate_up_bias:
        found["gate_up_bias"] = TensorSpec((E, 2 * I), "float32")
    if config.has_scales:
        found["gate_up_scale"] = TensorSpec((E, 2 * I), "float32")
    if config.down_scale != "none":
        found["down_scale"] = TensorSpec((E, H if config.down_scale == "channel" else 1), "float32")
    return found
