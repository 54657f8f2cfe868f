"""Calibration: drift, switches, what each probe shows, and whole draws (slow)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.chip.calibrate import ROUNDS, conclude, main
from lab.chip.coefficients import COEFFICIENTS, LAUNCH, chip_with, start_values
from lab.chip.fit import CLOCK_ERROR, _Problem, find_switches
from lab.chip.model import ProbeModel
from lab.chip.observe import Observed, observe, probe_jobs, read_observed
from lab.chip.probes.listing import PROBES, SWITCH_PROBES
from lab.chip.rehearse import summarise
from lab.chip.series import Times, measure, without_drift
from lab.chip.stand_in import StandIn, timed
from nki_sim.hardware import SWITCHES, TRN2, Hardware
from nki_sim.lint.linter import lint_file
from nki_sim.time.costs import price_matmul, price_meeting
from nki_sim.trace import MatmulFacts, SyncFacts
from tests.repo.published.results import result

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def model() -> ProbeModel:
    return ProbeModel([timed(job) for job in probe_jobs()])


def test_probes_keep_to_the_dialect() -> None:
    files = [
        *(ROOT / "lab" / "chip" / "probes").glob("*.py"),
        ROOT / "lab" / "chip" / "open_features" / "kernels.py",
        ROOT / "lab" / "chip" / "open_features" / "tiles.py",
    ]
    findings = [
        str(finding)
        for file in files
        if file.name != "listing.py"
        for finding in lint_file(file, dialect="house")
    ]
    assert findings == []


def test_every_coefficient_moves_the_probe_that_is_there_for_it(model: ProbeModel) -> None:
    start = start_values()
    plain = model.ns(start, {})
    for number, probe in enumerate(PROBES):
        for name in set(probe.shows) - set(SWITCHES) - {"vector_floor_cycles"}:
            changed = model.ns({**start, name: 0.6 * start[name]}, {}, [number])[0]
            assert abs(changed / plain[number] - 1.0) > 0.01, (probe.name, name)


NO_TIMES = {
    "name",
    "generation",
    "cores_per_chip",
    "partitions",
    "sbuf_bytes_per_partition",
    "sbuf_usable_bytes_per_partition",
    "psum_banks",
    "psum_bank_bytes",
    "hbm_bytes_per_core",
    "dma_rings",
    "array_rows",
    "array_columns",
}
"""What a kernel is cut by; its instructions take as long on a chip with more of it."""


def _price_what_no_probe_has(chip: Hardware) -> list[Any]:
    """Price transposes and one-zero matmuls of float32, and collectives of three sizes."""
    matmul = MatmulFacts(128, 128, 512, "float32", "float32", "float32")
    priced: list[Any] = [price_matmul(matmul._replace(is_transpose=True), chip)]
    priced.append(price_matmul(matmul._replace(onezero=1), chip))
    for size in (1 << 16, 1 << 22, 1 << 27):
        reduce = SyncFacts("all_reduce", (), 8, moved_bytes=size, ranks=8)
        priced.append(price_meeting(reduce, chip))
    return [*priced, chip.launch_cost_ns(2)]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Hardware)])
def test_every_coefficient_moves_a_time(name: str, model: ProbeModel) -> None:
    is_shown = name in SWITCHES or any(name in reads for reads in model.reads)
    if name in NO_TIMES or is_shown:
        return
    changed = [TRN2.varied(name, factor) for factor in (0.1, 10.0)]
    usual = _price_what_no_probe_has(TRN2)
    assert any(_price_what_no_probe_has(chip) != usual for chip in changed)


def test_what_a_probe_is_said_not_to_depend_on_does_not_move_it(model: ProbeModel) -> None:
    start = start_values()
    for name in ("swdge_ns", "table_load_ns", "core_barrier_ns", "matmul_drain_ns"):
        changed = model.ns({**start, name: 2.0 * start[name]}, {})
        moved = np.flatnonzero(changed != model.ns(start, {})).tolist()
        assert moved
        assert all(name in model.reads[number] for number in moved)


def test_the_launch_is_in_every_time_once(model: ProbeModel) -> None:
    start = start_values()
    later = model.ns({**start, LAUNCH: start[LAUNCH] + 1000.0}, {})
    np.testing.assert_allclose(later - model.ns(start, {}), 1000.0)


def test_drift_is_taken_out_and_times_are_those_at_the_start() -> None:
    random = np.random.default_rng(0)
    true_ns = np.array([2e4, 5e4, 1e5, 3e5, 9e5] * 6)
    where = np.linspace(0.0, 1.0, 600)
    drift = 0.05 * where - 0.03 * np.sin(4.0 * where)
    log_ns = np.log(true_ns) + np.log1p(drift)[:, None]
    log_ns = log_ns + 0.03 * random.standard_normal(log_ns.shape)
    found = without_drift(log_ns)
    assert np.abs(found.ns / true_ns - 1.0).max() < 0.012
    assert np.abs(found.drift - drift).max() < 3 * CLOCK_ERROR
    assert np.all((found.error > 0.001) & (found.error < 0.003))


@pytest.mark.long
def test_the_bar_of_what_others_hide_holds_all_of_it() -> None:
    model = ProbeModel([timed(job) for job in probe_jobs() if job.name == "tiles at once"])
    # Loads of stationary tiles take so long that the gap between tiles hides behind them.
    truth = {**start_values(), "stationary_load_floor_cycles": 28.0, "tile_issue_cycles": 8.2}
    times = Times(ns=model.ns(truth, {}), error=np.full(len(model), 1e-3), drift=np.zeros(1))
    problem = _Problem(model, times, {})
    theta = np.zeros(len(COEFFICIENTS) + 1)
    number = COEFFICIENTS.index("tile_issue_cycles")
    theta[COEFFICIENTS.index("stationary_load_floor_cycles")] = np.log(
        28.0 / TRN2.stationary_load_floor_cycles
    )
    theta[number] = np.log(27.0 / TRN2.tile_issue_cycles)
    state = problem.at(theta)
    assert 27.0 * np.exp(-problem.reach(state, number, -1.0)) < 8.2
    assert 27.0 * np.exp(problem.reach(state, number, 1.0)) < 60.0


@pytest.mark.parametrize("seed", range(4))
def test_switches_are_found_from_two_probes_each(seed: int) -> None:
    device = StandIn(seed)
    jobs = {job.name: job for job in probe_jobs()}
    names = [name for pair in SWITCH_PROBES.values() for name in pair]
    times = measure([device.load(jobs[name]) for name in names], 400)
    found = find_switches(times, names)
    assert found == {name: device.truth[name] for name in SWITCHES}


def test_a_stand_in_is_the_same_chip_for_the_same_seed_and_hides_it() -> None:
    one, same, other = StandIn(5), StandIn(5), StandIn(6)
    assert one.truth == same.truth
    assert one.truth != other.truth
    for name, value in start_values().items():
        assert 0.5 <= one.truth[name] / value <= 2.0, name
    job = probe_jobs()[0]
    first, second = one.load(job), one.load(job)
    assert first.time_ns() != second.time_ns()  # noise


def test_all_coefficients_with_a_source_are_fitted_or_said_to_be_left_out() -> None:
    from lab.chip.coefficients import NOT_MEASURED

    guessed = {*TRN2.assumed_fields(), *TRN2.fields_of_kind("measured")}
    assert guessed <= {*COEFFICIENTS, *SWITCHES, *NOT_MEASURED}


def test_a_chip_has_the_coefficients_it_is_given() -> None:
    chip = chip_with({LAUNCH: 1.0, "hwdge_ns": 7.0, "ramp_start_share": 1.4}, {})
    assert (chip.hwdge_ns, chip.ramp_start_share, chip.swdge_ns) == (7.0, 1.0, TRN2.swdge_ns)


def test_times_of_other_probes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    Observed(
        device="d", kind="measured", probes=[1.0], errors=[0.1], largest_drift=0.0, kernels=[]
    ).write(path)
    with pytest.raises(ValueError, match="has 1 probes"):
        read_observed(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not times of probes"):
        read_observed(path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--against", "chip"], "must be sim: and a number"),
        (["--rounds", "3"], "at least 20"),
        (["--times", "x.json", "--against", "sim:1"], "contradicts"),
        ([], "no device"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(argv: list[str], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        main(argv)


def test_a_summary_names_what_was_not_recovered() -> None:
    def draw(estimate: float, **flags: Any) -> dict[str, Any]:
        one = {"estimate": estimate, "low": 0.9, "high": 1.1, "truth": 1.0, **flags}
        return {
            "device": "sim:0",
            "coefficients": {"a": one},
            "held_out": [{"kernel": "k", "predicted_us": 1.06, "true_us": 1.0}],
        }

    assert summarise([draw(1.05, barely_visible=False)])["wrong"] == ["sim:0: k"]
    assert "sim:0: a" in summarise([draw(1.2, barely_visible=False)])["wrong"]
    assert "sim:0: a" not in summarise([draw(1.2, barely_visible=True)])["wrong"]
    outside = draw(1.2, barely_visible=True, truth=1.2)
    assert "sim:0: a" in summarise([outside])["wrong"]


def test_the_published_rehearsal_recovers_every_coefficient_but_stationary_loads() -> None:
    """In two of 20 chips short matmuls hide them more than the fit tells."""
    found = result("chip_rehearsal")
    chips, names = zip(*(wrong.split(": ", 1) for wrong in found["wrong"]), strict=True)
    loads = {"stationary_load_speedup", "stationary_load_floor_cycles", "matmul_drain_ns"}
    assert (len({*chips}), {*names} - loads, found["draws"]) == (2, set(), 20)
    assert set(found["coefficients"]) == {*COEFFICIENTS, *SWITCHES}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 12])
def test_a_chip_that_nobody_knows_is_recovered(seed: int) -> None:
    device = StandIn(seed)
    observed = observe(device, ROUNDS, with_kernels=False)
    found = conclude(observed, device, with_conclusions=False).as_json()
    assert summarise([found])["wrong"] == []
    assert json.loads(json.dumps(found)) == found
