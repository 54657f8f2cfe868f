"""What a forward pass keeps for the backward pass, and that the gradients do not depend on it."""

import pytest
import torch
from torch import Tensor

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK

E, K, H, I, T = 4, 2, 6, 5, 10  # noqa: E741  the axis letters of the project


def build(save_percent: int | None, *, act: str = "silu", early: bool = False) -> MoE:
    torch.manual_seed(0)
    is_oai = act == "swiglu"
    config = RoutedExpertsMLPOpsConfig(
        num_experts=E,
        top_k=K,
        hidden_size=H,
        intermediate_size=I,
        hidden_act=act,
        glu_mlp=True,
        bias=is_oai,
        early_expert_affinity_modulation=early,
    )
    router = RouterTopK(E, K, H, act_fn="sigmoid", renormalize=True, bias=is_oai)
    layer = MoE(router, ExpertMLPsV2(config, save_percent=save_percent)).train()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return layer


def run(layer: MoE, hidden: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden, mask)[0]
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return [output, *torch.autograd.grad(output.square().sum(), [hidden, *weights])]


@pytest.mark.parametrize("early", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("act", ["silu", "swiglu"])
@pytest.mark.parametrize("save_percent", [0, 37, 100])
def test_gradients_do_not_depend_on_what_is_kept(save_percent: int, act: str, early: bool) -> None:
    hidden, mask = torch.randn(1, T, H, dtype=torch.float64), torch.ones(1, T)
    mask[0, 3] = 0
    expected = run(build(None, act=act, early=early).double(), hidden, mask)
    found = run(build(save_percent, act=act, early=early).double(), hidden, mask)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def kept_bytes(layer: MoE) -> int:
    """Return the bytes experts keep beside their inputs: tokens, choices, affinities, weights."""
    experts = layer.expert_mlps
    hidden = torch.randn(T, H, requires_grad=True)
    affinities = torch.rand(T, K, requires_grad=True)
    index = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(torch.int32)
    given = [hidden, affinities, index, *experts.parameters()]
    known = {each.untyped_storage().data_ptr() for each in given}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = experts(hidden, affinities, index, T)
    assert output.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("save_percent", [0, 25, 50, 75, 100])
def test_memory_follows_the_percentage(save_percent: int) -> None:
    whole = T * K * 2 * I * 4  # of each pair, gate and up in float32
    routing = T * K * (4 + 4 + 1)  # choice, affinity, and whether there is one
    assert kept_bytes(build(save_percent)) == routing + whole * save_percent // 100


def test_autograd_alone_keeps_several_times_as_much() -> None:
    assert kept_bytes(build(None)) > 3 * kept_bytes(build(100))


@pytest.mark.parametrize("save_percent", [-1, 101, 0.5, True])
def test_another_percentage_is_refused(save_percent: int) -> None:
    with pytest.raises(ValueError, match=r"save_percent=.*from 0 .* to 100"):
        build(save_percent)


def test_outputs_and_reruns_are_the_same_bits() -> None:
    hidden = torch.randn(1, T, H)
    first, second = run(build(0), hidden), run(build(0), hidden)
    assert all(map(torch.equal, first, second))
    assert torch.equal(first[0], run(build(None), hidden)[0])


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch is older than 2.10")
def test_gradients_of_many_batches_may_add_up_in_float32() -> None:
    def add_up(dtype: torch.dtype, grad_dtype: torch.dtype) -> list[Tensor]:
        layer = build(0).bfloat16().to(dtype)
        weights = [each for each in layer.parameters() if each.requires_grad]
        for weight in weights:
            weight.grad_dtype = grad_dtype
        generator = torch.Generator().manual_seed(1)
        for _ in range(32):
            hidden = torch.randn(1, T, H, generator=generator).bfloat16().to(dtype)
            layer(hidden)[0].square().sum().backward()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        assert {each.dtype for each in gradients} == {grad_dtype}
        return gradients

    exact = add_up(torch.float64, torch.float64)
    wide, narrow = (add_up(torch.bfloat16, each) for each in (torch.float32, torch.bfloat16))
    for mine, rounded, wanted in zip(wide, narrow, exact, strict=True):
        assert (mine.double() - wanted).norm() < 0.8 * (rounded.double() - wanted).norm()


@pytest.mark.parametrize(
    ("save_percent", "act", "early"),
    [
        (37, "swiglu", True),
        pytest.param(0, "silu", False, marks=pytest.mark.long),
        pytest.param(100, "swiglu", False, marks=pytest.mark.long),
    ],
)
def test_a_graph_without_breaks_keeps_as_much(save_percent: int, act: str, early: bool) -> None:
    torch._dynamo.reset()
    hidden, mask = torch.randn(1, T, H, dtype=torch.float64), torch.ones(1, T)
    mask[0, 3] = 0
    layer = build(save_percent, act=act, early=early).double()
    layer.router.linear_router.requires_grad_(False)  # whose gradient is left out
    expected = run(layer, hidden, mask)
    kept: list[torch.Size] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    weights = [each for each in layer.parameters() if each.requires_grad]
    hidden.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = compiled(hidden, mask)[0]
    found = [output, *torch.autograd.grad(output.square().sum(), [hidden, *weights])]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert torch.Size((T * K * save_percent // 100, 2 * I)) in kept or save_percent == 0


@pytest.mark.parametrize("save_percent", [None, 0, 60, 100])
@pytest.mark.parametrize("tokens", [0, T], ids=["no-tokens", "padding"])
def test_weights_without_a_real_token_have_zero_gradients(
    save_percent: int | None, tokens: int
) -> None:
    layer = build(save_percent, act="swiglu")
    output = layer(torch.randn(1, tokens, H), torch.zeros(1, tokens))[0]
    output.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("save_percent", [0, 100])
def test_under_autocast_both_ways_multiply_in_its_dtype(save_percent: int) -> None:
    hidden = torch.randn(1, 40, H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run(build(None, act="swiglu"), hidden)
        found = run(build(save_percent, act="swiglu"), hidden)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        error = (mine - theirs).norm() / theirs.norm()
        assert float(error.detach()) < 0.02  # bfloat16's rounding
