"""Our decode kernels on a benchmark's case, floating point without values."""

from __future__ import annotations

from typing import Any

import numpy as np

import nki_sim
from neuron_moe.tools.bench.comparison import runs
from neuron_moe.tools.bench.comparison.layers import Model
from neuron_moe.tools.bench.decode.cases import ROUTERS, DecodeCase
from neuron_moe.tools.bench.decode.router_inputs import RouterInputs
from nki_kernels.common.formula import ExpertFormula, RouterFormula, limits
from nki_kernels.decode import (
    DecodeConfig,
    DecodeRequest,
    DecodeSizes,
    LayerConfig,
    LayerForm,
    WeightForm,
    decode_layer,
    decode_moe,
    loads_bias,
    make_decode_config,
    make_layer_config,
    pack_router_weight,
    weight_shapes,
)
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
    records = _records(case, mode, layout)
    index_TK = case.expert_index()
    first = np.zeros((1, 1), np.int32)
    if case.kernel == "decode_block":
        return _launch_layer(case, _layer_config(case, *records), first, options)
    config = make_decode_config(*records)
    operands = expert_specs(case.model, config)
    run = runs.run(
        decode_moe, TensorSpec((case.B, case.model.H), "bfloat16"), operands.pop("gate_up"),
        operands.pop("down"), index_TK, TensorSpec(index_TK.shape, "float32"), first, config,
        lnc=CORES, options=options, **operands,
    )  # fmt: skip
    return run, config


def configure(case: DecodeCase, mode: str = "auto", layout: str = "packed") -> DecodeConfig:
    """Return what the experts of a case are compiled for; nothing runs."""
    records = _records(case, mode, layout)
    if case.kernel == "decode_block":
        return _layer_config(case, *records).moe
    return make_decode_config(*records)


def _layer_config(
    case: DecodeCase,
    sizes: DecodeSizes,
    formula: ExpertFormula,
    weights: WeightForm,
    request: DecodeRequest,
) -> LayerConfig:
    router = RouterFormula(top_k=case.model.K, **ROUTERS[case.model.name])
    return make_layer_config(sizes, router, formula, LayerForm(has_norm=True), weights, request)


def _launch_layer(
    case: DecodeCase, config: LayerConfig, first: Any, options: SimOptions
) -> tuple[nki_sim.Run, DecodeConfig]:
    front = RouterInputs.of(case, case.model.H)
    router = pack_router_weight(front.weight_EH, config.moe.h_axis, config.router_parts)
    operands = expert_specs(case.model, config.moe)
    run = runs.run(
        decode_layer, front.hidden_TH, router,
        operands.pop("gate_up"), operands.pop("down"), first, config, lnc=CORES,
        options=options, norm_weight=front.norm_1H, router_bias=front.bias_1E, **operands,
    )  # fmt: skip
    return run, config.moe


def _records(
    case: DecodeCase, mode: str, layout: str
) -> tuple[DecodeSizes, ExpertFormula, WeightForm, DecodeRequest]:
    """Return what the experts' configuration is made of."""
    model = case.model
    options = dict(model.options)
    scaling = options.pop("scaling", "post")
    if options.get("activation") == "swiglu_oai":
        options |= {"activation": "sigmoid", "gates_itself": True, "scale": 1.702}
    for name in ("gate_limits", "up_limits"):
        if name in options:
            options[name] = limits(*options[name])
    return (
        DecodeSizes(case.B, model.H, model.I, model.E, model.K, model.E, CORES),
        ExpertFormula(**options),
        WeightForm(case.weight_format, layout, case.format == "fp8", case.down_scale),
        DecodeRequest(mode=mode, scaling=scaling, output_dtype="bfloat16"),
    )


def expert_specs(model: Model, config: DecodeConfig) -> dict[str, Any]:
    """Return the experts' operands, without values."""
    E, H, I = model.E, model.H, model.I  # noqa: E741  the axis letters
    found: dict[str, Any] = {}
    formula, weights = config.formula, config.weights
    gate_up, down = weight_shapes(config)
    found["gate_up"] = TensorSpec(gate_up, weights.format)
    found["down"] = TensorSpec(down, weights.format)
    if loads_bias(config):
        found["down_bias"] = TensorSpec((E, H), "bfloat16")
    if weights.layout == "packed":  # biases of the projections and scales lie in the runs
        return found
    if formula.has_gate_up_bias:
        found["gate_up_bias"] = TensorSpec((E, 2 * I), "float32")
    if weights.has_scales:
        found["gate_up_scale"] = TensorSpec((E, 2 * I), "float32")
    if weights.down_scale != "none":
        columns = H if weights.down_scale == "channel" else 1
        found["down_scale"] = TensorSpec((E, columns), "float32")
    return found
