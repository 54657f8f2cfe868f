"""router_topk against the formula: the router family, odd sizes, ties, limits, cost."""

from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import nki_sim
from neuron_moe.router import route as route_with_torch
from nki_kernels.common import router_reference as reference
from nki_kernels.common.chip import SBUF_BYTES
from nki_kernels.common.formula import RouterFormula
from nki_kernels.common.token_tiles import split_tokens, tile_rows, used_partitions
from nki_kernels.route import (
    RouterConfig,
    check_router_topk,
    cost_router_topk,
    router_topk,
)
from nki_kernels.route.memory import router_table, sbuf_bytes
from nki_sim import SimOptions, TensorSpec
from tests.nki_kernels.traces import measured_cost

BF16 = ml_dtypes.bfloat16
DEEPSEEK: dict[str, Any] = {
    "act_fn": "sigmoid",
    "has_selection_bias": True,
    "n_group": 8,
    "topk_group": 4,
    "renormalize": True,
    "routed_scaling_factor": 2.5,
}
GLM: dict[str, Any] = {
    "top_k": 8,
    "act_fn": "sigmoid",
    "has_selection_bias": True,
    "renormalize": True,
}
# name: (T, H, E, hidden dtype, weight dtype, formula)
Case = tuple[int, int, int, Any, Any, dict[str, Any]]
CASES: dict[str, Case] = {
    "gpt-oss": (33, 320, 32, BF16, BF16, {"top_k": 4, "act_over_topk": True, "has_bias": True}),
    "llama4": (17, 256, 16, BF16, BF16, {"top_k": 1, "act_fn": "sigmoid"}),
    "qwen3-moe": (40, 128, 128, BF16, BF16, {"top_k": 8, "renormalize": True}),
    "mixtral": (20, 192, 8, BF16, BF16, {"top_k": 2, "renormalize": True}),
    "dbrx": (9, 128, 16, np.float32, np.float32, {"top_k": 4}),
    "deepseek": (24, 128, 64, BF16, np.float32, {"top_k": 8, **DEEPSEEK}),
    "groups-fill-0": (24, 64, 32, BF16, BF16, {"top_k": 5, **DEEPSEEK, "out_of_group_fill": 0.0}),
    "groups-of-two": (24, 64, 32, BF16, BF16, {"top_k": 6, "n_group": 16, "topk_group": 9}),
    "one-of-two-groups": (
        24,
        64,
        16,
        BF16,
        BF16,
        {"top_k": 4, "act_fn": "sigmoid", "n_group": 2, "topk_group": 1},
    ),
    "glm": (24, 64, 32, BF16, BF16, GLM),
    "16-of-512": (12, 64, 512, BF16, BF16, {"top_k": 16, "renormalize": True}),
    "sqrtsoftplus": (24, 64, 32, BF16, BF16, {**GLM, "act_fn": "sqrtsoftplus"}),
    "sqrtsoftplus-of-logits": (24, 64, 32, BF16, BF16, {"top_k": 3, "act_fn": "sqrtsoftplus"}),
    "16-of-896": (12, 64, 896, BF16, BF16, {**GLM, "top_k": 16, "returns_logits": True}),
    "32-of-1024": (12, 64, 1024, BF16, BF16, {"top_k": 32, "has_bias": True}),
    "10-of-12-float32": (12, 64, 12, np.float32, np.float32, {"top_k": 10, "returns_logits": True}),
    "4-experts": (7, 64, 4, BF16, BF16, {"top_k": 2, "has_bias": True, "returns_logits": True}),
    "two-chunks-and-a-rest": (9, 1100, 16, BF16, BF16, {"top_k": 2}),
    "float16": (7, 128, 16, np.float16, np.float16, {"top_k": 2}),
    "sigmoid-over-chosen": (
        7,
        64,
        16,
        BF16,
        BF16,
        {"top_k": 3, "act_fn": "sigmoid", "act_over_topk": True},
    ),
    "norm": (50, 192, 16, BF16, BF16, {"top_k": 2, "has_norm": True, "norm_eps": 1e-5}),
    "one-token": (1, 64, 16, BF16, BF16, {"top_k": 2}),
    "three-uneven-tiles": (515, 64, 16, BF16, BF16, {"top_k": 2, "returns_logits": True}),
}
OPTIONS = {
    "core-1-first": SimOptions(start_core=1),
    "preempted": SimOptions(preempt=0.3, seed=2),
    "zero-filled": SimOptions(fill=0),
}


def config_for(E: int, H: int, **values: Any) -> RouterConfig:
    """Return the configuration that values make, by the names of the records' fields."""
    names = {entry.name for entry in fields(RouterFormula)}
    formula = RouterFormula(**{name: values[name] for name in values if name in names})
    rest = {name: value for name, value in values.items() if name not in names}
    return RouterConfig(formula, E, H, **rest)


def config_of(case: Case, num_cores: int = 2) -> RouterConfig:
    """Return what the kernel is compiled for."""
    _, H, E, hidden_dtype, weight_dtype, values = case
    return config_for(
        E,
        H,
        hidden_dtype=dtype_name(hidden_dtype),
        weight_dtype=dtype_name(weight_dtype),
        num_cores=num_cores,
        **values,
    )


def operands(T: int, config: RouterConfig) -> list[Any]:
    """Draw hidden, router weight, bias, selection bias and norm weight; None if not used."""
    H, E, formula = config.hidden_size, config.num_experts, config.formula
    hidden_dtype, weight_dtype = (
        BF16 if name == "bfloat16" else np.dtype(name)
        for name in (config.hidden_dtype, config.weight_dtype)
    )
    rng = np.random.default_rng(T + H + E)
    bias = rng.normal(size=(1, E)).astype(np.float32)
    selection_bias = (0.1 * rng.normal(size=(1, E))).astype(np.float32)
    return [
        rng.normal(size=(T, H)).astype(hidden_dtype),
        (rng.normal(size=(E, H)) / np.sqrt(H)).astype(weight_dtype),
        bias if formula.has_bias else None,
        selection_bias if formula.has_selection_bias else None,
        (1 + 0.1 * rng.normal(size=(1, H))).astype(hidden_dtype) if config.has_norm else None,
    ]


def expected(arrays: list[Any], config: RouterConfig) -> tuple[Any, Any, Any]:
    """Return (affinities, index, logits) of the formula in float64."""
    hidden, weight, bias, selection_bias, norm = arrays
    x = hidden.astype(np.float64)
    if norm is not None:
        x = reference.rms_norm(x, norm.astype(np.float64), config.norm_eps)
        x = x.astype(hidden.dtype).astype(np.float64)
    logits = x @ weight.astype(np.float64).T + (0 if bias is None else bias)
    return *reference.route(logits, config.formula, selection_bias), logits


def dtype_name(dtype: Any) -> str:
    return str(np.dtype(dtype).name)


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_router_equals_the_formula(case: str, num_cores: int) -> None:
    T, config = CASES[case][0], config_of(CASES[case], num_cores)
    arrays = operands(T, config)
    run = nki_sim.run(router_topk, *arrays, config, lnc=num_cores)
    affinities, index, logits = expected(arrays, config)
    # float32 sums of H products; one rounding of x may differ where a norm is in front.
    tolerance = 1e-3 if config.has_norm else 2e-6
    np.testing.assert_array_equal(run.outputs[1], index)
    np.testing.assert_allclose(run.outputs[0], affinities, rtol=tolerance, atol=tolerance)
    if config.returns_logits:
        np.testing.assert_allclose(run.outputs[2], logits, rtol=2e-6, atol=2e-6)
    if config.has_norm:
        normed = reference.rms_norm(
            arrays[0].astype(np.float64), arrays[4].astype(np.float64), config.norm_eps
        )
        error = np.abs(run.outputs[-1].astype(np.float64) - normed)
        assert (error <= np.abs(normed) * 2.0**-8).all()
    assert not run.findings
    assert measured_cost(run.trace) == cost_router_topk(config, T)


@pytest.mark.parametrize("option", OPTIONS)
def test_neither_unset_memory_nor_the_order_of_the_cores_matters(option: str) -> None:
    T, config = CASES["deepseek"][0], config_of(CASES["deepseek"])
    arrays = operands(T, config)
    usual = nki_sim.run(router_topk, *arrays, config, lnc=2).outputs
    other = nki_sim.run(router_topk, *arrays, config, lnc=2, options=OPTIONS[option]).outputs
    for one, two in zip(usual, other, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("top_k", [1, 4, 8, 9, 16])
@pytest.mark.parametrize("n_group", [1, 4])
def test_lowest_expert_wins_a_tie_as_in_torch(top_k: int, n_group: int) -> None:
    T, E = 64, 32
    rng = np.random.default_rng(top_k)
    logits_TE = rng.integers(-2, 2, (T, E)).astype(np.float32)
    bias_1E = rng.integers(-1, 2, (1, E)).astype(np.float32) if n_group > 1 else None
    values: dict[str, Any] = {
        "top_k": top_k,
        "act_fn": "sigmoid",
        "n_group": n_group,
        "topk_group": 2 if n_group > 1 else 1,
        "has_selection_bias": n_group > 1,
        "out_of_group_fill": 0.0 if top_k % 2 else -np.inf,
    }
    config = config_for(E, 64, hidden_dtype="float32", weight_dtype="float32", **values)
    identity = np.eye(E, 64, dtype=np.float32)
    hidden = np.pad(logits_TE, ((0, 0), (0, 64 - E)))
    outputs = nki_sim.run(router_topk, hidden, identity, None, bias_1E, None, config, lnc=2).outputs
    bias_E = None if bias_1E is None else torch.from_numpy(bias_1E[0])
    routing = route_with_torch(torch.from_numpy(logits_TE), config.formula, bias_E)
    np.testing.assert_array_equal(outputs[1], routing.expert_index_TK.numpy())
    np.testing.assert_allclose(outputs[0], routing.expert_affinities_TK.numpy(), rtol=1e-6)


@pytest.mark.parametrize("case", ["gpt-oss", "qwen3-moe", "deepseek"])
def test_a_token_without_numbers_chooses_some_expert_and_stays_alone(case: str) -> None:
    T, E, config = CASES[case][0], CASES[case][2], config_of(CASES[case])
    arrays = operands(T, config)
    clean = nki_sim.run(router_topk, *arrays, config, lnc=2).outputs
    arrays[0][3] = np.nan
    affinities, index = nki_sim.run(router_topk, *arrays, config, lnc=2).outputs
    others = np.arange(T) != 3
    np.testing.assert_array_equal(affinities[others], clean[0][others])
    np.testing.assert_array_equal(index[others], clean[1][others])
    assert ((index >= 0) & (index < E)).all()


TWO = {"top_k": 2}
GROUPS = {"act_fn": "sigmoid", "n_group": 4, "topk_group": 1}
REFUSED: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "num_tokens=0": (0, 64, 8, TWO),
    "num_tokens=32769: must be 1 to 32768": (32769, 64, 8, TWO),
    "num_tokens=16385: must be 1 to 16384": (16385, 64, 8, {"top_k": 2, "num_cores": 1}),
    "hidden_size=0: must be a multiple of 64": (4, 0, 8, TWO),
    "hidden_size=65: must be a multiple of 64": (4, 65, 8, TWO),
    "num_experts=1: must be 2 to 1024": (4, 64, 1, {"top_k": 1}),
    "num_experts=1025: must be 2 to 1024": (4, 64, 1025, TWO),
    "top_k=0": (4, 64, 8, {"top_k": 0}),
    "top_k=33": (4, 64, 64, {"top_k": 33}),
    "top_k=9: .* at most num_experts=8": (4, 64, 8, {"top_k": 9}),
    "act_fn='relu'": (4, 64, 8, {"top_k": 2, "act_fn": "relu"}),
    "act_over_topk=True": (
        4,
        64,
        8,
        {"top_k": 2, "act_over_topk": True, "has_selection_bias": True},
    ),
    "act_over_topk=True: .* groups": (4, 64, 8, {"top_k": 2, **GROUPS, "act_over_topk": True}),
    "n_group=4: num_experts=4": (4, 64, 4, {"top_k": 1, **GROUPS}),
    "n_group=4: num_experts=10": (4, 64, 10, {"top_k": 2, **GROUPS}),
    "topk_group=0": (4, 64, 8, {"top_k": 2, **GROUPS, "topk_group": 0}),
    "topk_group=5": (4, 64, 8, {"top_k": 2, **GROUPS, "topk_group": 5}),
    "offer only 2": (4, 64, 8, {"top_k": 3, **GROUPS}),
    "out_of_group_fill=1.0": (4, 64, 8, {"top_k": 2, **GROUPS, "out_of_group_fill": 1.0}),
    "weight_dtype='int8'": (4, 64, 8, {"top_k": 2, "weight_dtype": "int8"}),
    "bytes of SBUF per partition": (4, 16384, 512, {"top_k": 2, "weight_dtype": "float32"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_limits_are_refused_by_name(message: str) -> None:
    T, H, E, values = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        check_router_topk(config_for(E, H, **values), T)


LARGEST = {
    "H8192-E512-K16-bias": (8192, 512, {"top_k": 16, "has_bias": True}, "float32"),
    "H8192-E512-groups": (8192, 512, {"top_k": 8, **DEEPSEEK}, "float32"),
    "H7168-E384-groups-norm": (7168, 384, {"top_k": 8, **DEEPSEEK, "has_norm": True}, "float32"),
    "H8192-E512-norm": (8192, 512, {"top_k": 8, "has_norm": True}, "bfloat16"),
}


@pytest.mark.parametrize("case", LARGEST)
def test_what_the_check_accepts_fits_in_memory(case: str) -> None:
    H, E, values, weight_dtype = LARGEST[case]
    config = config_for(E, H, weight_dtype=weight_dtype, **values)
    check_router_topk(config, 32768)
    shapes = [
        TensorSpec((300, H), "bfloat16"),
        TensorSpec((E, H), weight_dtype),
        TensorSpec((1, E), "float32"),
        TensorSpec((1, E), "float32"),
        TensorSpec((1, H), "float32"),
    ]
    run = nki_sim.run(router_topk, *shapes, config, lnc=2, options=SimOptions(mode="indices"))
    assert 0 < run.sbuf_peak_bytes <= SBUF_BYTES


@pytest.mark.parametrize(
    ("T", "H", "E", "values"),
    [
        (1, 64, 2, {"top_k": 1}),
        (32768, 64, 8, TWO),
        (16384, 64, 8, {"top_k": 2, "num_cores": 1}),
        (4, 128, 1024, {"top_k": 32}),
        (4, 64, 8, {"top_k": 8}),
        (4, 64, 8, {"top_k": 2, **GROUPS}),
        (4, 64, 8, {"top_k": 8, **GROUPS, "topk_group": 4, "out_of_group_fill": 0.0}),
        (4, 64, 8, {"top_k": 2, "act_over_topk": True, "has_bias": True}),
    ],
)
def test_limits_are_reached(T: int, H: int, E: int, values: dict[str, Any]) -> None:
    check_router_topk(config_for(E, H, **values), T)


def test_the_bytes_that_are_too_many_are_those_of_one_core() -> None:
    config = config_for(512, 16384, top_k=2, weight_dtype="float32")
    for num_tokens, tokens_of_core in ((4, 2), (5, 3), (32768, 16384)):
        needed = sbuf_bytes(router_table(config, tokens_of_core, 1))
        with pytest.raises(ValueError, match=f"need {needed} bytes of SBUF per partition"):
            check_router_topk(config, num_tokens)


@pytest.mark.parametrize("count", [1, 127, 128, 129, 200, 256])
def test_the_used_partitions_are_those_of_the_fullest_tile(count: int) -> None:
    tokens = split_tokens(count, 0, 1)
    assert used_partitions(tokens) == max(tile_rows(tokens, n) for n in range(tokens.count))


@pytest.mark.parametrize(("tokens", "tiles"), [(1, 1), (127, 1), (128, 1), (129, 2), (256, 2)])
def test_each_tile_of_tokens_has_its_columns(tokens: int, tiles: int) -> None:
    table = router_table(config_for(8, 64, top_k=3), tokens, 1)
    assert table.affinities.shape == table.chosen.shape == (128, 3 * tiles)


def test_scores_that_are_all_one_are_ranked_by_their_logits() -> None:
    logits_TE = np.array([[30.0, 40.0, 20.0, 60.0]], np.float32)
    formula = RouterFormula(top_k=2, act_fn="sigmoid")
    ours = route_with_torch(torch.tensor(logits_TE), formula)
    for affinities_TK, index_TK in (
        reference.route(logits_TE, formula),
        (ours.expert_affinities_TK, ours.expert_index_TK),
    ):
        assert affinities_TK.tolist() == [[1.0, 1.0]]
        assert index_TK.tolist() == [[3, 1]]


def test_tiles_that_just_fit_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(8, 64, top_k=2)
    arrays = operands(300, config)
    needed = sbuf_bytes(router_table(config, 150, 2))
    orders = []
    for limit in (SBUF_BYTES, needed, needed - 1):
        monkeypatch.setattr("nki_kernels.route.kernel.SBUF_BYTES", limit)
        run = nki_sim.run(router_topk, *arrays, config, lnc=2)
        orders.append([record.op for record in run.trace])
    assert orders[0] == orders[1] != orders[2]
