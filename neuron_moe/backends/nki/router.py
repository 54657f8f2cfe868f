"""Routing on the kernels: router_topk.

Axes: T tokens, E experts of the model, H hidden.
"""

import torch
from torch import Tensor

from neuron_moe.backends.nki.launch import Input, Launch, dtype_name
from neuron_moe.device import has_numbers
from neuron_moe.plan import Forms
from neuron_moe.router import Router
from nki_kernels.route import RouterConfig, check_router_topk, router_topk

Norm = tuple[Tensor, float]  # weight [H] and epsilon of an RMSNorm


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

    if weight.dtype != torch.float32 or not has_numbers(weight):
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


def router_launch(
    router: Router,
    forms: Forms,
    num_tokens: int,
    dtype: torch.dtype,
    num_cores: int,
    norm: Norm | None = None,
) -> Launch:
    """Return the launch of router_topk; affinities of a token that is no number are none either.

    Args:
        router: of the layer.
        forms: where forms of its weights are kept.
        num_tokens: T that it routes.
        dtype: of the tokens.
        num_cores: physical cores of the launch.
        norm: weight and epsilon of the RMSNorm that the launch computes first, if any.

    Raises:
        ValueError: sizes that the kernel does not take.
    """
    weight_EH = router.linear_router.weight
    if dtype == torch.bfloat16:
        weight_EH = router_form(router, forms)
    config = router_config(router, num_tokens, dtype, weight_EH.dtype, num_cores, norm)
    bias, selection_bias = router.linear_router.bias, router.e_score_correction_bias
    shape = (num_tokens, router.spec.hidden_size)
    return Launch(
        router_topk,
        num_cores,
        {"config": config},
        {
            "hidden_TH": Input("hidden", shape, dtype_name(dtype)),
            "router_weight_EH": weight_EH,
            "bias_1E": None if bias is None else bias.view(1, -1),
            "selection_bias_1E": None if selection_bias is None else selection_bias.view(1, -1),
            "norm_weight_1H": None if norm is None else norm[0].view(1, -1),
        },
        ("affinities", "index", "logits", *(() if norm is None else ("normed",))),
    )


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
        spec.num_classes,
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
