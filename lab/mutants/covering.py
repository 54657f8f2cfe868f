"""Which tests run a line, and how long they take: the suite once, under `coverage`."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData

from lab.mutants.places import ROOMS, ROOT, Mutant, lines_of_use
from lab.mutants.trying import QUIET, in_fork, settle_in

# `_exit` saves what forked ranks ran, under the name of the test that forked them.
OPTIONS = "[run]\nparallel = true\npatch = _exit\nrelative_files = true\nsource = {rooms}\n"
# Tests of the rules of the tree, of commands, and of prices, where no mutants are made.
LEFT_OUT = (
    "tests/lab",
    "tests/repo",
    "tests/tools",
    "tests/nki_kernels/decode/test_fit",
    "tests/nki_kernels/prefill/test_fit",
    "tests/nki_kernels/prefill/test_candidates",
    "tests/models/test_family_configs",
    "tests/models/whole_model",
    "tests/neuron_moe/test_cuda_backend",
    "tests/nki_sim/timing",
    "tests/serving",
)
READER = "tests/golden/test_signatures.py"  # reads what stands in files: it runs no line of them
CHOSEN = "not slow and not device and not vllm"
FILE_LIMIT_S = 300.0
LONGEST = ("golden", "fuzz")


def test_files() -> list[str]:
    """Return the files of tests: those that take longest, then the largest first."""
    found = [file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py")]
    kept = [file for file in found if not str(file).startswith(LEFT_OUT)]

    def rank(file: Path) -> tuple[bool, int]:
        return file.parts[1] not in LONGEST, -(ROOT / file).stat().st_size

    return [str(file) for file in sorted(kept, key=rank)]


def run_under_coverage(file: str, tree: Path, folder: Path, limit_s: float) -> None:
    """Run a file of tests in a copy of the tree; leave data and outcomes in a new folder.

    These are the tests that CI runs. Nothing is learned from a file that runs out of time.
    """
    folder.mkdir(parents=True)
    rooms = ",".join(sorted({room.split("/")[0] for room in ROOMS}))
    (folder / "options").write_text(OPTIONS.format(rooms=rooms))
    in_fork(_run_under_coverage, (file, str(tree), str(folder)), min(FILE_LIMIT_S, limit_s))


def _run_under_coverage(file: str, tree: str, folder: str) -> None:
    settle_in(tree)
    import coverage
    import pytest

    coverage.Coverage(data_file=f"{folder}/data", config_file=f"{folder}/options").start()
    options = ["-p", "lab.mutants.contexts", f"--outcomes={folder}/outcomes", *QUIET]
    os._exit(pytest.main([*options, "-m", CHOSEN, file]))


class Covering:
    """The tests that notice a mutant, if any does.

    Args:
        folders: where `run_under_coverage` left its data.
        mutants: those that will be requested.
    """

    def __init__(self, folders: Iterable[Path], mutants: Iterable[Mutant]) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._uses = {mutant: lines_of_use(mutant) for mutant in mutants}
        self._lines: dict[tuple[str, int], set[str]] = {
            (str(mutant.path), line): set()
            for mutant, lines in self._uses.items()
            for line in lines | {mutant.line}
        }
        self._rooms: dict[Path, set[str]] = {Path(path).parent: set() for path, _ in self._lines}
        for folder in folders:
            if (folder / "outcomes").exists():
                outcomes = json.loads((folder / "outcomes").read_text())
                self.seconds |= outcomes["passed"]
                self.failed += outcomes["failed"]
            for file in folder.glob("data.*"):
                self._add(file)

    def _add(self, file: Path) -> None:
        data = CoverageData(file)
        data.read()
        for path in data.measured_files():
            room = self._rooms.get(Path(path).parent)
            if room is not None:
                for line, tests in data.contexts_by_lineno(path).items():
                    room.update(tests)
                    if (path, line) in self._lines:
                        self._lines[path, line].update(tests)

    def _using(self, mutant: Mutant) -> set[str]:
        """Return the tests that run a line whose result hangs on a mutant."""
        path = str(mutant.path)
        return set().union(*(self._lines[path, line] for line in self._uses[mutant]))

    def order(self, mutant: Mutant, budget_s: float) -> dict[str, float]:
        """Give tests that pass without the mutant, with their seconds.

        They run its line; or, where that runs while the file is imported, first those of lines that
        use what it defines, then those of its folder and the one that reads files. Tests of its own
        folder and of tests/golden, which see most, come first, and one case of each test before
        another; they end where they would take `budget_s`, all but the first.
        """
        using = self._using(mutant) & self.seconds.keys()
        found = using
        if mutant.runs_once or not using:
            room = self._rooms[mutant.path.parent]
            found = {test for test in self.seconds if test in room or test.startswith(READER)}
            found |= using
        chosen: dict[str, float] = {}
        spent = 0.0
        folders = (f"tests/{mutant.path.parent}/", "tests/golden/")
        turns = turns_of(sorted(found, key=lambda test: (self.seconds[test], test)))

        def rank(test: str) -> tuple[bool, bool, int, float, str]:
            is_far = not test.startswith(folders)
            return test not in using, is_far, turns[test], self.seconds[test], test

        for test in sorted(found, key=rank):
            spent += self.seconds[test]
            if chosen and spent > budget_s:
                break
            chosen[test] = self.seconds[test]
        return chosen


def turns_of(tests: Iterable[str]) -> dict[str, int]:
    """Number the cases of each test, in the order in which they are given."""
    cases: dict[str, int] = {}
    turns: dict[str, int] = {}
    for test in tests:
        function = test.partition("[")[0]
        turns[test] = cases[function] = cases.get(function, -1) + 1
    return turns
