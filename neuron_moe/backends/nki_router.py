"""Routing on the kernels: router_topk.

Axes: T tokens, E experts of the model, H hidden.
"""

from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends.nki_launch import Launch, dtype_name
from neuron_moe.backends.prepared import Prepared
from neuron_moe.routing import RouterBase, Routing


def shortened(weight: Tensor, prepared: Prepared) -> Tensor:
    """Return a weight whose values are all bfloat16 numbers in bfloat16, another as it is.

    The products are the same, in one pass of the tensor engine instead of four: checkpoints in
    bfloat16 often feed routers that are kept in float32.
    """

    def shorten() -> Tensor:
        short = weight.detach().to(torch.bfloat16)
        return short if torch.equal(short.float(), weight.detach()) else weight.detach()

    if weight.dtype != torch.float32 or weight.is_meta:
        return weight
    return prepared.get((weight,), "bfloat16", shorten)


def formula_of(router: RouterBase) -> Any:
    """Return the kernels' form of a router.

    Raises:
        ValueError: the router is in training and jitters.
    """
    from nki_kernels.common.formula import RouterFormula

    if router.training and router.jitter_eps:
        raise ValueError(
            f"jitter_eps={router.jitter_eps}: is for training, which backend='nki' does not"
            " do. Call eval(), or use backend='torch'."
        )
    spec = router.spec
    return RouterFormula(
        top_k=spec.top_k,
        act_fn=spec.act_fn,
        act_over_topk=spec.act_over_topk,
        has_bias=spec.has_bias,
        has_selection_bias=spec.has_selection_bias,
        n_group=spec.n_group,
        topk_group=spec.topk_group,
        out_of_group_fill=spec.out_of_group_fill,
        renormalize=spec.renormalize,
        renormalize_eps=spec.renormalize_eps,
        routed_scaling_factor=spec.routed_scaling_factor,
    )


def route(
    launch: Launch,
    hidden_TH: Tensor,
    router: RouterBase,
    prepared: Prepared,
    num_cores: int,
) -> Routing:
    """Route T tokens in float32."""
    from nki_kernels.route import RouterConfig, check_router_topk, router_topk

    spec, linear = router.spec, router.linear_router
    weight_EH = linear.weight
    if hidden_TH.dtype == torch.bfloat16:
        weight_EH = shortened(weight_EH, prepared)
    config = RouterConfig(
        formula_of(router),
        spec.num_experts,
        spec.hidden_size,
        returns_logits=True,
        hidden_dtype=dtype_name(hidden_TH),
        weight_dtype=dtype_name(weight_EH),
        num_cores=num_cores,
    )
    check_router_topk(config, hidden_TH.shape[0])
    bias, selection_bias = linear.bias, router.e_score_correction_bias
    affinities_TK, index_TK, logits_TE = launch(
        router_topk,
        hidden_TH,
        weight_EH,
        None if bias is None else bias.view(1, -1),
        None if selection_bias is None else selection_bias.view(1, -1),
        None,
        config,
    )
    return Routing(logits_TE, affinities_TK, index_TK)
