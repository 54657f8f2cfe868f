"""Check kernel source against what the front ends of the NKI compiler accept.

This module walks the syntax tree of kernels. NKI 0.7 lets Python run a kernel, so its rules are
those on values that only the device knows (`values.py`), on loops and on their bodies. NKI 0.6
reads a subset of Python, which a simulator, running plain Python, cannot check; the rules follow
the NKI language guide (aws-neuron-sdk, nki/get-started/nki-language-guide.rst) and, where the guide
is silent, the open front end KLR (KLR/NKI/Simplify.lean), which is the stricter reading.

Only code that runs inside a kernel is checked: functions decorated with ``nki.jit``, functions that
issue ``nki.isa`` or ``nki.collectives`` operations, whatever these reach by name, and the record
classes derived from ``NKIObject``. Host code in the same file (shape checks, cost models) may use
all of Python.

Command line: ``python -m nki_sim.lint.linter [--dialect 0.7|0.6|house] FILE...``; the exit status
is 1 if an error was found.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nki_sim.lint.older import old_uses
from nki_sim.lint.rules import DIALECTS, RULES, Dialect, Finding, Rule, Severity
from nki_sim.lint.scope import (
    FunctionNode,
    dotted,
    kernel_side,
    last_name,
    local_names,
    loop_bodies,
    module_names,
    references,
    scope_of,
    unwrap,
)
from nki_sim.lint.values import lint_values, results_of

_BUILTINS = frozenset(
    {"isinstance", "type", "slice", "print", "min", "max", "abs", "str", "bool", "int", "float"}
    | {"divmod", "tuple", "list", "dict", "len", "range", "enumerate", "zip", "Ellipsis"}
)
_DECORATORS = frozenset({"staticmethod", "dataclass", "dataclasses.dataclass", "jit", "nki.jit"})
_BASES = frozenset(
    {"NKIObject", "nl.NKIObject", "nki.language.NKIObject", "Enum", "enum.Enum"}
    | {"NamedTuple", "typing.NamedTuple"}
)
_DYNAMIC_LOOPS = frozenset({"dynamic_range", "fori_loop", "while_loop"})
_NUMPY = frozenset({"np", "numpy"})
_MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_STATEMENTS = (
    ast.Pass,
    ast.Expr,
    ast.Assert,
    ast.Return,
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.If,
    ast.For,
    ast.While,
    ast.Break,
    ast.Continue,
    ast.With,
    ast.FunctionDef,
)
_EXPRESSIONS = (
    ast.Constant,
    ast.JoinedStr,
    ast.FormattedValue,
    ast.Name,
    ast.Attribute,
    ast.Tuple,
    ast.List,
    ast.Dict,
    ast.Subscript,
    ast.Slice,
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.IfExp,
    ast.Call,
)
_FORBIDDEN: tuple[tuple[type[ast.AST] | tuple[type[ast.AST], ...], str], ...] = (
    ((ast.Try, ast.TryStar), "NKI001"),
    (ast.Raise, "NKI002"),
    (ast.Delete, "NKI003"),
    ((ast.Global, ast.Nonlocal), "NKI004"),
    ((ast.Import, ast.ImportFrom), "NKI005"),
    (ast.Lambda, "NKI006"),
    (_COMPREHENSIONS, "NKI007"),
    (
        (
            ast.GeneratorExp,
            ast.Yield,
            ast.YieldFrom,
            ast.Await,
            ast.AsyncFor,
            ast.AsyncWith,
            ast.AsyncFunctionDef,
        ),
        "NKI008",
    ),
    (ast.Match, "NKI009"),
    (ast.Starred, "NKI010"),
    (ast.NamedExpr, "NKI020"),
    (ast.ClassDef, "NKI030"),
    (ast.Set, "NKI031"),
)


def _finding(
    rule: Rule, severity: Severity, path: str, line: int, column: int, detail: str
) -> Finding:
    construct = f"{rule.construct} `{detail}`" if detail else rule.construct
    return Finding(path, line, column, rule.id, severity, construct, rule.why, rule.accepted)


def _found(
    rule: Rule, dialect: Dialect, path: str, first_line: int, node: ast.AST, detail: str
) -> list[Finding]:
    """Return the finding about a node, none if the dialect accepts it."""
    severity = rule.severity(dialect)
    if severity is None:
        return []
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    return [_finding(rule, severity, path, line + first_line - 1, column + 1, detail)]


class _FunctionLinter(ast.NodeVisitor):
    """Collects the findings of one function that runs inside a kernel."""

    def __init__(
        self,
        path: str,
        dialect: Dialect,
        defined: frozenset[str],
        first_line: int,
        results: Mapping[str, str],
    ) -> None:
        self.path = path
        self.dialect = dialect
        self.defined = defined  # names that hide a built-in
        self.first_line = first_line
        self.results = results  # of the functions of the file
        self.findings: list[Finding] = []
        self._dynamic_loops = 0  # dynamic loops around the current statement
        self._static_loops = 0  # static loops inside the innermost dynamic one
        self._no_reorder = 0
        self._loop_bodies: frozenset[str] = frozenset()
        self._is_body_of_loop = False

    def report(self, rule_id: str, node: ast.AST, detail: str = "") -> None:
        """Record one finding, unless the dialect accepts the construct."""
        self.findings += _found(
            RULES[rule_id], self.dialect, self.path, self.first_line, node, detail
        )

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith | ast.AsyncFunctionDef):
            self.report("NKI046", node)
        for kinds, rule_id in _FORBIDDEN:
            if isinstance(node, kinds):
                self.report(rule_id, node)
                break
        else:
            if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
                self.report("NKI034", node, type(node).__name__)
            elif isinstance(node, ast.expr) and not isinstance(node, _EXPRESSIONS):
                self.report("NKI035", node, type(node).__name__)
        super().generic_visit(node)

    # Definitions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.lint_function(node, inner=True)

    def lint_function(self, node: FunctionNode, *, inner: bool = False) -> None:
        """Check the signature, the decorators and the body of one function."""
        if not inner:
            is_parsed = self.dialect == "0.6"
            lint_values(node, self.report, is_parsed=is_parsed, results=self.results)
        is_loop_body = inner and node.name in self._loop_bodies
        if isinstance(node, ast.AsyncFunctionDef):
            self.report("NKI008", node, node.name)
            self.report("NKI046", node, node.name)
        if inner and not is_loop_body:
            self.report("NKI024", node, node.name)
        for decorator in node.decorator_list:
            name = dotted(decorator)
            if name not in _DECORATORS:
                self.report("NKI011", decorator, name or ast.unparse(decorator))
        arguments = node.args
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                self.report("NKI014", extra, extra.arg)
        only = [*arguments.posonlyargs, *arguments.kwonlyargs]
        if only:
            self.report("NKI015", only[0], only[0].arg)
        for default in [*arguments.defaults, *(value for value in arguments.kw_defaults if value)]:
            is_new = isinstance(default, ast.Call) and dotted(default) in ("list", "dict", "set")
            if is_new or isinstance(default, _MUTABLE):
                self.report("NKI037", default, ast.unparse(default))
            self.visit(default)
        state = self._loop_bodies, self._dynamic_loops, self._static_loops, self._is_body_of_loop
        self._loop_bodies = frozenset(name for name, _ in loop_bodies(node))
        if is_loop_body:
            self._dynamic_loops, self._static_loops, self._is_body_of_loop = 0, 0, True
        for statement in node.body:
            self.visit(statement)
        self._loop_bodies, self._dynamic_loops, self._static_loops, self._is_body_of_loop = state

    # Statements

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:  # the annotation is not evaluated
            self.visit(node.value)

    def visit_For(self, node: ast.For) -> None:
        if node.orelse:
            self.report("NKI012", node, "for")
        if isinstance(node.target, ast.Tuple | ast.List):
            self.report("NKI032", node.target)
        is_dynamic = isinstance(node.iter, ast.Call) and last_name(node.iter) == "dynamic_range"
        if is_dynamic:
            self.report("NKI033", node.iter)
        self.visit(node.target)
        self.visit(node.iter)
        self._loop(node.body, is_dynamic=is_dynamic)
        for statement in node.orelse:
            self.visit(statement)

    def visit_While(self, node: ast.While) -> None:
        if node.orelse:
            self.report("NKI012", node, "while")
        self.visit(node.test)
        self._loop([*node.body, *node.orelse], is_dynamic=False)

    def _loop(self, body: list[ast.stmt], *, is_dynamic: bool) -> None:
        static_outside = self._static_loops
        self._dynamic_loops += is_dynamic
        self._static_loops = 0 if is_dynamic else static_outside + 1
        for statement in body:
            self.visit(statement)
        self._dynamic_loops -= is_dynamic
        self._static_loops = static_outside

    def _jump(self, node: ast.Break | ast.Continue) -> None:
        if self._dynamic_loops and not self._static_loops:
            self.report("NKI025", node, type(node).__name__.lower())

    visit_Break = visit_Continue = _jump

    def visit_Return(self, node: ast.Return) -> None:
        if self._dynamic_loops:
            self.report("NKI025", node, "return")
        if node.value is not None:
            self.visit(node.value)

    def visit_With(self, node: ast.With) -> None:
        item = node.items[0]
        is_known = (
            len(node.items) == 1
            and item.optional_vars is None
            and isinstance(item.context_expr, ast.Call)
            and last_name(item.context_expr) == "no_reorder"
            and not item.context_expr.args
            and not item.context_expr.keywords
        )
        if not is_known:
            self.report("NKI022", node, ast.unparse(item.context_expr))
        self._no_reorder += is_known
        for statement in node.body:
            self.visit(statement)
        self._no_reorder -= is_known

    # Expressions

    def visit_Call(self, node: ast.Call) -> None:
        if self._no_reorder and last_name(node.func) in _DYNAMIC_LOOPS:
            self.report("NKI026", node, last_name(node.func))
        name = dotted(node.func)
        if name.partition(".")[0] in _NUMPY and "." in name:
            self.report("NKI036", node, name)
        for keyword in node.keywords:
            if keyword.arg is None:
                self.report("NKI010", keyword.value, "**" + ast.unparse(keyword.value))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        is_read = isinstance(node.ctx, ast.Load)
        if (
            is_read
            and node.id not in self.defined
            and hasattr(builtins, node.id)
            and node.id not in _BUILTINS
        ):
            self.report("NKI023", node, node.id)

    def _operator(self, node: ast.BinOp | ast.AugAssign) -> None:
        if isinstance(node.op, ast.MatMult):
            self.report("NKI013", node)
        self.generic_visit(node)

    visit_BinOp = visit_AugAssign = _operator

    def visit_Compare(self, node: ast.Compare) -> None:
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(operator, ast.Is | ast.IsNot):
                is_none = isinstance(right, ast.Constant) and right.value is None
                self.report("NKI017" if is_none else "NKI016", node)
            elif isinstance(operator, ast.In | ast.NotIn):
                self.report("NKI018" if len(node.ops) > 1 else "NKI019", node)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                self.report("NKI010", value, "**" + ast.unparse(value))
            elif isinstance(key, ast.Constant) and not isinstance(key.value, str):
                self.report("NKI027", key, repr(key.value))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool | float | str) or value is None or value is Ellipsis:
            return
        if not isinstance(value, int):
            self.report("NKI029", node, repr(value))
        elif not -(2**31) <= value < 2**32:
            self.report("NKI028", node, repr(value))


def _older(tree: ast.AST, path: str, dialect: Dialect, first_line: int = 1) -> list[Finding]:
    """Return the findings about names of older dialects."""
    findings: list[Finding] = []
    for use in old_uses(tree):
        known = use.old._asdict()
        rule = RULES[use.rule]
        rule = replace(rule, why=rule.why.format(**known), accepted=rule.accepted.format(**known))
        findings += _found(rule, dialect, path, first_line, use.node, use.name)
    return findings


def _lint(linter: _FunctionLinter, node: ast.AST) -> list[Finding]:
    """Return the findings of a function or class, none of other statements."""
    if isinstance(node, ast.ClassDef):
        _lint_class(linter, node)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        linter.lint_function(node)
    return linter.findings


def _lint_class(linter: _FunctionLinter, node: ast.ClassDef) -> None:
    unknown = [base for base in node.bases if dotted(base) not in _BASES]
    for base in unknown:
        linter.report("NKI021", base, dotted(base) or ast.unparse(base))
    if len(node.bases) > 1 and not unknown:
        linter.report("NKI021", node.bases[1], "more than one base")
    for decorator in node.decorator_list:
        if last_name(decorator) != "dataclass":
            linter.report("NKI011", decorator, dotted(decorator))
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            linter.lint_function(statement)


def lint_source(
    source: str,
    path: str = "<string>",
    *,
    dialect: Dialect = "0.7",
    everything: bool = False,
) -> list[Finding]:
    """Check the kernel side of one module.

    Args:
        source: text of the module.
        path: name used in the findings.
        dialect: "0.7" is what the tracer takes, "0.6" what the parser before it takes; "house" is
            what both take, and adds this project's rules (no membership test, no identity test, one
            loop variable).
        everything: check every function and class, host code too.

    Returns:
        The findings in file order; empty if the code keeps to the dialect. Text that is no Python
        gives the one finding NKI000.

    Raises:
        ValueError: unknown dialect.
    """
    if dialect not in DIALECTS:
        raise ValueError(
            f"dialect={dialect!r}: must be '0.7', '0.6' or 'house'. Use '0.7' for NKI of today."
        )
    try:
        tree = ast.parse(source, filename=path)
    except SyntaxError as error:
        return [
            _finding(
                RULES["NKI000"], "error", path, error.lineno or 1, error.offset or 1, error.msg
            )
        ]
    top_names = module_names(tree)
    if everything:
        nodes: Sequence[ast.AST] = tree.body
    else:
        nodes = kernel_side(tree)
    findings: list[Finding] = []
    results = results_of(tree)
    for node in nodes:
        defined = frozenset(top_names | local_names(node))
        linter = _FunctionLinter(path, dialect, defined, 1, results)
        findings += _lint(linter, node)
    return sorted(findings + _older(tree, path, dialect))


def lint_file(
    path: str | Path, *, dialect: Dialect = "0.7", everything: bool = False
) -> list[Finding]:
    """Check the kernel side of one file; see :func:`lint_source`."""
    return lint_source(
        Path(path).read_text(encoding="utf-8"), str(path), dialect=dialect, everything=everything
    )


def lint_kernel(kernel: Callable[..., Any], *, dialect: Dialect = "0.7") -> list[Finding]:
    """Check one kernel and every Python function it reaches by name, in other modules too.

    Args:
        kernel: a function, or the object that ``nki.jit`` made of it.
        dialect: as in :func:`lint_source`.

    Raises:
        TypeError: the object is no Python function with source text.
    """
    pending: list[Any] = [unwrap(kernel)]
    if not isinstance(pending[0], types.FunctionType):
        raise TypeError(
            f"kernel={kernel!r}: must be a Python function. Pass the function given to nki.jit."
        )
    seen: set[int] = set()
    findings: list[Finding] = []
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        try:
            lines, first_line = inspect.getsourcelines(item)
        except (OSError, TypeError) as error:
            if item is unwrap(kernel):
                raise TypeError(f"kernel={kernel!r}: its source text cannot be found.") from error
            continue
        node = ast.parse(textwrap.dedent("".join(lines))).body[0]
        scope = scope_of(item)
        linter = _FunctionLinter(
            inspect.getsourcefile(item) or "<unknown>",
            dialect,
            frozenset(set(scope) | local_names(node)),
            max(first_line, 1),
            _results_in(inspect.getsourcefile(item)),
        )
        findings += _lint(linter, node)
        findings += _older(node, linter.path, dialect, linter.first_line)
        pending.extend(references(node, scope))
    return sorted(findings)


@functools.cache
def _results_in(path: str | None) -> dict[str, str]:
    """Return `results_of` a file of functions."""
    source = "".join(linecache.getlines(path or ""))
    return results_of(ast.parse(source))


def main(argv: list[str] | None = None) -> int:
    """Lint the named files and print the findings."""
    parser = argparse.ArgumentParser(
        prog="nki-sim lint",
        description="Check kernels against the NKI language.",
        epilog="nki-sim lint --precedent FILE.py:NAME ARGUMENT ... runs a kernel instead, and lists"
        " which uses of instructions no public kernel shows; with --help it tells more.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.py", help="with kernels in it")
    parser.add_argument(
        "--dialect",
        choices=DIALECTS,
        default="0.7",
        help="what may be written: 0.7: all that a tracer takes (default); 0.6: the subset of "
        "Python that older front ends parse; house: both, as kernels here are written",
    )
    parser.add_argument(
        "--everything",
        action="store_true",
        help="all functions of a file; without it kernels and what they call",
    )
    arguments = parser.parse_args(argv)
    for path in arguments.files:
        if not path.is_file():
            parser.error(f"{path}: no such file. Name Python files with kernels")
    findings = [
        finding
        for path in arguments.files
        for finding in lint_file(path, dialect=arguments.dialect, everything=arguments.everything)
    ]
    sys.stdout.write("".join(f"{finding}\n" for finding in findings))
    return int(any(finding.severity == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
