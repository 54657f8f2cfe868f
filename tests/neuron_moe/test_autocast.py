"""Under torch.autocast routers stay in float32, as their choices are decided by rounding."""

import pytest
import torch

from neuron_moe import GroupLimitedRouter, RouterTopK
from neuron_moe.router import Router

H = 128
ROUTERS = {
    "top-k": RouterTopK(64, 4, H, act_fn="softmax", renormalize=True, bias=True),
    "groups": GroupLimitedRouter(64, 4, H, n_group=8, topk_group=2),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_gradients_are_those_outside(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    router: Router = ROUTERS[name]
    hidden = torch.randn(1, 512, H, dtype=dtype)
    found = []
    for is_on in (False, True):
        router.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            routing = router(hidden)
        routing.router_logits_TE.square().sum().backward()
        weight = router.linear_router.weight
        assert weight.grad is not None
        found.append((*routing, weight.grad.clone()))
    for plain, inside in zip(*found, strict=True):
        assert plain.dtype == inside.dtype
        assert torch.equal(plain, inside)
