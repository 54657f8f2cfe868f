"""prefill_layer with choices of another launch: what one launch that routes gives, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_kernels.common.formula import RouterFormula
from nki_kernels.layer import (
    GivenChoices,
    PrefillLayerConfig,
    check_prefill_layer,
    prefill_layer,
)
from nki_kernels.route import router_topk
from nki_sim import SimOptions
from tests.nki_kernels.layer.test_kernel import (
    CASES,
    Case,
    cost_of,
    draw_arrays,
    is_counted,
    operands_of,
)
from tests.nki_kernels.traces import measured_cost

NAMES = (
    "one-tile",
    "one-token",
    "one-core",
    "rank-of-four",
    "few-here",
    "room-of-one-core",
    "groups",
    "scaled-inputs",
    "shared-residual-broken",
    "broken-tokens",
    "all-broken",
    "whole-rows-broken",
)


def _given(config: PrefillLayerConfig) -> PrefillLayerConfig:
    """Return the same launch with choices of another one."""
    assert config.router is not None
    choices = GivenChoices(config.router.formula.top_k, config.router.num_experts)
    given = replace(config, router=None, given=choices, returns_routing=False)
    check_prefill_layer(given)
    return given


def _routed(case: Case, operands: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return affinities, choices in the numbers of this rank, and normalised tokens."""
    config = operands["config"].router
    affinities_TK, index_TK, *normed = nki_sim.run(
        router_topk,
        operands["hidden"],
        operands["router_weight"],
        None,
        operands["selection_bias"],
        operands["norm_weight"],
        config,
        lnc=case.num_cores,
    ).outputs
    return affinities_TK, index_TK - case.first, normed[0] if normed else operands["hidden"]


def _run_given(
    case: Case, operands: dict[str, Any], routed: tuple[Any, Any, Any], order: int = 0
) -> nki_sim.Run:
    """Run the launch that takes what another one chose."""
    no_router = dict.fromkeys(
        ("router_weight", "first_expert", "norm_weight", "selection_bias", "shared_gate")
    )
    affinities_TK, index_TK, hidden_TH = routed
    given = {
        **operands,
        **no_router,
        "config": _given(operands["config"]),
        "hidden": hidden_TH,
        "index": index_TK,
        "affinities": affinities_TK,
    }
    options = SimOptions(start_core=order)
    return nki_sim.run(prefill_layer, lnc=case.num_cores, options=options, **given)


@pytest.mark.parametrize("name", NAMES)
def test_two_launches_give_what_one_does(name: str) -> None:
    case = CASES[name]
    arrays, config = draw_arrays(case), replace(case.config(), returns_routing=True)
    operands = operands_of(case, arrays, config)
    whole = nki_sim.run(prefill_layer, lnc=case.num_cores, **operands).outputs
    routed = _routed(case, operands)
    run = _run_given(case, operands, routed)
    np.testing.assert_array_equal(run.outputs, whole[0])
    assert np.isnan(run.outputs[list(case.broken)]).all()
    assert not {each.kind for each in run.findings} - {"uninitialized", "output"}
    if is_counted(name):
        counted = cost_of(case, routed[1] + case.first, make=_given)
        assert counted == measured_cost(run.trace)
    again = _run_given(case, operands, routed, order=case.num_cores - 1)
    np.testing.assert_array_equal(again.outputs, run.outputs)


@pytest.mark.parametrize("act_fn", ["softmax", "sigmoid"])
def test_infinite_tokens_have_affinities_that_are_no_numbers(act_fn: str) -> None:
    case = Case(T=150, H=128, has_norm=False, router=RouterFormula(top_k=2, act_fn=act_fn))
    arrays = draw_arrays(case)
    hidden = arrays.hidden_TH.copy()
    hidden[17, 5], hidden[140, 0] = np.inf, -np.inf
    operands = operands_of(case, replace(arrays, hidden_TH=hidden), case.config())
    routed = _routed(case, operands)
    is_broken_T = np.isin(np.arange(case.T), (17, 140))
    np.testing.assert_array_equal(np.isnan(routed[0]).all(1), is_broken_T)
    np.testing.assert_array_equal(np.isnan(routed[0]).any(1), is_broken_T)
    output_TH = _run_given(case, operands, routed).outputs
    np.testing.assert_array_equal(np.isnan(output_TH).all(1), is_broken_T)
    np.testing.assert_array_equal(np.isnan(output_TH).any(1), is_broken_T)


def test_a_choice_that_was_dropped_adds_nothing() -> None:
    case = Case(T=60, H=128)
    operands = operands_of(case, draw_arrays(case), case.config())
    affinities_TK, index_TK, hidden_TH = _routed(case, operands)
    none_TK = np.where(np.arange(case.T)[:, None] < 7, -1, index_TK).astype(np.int32)
    output_TH = _run_given(case, operands, (affinities_TK, none_TK, hidden_TH)).outputs
    whole_TH = _run_given(case, operands, (affinities_TK, index_TK, hidden_TH)).outputs
    assert not output_TH[:7].any()
    np.testing.assert_array_equal(output_TH[7:], whole_TH[7:])


def _refused() -> dict[str, tuple[PrefillLayerConfig, str]]:
    config = Case().config()
    given = replace(_given(config), given=GivenChoices(2, 8))
    gated = Case(shared=64, gated=True).config()
    return {
        "neither": (replace(config, router=None), "given=None"),
        "both": (replace(config, given=GivenChoices(2, 8)), "given=GivenChoices"),
        "returned": (replace(given, returns_routing=True), "returns_routing=True"),
        "gate": (
            replace(gated, router=None, given=GivenChoices(2, 8), returns_routing=False),
            "has_gate=True",
        ),
        "no-spoils": (replace(given, out=replace(given.out, has_spoils=False)), "marks_broken"),
    }


@pytest.mark.parametrize("name", ["neither", "both", "returned", "gate", "no-spoils"])
def test_refusals_name_the_setting(name: str) -> None:
    config, shown = _refused()[name]
    with pytest.raises(ValueError, match=shown):
        check_prefill_layer(config)
