"""decode_layer against its formula and against the torch layer: routers, shared experts, ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nki_kernels.common.formula import ExpertFormula, RouterFormula
from nki_kernels.decode.config import DecodeRequest, DecodeSizes, WeightForm
from nki_kernels.decode.layer_config import (
    LayerForm,
    check_decode_layer,
    make_layer_config,
)
from nki_kernels.decode.layer_cost import cost_decode_layer
from nki_kernels.decode.norm import _vector_share
from nki_kernels.decode.shared import num_parts, pack_shared_experts
from nki_sim import SimOptions
from tests.nki_kernels.decode.layer_cases import (
    BF16,
    FAMILIES,
    Case,
    draw,
    expected,
    operands_of,
    run,
    run_case,
    specs_of,
)
from tests.nki_kernels.traces import measured_cost

PACKED: dict[str, Any] = {"layout": "packed"}
E4M3: dict[str, Any] = {"format": "float8_e4m3", "has_scales": True}
CASES = {
    **{
        f"{family}-T{T}": Case(family, T)
        for family in ("gpt-oss", "qwen3", "deepseek", "llama4", "qwen2-moe", "mixtral")
        for T in (1, 4, 16)
    },
    "gpt-oss-T2": Case("gpt-oss", 2, N=23, E=23),
    "qwen3-T64": Case("qwen3", 64, N=24, E=6, first=12),
    "deepseek-T128": Case("deepseek", 128, N=32, E=8, first=8),
    "gpt-oss-T256": Case("gpt-oss", 256, N=8, E=8, H=128),
    "kimi-k3-16-of-896": Case("kimi-k3", 2, N=896, E=896, H=64, I=16),
    "prime-experts": Case("mixtral", 9, N=37, E=37, I=40),
    "rank-with-few-experts": Case("gpt-oss", 5, N=40, E=7, first=21),
    "rank-with-one-token": Case("qwen3", 1, N=40, E=5, first=10),
    "uneven-hidden": Case("deepseek", 3, H=320, options={"has_residual": True}),
    "one-element-over": Case("qwen3", 1, H=304),
    "one-token-over": Case("mixtral", 129, H=144),
    "one-element-over-T5": Case("gpt-oss", 5, H=304, options={"has_residual": True}),
    "packed-one-element-over": Case("deepseek", 2, H=304, options=PACKED),
    "uneven-hidden-T20": Case("gpt-oss", 20, H=320),
    "float32-router": Case("deepseek", 6, N=32, E=32, router_dtype=np.float32),
    "no-norm": Case("qwen2-moe", 12, has_norm=False, options={"has_residual": True}),
    "no-norm-T1": Case("gpt-oss", 1, has_norm=False),
    "no-norm-T130": Case("mixtral", 130, has_norm=False, H=128),
    "bfloat16-out": Case("llama4", 8, options={"output_dtype": "bfloat16", "has_residual": True}),
    "all-experts-T1": Case("mixtral", 1, options={"mode": "all"}),
    "wide-shared": Case("qwen2-moe", 4, options={"shared_width": 700}),
    "e4m3-shared": Case(
        "qwen2-moe", 4, options={"shared_width": 200, "shared_format": "float8_e4m3"}
    ),
    "packed-e5m2-shared": Case(
        "llama4", 7, H=320, options={**PACKED, "shared_format": "float8_e5m2"}
    ),
    "odd-shared": Case("qwen2-moe", 4, options={"shared_width": 45}),
    "packed-gpt-oss-T1": Case("gpt-oss", 1, options=PACKED),
    "packed-T7": Case("gpt-oss", 7, I=150, options=PACKED),
    "packed-uneven-hidden": Case("qwen2-moe", 5, H=320, options=PACKED),
    "packed-uneven-hidden-T30": Case("deepseek", 30, H=320, options=PACKED),
    "packed-uneven-hidden-T1": Case("gpt-oss", 1, H=320, options=PACKED),
    "packed-no-norm": Case("mixtral", 3, H=320, has_norm=False, options=PACKED),
    "packed-shared-of-64": Case("qwen3", 2, options={**PACKED, "shared_width": 128}),
    "packed-shared-of-128": Case("qwen3", 3, options={**PACKED, "shared_width": 256}),
    "packed-shared-uneven": Case("qwen3", 6, options={**PACKED, "shared_width": 257}),
    "packed-shared-one-core": Case(
        "qwen3", 2, num_cores=1, options={**PACKED, "shared_width": 100}
    ),
    "packed-shared-wide-hidden": Case(
        "qwen2-moe", 2, E=2, H=7168, options={**PACKED, "shared_width": 128}
    ),
    "e4m3-by-channel": Case("deepseek", 5, options={**E4M3, "down_scale": "channel"}),
    "e4m3-packed-T1": Case(
        "gpt-oss", 1, options={**E4M3, **PACKED, "down_scale": "channel", "has_down_bias": True}
    ),
    "e5m2-packed": Case(
        "gpt-oss",
        20,
        options={**E4M3, **PACKED, "format": "float8_e5m2", "down_scale": "expert"},
    ),
    "rows": Case("qwen2-moe", 100, options={"has_residual": True}),
    "rows-packed-gpt-oss": Case("gpt-oss", 128, H=320, options={**PACKED, "has_residual": True}),
    "rows-one-core": Case("llama4", 65, num_cores=1, options={"has_residual": True}),
    "turned-beside-shared": Case("qwen2-moe", 70, options={**E4M3, "down_scale": "channel"}),
    "one-core": Case("qwen2-moe", 11, num_cores=1, options={"has_residual": True}),
}
ORDERS = {
    "core-1-first": SimOptions(start_core=1),
    "preempted": SimOptions(preempt=0.3, seed=2),
    "zero-filled": SimOptions(fill=0),
}


def assert_close(output: Any, wanted: Any) -> None:
    """Inner activations are rounded to bfloat16, and the output may be."""
    error = output.astype(np.float64) - wanted
    rms = np.sqrt(np.square(wanted).mean())
    assert np.sqrt(np.square(error).mean()) <= 2.0**-8 * rms
    assert np.abs(error).max() <= 2.0**-6 * np.abs(wanted).max()


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_the_formula(name: str) -> None:
    case = CASES[name]
    config = case.config(returns_routing=True)
    arrays = draw(case)
    result = run(config, operands_of(config, arrays, case.first))
    output, affinities, index = result.outputs
    wanted = expected(case, arrays)
    np.testing.assert_array_equal(index, wanted.index_TK)
    np.testing.assert_allclose(affinities, wanted.affinities_TK, rtol=1e-4, atol=1e-6)
    assert_close(output, wanted.output_TH)
    assert not result.findings
    local = set(wanted.index_TK.flat) & set(range(case.first, case.first + case.E))
    assert measured_cost(result.trace) == cost_decode_layer(config, len(local))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["deepseek-T4", "rank-with-few-experts", "no-norm"])
def test_neither_unset_memory_nor_the_order_of_the_cores_matters(name: str, order: str) -> None:
    case = CASES[name]
    config = case.config()
    operands = operands_of(config, draw(case), case.first)
    usual = run(config, operands).outputs
    np.testing.assert_array_equal(run(config, operands, ORDERS[order]).outputs, usual)


@pytest.mark.parametrize("T", [1, 4, 40])
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek"])
def test_a_rank_that_no_token_chose_adds_only_what_all_tokens_take(family: str, T: int) -> None:
    case = Case(family, T, N=32, E=4, first=8, options={"has_residual": True})
    arrays = draw(case)
    bias = "router_bias" if family == "gpt-oss" else "selection_bias"
    arrays[bias][0, 8:12] = -100
    output = run_case(case, arrays)
    wanted = expected(case, arrays)
    assert not np.isin(wanted.index_TK, range(8, 12)).any()
    assert_close(output, wanted.output_TH)


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek", "llama4"])
def test_a_token_without_numbers_spoils_its_own_row_alone(family: str) -> None:
    case = Case(family, 9, N=32, E=32, options={"has_residual": True})
    arrays = draw(case)
    wanted = expected(case, arrays).output_TH
    arrays["hidden"][4, 7] = np.nan
    output = run_case(case, arrays)
    others = np.arange(9) != 4
    assert_close(output[others], wanted[others])
    assert np.isnan(output[4]).all()


@pytest.mark.parametrize("T", [1, 5, 40, 130])
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek", "llama4", "qwen2-moe"])
def test_padding_takes_shared_experts_alone(family: str, T: int) -> None:
    options = {"has_padding": True, "returns_routing": True, "has_residual": True}
    case = Case(family, T, N=32, E=16, first=8, options=options)
    arrays = draw(case)
    wanted = expected(case, arrays)
    none = {"gate_up_bias", "down", "down_bias"} & set(arrays)
    shared_only = expected(case, arrays | {name: 0 * arrays[name] for name in none}).output_TH
    is_real_T = np.arange(T) % 3 == 1
    config = case.config()
    arrays["is_real"] = is_real_T.astype(np.int32)[:, None]
    found = run(config, operands_of(config, arrays, case.first))
    output_TH, affinities_TK, index_TK = found.outputs
    assert_close(output_TH, np.where(is_real_T[:, None], wanted.output_TH, shared_only))
    np.testing.assert_array_equal(index_TK, wanted.index_TK)  # as the router chose
    np.testing.assert_allclose(affinities_TK, wanted.affinities_TK, rtol=2e-3)
    here = np.unique(index_TK[is_real_T])
    touched = config.moe.E if config.moe.mode == "all" else int(np.isin(here, range(8, 24)).sum())
    assert cost_decode_layer(config, touched) == measured_cost(found.trace)


def test_the_residual_may_be_the_input() -> None:
    case = Case("mixtral", 3, options={"has_residual": True})
    arrays = draw(case)
    arrays["residual"] = arrays["hidden"]
    assert_close(run_case(case, arrays), expected(case, arrays).output_TH)


# The layer of neuron_moe.


SIZES = DecodeSizes(T=4, H=128, I=32, E=8, K=2, num_experts=8)
ROUTER = RouterFormula(top_k=2, has_bias=True)
REFUSED: dict[str, dict[str, Any]] = {
    "router_dtype='float16': must be one of": {"form": LayerForm(router_dtype="float16")},
    "shared_width=-1": {"form": LayerForm(shared_width=-1)},
    "has_shared_gate=True: there are no shared": {"form": LayerForm(has_shared_gate=True)},
    "top_k=9": {"router": RouterFormula(top_k=9)},
    "K=2: must be top_k=3 of the router": {"router": RouterFormula(top_k=3)},
    "T=257: must be 1 to 256": {"sizes": replace(SIZES, T=257)},
    "has_gate=False": {"formula": ExpertFormula(has_gate=False)},
    "activation='relu', scale=1, has_gate=False": {
        "form": LayerForm(shared_width=64, shared_formula=ExpertFormula("relu", has_gate=False))
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_limits_are_refused_by_name(message: str) -> None:
    arguments = {"sizes": SIZES, "router": ROUTER, "formula": ExpertFormula(), **REFUSED[message]}
    with pytest.raises(ValueError, match=message):
        make_layer_config(**arguments)


# name: (T, H, I, E, N, shared width, router dtype, layout), of whole models on one rank
LARGEST = {
    "deepseek-v3-float32-router": (128, 7168, 2048, 4, 256, 2048, "float32", "packed"),
    "deepseek-v3-T256": (256, 7168, 2048, 2, 256, 2048, "bfloat16", "ehi"),
    "16-of-512": (64, 8192, 512, 4, 512, 1024, "float32", "packed"),
}


@pytest.mark.parametrize("name", LARGEST)
def test_what_the_configuration_accepts_fits_in_memory(name: str) -> None:
    T, H, I, E, N, width, dtype, layout = LARGEST[name]  # noqa: E741
    terms = FAMILIES["deepseek"][0] if N == 256 else {"top_k": 16, "has_bias": True}
    router = RouterFormula(**terms)
    form = LayerForm(
        has_norm=True,
        router_dtype=dtype,
        shared_width=width,
        has_shared_gate=True,
        has_residual=True,
        has_padding=True,
    )
    config = make_layer_config(
        DecodeSizes(T, H, I, E, router.top_k, N),
        router,
        ExpertFormula(),
        form,
        WeightForm(layout=layout),
        DecodeRequest(mode="all"),
    )
    run(config, specs_of(config), SimOptions(mode="indices"))  # raises where memory is too small


def test_a_layer_that_does_not_fit_is_refused() -> None:
    sizes = DecodeSizes(128, 8192, 64, 2, 8, 512, num_cores=1)
    form = LayerForm(has_norm=True, router_dtype="float32", shared_width=4096)
    with pytest.raises(ValueError, match="bytes of SBUF per partition, must be at most"):
        make_layer_config(sizes, RouterFormula(top_k=8), ExpertFormula(), form)


WRONG: dict[str, tuple[str, Any, str]] = {
    "missing": ("router_bias", None, r"router_bias: is missing, must be \[1, 16\]"),
    "unexpected": ("selection_bias", np.zeros((1, 16), np.float32), "selection_bias: is given"),
    "not-packed": ("router_weight", np.zeros((16, 192), BF16), r"Use pack_router_weight\(\)"),
    "shape": ("hidden", np.zeros((5, 192), BF16), r"hidden: shape \[5, 192\] must be \[4, 192\]"),
    "sizes": ("hidden", np.zeros((5, 192), BF16), r"Build the configuration from the same sizes"),
    "dtype": ("hidden", np.zeros((4, 192), np.float32), "hidden: dtype float32 must be bfloat16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operands_are_refused_by_name(name: str) -> None:
    operand, value, message = WRONG[name]
    case = Case("gpt-oss", 4)
    config = case.config()
    operands = {**operands_of(config, draw(case)), operand: value}
    with pytest.raises(ValueError, match=message):
        check_decode_layer(config, operands)


def test_shared_experts_of_another_shape_name_how_to_pack_them() -> None:
    case = Case("qwen2-moe", 4)
    operands = operands_of(case.config(), draw(case))
    ways = {"shared_gate": "pack_router_weight", "shared_gate_up": "pack_shared_experts"}
    for name in ways.keys() & operands.keys():
        wrong = {**operands, name: operands[name][:1, :1]}
        with pytest.raises(ValueError, match=rf"{name}: shape .* Use {ways[name]}\(\)"):
            check_decode_layer(case.config(), wrong)


@pytest.mark.parametrize("width", [10, 45, 300])
def test_packing_shared_experts_keeps_every_weight(width: int) -> None:
    case = Case("qwen2-moe", 4, options={"shared_width": width})
    shared = case.config().shared
    assert num_parts(width, 2) == shared.E
    assert shared.E % 2 == 0
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, width, case.H))
    gate_up, down = pack_shared_experts(shared, gate, up, gate.T)
    parts = np.concatenate(gate_up.reshape(shared.E, case.H, 2, -1).transpose(0, 2, 3, 1), axis=1)
    np.testing.assert_array_equal(parts[:, :width], [gate, up])
    assert not parts[:, width:].any()
    np.testing.assert_array_equal(np.concatenate(down)[:width], gate)


@pytest.mark.parametrize(("dtype", "parts"), [("bfloat16", 1), ("float32", 2)])
def test_the_cores_share_a_router_of_a_mebibyte(dtype: str, parts: int) -> None:
    sizes = DecodeSizes(T=1, H=2048, I=64, E=8, K=2, num_experts=192)
    config = make_layer_config(
        sizes, RouterFormula(top_k=2), ExpertFormula(), LayerForm(router_dtype=dtype)
    )
    assert config.router_parts == parts


def test_the_vector_engine_shares_its_passes_from_32_tokens_on() -> None:
    assert [_vector_share(9, rows) for rows in (1, 31, 32, 128)] == [9, 9, 6, 6]
