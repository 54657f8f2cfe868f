"""Open features of NKI: each kernel settles its question, each fallback gives right results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.chip.fallbacks import answer, cost
from neuron_moe.tools.chip.device import Job
from neuron_moe.tools.chip.open_features.listing import OPEN_FEATURES, Fallback
from neuron_moe.tools.chip.planted import Planted
from neuron_moe.tools.chip.stand_in import StandIn

FALLBACKS = {fallback.switch: fallback for one in OPEN_FEATURES for fallback in one.fallbacks}


@pytest.mark.parametrize("feature", OPEN_FEATURES, ids=lambda feature: feature.name)
def test_the_kernel_of_a_feature_settles_it(feature: Any) -> None:
    assert answer(feature, StandIn(0)) == ""
    assert "elements are wrong" in answer(feature, Planted(StandIn(0), "wrong"))
    assert "planted" in answer(feature, Planted(StandIn(0), "compile"))


@pytest.mark.parametrize(
    "switch", ['DecodeRequest(sums="sbuf")', 'DecodeRequest(loops="unrolled")']
)
def test_a_decode_fallback_is_right_and_has_a_cost(switch: str) -> None:
    found = cost(FALLBACKS[switch])
    assert found["right"], found["why"]
    assert found["cost"] >= 1.0


def test_a_fallback_changes_the_instructions() -> None:
    """Unrolled, no loop is left, and no engine copies by a register."""
    from lab.chip.fallbacks import with_changes
    from neuron_moe.tools.check.launcher import simulate
    from neuron_moe.tools.chip.cases import CASES
    from neuron_moe.tools.chip.held_out import jobs_of
    from neuron_moe.tools.chip.stand_in import timed

    def kinds(changes: dict[str, Any]) -> set[str]:
        job: Job = jobs_of(with_changes(CASES["small/decode"], changes), simulate)[0]
        return {op for op in timed(job).trace.ops if "loop" in op or "register" in op}

    assert kinds({})
    assert kinds({"loops": "unrolled"}) == set()


@pytest.mark.slow
@pytest.mark.parametrize("fallback", FALLBACKS.values(), ids=lambda fallback: fallback.switch)
def test_every_fallback_is_right(fallback: Fallback) -> None:
    found = cost(fallback)
    assert found["right"], found["why"]
    assert np.isfinite(found["cost"])
