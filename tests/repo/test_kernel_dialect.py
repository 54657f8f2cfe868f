"""Kernels keep to what both front ends of the NKI compiler take, in the stricter form of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from nki_sim.lint.linter import lint_file
from nki_sim.lint.rules import DIALECTS, Dialect

KERNELS = sorted(Path(__file__).parents[2].joinpath("nki_kernels").rglob("*.py"))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_kernel_files_keep_to_the_dialects(path: Path, dialect: Dialect) -> None:
    assert [str(finding) for finding in lint_file(path, dialect=dialect)] == []


def test_a_lambda_in_a_kernel_is_found(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("import nki\n\n@nki.jit\ndef f(x):\n    return (lambda y: y)(x)\n")
    assert [finding.rule for finding in lint_file(path, dialect="house")] == ["NKI006"]
