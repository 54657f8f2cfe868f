"""The router in two launches, for inference.

Axes: T tokens, E experts, K choices, S parts of the depth, H hidden.
"""

import functools
from dataclasses import fields
from typing import Any

import torch
import triton
from torch import Tensor

from neuron_moe.backends.cuda import route_kernels
from neuron_moe.device import is_captured
from neuron_moe.router import Router, Routing
from nki_kernels.common.formula import RouterFormula

_FORMULAS: dict[str, RouterFormula] = {}
_KNOWN = (
    *("top_k", "has_bias", "has_selection_bias", "act_fn", "act_over_topk", "renormalize"),
    *("renormalize_eps", "routed_scaling_factor", "topk_group", "out_of_group_fill"),
)  # the last two are of groups, of which there is one
_BLOCK_EXPERTS, _BLOCK_DEPTH = 64, 64
_FEW_TOKENS, _MANY_TOKENS = 16, 64
_PROGRAMS = 128  # about one for each multiprocessor
_WIDE_TOKENS = 64  # more in float32 are multiplied by torch


def takes(router: Router, hidden_TH: Tensor) -> bool:
    """Tell whether the kernels route these tokens: no gradient, noise, groups or hooks are wanted.

    Args:
        router: of the layer.
        hidden_TH: contiguous or not.
    """
    if is_captured():  # which fuses torch's operations
        return False
    weight_EH, formula = router.linear_router.weight, router.spec.formula
    is_watched = router._forward_hooks or router._forward_pre_hooks
    is_other = type(router).forward is not Router.forward or not _is_known(formula)
    if is_other or is_watched or hidden_TH.shape[-1] != router.hidden_size:
        return False
    if router.training or (
        torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_EH.requires_grad)
    ):
        return False
    is_known = all(each.dtype.itemsize in (2, 4) for each in (hidden_TH, weight_EH))
    return is_known and not (_widens(hidden_TH, weight_EH) and hidden_TH.shape[0] > _WIDE_TOKENS)


def _widens(hidden_TH: Tensor, weight_EH: Tensor) -> bool:
    """Tell whether the logits are products of float32 numbers."""
    return hidden_TH.dtype != weight_EH.dtype or weight_EH.dtype == torch.float32


def route(router: Router, hidden_TH: Tensor) -> Routing:
    """Return the routing of [.., H] hidden states; see `takes`."""
    formula = router.spec.formula
    name = repr(formula)
    _FORMULAS.setdefault(name, formula)
    linear = router.linear_router
    rows_TH = hidden_TH.reshape(-1, hidden_TH.shape[-1])
    logits_TE, affinities_TK, index_TK = _route(
        rows_TH, linear.weight, linear.bias, router.e_score_correction_bias, name
    )
    return Routing(logits_TE, affinities_TK, index_TK)


@torch.library.custom_op("neuron_moe::cuda_route", mutates_args=())
def _route(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, selection: Tensor | None, formula: str
) -> tuple[Tensor, Tensor, Tensor]:
    made = _FORMULAS[formula]
    logits_TE, affinities_TK, index_TK = _results(hidden, weight, made)
    parts_STE = _logits(hidden.contiguous(), weight.contiguous())
    num_tokens, num_experts = logits_TE.shape
    if num_tokens == 0:
        return logits_TE, affinities_TK, index_TK
    tokens = 1 if num_tokens <= _MANY_TOKENS else 4
    route_kernels.choose_experts[(triton.cdiv(num_tokens, tokens),)](
        parts_STE,
        bias,
        selection,
        logits_TE,
        affinities_TK,
        index_TK,
        num_tokens,
        EXPERTS=num_experts,
        PARTS=parts_STE.shape[0],
        HAS_BIAS=bias is not None,
        **_constants(made),
        TOKENS=tokens,
        BINS=triton.next_power_of_2(num_experts),
        num_warps=tokens,
    )
    return logits_TE, affinities_TK, index_TK


@_route.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, selection: Tensor | None, formula: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(hidden, weight, _FORMULAS[formula])


def _results(
    hidden: Tensor, weight: Tensor, formula: RouterFormula
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = hidden.shape[0]

    def make(width: int, dtype: torch.dtype) -> Tensor:
        return hidden.new_empty((num_tokens, width), dtype=dtype)

    sums = make(weight.shape[0], torch.float32)
    return sums, make(formula.top_k, torch.float32), make(formula.top_k, torch.int32)


def _logits(hidden_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """Return the parts of the logits, [S, T, E]; few tokens split the depth over the GPU."""
    (num_tokens, H), num_experts = hidden_TH.shape, weight_EH.shape[0]
    block = _FEW_TOKENS if num_tokens <= _MANY_TOKENS else _MANY_TOKENS
    grid = triton.cdiv(num_tokens, block), triton.cdiv(num_experts, _BLOCK_EXPERTS)
    steps = triton.cdiv(H, _BLOCK_DEPTH)
    parts = max(1, min(_PROGRAMS // max(1, grid[0] * grid[1]), steps))
    depth_part = triton.cdiv(steps, parts) * _BLOCK_DEPTH
    parts = triton.cdiv(H, depth_part)
    parts_STE = torch.empty(
        (parts, num_tokens, num_experts), dtype=torch.float32, device=hidden_TH.device
    )
    if num_tokens:
        route_kernels.project_tokens[(*grid, parts)](
            hidden_TH,
            weight_EH,
            parts_STE,
            num_tokens,
            H=H,
            EXPERTS=num_experts,
            DEPTH_PART=depth_part,
            BLOCK_TOKENS=block,
            BLOCK_EXPERTS=_BLOCK_EXPERTS,
            BLOCK_DEPTH=_BLOCK_DEPTH,
            WIDENS=_widens(hidden_TH, weight_EH),
        )
    return parts_STE


@functools.cache
def _is_known(formula: RouterFormula) -> bool:
    """Whether the kernels compute it: no groups, nor a field that they do not know."""
    others = (each for each in fields(formula) if each.name not in _KNOWN)
    return all(getattr(formula, each.name) == each.default for each in others)


def _constants(formula: RouterFormula) -> dict[str, Any]:
    """Return a formula as the kernel takes it; its fields are in _KNOWN."""
    return {
        "TOP_K": formula.top_k,
        "CHOICES": triton.next_power_of_2(formula.top_k),
        "HAS_SELECTION": formula.has_selection_bias,
        "ACT": formula.act_fn,
        "IS_OVER_CHOSEN": formula.act_over_topk,
        "RENORMALIZES": formula.renormalize,
        "EPS": formula.renormalize_eps,
        "FACTOR": formula.routed_scaling_factor,
    }
