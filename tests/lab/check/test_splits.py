"""neuron-moe check kernels --splits: drawn splits of models, and faults that they must see."""

from typing import Any

import numpy as np
import pytest

from lab.check import kernels as check_kernels
from lab.check.kernel_cases import splits
from lab.check.kernel_cases.models import LAYERS
from lab.check.kernel_cases.splits import PHASES, drawn_cases
from lab.check.outcomes import Outcome
from lab.check.vendor_cases.case import Case

SMALL = 2e8  # multiply-accumulates
COUNT = 300


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return drawn_cases((), PHASES, COUNT, 0, 2e9)


def test_a_seed_draws_the_same_splits_and_each_once(drawn: list[Case]) -> None:
    assert drawn == drawn_cases((), PHASES, COUNT, 0, 2e9)
    assert len({case.id for case in drawn}) == COUNT
    others = drawn_cases((), PHASES, COUNT, 1, 2e9)
    assert len({case.id for case in drawn} & {case.id for case in others}) < COUNT // 10


def test_the_draw_reaches_all_models_degrees_phases_and_forms(drawn: list[Case]) -> None:
    names, tps, eps = zip(*(case.id.split("/")[:3] for case in drawn), strict=True)
    assert {*names} == {*LAYERS}
    assert {int(tp[2:]) for tp in tps} == {int(ep[2:]) for ep in eps} == {1 << n for n in range(7)}
    assert {case.params["phase"] for case in drawn} == {*PHASES}
    assert {case.params["is_sent"] for case in drawn} == {True, False}
    for case in drawn:
        assert (
            case.params["E_local"] * int(case.id.split("/ep")[1].split("/")[0])
            == (case.params["experts"])
        )


def small(phase: str, **wanted: Any) -> Case:
    """Return the first drawn case of a kind that has little to compute."""
    cases = drawn_cases(["qwen3-30b"], (phase,), 40, 0, SMALL)
    return next(
        case
        for case in cases
        if all(case.params[name] == value for name, value in wanted.items())
        and case.params["routing"] == "uniform"
    )


def outcome(case: Case) -> Outcome:
    return check_kernels.run_case(case, check_kernels.NO_LIMITS)


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("is_sent", [False, True])
def test_a_split_passes(phase: str, is_sent: bool) -> None:
    result = outcome(small(phase, is_sent=is_sent))
    assert result.outcome == "passed", result.reason
    assert result.simulated_us


def test_faults_in_values_and_by_the_order_of_cores_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, right = small("decode", is_sent=False), splits.launch
    found = right(case, splits.prefill.build(case, check_kernels.NO_LIMITS)[0], 0)

    def with_fault(fault: Any) -> str:
        def faulty(case: Case, problem: Any, start_core: int) -> Any:
            output, us, kernels = found
            return fault(output.copy(), start_core), us, kernels

        monkeypatch.setattr(splits, "launch", faulty)
        return outcome(case).reason

    def leans(output: np.ndarray, start_core: int) -> np.ndarray:
        output[0, 0] += 1e-6 * start_core * abs(output).max()
        return output

    assert with_fault(lambda output, _: output) == found[2]
    assert "1 elements differ with the other core first" in with_fault(leans)
    assert "elements off" in with_fault(lambda output, _: np.roll(output, 1, 1))


@pytest.mark.parametrize("arguments", [["--splits", "2"], ["--models", "--splits", "-1"]])
def test_a_number_of_splits_that_means_nothing_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="--splits"):
        check_kernels.main(arguments)
