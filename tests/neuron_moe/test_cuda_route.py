"""The router's kernels of the cuda backend, in Triton's interpreter or on a GPU, against torch."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from neuron_moe import RouterTopK
from neuron_moe.backends.cuda import route
from neuron_moe.router import Router, Routing
from neuron_moe.spec import RouterSpec
from nki_kernels.common.formula import RouterFormula
from tests.neuron_moe.test_cuda_backend import DEVICE, build

E, H, K = 21, 100, 3
FORMULAS: dict[str, dict[str, Any]] = {
    "sqrtsoftplus": {"act_fn": "sqrtsoftplus", "has_selection_bias": True, "renormalize": True},
    "softmax": {"renormalize": True},
    "softmax over the chosen": {"act_over_topk": True, "has_bias": True},
    "sigmoid, selection bias": {
        "act_fn": "sigmoid",
        "has_selection_bias": True,
        "renormalize": True,
        "routed_scaling_factor": 2.5,
    },
}


def make(name: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Router:
    formula = RouterFormula(top_k=K, **FORMULAS[name])
    spec = RouterSpec(**{"hidden_size": H, "num_experts": E, **sizes}, formula=formula)
    router = Router(spec, dtype=dtype).eval().requires_grad_(False)
    for parameter in (*router.parameters(), *router.buffers()):
        parameter.copy_(torch.randn(parameter.shape))
    return router.to(DEVICE)


def compare(router: Router, hidden_TH: Tensor) -> Routing:
    assert route.takes(router, hidden_TH)
    found, expected = route.route(router, hidden_TH), router(hidden_TH)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-4, equal_nan=True)
    assert torch.equal(found.expert_index_TK, expected.expert_index_TK)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6, equal_nan=True)
    return found


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("tokens", [1, pytest.param(70, marks=pytest.mark.long)])
def test_choices_and_affinities_are_those_of_torch(name: str, tokens: int) -> None:
    compare(make(name), torch.randn(min(tokens, 64), H, device=DEVICE))
    if tokens > 64:
        half = torch.float16  # multiplied as it is: products are exact in float32
        compare(make(name, half), torch.randn(tokens, H, device=DEVICE).to(half))


def test_of_equal_scores_the_lowest_expert_comes_first_and_no_number_before_all() -> None:
    router = make("softmax over the chosen")
    router.linear_router.weight.zero_()
    router.linear_router.bias.copy_(torch.arange(E) % 2)
    hidden_TH = torch.ones(2, H, device=DEVICE)
    assert compare(router, hidden_TH).expert_index_TK.tolist() == [[1, 3, 5]] * 2
    router.linear_router.bias[4] = torch.nan
    assert compare(router, hidden_TH).expert_index_TK.tolist() == [[4, 1, 3]] * 2


def test_torch_routes_where_a_gradient_noise_groups_or_a_hook_are_wanted() -> None:
    router, hidden_TH = make("softmax"), torch.ones(2, H, device=DEVICE)
    assert route.takes(router, hidden_TH)
    assert not route.takes(router, hidden_TH.clone().requires_grad_())
    assert not route.takes(router, hidden_TH.double())
    assert not route.takes(router, torch.ones(65, H, device=DEVICE))
    assert not route.takes(router, torch.ones(2, H + 1, device=DEVICE))
    assert not route.takes(make("softmax").train(), hidden_TH)
    router.register_forward_hook(lambda *_: None)
    assert not route.takes(router, hidden_TH)


@dataclass(frozen=True)
class LaterFormula(RouterFormula):
    """A formula with a field that the kernels do not know."""

    floor: float = 0.0


def test_torch_routes_by_a_field_that_the_kernels_do_not_know() -> None:
    hidden_TH, router = torch.randn(4, H, device=DEVICE), make("softmax")
    for floor in (0.0, 0.1):
        router.spec = replace(router.spec, formula=LaterFormula(top_k=K, floor=floor))
        assert route.takes(router, hidden_TH) == (floor == 0.0)


def test_a_layer_without_gradient_routes_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build("cuda").eval()
    hidden = torch.randn(3, 1, layer.router.hidden_size, device=DEVICE)
    assert isinstance(layer.router, RouterTopK)
    monkeypatch.setattr(Router, "get_router_logits", lambda *_: pytest.fail("torch was asked"))
    with torch.no_grad():
        assert layer(hidden)[0].shape == hidden.shape


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 8, 300, 5000])
@pytest.mark.parametrize("name", FORMULAS)
def test_real_sizes_in_bfloat16(name: str, tokens: int) -> None:
    router = make(name, torch.bfloat16, hidden_size=2880, num_experts=128)
    hidden_TH = torch.randn(tokens, 2880, device=DEVICE, dtype=torch.bfloat16)
    found, expected = route.route(router, hidden_TH), router(hidden_TH)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=2e-3)
    same = found.expert_index_TK == expected.expert_index_TK
    assert same.float().mean() > 0.999  # logits that differ in the last bits may change places
    torch.testing.assert_close(
        found.expert_affinities_TK[same], expected.expert_affinities_TK[same], rtol=2e-3, atol=1e-4
    )
    again = route.route(router, hidden_TH)
    assert all(map(torch.equal, found, again))
