"""What `blockwise_moe` computes, as a formula over slots; NumPy, in the precision of its inputs."""

from __future__ import annotations

import numpy as np

from nki_kernels.common.expert_reference import Array, inner
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.mx_reference import quantized_words


def blockwise_moe_ref(
    hidden_SH: Array,
    expert_S: Array,
    gate_up_EH2I: Array,
    down_EIH: Array,
    formula: ExpertFormula,
    *,
    gate_up_bias_E2I: Array | None = None,
    down_bias_EH: Array | None = None,
    in_words: bool = False,
) -> Array:
    """Return [S, H], row s of `hidden_SH` through expert `expert_S[s]`.

    Args:
        hidden_SH: [S, H] input of every slot.
        expert_S: [S] expert of every slot.
        gate_up_EH2I: [E, H, 2I] weights, gate columns first, scales applied; [E, H, I] without it.
        down_EIH: [E, I, H] weights, scales applied.
        formula: what an expert computes.
        gate_up_bias_E2I, down_bias_EH: biases, or None.
        in_words: inputs and inner activations become MX words on the way.
    """
    if in_words:
        hidden_SH = quantized_words(hidden_SH)
    output_SH = np.zeros((len(hidden_SH), down_EIH.shape[2]), hidden_SH.dtype)
    for expert in np.unique(expert_S):
        rows = expert_S == expert
        projected = hidden_SH[rows] @ gate_up_EH2I[expert]
        if gate_up_bias_E2I is not None:
            projected = projected + gate_up_bias_E2I[expert]
        halfway = inner(formula, projected)
        output = (quantized_words(halfway) if in_words else halfway) @ down_EIH[expert]
        if down_bias_EH is not None:
            output = output + down_bias_EH[expert]
        output_SH[rows] = output
    return output_SH
