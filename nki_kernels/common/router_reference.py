"""Reference of router_topk: the formula in NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nki_kernels.common.formula import RouterFormula

Array = np.ndarray[Any, Any]


def softmax(values: Array) -> Array:
    """Return the softmax over the last axis."""
    powers = np.exp(values - values.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def rms_norm(hidden_TH: Array, weight_H: Array, eps: float) -> Array:
    """Return hidden * rsqrt(mean(hidden^2) + eps) * weight."""
    mean_T1 = np.square(hidden_TH).mean(-1, keepdims=True)
    return np.asarray(hidden_TH / np.sqrt(mean_T1 + hidden_TH.dtype.type(eps)) * weight_H)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "softmax": softmax,
    "sigmoid": lambda x: np.asarray(1 / (1 + np.exp(-x))),
    "sqrtsoftplus": lambda x: np.asarray(np.sqrt(np.logaddexp(0, x))),
}


def route(
    logits_TE: Array, formula: RouterFormula, selection_bias_E: Array | None = None
) -> tuple[Array, Array]:
    """Return (affinities [T, K], index [T, K]) of biased logits [T, E], in their dtype."""
    activate = _ACTIVATIONS[formula.act_fn]
    ranked_TE = logits_TE
    if selection_bias_E is not None or formula.n_group > 1:
        ranked_TE = activate(logits_TE) + (0 if selection_bias_E is None else selection_bias_E)
    if formula.n_group > 1:
        grouped_TGX = ranked_TE.reshape(len(ranked_TE), formula.n_group, -1)
        group_scores_TG = np.sort(grouped_TGX, axis=-1)[..., -2:].sum(-1)
        best = np.argsort(-group_scores_TG, axis=-1, kind="stable")[:, : formula.topk_group]
        keep_TG = np.zeros(group_scores_TG.shape, bool)
        np.put_along_axis(keep_TG, best, True, axis=1)
        ranked_TE = np.where(keep_TG[..., None], grouped_TGX, formula.out_of_group_fill)
        ranked_TE = ranked_TE.reshape(logits_TE.shape)
    index_TK = np.argsort(-ranked_TE, axis=-1, kind="stable")[:, : formula.top_k]
    source_TE = logits_TE if formula.act_over_topk else activate(logits_TE)
    affinities_TK = np.take_along_axis(source_TE, index_TK, axis=1)
    if formula.act_over_topk:
        affinities_TK = activate(affinities_TK)
    if formula.renormalize:
        total_T1 = affinities_TK.sum(-1, keepdims=True)
        affinities_TK = affinities_TK / (total_T1 + formula.renormalize_eps)
    return affinities_TK * formula.routed_scaling_factor, index_TK.astype(np.int32)
