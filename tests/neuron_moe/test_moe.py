"""The MoE layer: what must not change the result, and what must."""

import copy
import dataclasses
import io
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertFormula,
    ExpertMLPsV2,
    ExpertSpec,
    MoE,
    RoutedExperts,
    RoutedExpertsMLPOpsConfig,
    Router,
    RouterFormula,
    RouterSpec,
    RouterTopK,
    SharedExperts,
    SharedSpec,
    moe,
    nxd_compat,
    shared_experts,
)
from neuron_moe.moe import _check_mask
from neuron_moe.plan import Step
from neuron_moe.weights.expert_weights import LocalRouting
from neuron_moe.weights.packed import is_packing_available
from tests.neuron_moe.one_path import OnePath
from tests.tolerances import FLOAT32_RELATIVE, relative_error

PATHS = ("blockwise", "selective", "all_experts")


def make_experts(
    num_experts: int, top_k: int, *, block_size: int = 16, hidden: int = 12, **changes: object
) -> ExpertMLPsV2:
    """Return experts with biases and a clamped SwiGLU, unless changed."""
    values = {
        "bias": True,
        "glu_type": "swiglu",
        "hidden_act": "sigmoid",
        "hidden_act_bias": 1.0,
        "gate_clamp_upper_limit": 0.5,
        "up_clamp_lower_limit": -0.5,
        "up_clamp_upper_limit": 0.5,
    }
    values.update(changes)
    config = RoutedExpertsMLPOpsConfig(
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=10,
        top_k=top_k,
        glu_mlp=True,
        **values,
    )
    experts = ExpertMLPsV2(config, BlockwiseMatmulConfig.from_kwargs(block_size=block_size))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts.eval()


def reference(
    experts: ExpertMLPsV2, hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor
) -> Tensor:
    """The formula, token by token, in float64."""
    weights = experts.mlp_op.weights()
    output_TH = torch.zeros_like(hidden_TH, dtype=torch.float64)
    for token, row in enumerate(index_TK.tolist()):
        for choice, expert in enumerate(row):
            if expert < 0:
                continue
            x = hidden_TH[token].double()
            gate, up = (
                x @ weights.gate_up_proj_EHI[expert].double()
                + weights.gate_up_bias_EI[expert].double()
            ).chunk(2)
            gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
            inner = gate * torch.sigmoid(gate) * (up + 1.0)
            y = inner @ weights.down_proj_EIH[expert].double() + weights.down_bias_EH[expert]
            output_TH[token] += y * affinities_TK[token, choice].double()
    return output_TH


@st.composite
def layers(draw: st.DrawFn) -> tuple[ExpertMLPsV2, Tensor, Tensor, Tensor]:
    """Draw (experts, hidden, affinities, index), hard routings included."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, num_experts))
    tokens = draw(st.integers(1, 33))
    experts = make_experts(num_experts, top_k, block_size=draw(st.integers(1, 40)))
    scores_TE = torch.rand(tokens, num_experts)
    kind = draw(st.sampled_from(["uniform", "one expert", "an expert with none", "ties", "zeros"]))
    if kind == "one expert":
        scores_TE[:, 0] += 10
    if kind == "an expert with none":
        scores_TE[:, -1] -= 10
    if kind == "ties":
        scores_TE = (scores_TE * 2).round()
    index_TK = scores_TE.sort(descending=True, stable=True).indices[:, :top_k]
    if top_k == num_experts:  # other orders are refused: they may be meant as dense
        index_TK = index_TK.sort().values
    affinities_TK = scores_TE.gather(1, index_TK)
    if kind == "zeros":
        affinities_TK = affinities_TK * (torch.rand_like(affinities_TK) < 0.5)
    return experts, torch.randn(tokens, 12), affinities_TK, index_TK.to(torch.int32)


@torch.no_grad()
@given(layers())
@settings(max_examples=60, deadline=None)
def test_every_path_and_form_computes_the_formula(
    layer: tuple[ExpertMLPsV2, Tensor, Tensor, Tensor],
) -> None:
    experts, hidden_TH, affinities_TK, index_TK = layer
    expected = reference(experts, hidden_TH, affinities_TK, index_TK)
    for is_static in (False, True):
        for path in PATHS:
            experts.backend = OnePath(path, static=is_static)
            actual = experts(hidden_TH, affinities_TK, index_TK, 2)
            assert relative_error(actual, expected) < FLOAT32_RELATIVE, (path, is_static)


@torch.no_grad()
@given(layers(), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_order_of_experts_does_not_matter(
    layer: tuple[ExpertMLPsV2, Tensor, Tensor, Tensor], seed: int
) -> None:
    experts, hidden_TH, affinities_TK, index_TK = layer
    assume(experts.spec.top_k == 1 or experts.spec.top_k < experts.spec.num_experts)
    before = experts(hidden_TH, affinities_TK, index_TK, 2)
    order = torch.randperm(
        experts.config.num_experts, generator=torch.Generator().manual_seed(seed)
    )
    for parameter in experts.parameters():
        parameter.copy_(parameter[order].clone())
    moved = torch.argsort(order)[index_TK.long()]
    after = experts(hidden_TH, affinities_TK, moved, 2)
    assert relative_error(after, before) < FLOAT32_RELATIVE


@torch.no_grad()
@given(layers())
@settings(max_examples=30, deadline=None)
def test_padding_tokens_change_nothing_and_get_nothing(
    layer: tuple[ExpertMLPsV2, Tensor, Tensor, Tensor],
) -> None:
    experts, hidden_TH, affinities_TK, index_TK = layer
    tokens = index_TK.shape[0]
    alone = experts(hidden_TH, affinities_TK, index_TK, 2)
    is_real = torch.zeros(2 * tokens, dtype=torch.bool)
    is_real[1::2] = True

    def spread(values: Tensor, filler: float) -> Tensor:
        wide = torch.full((2 * tokens, values.shape[1]), filler, dtype=values.dtype)
        wide[1::2] = values
        return wide

    for phase in ("prefill", "decode", "speculation"):
        padded = experts(
            spread(hidden_TH, float("nan")),
            spread(affinities_TK, 0.7),
            spread(index_TK, 0),
            2,
            is_real,
            phase=phase,
        )
        assert relative_error(padded[1::2], alone) < FLOAT32_RELATIVE
        assert (padded[0::2] == 0).all()


@pytest.mark.parametrize("is_static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("path", PATHS)
def test_padding_with_nan_stays_out_of_every_path(path: str, is_static: bool) -> None:
    experts = make_experts(4, 2)
    experts.backend = OnePath(path, static=is_static)
    hidden_TH = torch.randn(6, 12)
    hidden_TH[3] = float("nan")
    index_TK = torch.randint(0, 4, (6, 2), dtype=torch.int32)
    index_TK[3] = -1
    affinities_TK = torch.where(index_TK < 0, 0.0, torch.rand(6, 2))
    with torch.no_grad():
        output = experts(hidden_TH, affinities_TK, index_TK, 2)
    assert torch.isfinite(output).all()


@torch.no_grad()
@given(
    tokens=st.integers(1, 40),
    top_k=st.integers(1, 4),
    factor=st.floats(0.05, 3.0),
    seed=st.integers(0, 9999),
)
@settings(max_examples=60, deadline=None)
def test_capacity_drops_late_tokens_and_renormalises(
    tokens: int, top_k: int, factor: float, seed: int
) -> None:
    torch.manual_seed(seed)
    num_experts = 6
    experts = make_experts(
        num_experts, top_k, capacity_factor=factor, normalize_top_k_affinities=top_k > 1
    )
    hidden_TH = torch.randn(tokens, 12)
    values, index = (torch.rand(tokens, num_experts) + torch.rand(num_experts)).topk(top_k)
    room = math.ceil(tokens * top_k * factor / num_experts)
    if factor >= num_experts / top_k:
        room = tokens
    kept, taken = index.clone(), [0] * num_experts
    for token in range(tokens):
        for choice in range(top_k):
            expert = index[token, choice].item()
            taken[expert] += 1
            if taken[expert] > room:
                kept[token, choice] = -1
    weights = torch.where(kept < 0, 0.0, values)
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)
    actual = experts(hidden_TH, values, index, tokens + 1)
    assert relative_error(actual, reference(experts, hidden_TH, weights, kept)) < FLOAT32_RELATIVE


def test_a_dropped_choice_is_of_no_expert_and_no_load() -> None:
    experts = make_experts(2, 1, capacity_factor=1.0)
    experts.enable_load_counters()
    index_TK, affinities_TK = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    chosen_TK, _ = experts.select(affinities_TK, index_TK, None, drops=True)
    assert chosen_TK.tolist() == [[0], [0], [-1], [-1]]
    assert experts.expert_load_E.tolist() == [2, 0]


def test_the_affinity_of_no_expert_counts_for_nothing() -> None:
    experts = make_experts(4, 2, normalize_top_k_affinities=True)
    index_TK = torch.tensor([[1, -1], [-1, -1]])
    _, affinities_TK = experts.select(torch.full((2, 2), 0.4), index_TK, None, drops=False)
    assert affinities_TK.tolist() == [[1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("is_static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_is_rounded_where_an_engine_writes_and_sums_are_float32(
    path: str, is_static: bool, scales_input: bool
) -> None:
    """Matrices of ones and zeros show every rounding: after the input is scaled, after each product
    and after the activation; affinities and sums over choices are float32.
    """
    experts = make_experts(
        3,
        2,
        bias=False,
        glu_type="glu",
        hidden_act="silu",
        hidden_act_bias=0.0,
        hidden=10,
        gate_clamp_upper_limit=None,
        up_clamp_lower_limit=None,
        up_clamp_upper_limit=None,
        early_expert_affinity_modulation=scales_input,
    ).bfloat16()
    order_E10 = torch.stack([torch.randperm(10) for _ in range(3)])
    weights = experts.mlp_op.weights()
    with torch.no_grad():
        weights.gate_up_proj_EHI.copy_(torch.eye(10).repeat(3, 1, 2))
        weights.down_proj_EIH.copy_(torch.eye(10)[order_E10])
    experts.backend = OnePath(path, static=is_static)
    hidden_TH = (3 * torch.randn(40, 10)).bfloat16()
    affinities_TK, index_TK = torch.rand(40, 3).topk(2)
    expected = torch.zeros(40, 10)
    for token, choice in np.ndindex(40, 2):
        weight, row = affinities_TK[token, choice], hidden_TH[token]
        scaled = ((row * weight) if scales_input else row).bfloat16().float()
        inner = (torch.nn.functional.silu(scaled) * scaled).bfloat16().float()
        output = torch.empty(10)
        output[order_E10[index_TK[token, choice]]] = inner
        expected[token] += output if scales_input else output * weight
    with torch.no_grad():
        plan = experts.plan(Step("prefill", 40))
        actual = plan.experts(hidden_TH, LocalRouting(index_TK, affinities_TK, scales_input))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_gated", [False, True])
def test_shared_experts_round_after_the_activation_and_at_the_end(is_gated: bool) -> None:
    shared = SharedExperts(10, 10, 1, "silu", is_gated=is_gated, dtype=torch.bfloat16)
    with torch.no_grad():
        for linear in (shared.gate_proj, shared.up_proj, shared.down_proj):
            linear.weight.copy_(torch.eye(10))
    x_TH = (3 * torch.randn(40, 10)).bfloat16()
    expected = (torch.nn.functional.silu(x_TH.float()) * x_TH.float()).bfloat16()
    if is_gated:
        gate_T1 = x_TH.float() @ shared.shared_expert_gate.weight.float().t()
        expected = (expected.float() * gate_T1.sigmoid()).bfloat16()
    with torch.no_grad():
        assert torch.equal(shared(x_TH), expected)


def test_dense_affinities_of_nxd_mean_the_same() -> None:
    experts = make_experts(8, 2)
    hidden_TH, dense_TE = torch.randn(9, 12), torch.rand(9, 8)
    affinities_TK, index_TK = dense_TE.topk(2)
    with torch.no_grad():
        assert torch.equal(
            experts(hidden_TH, dense_TE, index_TK, 9),
            experts(hidden_TH, affinities_TK, index_TK, 9),
        )


def test_dense_affinities_stay_dense_where_every_expert_is_chosen() -> None:
    experts = make_experts(2, 2)
    hidden_TH, dense_TE = torch.randn(1, 12), torch.tensor([[0.1, 0.9]])
    straight, turned = torch.tensor([[0, 1]]), torch.tensor([[1, 0]])
    with torch.no_grad():
        expected = experts(hidden_TH, dense_TE, straight, 9)
        torch.testing.assert_close(
            experts(hidden_TH, dense_TE, turned, 9, expert_affinities_masked_full=dense_TE),
            expected,
        )


def test_expert_0_out_of_order_is_enough_to_refuse_what_may_be_dense() -> None:
    with pytest.raises(ValueError, match="choices in the order 0 to 1"):
        make_experts(2, 2)(torch.randn(1, 12), torch.rand(1, 2), torch.tensor([[-1, 0]]), 9)


def test_affinities_that_may_be_dense_or_not_are_refused() -> None:
    experts = make_experts(2, 2)
    hidden_TH, wide = torch.randn(2, 12), torch.tensor([[0.1, 0.9], [0.4, 0.6]])
    with torch.no_grad():
        for both_mean_the_same in ([[0, 1], [0, 1]], [[0, 1], [0, -1]]):
            index_TK = torch.tensor(both_mean_the_same)
            experts(hidden_TH, wide, index_TK, 9)
        with pytest.raises(ValueError, match=r"\[2, 2\] may be .* expert_affinities_masked_full"):
            experts(hidden_TH, wide, torch.tensor([[0, 1], [1, 0]]), 9)
        with pytest.raises(ValueError, match=r"expert_affinities: must be a Tensor, not NoneType"):
            experts(hidden_TH, None, torch.tensor([[0, 1], [1, 0]]), 9)


def test_full_affinities_must_be_as_wide_as_the_experts() -> None:
    experts = make_experts(8, 2)
    hidden_TH, index_TK = torch.randn(3, 12), torch.tensor([[0, 1]] * 3)
    with pytest.raises(ValueError, match=r"expert_affinities_masked_full: shape \(3, 2\) must be"):
        experts(hidden_TH, None, index_TK, 3, None, torch.rand(3, 2))


def test_results_are_the_same_bits_each_time() -> None:
    experts = make_experts(8, 4, hidden=64)
    hidden_TH = torch.randn(300, 64)
    affinities_TK, index_TK = torch.rand(300, 8).topk(4)
    with torch.no_grad():
        first = experts(hidden_TH, affinities_TK, index_TK, 300)
        assert all(
            torch.equal(first, experts(hidden_TH, affinities_TK, index_TK, 300)) for _ in range(5)
        )


def test_a_clamp_of_zero_is_a_clamp() -> None:
    zero = make_experts(4, 2, up_clamp_upper_limit=0.0)
    none = make_experts(4, 2, up_clamp_upper_limit=None, up_clamp_lower_limit=None)
    none.load_state_dict(zero.state_dict())
    hidden_TH = torch.randn(7, 12)
    affinities_TK, index_TK = torch.rand(7, 4).topk(2)
    with torch.no_grad():
        clamped = zero(hidden_TH, affinities_TK, index_TK, 7)
        assert relative_error(none(hidden_TH, affinities_TK, index_TK, 7), clamped) > 1e-3


@pytest.mark.parametrize("fused", [False, True])
def test_shared_experts_add_to_the_routed_ones(fused: bool) -> None:
    experts = make_experts(4, 2)
    shared = SharedExperts(12, 6, 2, "silu", fused_gate_up_projection=fused)
    router = RouterTopK(4, 2, 12)
    hidden_BSH = torch.randn(2, 3, 12)
    with torch.no_grad():
        routed = MoE(router, experts)(hidden_BSH)[0]
        both = MoE(router, experts, shared)(hidden_BSH)[0]
        if fused:
            gate, up = shared.gate_up_proj(hidden_BSH).chunk(2, -1)
        else:
            gate, up = shared.gate_proj(hidden_BSH), shared.up_proj(hidden_BSH)
        expected = routed + shared.down_proj(nn.functional.silu(gate) * up)
    assert relative_error(both, expected) < FLOAT32_RELATIVE


def test_residual_is_added_first_and_returned_last() -> None:
    moe = MoE(RouterTopK(4, 2, 12), make_experts(4, 2), rmsnorm=nn.RMSNorm(12))
    hidden, residual = torch.randn(2, 3, 12), torch.randn(2, 3, 12)
    with torch.no_grad():
        result = moe(hidden, residual=residual)
        assert torch.equal(result[-1], hidden + residual)
        assert torch.equal(result[0], moe(hidden + residual)[0])
    assert result.router_logits is None


def test_load_counters_count_real_tokens() -> None:
    moe = MoE(RouterTopK(4, 2, 12), make_experts(4, 2), return_expert_index=True).eval()
    assert moe.expert_load is None
    moe.enable_load_counters()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with torch.no_grad():
        index = moe(torch.randn(2, 3, 12), mask).expert_index
        index = index.view(2, 3, 2)[mask.bool()]
    assert moe.expert_load.tolist() == torch.bincount(index.reshape(-1), minlength=4).tolist()
    assert "expert_load_E" not in "".join(moe.state_dict())


def test_state_dict_keys_are_nxds() -> None:
    moe = MoE(RouterTopK(4, 2, 12, bias=True), make_experts(4, 2), SharedExperts(12, 6, 1, "silu"))
    shapes = {key: tuple(value.shape) for key, value in moe.state_dict().items()}
    assert shapes == {
        "router.linear_router.weight": (4, 12),
        "router.linear_router.bias": (4,),
        "expert_mlps.mlp_op.gate_up_proj.weight": (4, 12, 20),
        "expert_mlps.mlp_op.gate_up_proj.bias": (4, 20),
        "expert_mlps.mlp_op.down_proj.weight": (4, 10, 12),
        "expert_mlps.mlp_op.down_proj.bias": (4, 12),
        "shared_experts.gate_proj.weight": (6, 12),
        "shared_experts.up_proj.weight": (6, 12),
        "shared_experts.down_proj.weight": (12, 6),
    }
    formula = RouterFormula(top_k=2, has_bias=True)
    expert = ExpertFormula(has_gate_up_bias=True, has_down_bias=True)
    sizes = {"num_experts": 4, "hidden_size": 12}
    native = MoE(
        Router(RouterSpec(formula=formula, **sizes)),
        RoutedExperts(ExpertSpec(top_k=2, intermediate_size=10, formula=expert, **sizes)),
        shared_experts.SharedExperts(SharedSpec(hidden_size=12, intermediate_size=6)),
    )
    assert {key: tuple(value.shape) for key, value in native.state_dict().items()} == shapes


def test_nxds_names_are_the_layer_and_classes_of_its_parts() -> None:
    assert nxd_compat.MoE is MoE is moe.MoE
    built = MoE(RouterTopK(4, 2, 12), make_experts(4, 2), SharedExperts(12, 6, 1, "silu"))
    assert isinstance(built.router, Router)
    assert isinstance(built.expert_mlps, RoutedExperts)
    assert isinstance(built.shared_experts, shared_experts.SharedExperts)


def test_experts_forward_runs_rows_of_their_own() -> None:
    experts = make_experts(4, 2)
    rows_ECH = torch.randn(4, 3, 12)
    with torch.no_grad():
        output = experts.mlp_op(rows_ECH)
        for expert in range(4):
            index = torch.full((3, 1), expert)
            expected = reference(experts, rows_ECH[expert], torch.ones(3, 1), index)
            assert relative_error(output[expert], expected) < FLOAT32_RELATIVE
        same = experts.mlp_op(rows_ECH[:1])
        picked = experts.mlp_op(rows_ECH[:1], torch.tensor([2, 0]))
        torch.testing.assert_close(picked, same[[2, 0]])
        weights = experts.mlp_op.weights()
        experts.mlp_op.weights = lambda: dataclasses.replace(weights, down_bias_scale=0.5)
        half_a_bias = experts.mlp_op(rows_ECH)
    bias_E1H = experts.mlp_op.down_proj.bias[:, None]
    torch.testing.assert_close(half_a_bias, output - 0.5 * bias_E1H)


def test_matrices_are_drawn_as_a_config_says() -> None:
    drawn = {"input_layer_init_method": nn.init.ones_, "output_layer_init_method": nn.init.zeros_}
    experts = ExpertMLPsV2(RoutedExpertsMLPOpsConfig(3, 12, 10, 2, "silu", True, **drawn))
    assert (experts.mlp_op.gate_up_proj.weight == 1).all()
    assert (experts.mlp_op.down_proj.weight == 0).all()


def test_no_tokens_no_output() -> None:
    experts = make_experts(4, 2)
    empty = experts(torch.randn(0, 12), torch.rand(0, 2), torch.zeros(0, 2), 5)
    assert empty.shape == (0, 12)


COPIES: dict[str, Callable[[MoE], MoE]] = {
    "deepcopy": copy.deepcopy,
    "save": lambda layer: _saved_and_loaded(layer),
    "same-dtype": lambda layer: layer.to(torch.float32),
    "there-and-back": lambda layer: layer.to(torch.float64).to(torch.float32),
}


def _saved_and_loaded(layer: MoE) -> MoE:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded: MoE = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.skipif(not is_packing_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("name", COPIES)
def test_a_packed_layer_is_copied_saved_and_cast(name: str) -> None:
    layer = MoE(RouterTopK(4, 2, 12), make_experts(4, 2)).eval()
    hidden = torch.randn(2, 9, 12)
    with torch.no_grad():
        expected = layer(hidden).output
        layer.expert_mlps.pack_weights()
        layer(hidden)
        other = COPIES[name](layer)
        if name == "same-dtype":
            assert other.expert_mlps.weights().packed_down is not None
        for linear in (other.expert_mlps.mlp_op.gate_up_proj, other.expert_mlps.mlp_op.down_proj):
            assert linear.weight.requires_grad
        torch.testing.assert_close(other(hidden).output, expected)
        assert torch.isfinite(other.to(torch.bfloat16)(hidden.bfloat16()).output).all()
        assert other.expert_mlps.mlp_op.down_proj.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"fused_gate_up_projection": True}, {"is_gated": True}])
def test_slices_of_shared_experts_add_up(options: dict[str, bool]) -> None:
    shared = SharedExperts(12, 7, 1, "silu", **options)
    x = torch.randn(5, 12)
    called: list[nn.Module] = []
    for projection in (shared.down_proj, getattr(shared, "gate_up_proj", shared.down_proj)):
        projection.register_forward_hook(lambda module, *_: called.append(module))
    with torch.no_grad():
        whole = shared(x)
        assert shared.down_proj in called  # a projection that was packed computes by itself
        called.clear()
        for count in (2, 3):
            parts = [shared(x, part=(index, count)) for index in range(count)]
            assert relative_error(sum(parts), whole) < FLOAT32_RELATIVE
            assert all(relative_error(part, whole) > 1e-3 for part in parts)
        assert called == []


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(
    ("mask", "hidden", "axis", "fits"),
    [
        ((2, 3), (2, 3, 4), 1, (True, True)),
        ((2, 5), (2, 3, 4), 1, (False, True)),  # all of a sequence of which this is a part
        ((3, 3), (2, 3, 4), 1, (True, False)),
        ((6,), (2, 3, 4), 1, (False, True)),
        ((2, 5), (3, 2, 4), 0, (False, True)),
        ((3, 2), (3, 2, 4), 0, (True, False)),
        ((6,), (3, 2, 4), 0, (False, False)),
        ((3,), (3, 1, 4), 0, (False, True)),
        ((3,), (1, 3, 4), 1, (False, True)),
    ],
)
def test_a_mask_is_of_its_sequences(
    mask: tuple[int, ...],
    hidden: tuple[int, ...],
    axis: int,
    fits: tuple[bool, bool],
    is_part: bool,
) -> None:
    values = torch.arange(math.prod(mask)).reshape(mask) % 3 != 0
    if not fits[is_part]:
        with pytest.raises(ValueError, match=r"must be .B, S. of hidden_states"):
            _check_mask(values, torch.zeros(hidden), axis, is_part=is_part)
        return
    found = _check_mask(values, torch.zeros(hidden), axis, is_part=is_part)
    assert torch.equal(found, values.t() if axis == 0 and len(mask) == 2 else values)
