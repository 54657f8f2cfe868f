"""Expert weights as the kernels take them: formats, scales, biases."""

import functools
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends.nki.launch import dtype_name
from neuron_moe.plan import LayerParts
from neuron_moe.quantize import recode_bf16_to_fp8
from neuron_moe.weights.expert_weights import ExpertWeights, Packed
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.narrow import MXFP4, NarrowMatrices
from nki_kernels.common.formula import EXPERT_ACTIVATIONS, ExpertFormula, limits

_log = logging.getLogger("neuron_moe")


@dataclass(frozen=True, eq=False)
class Operands:
    """Expert weights as the kernels take them.

    Attributes:
        gate_up_EHI: [E, H, 2I] bfloat16, float8_e4m3 or float8_e5m2; or a laid out copy.
        down_EIH: [E, I, H] in that format; or a laid out copy.
        gate_up_scale_EI: [E, 2I] float32 with an 8 bit format, else None.
        down_scale_En: [E, 1] or [E, H] float32 with an 8 bit format, else None.
        gate_up_bias_EI: [E, 2I] float32 or None.
        down_bias_EH: [E, H] float32 or None; the share of this rank.
    """

    gate_up_EHI: Any
    down_EIH: Any
    gate_up_scale_EI: Tensor | None
    down_scale_En: Tensor | None
    gate_up_bias_EI: Tensor | None
    down_bias_EH: Tensor | None

    def laid_out(self, copy: LaidOut) -> "Operands":
        """Return the same with the matrices of a laid out copy."""
        return replace(self, gate_up_EHI=copy.gate_up, down_EIH=copy.down)


def weight_format(weights: ExpertWeights) -> str:
    """Return bfloat16, float8_e4m3 or float8_e5m2."""
    down = weights.packed_down
    return down.format if isinstance(down, NarrowMatrices) else "bfloat16"


def operands_of(parts: LayerParts) -> Operands:
    """Return what the kernels of the experts take; made once for a plan.

    Raises:
        ValueError: a dtype or form that the kernels do not read.
    """
    weights = parts.weights
    check_weights(weights)
    beside = parts.expert_form("beside", partial(_beside, weights))
    return Operands(*matrices_of(weights), *beside)


def _beside(weights: ExpertWeights) -> tuple[Tensor | None, ...]:
    """Return scales and biases as `Operands` has them."""
    gate_up, down = weights.packed_gate_up, weights.packed_down
    gate_up_bias, down_bias = weights.gate_up_bias_EI, weights.down_bias_EH
    if gate_up_bias is not None:
        gate_up_bias = gate_up_bias.detach().float()
    if down_bias is not None:
        down_bias = down_bias.detach().float() * weights.down_bias_scale
    if not isinstance(gate_up, NarrowMatrices) or not isinstance(down, NarrowMatrices):
        return None, None, gate_up_bias, down_bias
    return gate_up.scale_per_channel_En, down.scale.contiguous(), gate_up_bias, down_bias


def matrices_of(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Return both matrices as torch tensors: codes, or plain."""
    gate_up, down = weights.packed_gate_up, weights.packed_down
    if isinstance(gate_up, NarrowMatrices) and isinstance(down, NarrowMatrices):
        return gate_up.codes_Ekn, down.codes_Ekn
    return weights.gate_up_proj_EHI, weights.down_proj_EIH


def check_weights(
    weights: ExpertWeights,
) -> tuple[NarrowMatrices, NarrowMatrices] | tuple[None, None]:
    """Raise ValueError for a dtype or form that the kernels do not read; return narrow matrices."""
    gate_up, down = weights.packed_gate_up, weights.packed_down
    plain = {}
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
    if gate_up is None and down is None:
        return None, None
    if not isinstance(gate_up, NarrowMatrices) or not isinstance(down, NarrowMatrices):
        raise ValueError(
            "packed weights: backend='nki' reads plain tensors or fp8 codes, and gate_up_proj and"
            " down_proj alike. Load the state dict again, which unpacks, and pack with this"
            " backend."
        )
    if MXFP4 in (gate_up.format, down.format):
        raise ValueError(
            "packed weights: MXFP4 as backend='cuda' packs it. Load the state dict again, which"
            " unpacks, and pack with backend='nki'."
        )
    if gate_up.format != down.format:
        raise ValueError(
            f"gate_up_proj in {gate_up.format}, down_proj in {down.format}: backend='nki' reads one"
            " format for both. Quantise both alike."
        )
    return gate_up, down


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
        " the bytes to read. MoE.explain() says which, and why."
    )


def format_note(weights: ExpertWeights) -> str:
    """Return a line for `MoE.explain` about the format of the weights."""
    down = weights.packed_down
    if isinstance(down, NarrowMatrices):
        origin = "as loaded" if down.is_quantized else "re-coded without loss"
        scales = "a scale per expert" if down.scale.shape[1] == 1 else "scales per channel"
        return f"weights: {down.format}, {origin}, {scales}"
    if weights.why_plain:
        return f"weights: bfloat16, not 8 bits: {weights.why_plain}"
    return "weights: bfloat16; pack_weights() keeps those of MXFP4 checkpoints in 8 bits"


def kernel_formula(weights: ExpertWeights) -> ExpertFormula:
    """Return the formula of experts with the biases that they have.

    Raises:
        ValueError: an activation that the kernels do not have.
    """
    check_formula(weights.formula)
    terms: dict[str, Any] = {
        "has_gate_up_bias": weights.gate_up_bias_EI is not None,
        "has_down_bias": weights.down_bias_EH is not None,
    }
    if not weights.formula.has_gate:  # torch reads neither; the kernels refuse them
        terms |= {"gate_limits": limits(None, None), "up_offset": 0.0}
    return replace(weights.formula, **terms)


def check_formula(formula: ExpertFormula) -> None:
    """Raise ValueError for an activation that the kernels do not have."""
    known = ("sigmoid",) if formula.gates_itself else EXPERT_ACTIVATIONS
    if formula.activation not in known:
        names = ", ".join(EXPERT_ACTIVATIONS)
        raise ValueError(
            f"hidden_act={formula.activation!r}, gates_itself={formula.gates_itself}: not in the"
            f" kernels, which have {names}, and of SwiGLU sigmoid. Use backend='torch'."
        )
