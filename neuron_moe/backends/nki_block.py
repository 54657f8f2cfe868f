"""A whole layer's decode step on the kernels: decode_layer, one launch.

Norm, router, routed and shared experts; nothing passes through HBM between them. Shapes: T tokens,
K choices, E experts of this rank, N of all ranks, H hidden, I intermediate.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends import nki_decode
from neuron_moe.backends.block import BlockLayer, BlockOutput, norm_of
from neuron_moe.backends.laid_out import from_numpy, to_numpy
from neuron_moe.backends.nki_decode import config_records
from neuron_moe.backends.nki_launch import Launch, dtype_name
from neuron_moe.backends.nki_router import formula_of, shortened
from neuron_moe.backends.nki_weights import kernel_weights
from neuron_moe.backends.prepared import Prepared
from neuron_moe.shared_experts import SharedExperts

SHARED_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def block_config(
    layer: BlockLayer, num_tokens: int, num_cores: int, mode: str | None, prepared: Prepared
) -> Any:
    """Return what decode_layer is compiled for.

    Args:
        layer: what it computes.
        num_tokens: T.
        num_cores: physical cores of the launch.
        mode: 'selective', 'all_experts', or None for the choice of the cost model.
        prepared: where forms of weights are kept.

    Raises:
        ValueError: the kernel does not have or hold it.
    """
    from nki_kernels.decode import LayerForm

    norm = None if layer.rmsnorm is None else norm_of(layer.rmsnorm)
    if layer.rmsnorm is not None and norm is None:
        raise ValueError(f"rmsnorm={type(layer.rmsnorm).__name__}: must have a weight and an eps.")
    router = formula_of(layer.router)
    shared = layer.shared
    if shared is not None and shared.hidden_act not in SHARED_ACTIVATIONS:
        raise ValueError(
            f"hidden_act={shared.hidden_act!r} of the shared experts: not in the kernel, which has"
            f" {', '.join(SHARED_ACTIVATIONS)}."
        )
    sizes, formula, weights, request = config_records(
        num_tokens,
        router.top_k,
        layer.num_experts,
        layer.weights,
        layer.scales_input,
        num_cores,
        mode,
    )
    activation = SHARED_ACTIVATIONS["silu" if shared is None else shared.hidden_act]
    form = LayerForm(
        has_norm=norm is not None,
        norm_eps=1e-6 if norm is None else norm[1],
        router_dtype=dtype_name(shortened(layer.router.linear_router.weight, prepared)),
        shared_width=0 if shared is None else shared.width,
        shared_formula=type(formula)(activation=activation),
        has_shared_gate=shared is not None and shared.shared_expert_gate is not None,
        returns_routing=layer.returns_routing,
    )
    return nki_decode.with_layout(
        layer.weights,
        lambda layout: _layer_config(
            sizes, router, formula, form, replace(weights, layout=layout), request
        ),
    )


@functools.lru_cache(maxsize=256)
def _layer_config(*records: Any) -> Any:
    from nki_kernels.decode import make_layer_config

    return make_layer_config(*records)


def compute(
    launch: Launch, hidden_TH: Tensor, layer: BlockLayer, config: Any, prepared: Prepared
) -> BlockOutput:
    """Compute a layer for T tokens, [T, H] bfloat16; see the module."""
    from nki_kernels.decode import decode_layer

    operands = kernel_weights(layer.weights, hidden_TH)
    linear, selection_bias = layer.router.linear_router, layer.router.e_score_correction_bias
    matrices = operands.gate_up_EHI, operands.down_EIH
    beside = {
        "gate_up_bias": operands.gate_up_bias_EI,
        "gate_up_scale": operands.gate_up_scale_EI,
        "down_scale": operands.down_scale_En,
    }
    copy = layer.weights.decode_copy
    if config.moe.weights.layout == "packed" and copy is not None:
        matrices, beside = (copy.gate_up, copy.down), {}
    norm = None if layer.rmsnorm is None else norm_of(layer.rmsnorm)
    down_bias_EH = operands.down_bias_EH
    first = torch.tensor([[layer.first_expert]], dtype=torch.int32, device=hidden_TH.device)
    found = launch(
        decode_layer,
        hidden_TH,
        _router_weight(linear.weight, config, prepared),
        *matrices,
        first,
        config,
        norm_weight=None if norm is None else norm[0].view(1, -1),
        router_bias=None if linear.bias is None else linear.bias.float().view(1, -1),
        selection_bias=None if selection_bias is None else selection_bias.float().view(1, -1),
        down_bias=None if down_bias_EH is None else down_bias_EH.to(torch.bfloat16),
        **beside,
        **_shared_operands(layer.shared, config, prepared),
    )
    if not layer.returns_routing:
        return BlockOutput(found, None)
    output_TH, _, index_TK = found
    return BlockOutput(output_TH, index_TK)


def describe(layer: BlockLayer, config: Any) -> tuple[str, ...]:
    """Return lines for `MoE.explain`."""
    parts = {
        "rmsnorm": layer.rmsnorm is not None,
        "router": True,
        "routed experts": True,
        "shared experts": layer.shared is not None,
    }
    fused = ", ".join(name for name, is_there in parts.items() if is_there)
    return (nki_decode.describe(config.moe), f"one kernel: {fused}; steps without padding only")


def _router_weight(weight_NH: Tensor, config: Any, prepared: Prepared) -> Tensor:
    """Return the router's weight in the order of the kernel, made once."""
    from nki_kernels.decode import pack_router_weight

    axis, parts = config.moe.h_axis, config.router_parts

    def pack() -> Tensor:
        short = shortened(weight_NH, prepared).detach()
        return _packed(pack_router_weight(to_numpy(short), axis, parts), short)

    return prepared.get((weight_NH,), f"router {axis} {parts}", pack)


def _shared_operands(
    shared: SharedExperts | None, config: Any, prepared: Prepared
) -> dict[str, Tensor]:
    """Return the shared experts' matrices in the order of the kernel, made once."""
    from nki_kernels.decode import pack_router_weight, pack_shared_experts

    if shared is None:
        return {}
    down_HI = shared.down_proj.weight
    sources: tuple[Tensor, ...]
    if shared.fused_gate_up_projection:
        sources = (shared.gate_up_proj.weight, down_HI)
        gate_IH, up_IH = shared.gate_up_proj.weight.chunk(2)
    else:
        gate_IH, up_IH = shared.gate_proj.weight, shared.up_proj.weight
        sources = (gate_IH, up_IH, down_HI)
    layout, axis = config.shared, config.moe.h_axis

    def pack() -> tuple[Tensor, ...]:
        packed = pack_shared_experts(layout, to_numpy(gate_IH), to_numpy(up_IH), to_numpy(down_HI))
        return tuple(_packed(array, down_HI) for array in packed)

    gate_up_packed, down_packed = prepared.get(
        sources, f"shared {layout.weights.layout} {layout.E} {layout.chunks} {axis}", pack
    )
    operands = {"shared_gate_up": gate_up_packed, "shared_down": down_packed}
    if shared.shared_expert_gate is not None:
        weight_1H = shared.shared_expert_gate.weight

        def pack_gate() -> Tensor:
            return _packed(pack_router_weight(to_numpy(weight_1H), axis), weight_1H)

        operands["shared_gate"] = prepared.get((weight_1H,), f"gate {axis}", pack_gate)
    return operands


def _packed(array: Any, like: Tensor) -> Tensor:
    return from_numpy(array, like.dtype).to(like.device)
