"""Planted dialect faults are found by rule and line; the accepted twins are clean."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nki_sim.lint import linter

HEADER = """\
import nki
import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

@nki.jit
def kernel(x, n):
"""
FAULT_LINE = HEADER.count("\n") + 1

# (rule, faulty body, accepted twin); both are bodies of `kernel`, the fault is in the first line.
BODIES = [
    ("NKI001", "try:\n    y = 1\nexcept ValueError:\n    y = 2", "y = 1"),
    ("NKI002", "raise ValueError('n')", "assert n == 1, 'n'"),
    ("NKI003", "del x", "x = None"),
    ("NKI004", "global counter", "counter = 1"),
    ("NKI005", "import numpy", "y = nl.add"),
    ("NKI006", "f = lambda y: y", "f = nl.add"),
    ("NKI007", "y = [i for i in range(n)]", "y = []\nfor i in range(n):\n    y.append(i)"),
    ("NKI007", "y = {str(i): i for i in range(n)}", "y = {'a': 1}"),
    ("NKI008", "y = tuple(i for i in range(n))", "y = tuple([1, 2])"),
    ("NKI008", "yield x", "return x"),
    ("NKI009", "match n:\n    case 1:\n        pass", "if n == 1:\n    pass"),
    ("NKI010", "y = kernel(*x)", "y = kernel(x, 1)"),
    ("NKI010", "y = kernel(**x)", "y = kernel(x=x, n=1)"),
    ("NKI010", "a, *b = x", "a, b = x"),
    ("NKI010", "y = {**x}", "y = x.copy()"),
    ("NKI012", "for i in range(n):\n    pass\nelse:\n    y = 1", "for i in range(n):\n    pass"),
    ("NKI012", "while n > 1:\n    n -= 1\nelse:\n    y = 1", "while n > 1:\n    n -= 1"),
    ("NKI013", "y = x @ x", "y = n * n"),
    ("NKI013", "x @= x", "n *= n"),
    ("NKI016", "y = x is n", "y = x == n"),
    ("NKI018", "y = 1 in x in x", "y = 1 in x"),
    ("NKI020", "y = (z := 1)", "z = 1"),
    ("NKI022", "with open('f'):\n    pass", "with nl.no_reorder():\n    pass"),
    ("NKI022", "with nl.no_reorder() as r:\n    pass", "with nl.no_reorder():\n    pass"),
    (
        "NKI022",
        "with nl.no_reorder(), nl.no_reorder():\n    pass",
        "with nl.no_reorder():\n    with nl.no_reorder():\n        pass",
    ),
    ("NKI023", "y = sorted(x)", "y = max(1, 2)"),
    ("NKI023", "y = getattr(x, 'shape')", "y = x.shape"),
    ("NKI024", "def inner(y):\n    pass", "def inner(y):\n    pass\nnl.fori_loop(0, n, inner)"),
    ("NKI027", "y = {1: 2}", "y = {'1': 2}"),
    ("NKI028", "y = 0x100000000", "y = 0xFFFFFFFF"),
    ("NKI029", "y = b'a'", "y = 'a'"),
    ("NKI029", "y = 1j", "y = 1.0"),
    ("NKI030", "class Inner(NKIObject):\n    pass", "y = NKIObject()"),
    ("NKI031", "y = {1, 2}", "y = [1, 2]"),
    ("NKI038", "y = nisa.register_alloc(2) == 2", "y = n == 2"),
]


def lint_body(body: str, dialect: linter.Dialect = "0.6") -> list[linter.Finding]:
    return linter.lint_source(
        HEADER + textwrap.indent(body, "    ") + "\n", "k.py", dialect=dialect
    )


@pytest.mark.parametrize(("rule", "faulty", "clean"), BODIES)
def test_a_planted_fault_is_found_at_its_line_and_its_twin_is_clean(
    rule: str, faulty: str, clean: str
) -> None:
    found = [(finding.rule, finding.line, finding.severity) for finding in lint_body(faulty)]
    assert (rule, FAULT_LINE, "error") in found
    assert lint_body(clean) == []


WARNED = [
    ("NKI036", "y=1", "np.sqrt(y)", "np.float32"),
    ("NKI036", "y=1", "numpy.linalg.norm(y)", "nl.sqrt(y)"),
    ("NKI037", "y=[]", "y", None),
    ("NKI037", "y=dict()", "y", None),
    (None, "y=()", "y", None),
]


@pytest.mark.parametrize(("rule", "default", "value", "clean"), WARNED)
@pytest.mark.parametrize(
    ("dialect", "severity"), [("0.7", "warning"), ("0.6", "warning"), ("house", "error")]
)
def test_what_python_would_do_while_compiling_is_warned_of(
    rule: str, default: str, value: str, clean: str, dialect: linter.Dialect, severity: str
) -> None:
    source = f"import nki\n@nki.jit\ndef kernel(x, {default}):\n    y = {{}}\n"
    found = linter.lint_source(source.format(value), dialect=dialect)
    assert [(each.rule, each.severity) for each in found] == ([(rule, severity)] if rule else [])
    if clean is not None:
        assert linter.lint_source(source.format(clean), dialect=dialect) == []


MODULES = [
    ("NKI011", "@functools.cache\n@nki.jit\ndef kernel(x):\n    pass\n"),
    ("NKI014", "@nki.jit\ndef kernel(*x):\n    pass\n"),
    ("NKI014", "@nki.jit\ndef kernel(**x):\n    pass\n"),
    ("NKI015", "@nki.jit\ndef kernel(x, *, n):\n    pass\n"),
    ("NKI015", "@nki.jit\ndef kernel(x, /, n):\n    pass\n"),
    ("NKI008", "@nki.jit\nasync def kernel(x):\n    pass\n"),
    ("NKI021", "class Plan(NKIObject, dict):\n    pass\n"),
    ("NKI006", "class Plan(NKIObject):\n    def f(self):\n        return lambda: 1\n"),
    ("NKI002", "@nki.jit\ndef kernel(x):\n    helper(x)\ndef helper(x):\n    raise x\n"),
    ("NKI006", "def stage(x):\n    nisa.memset(x, 0)\n    return lambda: 1\n"),
    ("NKI006", "def stage(x):\n    core_barrier(x, 0)\n    return lambda: 1\n"),
]


@pytest.mark.parametrize(("rule", "module"), MODULES)
def test_a_fault_of_signature_class_or_helper_is_found(rule: str, module: str) -> None:
    header = HEADER.partition("@nki.jit")[0] + "from nki.isa import core_barrier\n"
    assert [finding.rule for finding in linter.lint_source(header + module, dialect="0.6")] == [
        rule
    ]


JUMPS = [
    ("for i in nl.dynamic_range(x):\n    break", ["NKI025"]),
    ("for i in nl.dynamic_range(x):\n    return", ["NKI025"]),
    ("for i in nl.dynamic_range(x):\n    for j in range(n):\n        continue", []),
    ("for j in range(n):\n    break", []),
    ("with nl.no_reorder():\n    for i in nl.dynamic_range(x):\n        pass", ["NKI026"]),
    ("for i in nl.dynamic_range(x):\n    with nl.no_reorder():\n        pass", []),
]


@pytest.mark.parametrize(("body", "rules"), JUMPS)
def test_dynamic_loops_may_not_be_left_nor_ordered(body: str, rules: list[str]) -> None:
    errors = [finding.rule for finding in lint_body(body) if finding.severity == "error"]
    assert errors == rules


def test_forms_that_the_parser_tolerates_are_warnings_and_house_errors() -> None:
    identity, membership = "y = x is not None", "y = n in (1, 2)"
    assert [(f.rule, f.severity) for f in lint_body(identity)] == [("NKI017", "warning")]
    assert lint_body(membership) == []
    assert [(f.rule, f.severity) for f in lint_body(identity, "house")] == [("NKI017", "error")]
    assert [(f.rule, f.severity) for f in lint_body(membership, "house")] == [("NKI019", "error")]
    assert [f.rule for f in lint_body("for i, j in zip(x, x):\n    pass", "house")] == ["NKI032"]


def test_a_name_that_hides_a_builtin_is_not_taken_for_it() -> None:
    assert lint_body("sum = 1\ny = sum + 1") == []


def test_host_functions_may_use_all_of_python_unless_everything_is_checked() -> None:
    module = "def check(n):\n    if n not in {1, 2}:\n        raise ValueError(f'n={n}')\n"
    assert linter.lint_source(module, dialect="0.6") == []
    assert {f.rule for f in linter.lint_source(module, dialect="0.6", everything=True)} == {
        "NKI002",
        "NKI023",
        "NKI031",
    }


def test_the_message_names_file_line_construct_reason_and_way_out() -> None:
    (finding,) = lint_body("f = lambda y: y")
    assert str(finding) == (
        f"k.py:{FAULT_LINE}:9: error NKI006 lambda: there are no anonymous functions. "
        "Use a named function of the module."
    )


def test_text_that_is_no_python_is_one_finding() -> None:
    (finding,) = linter.lint_source("def f(:\n", "bad.py")
    assert (finding.rule, finding.path, finding.line) == ("NKI000", "bad.py", 1)


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(ValueError, match="dialect='loose': must be"):
        linter.lint_source("", dialect="loose")  # type: ignore[arg-type]


def helper_with_raise(n: int) -> None:
    raise ValueError(n)


def clean_function(n: int) -> int:
    return n + 1


def function_that_reaches_a_fault(n: int) -> int:
    helper_with_raise(n)
    return clean_function(n)


def test_a_function_object_is_followed_into_what_it_calls() -> None:
    assert linter.lint_kernel(clean_function, dialect="0.6") == []
    found = linter.lint_kernel(function_that_reaches_a_fault, dialect="0.6")
    rules = {(f.rule, Path(f.path).name) for f in found}
    assert ("NKI002", Path(__file__).name) in rules
    raise_line = helper_with_raise.__code__.co_firstlineno + 1
    assert raise_line in {
        f.line for f in linter.lint_kernel(helper_with_raise, dialect="0.6") if f.rule == "NKI002"
    }


class NKIObject:
    """Stands for the class of that name in nki.language."""


class FaultyPlan(NKIObject):
    def first(self) -> int:
        return sorted([1])[0]


class OtherClass:
    def first(self) -> int:
        return sorted([1])[0]


def function_with_a_record(n: int) -> int:
    return FaultyPlan().first() + n


def function_with_another_class(n: int) -> int:
    return OtherClass().first() + n


def test_a_record_class_is_kernel_code_and_another_class_is_not() -> None:
    assert {f.rule for f in linter.lint_kernel(function_with_a_record, dialect="0.6")} == {"NKI023"}
    assert linter.lint_kernel(function_with_another_class, dialect="0.6") == []


def test_only_functions_with_source_are_linted() -> None:
    with pytest.raises(TypeError, match="must be a Python function"):
        linter.lint_kernel(3)  # type: ignore[arg-type]


def test_the_command_prints_findings_and_fails_on_errors(tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.py"
    faulty.write_text(HEADER + "    f = lambda y: y\n")
    clean = tmp_path / "clean.py"
    clean.write_text(HEADER + "    return x\n")
    command = [sys.executable, "-m", "nki_sim.lint.linter", "--dialect", "0.6"]
    failed = subprocess.run(
        [*command, str(clean), str(faulty)], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert failed.stdout.startswith(f"{faulty}:{FAULT_LINE}:9: error NKI006")
    assert subprocess.run([*command, str(clean)], check=False).returncode == 0
