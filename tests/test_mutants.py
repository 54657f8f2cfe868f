"""The sampler of mutants changes one piece of one line, and the result is Python."""

import ast
import random
from pathlib import Path

from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.places import ROOMS, ROOT, all_mutants, mutants_of


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
