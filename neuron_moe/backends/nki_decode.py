"""Decode on the kernels: the experts of a few tokens in one launch of decode_moe.

Axes: T tokens, K choices, E experts of this rank, H hidden.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends import ExpertWeights, LocalRouting
from neuron_moe.backends.laid_out import LaidOut, from_numpy, to_numpy
from neuron_moe.backends.narrow import NarrowMatrices
from neuron_moe.backends.nki_launch import Launch
from neuron_moe.backends.nki_weights import expert_formula, kernel_weights

MODES = {"selective": "selective", "all_experts": "all"}  # path of a decision: mode of the kernel


def compute(
    launch: Launch,
    hidden_TH: Tensor,
    routing: LocalRouting,
    weights: ExpertWeights,
    mode: str,
    num_cores: int,
) -> Tensor:
    """Compute few tokens; return [T, H] float32.

    Args:
        launch: starts the kernel.
        hidden_TH: [T, H] bfloat16.
        routing: choices; those of other ranks are told apart on the chip.
        weights: of this rank.
        mode: 'selective' or 'all_experts'.
        num_cores: physical cores of the launch.
    """
    from nki_kernels.decode import decode_moe

    operands = kernel_weights(weights, hidden_TH)
    index_TK, first_expert, num_experts = _in_the_model(routing, weights)
    config = decode_config(
        hidden_TH.shape[0],
        index_TK.shape[1],
        num_experts,
        weights,
        routing.scales_input,
        num_cores,
        mode,
    )
    down_bias_EH = operands.down_bias_EH
    matrices = operands.gate_up_EHI, operands.down_EIH
    beside = {
        "gate_up_bias": operands.gate_up_bias_EI,
        "gate_up_scale": operands.gate_up_scale_EI,
        "down_scale": operands.down_scale_En,
    }
    if config.weights.layout == "packed":
        assert weights.decode_copy is not None
        matrices = weights.decode_copy.gate_up, weights.decode_copy.down
        beside = {}
    output_TH: Tensor = launch(
        decode_moe,
        hidden_TH,
        *matrices,
        index_TK,
        routing.expert_affinities_TK,
        torch.tensor([[first_expert]], dtype=torch.int32, device=hidden_TH.device),
        config,
        down_bias=None if down_bias_EH is None else down_bias_EH.to(torch.bfloat16),
        **beside,
    )
    return output_TH


def _in_the_model(routing: LocalRouting, weights: ExpertWeights) -> tuple[Tensor, int, int]:
    """Return choices [T, K] in the model's numbering, this rank's first expert, and all experts.

    The first expert is data of the kernel, so that one compiled graph serves all ranks.
    """
    if routing.model_index_TK is None:
        return routing.expert_index_TK, 0, weights.num_experts
    return routing.model_index_TK, routing.first_expert, routing.num_experts


def decode_config(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    weights: ExpertWeights,
    scales_input: bool,
    num_cores: int,
    mode: str | None = None,
) -> Any:
    """Return what decode_moe is compiled for; without a mode its cost model takes the faster one.

    Args:
        num_tokens: T.
        top_k: K.
        num_experts: experts of all ranks.
        weights: of this rank.
        scales_input: affinities multiply the experts' input.
        num_cores: physical cores of the launch.
        mode: 'selective', 'all_experts' or None.

    Raises:
        ValueError: sizes or an activation that the kernel does not have.
    """
    sizes, formula, form, request = config_records(
        num_tokens, top_k, num_experts, weights, scales_input, num_cores, mode
    )
    return with_layout(
        weights,
        lambda layout: _decode_config(sizes, formula, replace(form, layout=layout), request),
    )


def with_layout(weights: ExpertWeights, make: Callable[[str], Any]) -> Any:
    """Return what `make` makes for the weights' copy for decode, else for plain weights.

    Chunks of the copy are fixed; where they leave no room for the tokens, plain weights do.

    Args:
        weights: of this rank.
        make: makes a configuration for a layout of the weights.
    """
    if weights.decode_copy is not None:
        with contextlib.suppress(ValueError):
            config = make("packed")
            if _is_laid_out_for(getattr(config, "moe", config), weights.decode_copy):
                return config
    return make("ehi")


def _is_laid_out_for(config: Any, copy: LaidOut) -> bool:
    from nki_kernels.decode import weight_shapes

    return tuple(copy.gate_up.shape) == weight_shapes(config)[0]


def config_records(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    weights: ExpertWeights,
    scales_input: bool,
    num_cores: int,
    mode: str | None,
) -> tuple[Any, Any, Any, Any]:
    """Return sizes, formula, form of the weights (plain layout) and request of a decode step."""
    from nki_kernels.decode import DecodeRequest, DecodeSizes, WeightForm

    down = weights.packed_down
    narrow = down if isinstance(down, NarrowMatrices) else None
    form = WeightForm()
    if narrow is not None:
        scope = "expert" if narrow.scale_En.shape[1] == 1 else "channel"
        form = WeightForm(format=narrow.format, has_scales=True, down_scale=scope)
    experts, width, hidden_size = weights.down_proj_EIH.shape
    sizes = DecodeSizes(num_tokens, hidden_size, width, experts, top_k, num_experts, num_cores)
    request = DecodeRequest(
        mode="auto" if mode is None else MODES[mode], scaling="pre" if scales_input else "post"
    )
    return sizes, expert_formula(weights), form, request


@functools.lru_cache(maxsize=256)
def _decode_config(sizes: Any, formula: Any, form: Any, request: Any) -> Any:
    from nki_kernels.decode import make_decode_config

    return make_decode_config(sizes, formula, form, request)


def lay_out(weights: ExpertWeights, top_k: int, num_cores: int) -> LaidOut:
    """Return experts in the packed layout of decode_moe, which does not depend on the tokens."""
    from nki_kernels.decode import pack_down, pack_gate_up

    operands = kernel_weights(weights)
    experts = max(weights.num_experts, top_k)
    sizes, formula, form, request = config_records(
        1, top_k, experts, weights, False, num_cores, None
    )
    try:
        config = _decode_config(sizes, formula, replace(form, layout="packed"), request)
    except ValueError as error:
        raise ValueError(
            f"for_decode=True: the decode kernel cannot take these experts: {error}"
        ) from error
    beside = (operands.gate_up_bias_EI, operands.gate_up_scale_EI, operands.down_scale_En)
    dtype, device = operands.down_EIH.dtype, operands.down_EIH.device
    gate_up = pack_gate_up(
        config,
        to_numpy(operands.gate_up_EHI),
        *(None if values is None else to_numpy(values) for values in beside),
    )
    down = pack_down(config, to_numpy(operands.down_EIH))
    return LaidOut(from_numpy(gate_up, dtype).to(device), from_numpy(down, dtype).to(device))


def path_of(config: Any) -> str:
    """Return the decision's path that a configuration stands for."""
    return next(path for path, mode in MODES.items() if mode == config.mode)


def describe(config: Any) -> str:
    """Return a line for `MoE.explain` about how the kernel goes through the experts."""
    parts = "whole experts" if config.chunks == 1 else f"experts in {config.chunks} parts"
    split = {"experts": "take alternate experts", "intermediate": "split each expert"}
    cores = f"{config.num_cores} cores {split[config.shard]}"
    if config.num_cores == 1:
        cores = "one core"
    layout = "laid out for decode" if config.weights.layout == "packed" else "plain layout"
    how = f"{parts}, {config.weight_buffers} on chip at once; {layout}"
    return f"plan: {config.mode} mode, {cores}; {how}"
