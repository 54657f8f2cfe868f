"""The stages in front of the experts, each in a small kernel: norm, turning, router, gate."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_kernels.common import router_reference as reference
from nki_kernels.common.axes import AxisTiles, tile_axis
from nki_kernels.common.formula import RouterFormula
from nki_kernels.decode.norm import load_norm, load_tokens, normalize, transpose, transposed_banks
from nki_kernels.decode.router import (
    gate_tokens,
    load_gate,
    load_router,
    make_logits,
    pack_router_weight,
    pick_experts,
    weigh_experts,
)
from nki_sim import SimOptions
from nki_sim import isa as nisa
from nki_sim.language import api as nl
from tests.nki_kernels.decode.layer_cases import FAMILIES

BF16 = ml_dtypes.bfloat16
EPS = 1e-5


def norm_and_route(
    hidden: Any,
    norm_weight: Any,
    router_weight: Any,
    bias: Any,
    selection_bias: Any,
    gate: Any,
    formula: RouterFormula,
    h_axis: AxisTiles,
) -> Any:
    """Return x^T [h, H/h, T], index, affinities and gates, as the stages leave them on chip."""
    num_tokens = hidden.shape[0]
    num_experts = router_weight.shape[0] * router_weight.shape[3]
    shape = (h_axis.rows, h_axis.count, num_tokens)
    x_out = nl.ndarray(shape, nl.bfloat16, buffer=nl.shared_hbm)
    index_out = nl.ndarray((num_tokens, formula.top_k), nl.int32, buffer=nl.shared_hbm)
    affinity_out = nl.ndarray((num_tokens, formula.top_k), nl.float32, buffer=nl.shared_hbm)
    gate_out = nl.ndarray((128, num_tokens), nl.float32, buffer=nl.shared_hbm)
    tiles = load_tokens(hidden, h_axis)
    norm = load_norm(norm_weight, h_axis)
    router = load_router(router_weight, bias, selection_bias, formula, num_tokens)
    gate_sb = load_gate(gate)
    banks_ps = transposed_banks(h_axis, num_tokens)
    x_sb = nl.ndarray(shape, nl.bfloat16, buffer=nl.sbuf)
    logits = []
    for number in range(len(tiles)):
        rows = tiles[number].transposed_sb.shape[2]
        first = number * 128
        transpose(tiles[number], h_axis, banks_ps)
        part = x_sb[:, :, first : first + rows]
        normalize(part, tiles[number], norm, h_axis, EPS)
        logits.append(make_logits(x_sb, first, rows, router, h_axis, num_experts, norm.ones_sb))
    index_tiles, picked = pick_experts(logits, router, num_experts, formula)
    affinity_tiles = weigh_experts(logits, picked, num_experts, formula)
    gate_row_sb = gate_tokens(x_sb, gate_sb, h_axis)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=x_out, src=x_sb)
        nisa.dma_copy(dst=gate_out, src=gate_row_sb)
        for number in range(len(tiles)):
            first = number * 128
            stop = min(first + 128, num_tokens)
            nisa.dma_copy(dst=index_out[first:stop, :], src=index_tiles[number])
            nisa.dma_copy(dst=affinity_out[first:stop, :], src=affinity_tiles[number])
    return x_out, index_out, affinity_out, gate_out


FORMULAS: dict[str, dict[str, Any]] = {
    **{name: FAMILIES[name][0] for name in ("gpt-oss", "llama4", "deepseek")},
    "qwen3-moe": FAMILIES["qwen3"][0],
    "16-of-40": {"top_k": 16, "has_bias": True},
}
# name: (T, H, E, router dtype, formula); H of 320 has no equal tiles, 192 and 576 have
CASES: dict[str, tuple[int, int, int, Any, str]] = {
    "one-token": (1, 576, 128, BF16, "gpt-oss"),
    "one-token-uneven-H": (1, 320, 16, BF16, "qwen3-moe"),
    "two-tokens-groups": (2, 192, 32, BF16, "deepseek"),
    "four-tokens-float32": (4, 256, 32, np.float32, "deepseek"),
    "five-tokens": (5, 192, 5, BF16, "llama4"),
    "sixteen-tokens": (16, 576, 40, BF16, "16-of-40"),
    "sixty-four": (64, 320, 32, BF16, "deepseek"),
    "two-tiles": (130, 192, 16, BF16, "llama4"),
    "two-full-tiles-float32": (256, 128, 24, np.float32, "qwen3-moe"),
}


def arrays_of(T: int, H: int, E: int, dtype: Any, formula: RouterFormula) -> list[Any]:
    """Draw hidden, norm weight, packed router weight, biases and gate; None if not used."""
    rng = np.random.default_rng(T + H + E)
    bias = rng.normal(size=(1, E)).astype(np.float32)
    selection_bias = (0.1 * rng.normal(size=(1, E))).astype(np.float32)
    return [
        (3 * rng.normal(size=(T, H))).astype(BF16),
        (1 + 0.2 * rng.normal(size=(1, H))).astype(BF16),
        (rng.normal(size=(E, H)) / np.sqrt(H)).astype(dtype),
        bias if formula.has_bias else None,
        selection_bias if formula.has_selection_bias else None,
        (rng.normal(size=(1, H)) / np.sqrt(H)).astype(BF16),
    ]


def run_stages(
    arrays: list[Any], formula: RouterFormula, num_parts: int = 1, **options: Any
) -> list[Any]:
    """Run the kernel; return x [T, H] and the other outputs."""
    hidden, norm, weight, bias, selection_bias, gate = arrays
    axis = tile_axis(hidden.shape[1])
    outputs = nki_sim.run(
        norm_and_route,
        hidden,
        norm,
        pack_router_weight(weight, axis, num_parts),
        bias,
        selection_bias,
        pack_router_weight(gate, axis),
        formula,
        axis,
        lnc=2,
        options=SimOptions(**options),
    ).outputs
    turned = outputs[0]
    if axis.is_strided:
        x = turned.transpose(2, 0, 1).reshape(hidden.shape)
    else:
        x = turned.transpose(2, 1, 0).reshape(len(hidden), -1)[:, : hidden.shape[1]]
    return [x, *outputs[1:]]


def routed(x: Any, arrays: list[Any], formula: RouterFormula) -> tuple[Any, Any]:
    """Return affinities and index of the formula in float64, for x [T, H]."""
    _, _, weight, bias, selection_bias, _ = arrays
    logits = x.astype(np.float64) @ weight.astype(np.float64).T + (0 if bias is None else bias)
    return reference.route(logits, formula, selection_bias)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_stages_equal_the_formulas(case: str, num_parts: int) -> None:
    T, H, E, dtype, name = CASES[case]
    if 8 * num_parts > E:
        num_parts = 1
    formula = RouterFormula(**FORMULAS[name])
    arrays = arrays_of(T, H, E, dtype, formula)
    x, index, affinities, gates = run_stages(arrays, formula, num_parts)
    hidden, norm = arrays[0].astype(np.float64), arrays[1].astype(np.float64)
    exact = reference.rms_norm(hidden, norm, EPS)
    assert (np.abs(x.astype(np.float64) - exact) <= np.abs(exact) * 1.001 * 2.0**-8).all()
    # From the rounded x on everything is float32.
    expected_affinities, expected_index = routed(x, arrays, formula)
    np.testing.assert_array_equal(index, expected_index)
    np.testing.assert_allclose(affinities, expected_affinities, rtol=2e-5, atol=1e-6)
    gate = 1 / (1 + np.exp(-x.astype(np.float64) @ arrays[5].astype(np.float64)[0]))
    np.testing.assert_allclose(gates, np.broadcast_to(gate, gates.shape), rtol=2e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("num_tokens", [3, 9])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "deepseek"])
def test_a_token_without_numbers_stays_alone(name: str, num_tokens: int, value: float) -> None:
    formula = RouterFormula(**FORMULAS[name])
    arrays = arrays_of(num_tokens, 192, 32, BF16, formula)
    clean = run_stages(arrays, formula)
    arrays[0][1, 5] = value
    spoiled = run_stages(arrays, formula)
    others = np.arange(num_tokens) != 1
    for number in range(3):
        np.testing.assert_array_equal(clean[number][others], spoiled[number][others])
    assert np.isnan(spoiled[0][1, 5].astype(np.float32))
    assert ((spoiled[1] >= 0) & (spoiled[1] < 32)).all()


@pytest.mark.parametrize("case", ["two-tokens-groups", "sixty-four"])
def test_neither_unset_memory_nor_the_order_of_the_cores_matters(case: str) -> None:
    T, H, E, dtype, name = CASES[case]
    formula = RouterFormula(**FORMULAS[name])
    arrays = arrays_of(T, H, E, dtype, formula)
    usual = run_stages(arrays, formula)
    for options in ({"start_core": 1}, {"fill": 0}, {"preempt": 0.3, "seed": 2}):
        for one, two in zip(usual, run_stages(arrays, formula, 2, **options), strict=True):
            np.testing.assert_array_equal(one, two)
