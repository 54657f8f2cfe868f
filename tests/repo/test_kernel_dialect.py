"""Kernels keep to what both front ends of the NKI compiler take, in the stricter form of ours."""

from __future__ import annotations

import ast
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import nki_sim
from lab.check.chip_cases import SMALL
from lab.check.kernels import NO_LIMITS, run_case
from lab.check.our_uses import case_params
from lab.check.vendor_cases.case import Case
from neuron_moe.spec import Tuning
from nki_sim.lint.linter import lint_file
from nki_sim.lint.rules import DIALECTS, Dialect
from tests.rows import thinned

KERNELS = sorted(Path(__file__).parents[2].joinpath("nki_kernels").rglob("*.py"))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_kernel_files_keep_to_the_dialects(path: Path, dialect: Dialect) -> None:
    assert [str(finding) for finding in lint_file(path, dialect=dialect)] == []


def test_a_lambda_in_a_kernel_is_found(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("import nki\n\n@nki.jit\ndef f(x):\n    return (lambda y: y)(x)\n")
    assert [finding.rule for finding in lint_file(path, dialect="house")] == ["NKI006"]


def _banned(node: ast.AST) -> str:
    """Name what the parser of NKI 0.6 refuses though it is plain Python; "" for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    name = ast.unparse(node.func)
    if name in ("min", "max") and len(node.args) > 2:
        return f"{name} of {len(node.args)}"
    if name == "list" and node.args and ast.unparse(node.args[0]).startswith("range("):
        return "list(range())"
    return "_replace()" if name.endswith("._replace") else ""


@cache
def _calls(file: str) -> list[tuple[int, str]]:
    """Return the lines of a file with such a call, and what it is."""
    tree = ast.parse(Path(file).read_text())
    return [(node.lineno, _banned(node)) for node in ast.walk(tree) if _banned(node)]


def _refused(code: types.CodeType) -> Iterator[str]:
    """Yield the lines of a function that have such a call."""
    last = max(line for _, _, line in code.co_lines() if line is not None)
    for line, what in _calls(code.co_filename):
        if code.co_firstlineno <= line <= last:
            yield f"{code.co_filename}:{line}: {what}"


@pytest.mark.parametrize("features", ["safe", "open"])
@pytest.mark.parametrize("case", thinned(SMALL, 4), ids=lambda case: case.id)
def test_a_kernel_runs_nothing_that_only_a_host_can(
    case: Case, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever function of ours a launch enters: not `min` of three, `list(range())`, `_replace`;
    and nobody goes through a record of buffers as through a list.
    """
    entered: set[types.CodeType] = set()
    run = nki_sim.run

    def noted(frame: types.FrameType, event: str, _argument: Any) -> None:
        if event == "call" and "/nki_kernels/" in frame.f_code.co_filename:
            entered.add(frame.f_code)

    def watched(*arguments: Any, **options: Any) -> nki_sim.Run:
        with pytest.MonkeyPatch.context() as patch:
            for table in list(_named_tuples()):
                patch.setattr(table, "__iter__", _refuse)
            threading.setprofile(noted)  # each core of a launch has a thread
            try:
                return run(*arguments, **options)
            finally:
                threading.setprofile(None)  # type: ignore[arg-type]

    monkeypatch.setattr(nki_sim, "run", watched)
    asked = {**case.params, **case_params(Tuning(features=features))}
    found = run_case(replace(case, params=asked), NO_LIMITS)
    assert found.outcome == "passed", found.reason
    assert len(entered) > 10
    assert sorted(line for code in entered for line in _refused(code)) == []


def _named_tuples() -> Iterator[type]:
    """Yield the records of buffers."""
    for name, module in sys.modules.items():
        if name.startswith("nki_kernels."):
            for value in vars(module).values():
                if isinstance(value, type) and hasattr(value, "_fields"):
                    yield value


def _refuse(table: Any) -> None:
    raise AssertionError(f"a kernel iterates over {type(table).__name__}")
