"""Routers: who is chosen, how they weigh, and what breaks ties."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from neuron_moe import GroupLimitedRouter, RouterTopK
from neuron_moe.router import route, selection_margin, selection_scores
from neuron_moe.spec import RouterFormula


def _logits(tokens: int = 50, experts: int = 16) -> torch.Tensor:
    return torch.randn(tokens, experts)


@pytest.mark.parametrize("act_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("act_over_topk", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_top_k_family_against_plain_torch(
    act_fn: str, act_over_topk: bool, renormalize: bool
) -> None:
    logits_TE = _logits()
    formula = RouterFormula(
        top_k=4,
        act_fn=act_fn,
        act_over_topk=act_over_topk,
        renormalize=renormalize,
        routed_scaling_factor=1.5,
    )
    routing = route(logits_TE, formula)
    act = (lambda x: x.softmax(-1)) if act_fn == "softmax" else torch.sigmoid
    chosen = logits_TE.topk(4)
    every = act(logits_TE).gather(1, chosen.indices)
    weights = act(chosen.values) if act_over_topk else every
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    assert torch.equal(routing.expert_index_TK.long(), chosen.indices)
    torch.testing.assert_close(routing.expert_affinities_TK, weights * 1.5)
    assert routing.expert_affinities_TK.dtype == torch.float32


def test_selection_bias_moves_the_choice_but_not_the_weights() -> None:
    logits_TE = _logits()
    bias_E = torch.randn(16)
    formula = RouterFormula(top_k=3, act_fn="sigmoid", has_selection_bias=True)
    routing = route(logits_TE, formula, bias_E)
    scores_TE = logits_TE.sigmoid()
    expected = (scores_TE + bias_E).topk(3).indices
    assert torch.equal(routing.expert_index_TK.long(), expected)
    torch.testing.assert_close(routing.expert_affinities_TK, scores_TE.gather(1, expected))
    assert not torch.equal(expected, scores_TE.topk(3).indices)


@pytest.mark.parametrize("fill", [0.0, float("-inf")])
def test_groups_limit_the_choice(fill: float) -> None:
    logits_TE = _logits(200, 16)
    bias_E = 0.1 * torch.randn(16) - (2.0 if fill == 0.0 else 0.0)
    formula = RouterFormula(
        top_k=4,
        act_fn="sigmoid",
        has_selection_bias=True,
        n_group=4,
        topk_group=2,
        out_of_group_fill=fill,
    )
    index_TK = route(logits_TE, formula, bias_E).expert_index_TK.long()
    biased = (logits_TE.sigmoid() + bias_E).view(200, 4, 4)
    best = biased.topk(2, dim=-1).values.sum(-1).topk(2).indices
    is_inside = (index_TK // 4).unsqueeze(-1).eq(best.unsqueeze(1)).any(-1)
    if fill == 0.0:
        # Every biased score is negative here, so a fill of 0 lets experts outside the groups win.
        assert not is_inside.any()
    else:
        assert is_inside.all()


def test_two_groups_limit_the_choice_and_one_does_not() -> None:
    logits_TE = torch.tensor([[3.0, -3.0, 2.0, 1.9], [1.0, 2.0, 4.0, -4.0]])
    pair = RouterFormula(top_k=2, act_fn="sigmoid", n_group=2, topk_group=1)
    # 0.95 + 0.05 against 0.88 + 0.87, then 0.73 + 0.88 against 0.98 + 0.02
    assert route(logits_TE, pair).expert_index_TK.tolist() == [[2, 3], [1, 0]]
    bias_E = torch.tensor([0.0, 0.5, 0.0, 0.0])
    single = RouterFormula(top_k=2, act_fn="sigmoid", has_selection_bias=True)
    assert route(logits_TE, single, bias_E).expert_index_TK.tolist() == [[0, 2], [1, 2]]


def test_eps_adds_to_the_sum_of_the_affinities() -> None:
    formula = RouterFormula(top_k=2, act_fn="sigmoid", renormalize=True, renormalize_eps=0.5)
    routing = route(torch.tensor([[0.0, 0.0, -9.0]]), formula)
    torch.testing.assert_close(routing.expert_affinities_TK, torch.full((1, 2), 0.5 / 1.5))


@pytest.mark.parametrize("act_over_topk", [False, True])
def test_experts_are_ranked_by_the_scores_that_a_caller_can_ask_for(act_over_topk: bool) -> None:
    logits_TE = _logits()
    formula = RouterFormula(top_k=16, act_fn="sigmoid", act_over_topk=act_over_topk)
    assert torch.equal(selection_scores(logits_TE, formula), logits_TE)
    bias_E = None if act_over_topk else torch.randn(16)
    formula = replace(formula, has_selection_bias=not act_over_topk)
    scores_TE = selection_scores(logits_TE, formula, bias_E)
    index_TK = route(logits_TE, formula, bias_E).expert_index_TK
    assert bool((scores_TE.gather(1, index_TK.long()).diff(dim=1) <= 0).all())
    if bias_E is not None:
        torch.testing.assert_close(scores_TE, logits_TE.sigmoid() + bias_E)


def test_a_router_is_calm_unless_told() -> None:
    router = RouterTopK(8, 2, 16).train()
    hidden = torch.randn(6, 16)
    trained = router(hidden)
    torch.testing.assert_close(router.eval()(hidden), trained, rtol=0, atol=0)


def test_lower_expert_wins_a_tie() -> None:
    formula = RouterFormula(
        top_k=3,
    )
    routing = route(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [0.0] * 6]), formula)
    assert routing.expert_index_TK.tolist() == [[1, 3, 5], [0, 1, 2]]
    many_TE = torch.randint(0, 3, (20, 256)).float()
    expected = np.argsort(-many_TE.numpy(), axis=-1, kind="stable")[:, :3]
    assert route(many_TE, formula).expert_index_TK.tolist() == expected.tolist()


def test_a_token_that_no_expert_scores_has_affinities_of_zero() -> None:
    formula = RouterFormula(top_k=2, act_fn="sigmoid", renormalize=True, renormalize_eps=1e-20)
    routing = route(torch.tensor([[-200.0, -300.0, -250.0]]), formula)
    assert routing.expert_affinities_TK.tolist() == [[0.0, 0.0]]


def test_saturated_sigmoid_still_ranks_by_logit() -> None:
    formula = RouterFormula(top_k=1, act_fn="sigmoid")
    routing = route(torch.tensor([[100.0, 200.0, 150.0]]), formula)
    assert routing.expert_index_TK.tolist() == [[1]]


def test_arithmetic_is_float32_whatever_the_weights_are() -> None:
    router = RouterTopK(32, 4, 64, dtype=torch.bfloat16)
    hidden = torch.randn(2, 9, 64, dtype=torch.bfloat16)
    routing = router(hidden)
    expected = hidden.float().reshape(18, 64) @ router.linear_router.weight.float().t()
    torch.testing.assert_close(routing.router_logits_TE, expected)
    assert routing.router_logits_TE.dtype == torch.float32


def test_jitter_only_while_training() -> None:
    router = RouterTopK(8, 2, 16, jitter_eps=0.3)
    hidden = torch.randn(4, 16)
    router.eval()
    calm = router(hidden).router_logits_TE
    router.train()
    assert not torch.equal(router(hidden).router_logits_TE, calm)
    router.eval()
    assert torch.equal(router(hidden).router_logits_TE, calm)


def test_jitter_multiplies_each_input_by_up_to_eps_more_or_less() -> None:
    router = RouterTopK(16, 2, 16, jitter_eps=0.3)
    torch.nn.init.eye_(router.linear_router.weight)
    logits = router.get_router_logits(torch.ones(400, 16)).detach()
    assert 0.7 <= float(logits.min()) < 0.71
    assert 1.29 < float(logits.max()) <= 1.3001


@pytest.mark.parametrize("jitter_eps", [1.0, -0.1, float("nan")])
def test_jitter_that_may_turn_an_input_around_is_refused(jitter_eps: float) -> None:
    with pytest.raises(ValueError, match=r"jitter_eps=.*(below 1|finite)"):
        RouterTopK(8, 2, 16, jitter_eps=jitter_eps)


def test_selection_bias_is_no_parameter_of_an_optimizer() -> None:
    router = RouterTopK(8, 2, 16, act_fn="sigmoid", selection_bias=True)
    assert [name for name, _ in router.named_parameters()] == ["linear_router.weight"]
    assert [name for name, _ in router.named_buffers()] == ["e_score_correction_bias"]


@pytest.mark.parametrize("is_parameter", [False, True])  # as programs written for NxD make it one
def test_selection_bias_stays_float32_when_the_layer_is_cast(is_parameter: bool) -> None:
    router = GroupLimitedRouter(8, 2, 16, n_group=4, topk_group=2)
    if is_parameter:
        router.e_score_correction_bias = torch.nn.Parameter(torch.zeros(8))
    with torch.no_grad():
        router.e_score_correction_bias.normal_()
    before_E = router.e_score_correction_bias.clone()
    router.to(torch.bfloat16)
    assert router.linear_router.weight.dtype == torch.bfloat16
    assert torch.equal(router.e_score_correction_bias, before_E)
    state = {name: weight.bfloat16() for name, weight in router.state_dict().items()}
    router.load_state_dict(state, assign=True)
    assert router.linear_router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.dtype == torch.float32


def test_dtypes_may_be_named() -> None:
    assert RouterTopK(8, 2, 16, dtype="bfloat16").linear_router.weight.dtype == torch.bfloat16


def test_a_choice_is_as_clear_as_its_last_score_is_above_the_next() -> None:
    scores_TE = torch.tensor([[4.0, -1.0, 2.5, 8.0], [0.0, 3.0, 3.0, 3.0]])
    assert selection_margin(scores_TE, 1).tolist() == [4.0, 0.0]
    assert selection_margin(scores_TE, 2).tolist() == [1.5, 0.0]
    assert selection_margin(scores_TE, 3).tolist() == [3.5, 3.0]
    assert selection_margin(scores_TE, 4).tolist() == [torch.inf, torch.inf]
    only_E1 = torch.zeros(2, 1)
    assert selection_margin(only_E1, 1).tolist() == [torch.inf, torch.inf]
