"""chip check: failures cost one row each, what is known is kept, machines and verdicts in words."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import nki_sim
from lab.check.chip_cases import CASES, FULL, SMALL
from lab.check.launcher import simulate
from lab.chip import check, worker
from lab.chip.duration import _kernels_of, check_sum
from lab.chip.fallbacks import with_changes
from lab.chip.held_out import jobs_of
from lab.chip.open_features.listing import ALIVE, OPEN_FEATURES
from lab.chip.planted import PLANTS
from lab.chip.stand_in import TIMES_ONLY, timed
from neuron_moe.tools.chip.environment import _language, read_environment
from neuron_moe.verdicts import verdicts
from nki_sim import UnknownValue

INDEX = "small/index"
ROOT = Path(__file__).parents[3]


def _row(tmp_path: Path, plant: str, case: str = INDEX) -> dict[str, Any]:
    stage = worker.Stage(tmp_path / "row.stage")
    return worker._run(case, "sim:1", plant, stage)


def test_a_kernel_that_is_right_has_its_times(tmp_path: Path) -> None:
    row = _row(tmp_path, "")
    assert (row["compiled"], row["right"], row["why"]) == (True, True, "")
    assert 5.0 < row["us"] < 100.0


@pytest.mark.parametrize(
    ("plant", "compiled", "words"),
    [
        ("compile", False, "does not compile: compiling index_blocks: RuntimeError: planted"),
        ("full-disk", False, "full disk while compiling index_blocks: .*No space left"),
        ("wrong", True, "wrong numbers: token_position_to_id"),
    ],
)
def test_a_planted_failure_is_one_row_and_a_sentence(
    tmp_path: Path, plant: str, compiled: bool, words: str
) -> None:
    row = _row(tmp_path, plant)
    assert (row["compiled"], row["right"]) == (compiled, False)
    assert re.match(words, row["why"]), row["why"]


def test_a_process_that_hangs_is_ended_with_all_it_started() -> None:
    status, _ = check.run_process(["sh", "-c", "sleep 60 & wait"], 1.0, os.environ)
    assert status is None


def test_a_process_that_crashes_has_its_signal_and_last_words() -> None:
    words = [sys.executable, "-c", "print('so'); import os; os.abort()"]
    status, output = check.run_process(words, 30.0, os.environ)
    assert status == -6
    assert "so" in output


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let workers answer at once; return which cases they were asked."""
    asked: list[str] = []

    def answer(options: Any, case: str, where: str, plant: str) -> dict[str, Any]:
        if case != ALIVE.name:
            asked.append(f"{where} {case}")
        is_right = not plant
        return {"compiled": True, "right": is_right, "us": 20.0, "why": plant}

    monkeypatch.setattr(check, "_in_a_process", answer)
    return asked


def _check(tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "result.json"
    state = ["--state", str(tmp_path / "state"), "--json", str(path)]
    (tmp_path / "state").mkdir(exist_ok=True)
    status = check.main([*argv, *state])
    return status, json.loads(path.read_text())


def test_one_failure_leaves_the_other_rows(tmp_path: Path, fake_worker: list[str]) -> None:
    argv = ["--against", "sim:1", "--only", "small", "--plant", f"hang:{INDEX}"]
    status, found = _check(tmp_path, *argv)
    rows = {row["name"]: row["outcome"] for row in found["rows"]}
    assert status == 1
    assert set(rows) == {case.id for case in SMALL}
    assert [name for name, outcome in rows.items() if outcome == "fails"] == [INDEX]
    assert "not tried" not in rows.values()


def test_the_same_command_goes_on_with_what_is_not_right(
    tmp_path: Path, fake_worker: list[str]
) -> None:
    argv = ["--against", "sim:1", "--match", "small/de"]
    _check(tmp_path, *argv, "--plant", "hang:small/decode")
    fake_worker.clear()
    status, found = _check(tmp_path, *argv)
    assert status == 0
    assert fake_worker == ["simulator small/decode", "sim:1 small/decode"]
    assert all(row["ratio"] == 1.0 for row in found["rows"])
    fake_worker.clear()
    _check(tmp_path, *argv, "--again")
    assert len(fake_worker) > 2


def test_without_a_device_nothing_is_tried(
    tmp_path: Path, fake_worker: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--against", "sim:1", "--match", INDEX, "--plant", "no-device"]
    status, found = _check(tmp_path, *argv)
    (row,) = found["rows"]
    assert status == 1
    assert (row["simulated_us"], row["us"], row["why"]) == (None, None, "not tried: see FAIL above")
    assert row["outcome"] == "not tried"
    assert not fake_worker
    assert "FAIL  device: no device" in capsys.readouterr().out


def test_a_machine_is_told_in_words(tmp_path: Path) -> None:
    facts = {fact.name: fact for fact in read_environment(tmp_path, {})}
    assert not facts["device"].is_right
    assert not facts["driver"].is_right
    assert facts["LNC"].is_right
    for name in ("dev", "sys/module/neuron", "sys/devices/virtual/dmi/id"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "dev" / "neuron0").touch()
    (tmp_path / "sys/module/neuron/version").write_text("2.24\n")
    (tmp_path / "sys/devices/virtual/dmi/id/product_name").write_text("trn2.3xlarge\n")
    facts = {fact.name: fact for fact in read_environment(tmp_path, {})}
    assert "NEURON_LOGICAL_NC_CONFIG=1" in read_lnc({"NEURON_LOGICAL_NC_CONFIG": "1"})
    assert facts["device"].text == "trn2.3xlarge: neuron0"
    assert facts["driver"].text == "neuron 2.24"


def read_lnc(variables: dict[str, str]) -> str:
    return next(fact.text for fact in read_environment(ROOT, variables) if fact.name == "LNC")


@pytest.mark.parametrize(
    ("version", "is_right", "words"),
    [
        ("0.7.0+g1", True, "nki 0.7.0+g1"),
        ("0.6.0+31049", True, "0.6 parses a subset of Python"),
        ("0.10.1", True, "nki 0.10.1"),
        ("1.0", True, "nki 1.0"),
        ("0.5.2", False, "older than 0.6. Install 0.7"),
    ],
)
def test_the_language_is_told_with_its_limits(version: str, is_right: bool, words: str) -> None:
    fact = _language(version)
    assert fact.is_right == is_right
    assert words in fact.text


@pytest.mark.parametrize("plant", ["hang", "hang:none", "no-device:small/index", "fire"])
def test_an_unknown_plant_is_refused(plant: str) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        check.main(["--against", "sim:1", "--plant", plant])


def test_the_minutes_are_a_sum_that_help_tells(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--help"])
    assert str(check_sum()) in " ".join(capsys.readouterr().out.split())


def test_the_sum_counts_the_launches_of_a_case() -> None:
    counted = sum(len(jobs_of(CASES[name], simulate)) for name in ("small/prefill", INDEX))
    assert counted == sum(_kernels_of(name) for name in ("small/prefill", INDEX))


@pytest.mark.long
def test_a_launch_that_routes_is_timed() -> None:
    """The router is in the same launch, so that the iterations of its loops need values."""
    layer = CASES["small/decode-layer"]
    wide = with_changes(layer, {"hidden": 4608, "num_global_experts": 32, "num_local_experts": 32})
    (job,) = jobs_of(wide, simulate)
    with pytest.raises(UnknownValue):
        nki_sim.run(job.kernel, *job.arguments, lnc=job.cores, options=TIMES_ONLY, **job.options)
    assert timed(job).total_us > 0


def test_rows_have_names_of_their_own_and_dangers_come_last() -> None:
    names = check.in_order()
    assert len(set(names)) == len(names) == len(SMALL) + len(FULL) + len(OPEN_FEATURES)
    dangers = [bool(check.danger(name)) for name in names]
    assert dangers == sorted(dangers)
    assert any(dangers)
    assert names[0] == OPEN_FEATURES[0].name


def test_what_is_dangerous_runs_only_if_asked_for_and_is_no_failure(
    tmp_path: Path, fake_worker: list[str]
) -> None:
    argv = ["--against", "sim:1", "--only", "probes", "--match", "skip"]
    status, found = _check(tmp_path, *argv)
    outcomes = [row["outcome"] for row in found["rows"]]
    assert (status, outcomes) == (0, [*["works"] * 4, "not tried"])
    assert "Run it with --dangerous" in found["rows"][-1]["why"]
    status, found = _check(tmp_path, *argv, "--dangerous")
    assert (status, [row["outcome"] for row in found["rows"]]) == (0, ["works"] * 5)
    # What is known is shown without the flag as well.
    _, found = _check(tmp_path, *argv)
    assert [row["outcome"] for row in found["rows"]] == ["works"] * 5


def test_verdicts_are_of_all_features_and_their_place_is_told(
    tmp_path: Path, fake_worker: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--against", "sim:1", "--only", "probes", "--match"]
    _check(tmp_path, *argv, "skipped rows")
    _check(tmp_path, *argv, "loops in", "--plant", "wrong:loops in a row")
    place = tmp_path / "state" / "verdicts.json"
    assert f"verdicts: {place}" in capsys.readouterr().out
    found = verdicts(place)
    assert set(found) == {feature.name for feature in OPEN_FEATURES}
    assert found["skipped rows"] == "works"
    assert found["loops in a row"] == "fails"
    assert found["skipped stores"] == "not tried"
    _check(tmp_path, *argv, "loops in", "--verdicts", str(tmp_path / "other.json"))
    assert verdicts(tmp_path / "other.json")["loops in a row"] == "works"
    assert verdicts(place) == found


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_every_plant_in_a_process_of_its_own(tmp_path: Path, plant: str) -> None:
    argv = ["--against", "sim:1", "--match", INDEX, "--limit-s", "40"]
    argv += ["--plant", f"{plant}:{INDEX}"]
    _, found = _check(tmp_path, *argv)
    words = {
        "compile": "does not compile",
        "crash": "ended by signal 6",
        "hang": "hangs: no answer",
        "wrong": "wrong numbers",
        "full-disk": "full disk",
    }
    (row,) = found["rows"]
    assert row["why"].startswith(words[plant])
    assert row["simulated_us"] > 0
