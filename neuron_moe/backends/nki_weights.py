"""Expert weights as the kernels take them: formats, scales, biases, formulas."""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends import ExpertWeights, Packed
from neuron_moe.backends.narrow import NarrowMatrices
from neuron_moe.backends.nki_launch import dtype_name
from neuron_moe.config import GLUType
from neuron_moe.quantize import recode_bf16_to_fp8

_log = logging.getLogger("neuron_moe")


@dataclass(frozen=True)
class KernelWeights:
    """Operands of the expert kernels.

    Attributes:
        format: bfloat16, float8_e4m3 or float8_e5m2.
        gate_up_EHI: [E, H, 2I] in that format.
        down_EIH: [E, I, H] in that format.
        gate_up_scale_EI: [E, 2I] float32 with an 8 bit format, else None.
        down_scale_En: [E, 1] or [E, H] float32 with an 8 bit format, else None.
        gate_up_bias_EI: [E, 2I] float32 or None.
        down_bias_EH: [E, H] float32 or None; the share of this rank.
    """

    format: str
    gate_up_EHI: Tensor
    down_EIH: Tensor
    gate_up_scale_EI: Tensor | None
    down_scale_En: Tensor | None
    gate_up_bias_EI: Tensor | None
    down_bias_EH: Tensor | None


def kernel_weights(weights: ExpertWeights, hidden_TH: Tensor | None = None) -> KernelWeights:
    """Return the operands.

    Args:
        weights: of this rank.
        hidden_TH: tokens whose dtype is checked too.

    Raises:
        ValueError: a dtype or form that the kernels do not read.
    """
    gate_up, down = weights.packed_gate_up, weights.packed_down
    plain = {} if hidden_TH is None else {"hidden_states": hidden_TH}
    if gate_up is None:
        plain["gate_up_proj"] = weights.gate_up_proj_EHI
    if down is None:
        plain["down_proj"] = weights.down_proj_EIH
    for name, tensor in plain.items():
        if tensor.dtype != torch.bfloat16:
            raise ValueError(
                f"{name}: dtype {dtype_name(tensor)} must be bfloat16 with backend='nki'. Convert"
                " the module with .to(torch.bfloat16), or use backend='torch'."
            )
    gate_up_bias, down_bias = weights.gate_up_bias_EI, weights.down_bias_EH
    if gate_up_bias is not None:
        gate_up_bias = gate_up_bias.float()
    if down_bias is not None:
        down_bias = down_bias.float() * weights.down_bias_scale
    if gate_up is None and down is None:
        both = weights.gate_up_proj_EHI, weights.down_proj_EIH
        return KernelWeights("bfloat16", *both, None, None, gate_up_bias, down_bias)
    if not isinstance(gate_up, NarrowMatrices) or not isinstance(down, NarrowMatrices):
        raise ValueError(
            "packed weights: backend='nki' reads plain tensors or fp8 codes, and gate_up_proj and"
            " down_proj alike. Load the state dict again, which unpacks, and pack with this"
            " backend."
        )
    if gate_up.format != down.format:
        raise ValueError(
            f"gate_up_proj in {gate_up.format}, down_proj in {down.format}: backend='nki' reads one"
            " format for both. Quantise both alike."
        )
    return KernelWeights(
        gate_up.format,
        gate_up.codes_Ekn,
        down.codes_Ekn,
        gate_up.scale_per_channel_En,
        down.scale_En,
        gate_up_bias,
        down_bias,
    )


def narrow_weights(first_EHI: Tensor, down_EIH: Tensor) -> tuple[Packed, Packed] | str:
    """Return both matrices as e5m2 codes if that loses nothing, else why not; log the first such.

    Decoded MXFP4 checkpoints lose nothing.
    """
    if {first_EHI.dtype, down_EIH.dtype} != {torch.bfloat16}:
        return f"{dtype_name(down_EIH)} weights are not re-coded"
    try:
        both = recode_bf16_to_fp8(first_EHI), recode_bf16_to_fp8(down_EIH)
    except ValueError as error:
        _log_once()
        return str(error)
    gate_up, down = (NarrowMatrices.from_exact(codes, torch.bfloat16) for codes in both)
    return gate_up, down


@functools.cache
def _log_once() -> None:
    _log.warning(
        "pack_weights(): some expert weights have no exact 8 bit form and stay bfloat16, with twice"
        " the bytes to read. MoE.explain() tells which, and why."
    )


def format_note(weights: ExpertWeights) -> str:
    """Return a line for `MoE.explain` about the format of the weights."""
    down = weights.packed_down
    if isinstance(down, NarrowMatrices):
        origin = "as loaded" if down.is_quantized else "re-coded without loss"
        scales = "a scale per expert" if down.scale_En.shape[1] == 1 else "scales per channel"
        return f"weights: {down.format}, {origin}, {scales}"
    if weights.why_plain:
        return f"weights: bfloat16, not 8 bits: {weights.why_plain}"
    return "weights: bfloat16; pack_weights() keeps those of MXFP4 checkpoints in 8 bits"


def expert_formula(weights: ExpertWeights) -> Any:
    """Return the kernels' formula of the experts.

    Raises:
        ValueError: the kernels do not have the activation.
    """
    from nki_kernels.common.formula import ExpertFormula, limits

    spec = weights.activation
    names = {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "sigmoid": "sigmoid",
        "tanh": "tanh",
    }
    name = names.get(spec.hidden_act)
    gates_itself = spec.is_glu and spec.glu_type is GLUType.SWIGLU
    if name is None or (gates_itself and name != "sigmoid"):
        raise ValueError(
            f"hidden_act={spec.hidden_act!r}, glu_type={spec.glu_type.value!r}: not in the kernels,"
            f" which have {', '.join(names)}, and of SwiGLU sigmoid. Use backend='torch'."
        )
    return ExpertFormula(
        activation=name,
        scale=spec.scale,
        has_gate=spec.is_glu,
        gates_itself=gates_itself,
        gate_limits=limits(spec.gate_lower, spec.gate_upper) if spec.is_glu else limits(None, None),
        up_limits=limits(spec.up_lower, spec.up_upper),
        up_offset=spec.bias if spec.is_glu else 0.0,
        has_gate_up_bias=weights.gate_up_bias_EI is not None,
        has_down_bias=weights.down_bias_EH is not None,
    )
