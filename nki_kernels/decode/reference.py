"""What `decode_moe` computes, as a formula over tokens and their choices; NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_kernels.common.expert_reference import Array, inner
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.mx_reference import quantized_words


def decode_moe_ref(
    hidden_TH: Array,
    gate_up_EH2I: Array,
    down_EIH: Array,
    expert_index_TK: Array,
    affinities_TK: Array,
    formula: ExpertFormula,
    *,
    scaling: str = "post",
    gate_up_bias_E2I: Array | None = None,
    down_bias_EH: Array | None = None,
    in_words: bool = False,
) -> Array:
    """Return [T, H], the sum over each token's choices among the experts of this rank.

    Args:
        hidden_TH: [T, H] tokens; the result has their precision.
        gate_up_EH2I: [E, H, 2I] weights, gate columns first, scales applied.
        down_EIH: [E, I, H] weights, scales applied.
        expert_index_TK: [T, K] local expert of each choice; others' experts add nothing.
        affinities_TK: [T, K].
        formula: what an expert computes; it has a gate.
        scaling: whether the affinity multiplies the expert's output (post), its input (pre), or
            nothing (none).
        gate_up_bias_E2I, down_bias_EH: biases, or None.
        in_words: tokens, and inner activations times the affinity, become MX words on the way.
    """
    if in_words:
        hidden_TH = quantized_words(hidden_TH)
    output_TH = np.zeros((len(hidden_TH), down_EIH.shape[2]), hidden_TH.dtype)
    for expert in range(len(down_EIH)):
        chosen_TK = expert_index_TK == expert
        tokens = np.flatnonzero(chosen_TK.any(axis=1))
        if not len(tokens):
            continue
        affinity = (affinities_TK * chosen_TK).sum(axis=1)[tokens, None].astype(hidden_TH.dtype)
        rows: Any = hidden_TH[tokens]
        if scaling == "pre":
            rows = rows * affinity
        projected = rows @ gate_up_EH2I[expert]
        if gate_up_bias_E2I is not None:
            projected = projected + gate_up_bias_E2I[expert]
        factor: Any = affinity if scaling == "post" else 1.0
        weighed = inner(formula, projected) * factor
        output = (quantized_words(weighed) if in_words else weighed) @ down_EIH[expert]
        if down_bias_EH is not None:
            output = output + down_bias_EH[expert] * factor
        output_TH[tokens] += output
    return output_TH
