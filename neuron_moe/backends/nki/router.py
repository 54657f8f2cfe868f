"""Routing on the kernels: router_topk.

Axes: T tokens, E experts of the model, H hidden.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from neuron_moe.backends.nki.launch import check_call, dtype_name, launch
from neuron_moe.plan import Forms
from neuron_moe.router import Router, Routing
from nki_kernels.route import RouterConfig, check_router_topk, router_topk

Norm = tuple[Tensor, float]  # weight [H] and epsilon of an RMSNorm
Route = Callable[[Tensor], tuple[Tensor, Routing]]  # tokens; the same, normalised if asked for


def router_form(router: Router, forms: Forms) -> Tensor:
    """Return the router's weight as it is multiplied with bfloat16 tokens.

    A float32 one whose values are all bfloat16 numbers is taken in bfloat16: the products are the
    same, in one pass of the tensor engine instead of four. Checkpoints in bfloat16 often feed
    routers that are kept in float32.

    Args:
        router: of the layer.
        forms: where it is kept.
    """
    weight = router.linear_router.weight

    def shorten() -> Tensor:
        short = weight.detach().to(torch.bfloat16)
        return short if torch.equal(short.float(), weight.detach()) else weight.detach()

    if weight.dtype != torch.float32 or weight.is_meta:
        return weight
    return forms.get("router", shorten)


def check_router(router: Router | None) -> None:
    """Raise ValueError for a router in training that jitters."""
    if router is not None and router.training and router.forces_balance:
        raise ValueError(
            "forces_balance=True: is for training, which backend='nki' does not do. Call eval(), or"
            " train with backend='torch'."
        )
    if router is not None and router.training and router.jitter_eps:
        raise ValueError(
            f"jitter_eps={router.jitter_eps}: is for training, which backend='nki' does not"
            " do. Call eval(), or use backend='torch'."
        )


def router_call(router: Router, forms: Forms, num_cores: int, norm: Norm | None = None) -> Route:
    """Return what routes tokens in float32, with operands prepared once.

    Affinities of a token with a logit that is no number are none either.

    Args:
        router: of the layer.
        forms: where forms of its weights are kept.
        num_cores: physical cores of the launch.
        norm: weight and epsilon of the RMSNorm that the launch computes first, if any.
    """
    linear = router.linear_router
    bias, selection_bias = (
        None if values is None else values.view(1, -1)
        for values in (linear.bias, router.e_score_correction_bias)
    )
    norm_weight = None if norm is None else norm[0].view(1, -1)
    checked: dict[tuple[int, torch.dtype], RouterConfig] = {}

    def route(hidden_TH: Tensor) -> tuple[Tensor, Routing]:
        check_call(hidden_TH)
        check_router(router)
        if not hidden_TH.shape[0]:  # a rank without tokens has nothing to launch
            return hidden_TH, router(hidden_TH)
        weight_EH = linear.weight
        if hidden_TH.dtype == torch.bfloat16:
            weight_EH = router_form(router, forms)
        case = (hidden_TH.shape[0], hidden_TH.dtype)
        if case not in checked:
            checked[case] = router_config(router, *case, weight_EH.dtype, num_cores, norm)
        affinities_TK, index_TK, logits_TE, *normed = launch(
            num_cores,
            router_topk,
            hidden_TH,
            weight_EH,
            bias,
            selection_bias,
            norm_weight,
            checked[case],
        )
        routing = Routing(logits_TE, affinities_TK, different_choices(index_TK))
        return (normed[0] if normed else hidden_TH), routing

    return route


def router_config(
    router: Router,
    num_tokens: int,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    num_cores: int,
    norm: Norm | None = None,
) -> RouterConfig:
    """Return what router_topk is compiled for.

    Args:
        router: of the layer.
        num_tokens: T.
        hidden_dtype: of the tokens.
        weight_dtype: of the router's weight.
        num_cores: physical cores of the launch.
        norm: weight and epsilon of the RMSNorm in front, if the launch has it.

    Raises:
        ValueError: sizes that the kernel does not take.
    """
    spec = router.spec
    config = RouterConfig(
        spec.formula,
        spec.num_experts,
        spec.hidden_size,
        has_norm=norm is not None,
        norm_eps=1e-6 if norm is None else norm[1],
        returns_logits=True,
        hidden_dtype=dtype_name(hidden_dtype),
        weight_dtype=dtype_name(weight_dtype),
        num_cores=num_cores,
        marks_broken=True,
    )
    check_router_topk(config, num_tokens)
    return config


def different_choices(index_TK: Tensor) -> Tensor:
    """Return the choices, experts 0 to K - 1 for a token that chose one twice, as torch does.

    Only a token without numbers does: the kernels find none of its values among the logits, and
    give it the last expert each time. Its affinities are NaN.
    """
    sorted_TK = index_TK.sort(1).values
    is_twice_T1 = (sorted_TK[:, 1:] == sorted_TK[:, :-1]).any(1, keepdim=True)
    first_K = torch.arange(index_TK.shape[1], dtype=index_TK.dtype, device=index_TK.device)
    return torch.where(is_twice_T1, first_K, index_TK)
