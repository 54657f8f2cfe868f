"""What `decode_layer` computes, as a formula; NumPy, in the precision of its inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nki_kernels.common.expert_reference import ACTIVATIONS, Array
from nki_kernels.common.router_choice import RouterFormula
from nki_kernels.common.router_reference import rms_norm, route
from nki_kernels.decode.reference import decode_moe_ref

_TERMS = (
    "top_k act_fn act_over_topk n_group topk_group out_of_group_fill renormalize renormalize_eps"
    " routed_scaling_factor"
).split()


class LayerResult(NamedTuple):
    """What a block gives.

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
    hidden_TH: Array,
    router_weight_NH: Array,
    gate_up_EH2I: Array,
    down_EIH: Array,
    formula: RouterFormula,
    first_expert: int = 0,
    *,
    norm_weight_H: Array | None = None,
    router_bias_N: Array | None = None,
    selection_bias_N: Array | None = None,
    shared: tuple[Array, Array, Array] | None = None,
    shared_activation: str = "silu",
    shared_gate_H: Array | None = None,
    residual_TH: Array | None = None,
    rounds_to: Any = None,
    **experts: Any,
) -> LayerResult:
    """Compute one MoE block.

    Args:
        hidden_TH: [T, H] tokens.
        router_weight_NH: [N, H].
        gate_up_EH2I, down_EIH: experts of this rank, as in `decode_moe_ref`.
        formula: the router and the norm.
        first_expert: global number of local expert 0.
        norm_weight_H, router_bias_N, selection_bias_N: as the formula says.
        shared: gate [I, H], up [I, H] and down [H, I] of the shared experts.
        shared_activation: theirs.
        shared_gate_H: weight of their gate.
        residual_TH: added at the end.
        rounds_to: type x is rounded to, as the kernel does; None for no rounding.
        **experts: other arguments of `decode_moe_ref`.
    """
    x_TH = hidden_TH
    if norm_weight_H is not None:
        x_TH = rms_norm(hidden_TH, norm_weight_H, formula.norm_eps)
    if rounds_to is not None:
        x_TH = x_TH.astype(rounds_to).astype(hidden_TH.dtype)
    logits_TN = x_TH @ router_weight_NH.T
    if router_bias_N is not None:
        logits_TN = logits_TN + router_bias_N
    terms = {name: getattr(formula, name) for name in _TERMS}
    affinities_TK, index_TK = route(logits_TN, selection_bias_E=selection_bias_N, **terms)
    output_TH = decode_moe_ref(
        x_TH, gate_up_EH2I, down_EIH, index_TK, affinities_TK, first_expert, **experts
    )
    if shared is not None:
        gate_IH, up_IH, down_HI = shared
        inner_TI = ACTIVATIONS[shared_activation](x_TH @ gate_IH.T) * (x_TH @ up_IH.T)
        scale_T1 = 1.0
        if shared_gate_H is not None:
            scale_T1 = 1 / (1 + np.exp(-(x_TH @ shared_gate_H)))[:, None]
        output_TH = output_TH + scale_T1 * (inner_TI @ down_HI.T)
    if residual_TH is not None:
        output_TH = output_TH + residual_TH
    return LayerResult(output_TH, affinities_TK, index_TK, x_TH)
