"""chip check on a chip with public bugs: every row, the culprit by name, the verdicts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.check.chip_cases import CASES
from lab.check.launcher import simulate
from lab.chip import check, worker
from lab.chip.bugs import BUGS, FOLDER, Buggy
from lab.chip.device import Job
from lab.chip.devices import find_device
from lab.chip.held_out import jobs_of
from lab.chip.open_features.listing import ALIVE, OPEN_FEATURES
from lab.chip.stand_in import StandIn, timed
from neuron_moe.verdicts import verdicts
from tests.rows import thinned

WEDGING = "gathers that transpose and skip"
# What each bug does to the probes that meet it; the rest works.
MET = {
    "skipped-transpose": {WEDGING: "wedges"},
    "lnc": {},  # each job sets its own
    "two-launches": {"two launches in a program": "fails"},
    "scalar-dge": {"patterns of four levels": "fails"},
    "psum-search": {"the largest of PSUM": "fails"},
    "loop-sums": {"loops in a row": "fails"},
}
CULPRITS = sorted({name for probes in MET.values() for name in probes})
OTHERS = sorted({feature.name for feature in OPEN_FEATURES} - set(CULPRITS))


def run_here(
    command: Sequence[str], limit_s: float, variables: Mapping[str, str]
) -> tuple[int, str]:
    """Run a worker in this process instead of one of its own."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        for name, value in variables.items():
            patch.setenv(name, value)
        status = worker.main(list(command[3:]))
    return status, output.getvalue()


def checked(tmp_path: Path, *argv: str) -> tuple[int, list[dict[str, Any]], dict[str, str]]:
    """Run the check; return its status, rows and verdicts."""
    path, state = tmp_path / "result.json", tmp_path / "state"
    status = check.main([*argv, "--state", str(state), "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    return status, rows, verdicts(state / "verdicts.json")


@pytest.mark.parametrize("seed", thinned(range(20), 3))
def test_any_bugs_leave_every_other_row(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    bugs = draw.sample(sorted(BUGS), draw.randint(1, len(BUGS)))
    names = [*draw.sample(CULPRITS, 3), *draw.sample(OTHERS, 2)]
    if "skipped-transpose" in bugs and WEDGING not in names:
        names.append(WEDGING)
    draw.shuffle(names)
    monkeypatch.setattr(check, "run_process", run_here)
    monkeypatch.setattr(check, "in_order", lambda: names)  # also with the worst first
    argv = ["--against", f"sim:bugs:{','.join(bugs)}", "--dangerous"]
    _, rows, found = checked(tmp_path, *argv)
    expected = dict.fromkeys(names, "works")
    for bug in bugs:
        expected.update({name: out for name, out in MET[bug].items() if name in names})
    assert [row["name"] for row in rows] == names
    assert {row["name"]: row["outcome"] for row in rows} == expected
    assert all(row["seconds"] > 0 for row in rows)
    for feature in OPEN_FEATURES:
        assert found[feature.name] == expected.get(feature.name, "not tried")
    for row in rows:
        if row["outcome"] == "wedges":
            assert row["why"].startswith("the device does not answer after it. fails while running")


def test_the_culprit_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def noted(command: Sequence[str], *rest: Any) -> tuple[int, str]:
        ran.append(command[3])
        return run_here(command, *rest)

    monkeypatch.setattr(check, "run_process", noted)
    argv = ["--against", "sim:bugs", "--match", WEDGING]
    assert checked(tmp_path, *argv, "--dangerous")[0] == 1
    assert ran == [ALIVE.name, WEDGING, ALIVE.name, ALIVE.name]  # the last one: after the reset
    ran.clear()
    status, (row,), _ = checked(tmp_path, *argv, "--dangerous")
    assert (status, row["outcome"], ran) == (1, "wedges", [])
    checked(tmp_path, *argv, "--dangerous", "--again")
    assert WEDGING in ran


class Chip:
    """Stands for a chip's workers: wedged by one row until a file is there."""

    def __init__(self, revived: Path) -> None:
        self._revived, self._is_wedged = revived, False

    def __call__(self, _options: Any, name: str, where: str, _plant: str) -> dict[str, Any]:
        is_right = where == worker.SIMULATOR or not self._is_wedged or self._revived.exists()
        self._is_wedged = self._is_wedged or name == "small/prefill"
        return {"compiled": True, "right": is_right, "us": 2.0, "why": ""}


@pytest.mark.parametrize("resets", [True, False])
def test_a_chip_that_wedges_is_reset_or_left_alone(
    resets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    revived = tmp_path / "revived"
    monkeypatch.setattr(check, "_in_a_process", Chip(revived))
    monkeypatch.setattr(check, "_environment", lambda options: [])
    argv = ["--only", "small", *(["--reset", f"touch {revived}"] if resets else [])]
    status, rows, _ = checked(tmp_path, *argv)
    outcomes = {row["name"]: row["outcome"] for row in rows}
    assert status == 1
    assert outcomes["small/prefill"] == "wedges"
    names = list(outcomes)
    after = names[names.index("small/prefill") + 1 :]
    assert after
    assert {outcomes[name] for name in after} == {"works" if resets else "not tried"}
    why = next(row["why"] for row in rows if row["name"] == after[0])
    assert ("the device does not answer since small/prefill" in why) != resets


def test_a_device_that_never_answers_is_told_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "run_process", run_here)
    argv = ["--against", "sim:1", "--match", "skipped r", "--plant", f"compile:{ALIVE.name}"]
    status, (row,), found = checked(tmp_path, *argv)
    assert (status, row["outcome"], row["seconds"]) == (1, "not tried", 0.0)
    assert "does not answer from the start (see is-the-device-alive.log)" in row["why"]
    assert set(found.values()) == {"not tried"}


def job(feature: str, cores: int) -> Job:
    (one,) = [each for each in (ALIVE, *OPEN_FEATURES) if each.name == feature]
    arguments, _ = one.problem(np.random.default_rng(0))
    return Job(name="", kernel=one.kernel, arguments=arguments, options={}, cores=cores)


def test_an_lnc_that_the_program_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What became of all probes on one core before each job set its own."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    device = Buggy(StandIn(1), ["lnc"])
    assert device.load(job(ALIVE.name, 2)).run().shape == (2, 128, 64)
    with pytest.raises(RuntimeError, match=r"NCC_EVRF066.*#1388"):
        device.load(job(ALIVE.name, 1))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert device.load(job(ALIVE.name, 1)).run().shape == (1, 128, 64)


def test_a_wedged_device_answers_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    device = Buggy(StandIn(1), BUGS)
    good = device.load(job(ALIVE.name, 2))
    assert good.time_ns() > 0
    with pytest.raises(RuntimeError, match="DMA_ABORT"):
        device.load(job(WEDGING, 2)).run()
    for ask in (good.run, good.time_ns, Buggy(StandIn(2), []).load(job(ALIVE.name, 2)).run):
        with pytest.raises(RuntimeError, match="does not answer"):
            ask()


def test_only_bugs_that_there_are_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'rust' must be one of skipped-transpose, lnc"):
        find_device("sim:bugs:lnc,rust")
    with pytest.raises(ValueError, match=r"must be sim: and a number"):
        check.main(["--against", "sim:bug"])
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(ValueError, match=f"{FOLDER}: not set"):
        find_device("sim:bugs")


def wedges(name: str) -> bool:
    """Tell whether a launch of a case has a transposing gather that skips an index."""
    jobs = jobs_of(CASES[name], simulate)
    return any(BUGS["skipped-transpose"].meets(one, list(timed(one).trace)) for one in jobs)


@pytest.mark.parametrize("name", ["small/prefill", "small/prefill-split-on-H"])
def test_no_prefill_of_ours_wedges_a_device(name: str) -> None:
    assert not wedges(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_kernel_of_ours_wedges_a_device(name: str) -> None:
    assert not wedges(name)


def check_all(tmp_path: Path, bugs: Sequence[str]) -> None:
    """Run every row on a chip with some bugs, and compare with what the bugs do."""
    against = f"sim:bugs:{','.join(bugs)}"
    _, rows, found = checked(tmp_path, "--against", against, "--dangerous")
    outcomes = {row["name"]: row["outcome"] for row in rows}
    assert list(outcomes) == check.in_order()
    probes = {feature.name: "works" for feature in OPEN_FEATURES}
    for bug in bugs:
        probes |= MET[bug]
    assert found == {name: outcomes[name] for name in probes} == probes
    refused = {"scalar-dge", "psum-search"} & set(bugs)
    for name in outcomes.keys() - probes.keys():
        if "loop-sums" in bugs or refused:
            assert outcomes[name] in ("works", "fails", "wedges")
        else:
            assert outcomes[name] == "works"
    assert outcomes["small/index"] == outcomes["small/combine"] == "works"


@pytest.mark.slow
@pytest.mark.parametrize("bugs", [["skipped-transpose", "lnc", "two-launches"], list(BUGS)])
def test_a_check_with_bugs_has_every_row(
    bugs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in check.in_order() if not name.startswith("full/")]
    monkeypatch.setattr(check, "in_order", lambda: names)
    monkeypatch.setattr(check, "run_process", run_here)
    check_all(tmp_path, bugs)


@pytest.mark.slow
def test_a_whole_check_with_bugs_has_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "run_process", run_here)
    check_all(tmp_path, list(BUGS))


@pytest.mark.long
def test_a_wedged_device_is_reset_between_processes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    argv = ["chip", "check", "--against", "sim:bugs", "--dangerous", "--match", "that transpose"]
    done = subprocess.run(
        [sys.executable, "-m", "neuron_moe.tools.cli", *argv, "--json", str(path)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row["outcome"] for row in json.loads(path.read_text())["rows"]}
    assert list(rows.values()) == ["wedges"]
    assert verdicts(tmp_path / "chip_check" / "verdicts.json").items() >= rows.items()
    assert "verdicts: chip_check/verdicts.json" in done.stdout
