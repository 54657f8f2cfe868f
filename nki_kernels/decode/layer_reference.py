"""What `decode_layer` computes, as a formula; NumPy, in the precision of its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nki_kernels.common.expert_reference import Array, inner
from nki_kernels.common.formula import ExpertFormula, RouterFormula
from nki_kernels.common.router_reference import rms_norm, route
from nki_kernels.decode.layer_config import LayerForm
from nki_kernels.decode.reference import decode_moe_ref


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArrays:
    """Tokens and weights of a layer; None for what it does not have.

    Attributes:
        hidden_TH: [T, H] tokens.
        router_weight_NH: [N, H].
        gate_up_EH2I, down_EIH: experts of this rank, as in `decode_moe_ref`.
        gate_up_bias_E2I, down_bias_EH: their biases.
        norm_weight_H, router_bias_N, selection_bias_N: in front of the choice.
        shared: gate [I, H], up [I, H] and down [H, I] of the shared experts.
        shared_gate_H: weight of their gate.
        residual_TH: added at the end.
    """

    hidden_TH: Array
    router_weight_NH: Array
    gate_up_EH2I: Array
    down_EIH: Array
    gate_up_bias_E2I: Array | None = None
    down_bias_EH: Array | None = None
    norm_weight_H: Array | None = None
    router_bias_N: Array | None = None
    selection_bias_N: Array | None = None
    shared: tuple[Array, Array, Array] | None = None
    shared_gate_H: Array | None = None
    residual_TH: Array | None = None


class LayerResult(NamedTuple):
    """What a layer gives.

    Attributes:
        output_TH: [T, H].
        affinities_TK: [T, K].
        index_TK: [T, K] int32.
        x_TH: [T, H], what router and experts saw.
    """

    output_TH: Array
    affinities_TK: Array
    index_TK: Array
    x_TH: Array


def decode_layer_ref(
    arrays: LayerArrays,
    router: RouterFormula,
    formula: ExpertFormula,
    form: LayerForm,
    *,
    first_expert: int = 0,
    scaling: str = "post",
    rounds_to: Any = None,
) -> LayerResult:
    """Compute one layer.

    Args:
        arrays: tokens and weights.
        router: how experts are chosen.
        formula: what a routed expert computes.
        form: epsilon of the norm, formula of the shared experts.
        first_expert: global number of local expert 0.
        scaling: as in `decode_moe_ref`.
        rounds_to: type x is rounded to, as the kernel does; None for no rounding.
    """
    x_TH = arrays.hidden_TH
    if arrays.norm_weight_H is not None:
        x_TH = rms_norm(x_TH, arrays.norm_weight_H, form.norm_eps)
    if rounds_to is not None:
        x_TH = x_TH.astype(rounds_to).astype(arrays.hidden_TH.dtype)
    logits_TN = x_TH @ arrays.router_weight_NH.T
    if arrays.router_bias_N is not None:
        logits_TN = logits_TN + arrays.router_bias_N
    affinities_TK, index_TK = route(logits_TN, router, arrays.selection_bias_N)
    output_TH = decode_moe_ref(
        x_TH,
        arrays.gate_up_EH2I,
        arrays.down_EIH,
        index_TK - first_expert,
        affinities_TK,
        formula,
        scaling=scaling,
        gate_up_bias_E2I=arrays.gate_up_bias_E2I,
        down_bias_EH=arrays.down_bias_EH,
    )
    if arrays.shared is not None:
        output_TH = output_TH + _shared(arrays.shared, arrays.shared_gate_H, x_TH, form)
    if arrays.residual_TH is not None:
        output_TH = output_TH + arrays.residual_TH
    return LayerResult(output_TH, affinities_TK, index_TK, x_TH)


def _shared(
    shared: tuple[Array, Array, Array], gate_H: Array | None, x_TH: Array, form: LayerForm
) -> Array:
    """Return [T, H], what the shared experts add."""
    gate_IH, up_IH, down_HI = shared
    output_TH = (
        inner(form.shared_formula, np.concatenate((x_TH @ gate_IH.T, x_TH @ up_IH.T), axis=1))
        @ down_HI.T
    )
    if gate_H is not None:
        output_TH = output_TH / (1 + np.exp(-(x_TH @ gate_H)))[:, None]
    return output_TH
