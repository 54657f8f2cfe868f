"""The sampler of mutants changes one piece of one line, and the result is Python."""

import ast
import random

from tests.mutants import ROOT, all_mutants


def test_every_mutant_changes_one_line_and_parses() -> None:
    mutants = all_mutants()
    assert len({mutant.path for mutant in mutants}) > 50
    for mutant in random.Random(0).sample(mutants, 60):
        before = (ROOT / mutant.path).read_text().splitlines()
        after = mutant.source().splitlines()
        ast.parse(mutant.source())
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b]
        assert changed == [mutant.line], mutant
