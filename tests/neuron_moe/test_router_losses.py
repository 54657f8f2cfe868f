"""Auxiliary losses against their formulas written out, and what else a router does in training."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers import modeling_switch_transformers as switch

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK, SharedExperts
from neuron_moe.router_losses import RouterLosses, auxiliary_loss
from neuron_moe.train.balance import BalanceStats, step_selection_biases

E, K, H, I = 8, 2, 16, 12  # noqa: E741  the axis letters of the project
ALL = RouterLosses(balance=0.02, sequence=0.003, z=0.01)


def build(act_fn: str = "softmax", top_k: int = K, **options: object) -> MoE:
    torch.manual_seed(0)
    config = RoutedExpertsMLPOpsConfig(E, H, I, top_k, "silu", True)
    router = RouterTopK(E, top_k, H, act_fn=act_fn, **options)  # type: ignore[arg-type]
    return MoE(router, ExpertMLPsV2(config), return_router_logits=True, return_expert_index=True)


def written_out(logits: Tensor, index: Tensor, mask: Tensor, act_fn: str) -> dict[str, Tensor]:
    """Return the losses of [U, S, E] logits and [U, S, K] choices, token by token."""
    score = logits.softmax(-1) if act_fn == "softmax" else logits.sigmoid()
    score = score / score.sum(-1, keepdim=True)
    tokens = [(u, s) for u, s in mask.nonzero().tolist()]

    def balance(some: list[tuple[int, int]]) -> Tensor:
        count = torch.zeros(E, dtype=logits.dtype)
        for u, s in some:
            count[index[u, s]] += 1
        share = count / (K * len(some))
        mean = torch.stack([score[place] for place in some]).mean(0)
        return E * (share * mean).sum()

    by_sequence = [[place for place in tokens if place[0] == u] for u in range(len(mask))]
    of_sequences = [balance(each) * len(each) / len(tokens) for each in by_sequence]
    z = torch.stack([logits[place].logsumexp(-1).square() for place in tokens]).mean()
    return {
        "balance": ALL.balance * balance(tokens),
        "sequence": ALL.sequence * torch.stack(of_sequences).sum(),
        "z": ALL.z * z,
    }


@pytest.mark.parametrize("act_fn", ["softmax", "sigmoid"])
def test_losses_are_their_formulas_and_reach_the_router(act_fn: str) -> None:
    layer = build(act_fn).double().train()
    layer.use_router_losses(ALL)
    hidden = torch.randn(3, 5, H, dtype=torch.float64)
    mask = torch.ones(3, 5)
    mask[1, 2:] = 0
    output, logits, index = layer(hidden, mask)[:3]
    expected = written_out(logits.view(3, 5, E), index.view(3, 5, K), mask, act_fn)
    assert {name: pytest.approx(float(loss)) for name, loss in layer.losses.items()} == {
        name: float(loss.detach()) for name, loss in expected.items()
    }
    weight = layer.router.linear_router.weight
    loss = output.sum() + auxiliary_loss(layer)
    (total,) = torch.autograd.grad(loss, weight, retain_graph=True)
    layer.use_router_losses(None)
    output, logits, index = layer(hidden, mask)[:3]
    losses = written_out(logits.view(3, 5, E), index.view(3, 5, K), mask, act_fn)
    (apart,) = torch.autograd.grad(output.sum() + torch.stack([*losses.values()]).sum(), weight)
    assert layer.losses == {}
    torch.testing.assert_close(total, apart)


def deepseek(logits: Tensor, index: Tensor) -> Tensor:
    """Equations 17 to 20 of DeepSeek-V3 for one sequence, [S, E] logits and [S, K] choices."""
    affinity = logits.sigmoid()
    mean_E = (affinity / affinity.sum(-1, keepdim=True)).mean(0)
    count_E = torch.nn.functional.one_hot(index, E).sum((0, 1))
    return (E / (K * len(logits)) * count_E * mean_E).sum()


@pytest.mark.parametrize("name", ["deepseek", "transformers", "switch", "st_moe"])
def test_a_named_loss_is_that_of_its_library_in_each_layer_and_in_their_sum(name: str) -> None:
    act_fn, k = ("sigmoid" if name == "deepseek" else "softmax"), 1 if name == "switch" else K
    layers = torch.nn.ModuleList([build(act_fn, top_k=k) for _ in range(2)]).double().train()
    torch.nn.init.normal_(layers[1].router.linear_router.weight)
    total = torch.zeros((), dtype=torch.float64)
    for layer in layers:
        layer.use_router_losses(RouterLosses.named(name, 0.3, k))
        logits, index = layer(torch.randn(2, 5, H, dtype=torch.float64))[1:3]
        by_sequence = logits.view(2, 5, E)
        if name == "deepseek":
            pairs = zip(by_sequence, index.view(2, 5, K), strict=True)
            wanted = torch.stack([deepseek(*pair) for pair in pairs]).mean()
        elif name == "transformers":
            wanted = load_balancing_loss_func((logits,), E, k)
        elif name == "switch":
            wanted = switch.load_balancing_loss_func(
                by_sequence.flatten(0, 1)[None].softmax(-1), index[None]
            )
        else:
            wanted = switch.router_z_loss_func(by_sequence)
        (found,) = layer.losses.values()
        torch.testing.assert_close(found, 0.3 * wanted.detach().double(), rtol=1e-6, atol=0)
        total += 0.3 * wanted.detach()
    torch.testing.assert_close(auxiliary_loss(layers).detach(), total, rtol=1e-6, atol=0)


def test_what_is_no_loss_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="step_selection_biases"):
        RouterLosses.named("torchtitan", 1e-3, K)
    with pytest.raises(ValueError, match=r"formula='mixtral': must be one of deepseek"):
        RouterLosses.named("mixtral", 1e-3, K)


def test_an_even_load_has_balance_losses_of_their_weights() -> None:
    layer = build().train()
    layer.router.forces_balance = True
    with torch.no_grad():
        layer.router.linear_router.weight.zero_()
    layer.use_router_losses(RouterLosses(balance=0.5, sequence=0.25))
    layer(torch.randn(2, E, H))
    assert {name: float(loss) for name, loss in layer.losses.items()} == pytest.approx(
        {"balance": 0.5, "sequence": 0.25}
    )


def test_losses_are_of_training_alone_and_checked() -> None:
    layer = build().eval()
    layer.use_router_losses(ALL)
    layer(torch.randn(2, 3, H))
    assert layer.losses == {}
    with pytest.raises(ValueError, match=r"balance=-1"):
        RouterLosses(balance=-1)


def test_forced_balance_takes_turns_while_training_and_weighs_by_the_scores() -> None:
    layer = build(renormalize=True).train()
    layer.router.forces_balance = True
    hidden = torch.randn(1, 12, H)
    _, logits, index = layer(hidden)[:3]
    assert index.flatten().tolist() == [pair % E for pair in range(12 * K)]
    scores = logits.softmax(-1).gather(1, index)
    affinities = layer.router(hidden).expert_affinities_TK
    torch.testing.assert_close(affinities, scores / scores.sum(-1, keepdim=True))
    free = layer.eval()(hidden)[2]
    assert free.tolist() == logits.topk(K).indices.tolist()


@pytest.mark.parametrize("save_percent", [None, 0])
def test_padding_that_holds_nan_leaves_gradients_finite(save_percent: int | None) -> None:
    layer = build().train()
    layer.expert_mlps.tuning = replace(layer.expert_mlps.tuning, save_percent=save_percent)
    layer = MoE(layer.router, layer.expert_mlps, SharedExperts(H, I, 1, "silu"))
    hidden, mask = torch.randn(1, 6, H), torch.ones(1, 6)
    hidden[:, 4:], mask[:, 4:] = float("nan"), 0
    output = layer(hidden.requires_grad_(), mask)[0]
    output[:, :4].square().sum().backward()
    assert hidden.grad is not None
    for gradient in (hidden.grad, *(parameter.grad for parameter in layer.parameters())):
        assert gradient is not None
        assert bool(torch.isfinite(gradient).all())


def test_biases_step_against_the_load_and_counters_start_again() -> None:
    layer = build("sigmoid", selection_bias=True).train()
    with torch.no_grad():
        layer.router.linear_router.weight[0] += 1.0  # one expert that everybody likes
    hidden = torch.randn(4, 64, H) + 0.5
    step_selection_biases(layer)  # from now on they count
    layer(hidden)
    assert layer.expert_load is not None
    before = BalanceStats.of(layer.expert_load).busiest_over_mean
    for _ in range(80):
        step_selection_biases(layer, rate=0.02)
        layer(hidden)
    after = BalanceStats.of(layer.expert_load).busiest_over_mean
    assert int(layer.expert_load.sum()) == 4 * 64 * K
    assert before > 2
    assert after < 1.3


@pytest.mark.parametrize("capacity", [pytest.param(None, marks=pytest.mark.long), 0.6])
@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("act", [pytest.param("silu", marks=pytest.mark.long), "swiglu"])
def test_gradients_are_those_of_differences(capacity: float | None, early: bool, act: str) -> None:
    torch.manual_seed(1)
    is_oai = act == "swiglu"
    config = RoutedExpertsMLPOpsConfig(
        num_experts=4,
        top_k=2,
        hidden_size=6,
        intermediate_size=5,
        hidden_act=act,
        glu_mlp=True,
        bias=is_oai,
        early_expert_affinity_modulation=early,
        capacity_factor=capacity,
    )
    router = RouterTopK(4, 2, 6, act_fn="sigmoid", renormalize=True, bias=is_oai)
    layer = MoE(router, ExpertMLPsV2(config)).double().train()
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    hidden = torch.randn(1, 7, 6, dtype=torch.float64, requires_grad=True)

    def run(hidden: Tensor, *_: Tensor) -> Tensor:
        output: Tensor = layer(hidden)[0]
        return output

    assert torch.autograd.gradcheck(run, (hidden, *weights))
