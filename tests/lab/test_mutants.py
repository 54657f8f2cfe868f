"""A mutant is one changed piece of one line, and what counts is what tests say of that change."""

import ast
import json
import random
import shutil
import time
from pathlib import Path

import pytest

from lab.mutants import places
from lab.mutants.__main__ import Attack, parts_of, survivors
from lab.mutants.covering import Covering, turns_of
from lab.mutants.equivalent import EQUIVALENT
from lab.mutants.places import ROOMS, ROOT, all_mutants, lines_of_use, mutants_of


def test_every_mutant_changes_one_line_and_parses() -> None:
    mutants = all_mutants()
    assert {
        room for room in ROOMS if not any(str(m.path).startswith(room) for m in mutants)
    } == set()
    for mutant in random.Random(0).sample(mutants, 60):
        before = (ROOT / mutant.path).read_text().splitlines()
        after = mutant.source().splitlines()
        ast.parse(mutant.source())
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b]
        assert changed == [mutant.line], mutant


def test_every_mutant_that_is_called_equivalent_exists() -> None:
    files = {Path(path) for path, *_ in EQUIVALENT}
    found = {(str(m.path), *m.lines) for file in files for m in mutants_of(file)}
    assert [entry for entry in EQUIVALENT if entry[:3] not in found] == []


SILENT = """
@cached(maxsize=8)
def grown(boxes, array, x):
    array.setflags(write=False)
    if len(boxes) > _MAX_BOXES:
        boxes.merge()
    x = x.astype(int, copy=False)
    _CHUNK = 8
    _POOL_BYTES: Final = 32
    _check_facts(x, 3)
    raise ValueError(x + 1)
"""


def test_what_changes_no_result_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grown.py").write_text(SILENT)
    monkeypatch.setattr(places, "ROOT", tmp_path)
    changed = [mutant.lines for mutant in mutants_of(Path("grown.py"))]
    assert changed == [
        ("boxes.merge()", "pass"),
    ]


SOURCE = "def double(x):\n    return x * 2\n"
TESTS = """
import double

def test_it_runs():
    double.double(3)

def test_six():
    assert double.double(3) == 6

def test_it_runs_alone(request):
    assert len(request.session.items) == 1
"""


@pytest.mark.long
def test_what_fails_without_a_mutant_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "double.py").write_text(SOURCE)
    (tree / "test_double.py").write_text(TESTS)
    monkeypatch.setattr(places, "ROOT", Path(shutil.copytree(tree, tmp_path / "root")))
    by_two, by_three = mutants_of(Path("double.py"))
    runs, six, alone = (
        f"test_double.py::test_{name}" for name in ("it_runs", "six", "it_runs_alone")
    )
    tests = {by_two: {runs: 0.1, alone: 0.1}, by_three: {six: 0.1}}
    file = tmp_path / "results.json"
    attack = Attack(tests, time.monotonic() + 60, 7, file)
    attack.run([tree])
    assert attack.unsound == {alone}
    assert attack.survived == [by_two]
    assert attack.noticed == [by_three]
    assert json.loads(file.read_text())["survived"][0]["tests"] == [runs]
    assert survivors([by_two, by_three], file) == [by_two]
    again = Attack(tests, time.monotonic() - 1, 7, file)
    again.resume()
    again.run([tree])
    assert (again.survived, again.noticed, again.unsound) == ([by_two], [by_three], {alone})
    with pytest.raises(ValueError, match="of seed 7, not 8"):
        Attack(tests, 0.0, 8, file).resume()


def test_one_case_of_each_test_comes_before_another() -> None:
    assert turns_of(["a[1]", "b", "a[0]", "a[2]"]) == {"a[1]": 0, "b": 0, "a[0]": 1, "a[2]": 2}
    mutant = next(mutants_of(Path("nki_sim/isa/query.py")))
    covering = Covering([], [mutant])
    covering.seconds = {"far[0]": 1.0, "far[1]": 0.5, "tests/golden/near[0]": 9.0, "other": 2.0}
    covering._lines[str(mutant.path), mutant.line] = set(covering.seconds)
    ordered = list(covering.order(mutant, 100.0))
    assert ordered == ["tests/golden/near[0]", "far[1]", "other", "far[0]"]
    assert list(covering.order(mutant, 10.0)) == ordered[:2]


def test_few_tests_run_first_and_long_ones_alone() -> None:
    tests = {"a": 5.0, "b": 0.5, "c": 1.0, "d": 38.0, "e": 2.0, "f": 70.0, "g": 1.0}
    assert [[*part] for part in parts_of(tests)] == [["a", "b"], ["c", "d"], ["e"], ["f"], ["g"]]
    assert list(parts_of({})) == []


def test_no_mutant_is_tried_after_the_deadline(tmp_path: Path) -> None:
    mutant = next(mutants_of(Path("nki_sim/isa/query.py")))
    attack = Attack({mutant: {"tests/test_mutants.py": 0.1}}, time.monotonic() - 1)
    attack.run([tmp_path])
    assert attack.tried == 0


CONSTANTS = """
LIMIT = 3

class Sizes:
    rows: int = 4

    def area(self):
        return self.rows * 2

def grow(x, by=5):
    y = x + by
    return y

def shrink(x):
    return x - LIMIT
"""


def test_a_constant_is_tried_with_the_tests_that_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sizes.py").write_text(CONSTANTS)
    monkeypatch.setattr(places, "ROOT", tmp_path)
    found = {mutant.lines[0]: lines_of_use(mutant) for mutant in mutants_of(Path("sizes.py"))}
    assert found == {
        "LIMIT = 3": {15},
        "rows: int = 4": {8},
        "return self.rows * 2": {8},
        "def grow(x, by=5):": {11, 12},
        "y = x + by": {11},
        "return x - LIMIT": {15},
    }
