"""A harness of strangers that compares a kernel with its copy: the case's formula judges it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.bench import strangers

SOLUTION = """
@nki.jit
def solution(x):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out
"""
HARNESS = """
import nki
import nki.isa as nisa
import nki.language as nl
import torch

# SUBSTITUTE HERE

ref = solution

def test_nki(ref_func, test_func):
    x = torch.arange(16.0).reshape(4, 4) + 1
    return bool((ref_func(x) == test_func(x)).all())

if __name__ == "__main__":
    test_nki(ref, solution)
"""


@pytest.mark.parametrize(
    ("formula", "outcome"),
    [(None, "right"), ("x, last two axes exchanged", "wrong: off by"), ("cumsum(x)", "wrong: off")],
)
def test_a_formula_finds_what_a_copy_cannot(
    tmp_path: Path, formula: str | None, outcome: str
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "harness.py").write_text(HARNESS)
    (tmp_path / "theirs" / "solution.py").write_text(SOLUTION)
    case = {"source": "theirs", "file": "harness.py", "solution": "solution.py"}
    if formula is not None:
        case["formula"] = formula
    assert strangers.run_case(case, tmp_path).startswith(outcome)


def test_formulas_of_harnesses_are_known() -> None:
    cases = json.loads(strangers.LIST.read_text())["cases"]
    assert {each["formula"] for each in cases if "formula" in each} <= set(strangers.FORMULAS)
