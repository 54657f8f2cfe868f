"""Open features of NKI: each kernel settles its question, each fallback gives right results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.chip.fallbacks import answer, cost
from lab.chip.open_features.listing import OPEN_FEATURES, Fallback
from lab.chip.planted import Planted
from lab.chip.stand_in import StandIn

FALLBACKS = {fallback.switch: fallback for one in OPEN_FEATURES for fallback in one.fallbacks}
SWITCHES = ['PlanRequest(iterations="alone")', 'PlanRequest(missing="spare")']


@pytest.mark.parametrize("feature", OPEN_FEATURES, ids=lambda feature: feature.name)
def test_the_kernel_of_a_feature_settles_it(feature: Any) -> None:
    assert answer(feature, StandIn(0)) == ""
    assert "elements are wrong" in answer(feature, Planted(StandIn(0), "wrong"))
    assert "planted" in answer(feature, Planted(StandIn(0), "compile"))


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_fallback_is_right(switch: str) -> None:
    found = cost(FALLBACKS[switch])
    assert found["right"], found["why"]


@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_fallback_has_a_cost_on_the_shapes_of_a_model(switch: str) -> None:
    assert cost(FALLBACKS[switch], on_full=True)["cost"] > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("fallback", FALLBACKS.values(), ids=lambda fallback: fallback.switch)
def test_every_fallback_is_right(fallback: Fallback) -> None:
    found = cost(fallback)
    assert found["right"], found["why"]
    assert np.isfinite(found["cost"])
