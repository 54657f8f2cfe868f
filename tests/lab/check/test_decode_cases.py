"""neuron-moe check kernels: decode cases, alone and in a block, small and from every model."""

import math
from typing import Any

import numpy as np
import pytest

from lab.check import kernels as check_kernels
from lab.check.kernel_cases import decode, decode_block
from lab.check.kernel_cases.decode_models import (
    TOKENS,
    decode_model_cases,
    quick_cases,
)
from lab.check.kernel_cases.models import LAYERS
from lab.check.vendor_cases.case import Case, Limits, Skipped
from tests.rows import thinned

NO_LIMITS = Limits(macs=math.inf, input_bytes=math.inf)
DECODE = {
    "lnc": 2,
    "tokens": 6,
    "hidden": 256,
    "intermediate": 96,
    "experts": 5,
    "top_k": 2,
    "act_fn": "Swish",
    "affinity_scaling_mode": "POST_SCALE",
    "dtype": "bfloat16",
    "clamp": True,
    "bias": True,
}
RANK = {"num_experts": 20, "ep_rank": 2}
BLOCK = {
    "lnc": 2,
    "is_all_expert": False,
    "batch": 3,
    "seqlen": 2,
    "hidden": 256,
    "intermediate": 64,
    "num_global_experts": 12,
    "num_local_experts": 12,
    "top_k": 4,
    "router_fn": "SOFTMAX",
    "act_fn": "SiLU",
    "affinity_scaling_mode": "POST_SCALE",
    "weight_dtype": "bfloat16",
    "dtype": "bfloat16",
    "has_shared_expert": False,
    "bias": False,
    "clamp": False,
    "router_act_first": True,
    "norm_topk_prob": True,
}
# kernel, variant and params by name
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "selective": ("moe_tkg", "selective", DECODE),
    "all-experts": ("moe_tkg", "all_expert", DECODE | {"top_k": None}),
    "one-token": ("moe_tkg", "selective", DECODE | {"tokens": 1}),
    "one-expert-for-all": ("moe_tkg", "selective", DECODE | {"routing": "one-expert", "top_k": 1}),
    "rank": ("moe_tkg", "", DECODE | RANK),
    "rank-without-hit": ("moe_tkg", "selective", DECODE | RANK | {"routing": "no-hit"}),
    "rank-without-hit-all": ("moe_tkg", "all_expert", DECODE | RANK | {"routing": "no-hit"}),
    "window-of-speculation": ("moe_tkg", "selective", DECODE | {"tokens": 20}),
    "pre-scale": ("moe_tkg", "selective", DECODE | {"affinity_scaling_mode": "PRE_SCALE"}),
    "no-scale": ("moe_tkg", "all_expert", DECODE | {"affinity_scaling_mode": "NO_SCALE"}),
    "float16": ("moe_tkg", "selective", DECODE | {"dtype": "float16", "clamp": False}),
    "unrouted-tokens": ("moe_tkg", "all_expert", DECODE | {"routed_token_ratio": 0.5}),
    "odd-hidden": ("moe_tkg", "selective", DECODE | {"hidden": 250}),
    "fp8-rows": ("moe_tkg", "selective", DECODE | {"quant_dtype": "float8_e4m3"}),
    "mxfp4": ("moe_tkg", "all_expert_mx", DECODE | {"quant_dtype": "float4_e2m1fn_x4"}),
    "mxfp4-expert-scale": (
        "moe_tkg",
        "selective_mx",
        DECODE | {"quant_dtype": "float4_e2m1fn_x4", "down_scale": "expert", "layout": "packed"},
    ),
    "packed": ("moe_tkg", "selective", DECODE | {"layout": "packed"}),
    "one-core": ("moe_tkg", "selective", DECODE | {"lnc": 1}),
    "block": ("moe_block_tkg", "selective", BLOCK),
    "block-all": ("moe_block_tkg", "all_expert", BLOCK | {"is_all_expert": True}),
    "block-rank": (
        "moe_block_tkg",
        "selective",
        BLOCK | {"num_local_experts": 3, "bias": True, "clamp": True},
    ),
    "block-fp8": ("moe_block_tkg", "selective", BLOCK | {"weight_dtype": "float8_e4m3"}),
    "block-padded": ("moe_block_tkg", "selective", BLOCK | {"hidden_actual": 208}),
    "block-groups": (
        "moe_block_tkg",
        "",
        BLOCK
        | {
            "router_fn": "SIGMOID",
            "n_group": 4,
            "topk_group": 2,
            "has_selection_bias": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "block-shared": (
        "moe_block_tkg",
        "",
        BLOCK
        | {
            "has_shared_expert": True,
            "shared_width": 80,
            "has_shared_gate": True,
            "has_residual": True,
        },
    ),
    "block-pre-scale": (
        "moe_block_tkg",
        "",
        BLOCK | {"affinity_scaling_mode": "PRE_SCALE", "top_k": 1, "router_fn": "SIGMOID"},
    ),
}


def entry(name: str, **changes: Any) -> Case:
    kernel, variant, params = CASES[name]
    return Case(
        id=name,
        kernel=kernel,
        variant=variant,
        platform="trn2",
        params=params | changes,
        rtol=0.05 if "fp8" in name or "mxfp4" in name else 0.02,
        atol=1e-5,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_small_cases_of_every_kind_pass(name: str) -> None:
    result = check_kernels.run_case(entry(name), NO_LIMITS)
    assert result.outcome == "passed", result.reason
    assert result.simulated_us is not None


@pytest.mark.long
@pytest.mark.parametrize(
    "case", thinned(quick_cases(), 4, pytest.mark.slow), ids=lambda case: case.id
)
def test_a_rank_of_every_model_passes(case: Case) -> None:
    result = check_kernels.run_case(case, NO_LIMITS)
    assert result.outcome == "passed", result.reason


def test_cases_of_models_keep_their_sizes() -> None:
    cases = decode_model_cases([])
    assert {case.id.split("/")[0] for case in cases} == set(LAYERS)
    experts = [case for case in cases if case.kernel == "moe_tkg"]
    assert {case.params["tokens"] for case in experts} == set(TOKENS)
    for case in experts:
        layer, params = LAYERS[case.id.split("/")[0]], case.params
        tp, ep = (int(part[2:]) for part in case.id.split("/")[1:3])
        assert (params["hidden"], params["intermediate"]) == (layer.H, layer.I // tp)
        assert params["top_k"] == layer.K
        if "to fit" not in case.variant:
            assert (params["experts"], params["num_experts"]) == (layer.E // ep, layer.E)
    assert sum("to fit" in case.variant for case in experts) < 0.05 * len(experts)


def test_some_ranks_of_models_have_no_hit() -> None:
    case = next(c for c in decode_model_cases(["deepseek-v3"]) if c.id.endswith("tp1/ep64/T2"))
    problem, rank, _ = decode.build(case, NO_LIMITS)
    assert (problem.index_TK < 0).all()
    assert rank.num_experts == 256


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"experts": 40, "top_k": None}, "K 40 -> 32"),
        ({"tokens": 300, "experts": 1, "top_k": 1}, "T 300 -> 256 to fit"),
        ({"dtype": "float16"}, "float16 -> bfloat16"),
        ({"hidden": 250}, "H 250 -> 256"),
    ],
)
def test_what_differs_from_a_case_is_said(changes: dict[str, Any], reason: str) -> None:
    _, _, note = decode.build(entry("selective", **changes), NO_LIMITS)
    assert reason in note


@pytest.mark.parametrize(
    "changes", [{"act_fn": "tanh"}, {"ep_rank": 7}, {"routing": "no-hit"}], ids=str
)
def test_what_the_kernel_does_not_have_is_skipped(changes: dict[str, Any]) -> None:
    with pytest.raises(Skipped):
        decode.build(entry("selective", **changes), NO_LIMITS)


def test_worse_rounding_than_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = decode.formula
    monkeypatch.setattr(decode, "torch_path", lambda problem, _: exact(problem))
    result = check_kernels.run_case(entry("selective"), NO_LIMITS)
    assert result.outcome == "failed"
    assert "rms error" in result.reason


def test_another_choice_of_experts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode_block.reference.route

    def in_another_order(*args: Any, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        affinities, index = right(*args, **kwargs)
        return affinities[:, ::-1], np.ascontiguousarray(index[:, ::-1])

    monkeypatch.setattr(decode_block.reference, "route", in_another_order)
    result = check_kernels.run_case(entry("block"), NO_LIMITS)
    assert result.outcome == "failed"
    assert "tokens choose other experts" in result.reason
