"""Values that only the device knows, and what Python may do with them: the linter's second pass.

A name is followed inside its function only, and only if everything assigned to it is such a value:
a tensor of `nki.language`, a register, a scalar, the counter of a loop, or the result of a function
of the same file that always returns one. So what is reported is certain.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from nki_sim.lint.scope import (
    FunctionNode,
    dotted,
    is_jitted,
    last_name,
    local_names,
    loop_bodies,
)

Report = Callable[..., None]
_LANGUAGE: Final = frozenset({"nl", "nki.language", "language"})
_ISA: Final = frozenset({"nisa", "isa", "nki.isa"})
_TENSORS: Final = frozenset(
    {"ndarray", "zeros", "ones", "full", "zeros_like", "empty_like", "shared_constant"}
    | {"shared_identity_matrix", "load", "matmul", "transpose", "softmax", "broadcast_to"}
)
_VIEWS: Final = frozenset(
    {"ap", "reshape", "permute", "view", "broadcast", "select", "slice", "expand_dims", "squeeze"}
)
_NUMBERS: Final = frozenset({"int", "float", "range", "min", "max", "abs", "divmod", "bool", "sum"})
_GROWS: Final = frozenset({"append", "extend", "insert", "pop", "remove", "clear", "update"})
_TENSOR_TYPES: Final = frozenset({"ndarray", "NkiTensor"})


def lint_values(
    node: FunctionNode, report: Report, *, is_parsed: bool, results: Mapping[str, str]
) -> None:
    """Report conditions, numbers and operators of values that only the device knows.

    Args:
        node: a function that runs inside a kernel.
        report: takes a rule, a node and a detail.
        is_parsed: whether the front end is that of NKI 0.6, where `while register:` is a loop and
            a tensor as a condition means that it is not None.
        results: kinds of what the functions of the file return, of `results_of`.
    """
    _ValueLinter(report, is_parsed, results).lint(node)


class _ValueLinter(ast.NodeVisitor):
    """Walks a function; see `lint_values`."""

    def __init__(self, report: Report, is_parsed: bool, results: Mapping[str, str]) -> None:
        self.report = report
        self.is_parsed = is_parsed
        self._kinds = {f"{name}()": kind for name, kind in results.items()}
        self._bodies: dict[str, str] = {}
        self._own: frozenset[str] = frozenset()  # names of the present loop body
        self._names: set[str] | None = None  # of instructions, in a loop body
        self._python_loops = 0

    def lint(self, node: FunctionNode) -> None:
        """Check a function, and those inside it."""
        if is_jitted(node):
            for part in _without_functions(node.body):
                if isinstance(part, ast.Yield | ast.YieldFrom):
                    self.report("NKI046", part, node.name)
        self._enter(node, loop="")

    def _enter(self, node: FunctionNode, loop: str) -> None:
        state = self._kinds, self._bodies, self._own, self._names, self._python_loops
        local = local_names(node)
        hidden = local | {f"{name}()" for name in local}
        outer = {name: kind for name, kind in self._kinds.items() if name not in hidden}
        self._kinds = _kinds_in(node, outer, loop)
        self._bodies = dict(loop_bodies(node))
        if loop:
            self._own, self._names, self._python_loops = frozenset(local), set(), 0
            self._check_body(node, loop)
        for statement in node.body:
            self.visit(statement)
        self._kinds, self._bodies, self._own, self._names, self._python_loops = state

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node, self._bodies.get(node.name, ""))

    def kind(self, node: ast.AST) -> str:
        """Return "tensor", "register", "scalar" or "counter"; '' if nothing is known."""
        return kind_of(node, self._kinds)

    # Bodies of loops.

    def _check_body(self, node: FunctionNode, loop: str) -> None:
        returns = [part for part in _without_functions(node.body) if isinstance(part, ast.Return)]
        gives = [part for part in returns if part.value is not None and not _is_none(part.value)]
        if loop == "fori_loop" and gives:
            self.report("NKI041", gives[0], f"{node.name} of fori_loop returns a value")
        if loop == "while_loop" and not gives:
            self.report("NKI041", node, f"{node.name} of while_loop returns no register")
        for part in _without_functions(node.body):
            if isinstance(part, ast.Nonlocal | ast.Global):
                self.report("NKI042", part, ", ".join(part.names))
            changed = _changed_in_place(part)
            if changed and changed not in self._own and not self._kinds.get(changed):
                self.report("NKI042", part, changed)

    def visit_For(self, node: ast.For) -> None:
        if self.kind(node.iter) == "tensor":
            self.report("NKI039", node.iter, ast.unparse(node.iter))
        self._loop(node)

    def visit_While(self, node: ast.While) -> None:
        is_loop = self.is_parsed and self.kind(node.test) == "register"
        if not is_loop:
            self._condition(node.test)
        self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> None:
        self._python_loops += 1
        self.generic_visit(node)
        self._python_loops -= 1

    # Conditions.

    def _condition(self, test: ast.expr) -> None:
        if isinstance(test, ast.BoolOp) or (
            isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        ):
            return  # their own visit looks at what they test
        if isinstance(test, ast.Compare):
            return
        found = self.kind(test)
        is_whole = isinstance(test, ast.Name) and found == "tensor"
        if found and not (self.is_parsed and is_whole):
            self.report("NKI038", test, ast.unparse(test))

    def _test(self, node: ast.If | ast.IfExp | ast.Assert) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_Assert = _test

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values:
            self._condition(value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._condition(node.operand)
        elif self.kind(node.operand) in ("tensor", "register"):
            self.report("NKI040", node, ast.unparse(node))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        by_identity = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
        is_equality = all(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops)
        kinds = [self.kind(side) for side in sides]
        if any(kinds) and not by_identity:
            same_thing = is_equality and (
                any(_is_none(side) for side in sides) or set(kinds) == {"tensor"}
            )
            if not same_thing:
                self.report("NKI038", node, ast.unparse(node))
        self.generic_visit(node)

    # Numbers and operators.

    def visit_BinOp(self, node: ast.BinOp) -> None:
        kinds = {self.kind(node.left), self.kind(node.right)} - {""}
        is_linear = isinstance(node.op, ast.Add | ast.Sub | ast.Mult)
        if kinds & {"tensor", "register"} or (kinds and not is_linear):
            self.report("NKI040", node, ast.unparse(node))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self.kind(node.value) == "tensor" or self.kind(node.target) in ("tensor", "register"):
            self.report("NKI040", node, ast.unparse(node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = dotted(node.func)
        if name in _NUMBERS and any(self.kind(value) for value in node.args):
            self.report("NKI039", node, ast.unparse(node))
        if last_name(node.func) == "fori_loop":
            step = _argument(node, 3, "step")
            if step is not None and self.kind(step):
                self.report("NKI043", node, ast.unparse(step))
        if last_name(node.func) == "scalar_store":
            value = _argument(node, 1, "value")
            if isinstance(value, ast.Constant):
                self.report("NKI045", node, ast.unparse(value))
        self._check_name(node)
        self.generic_visit(node)

    def _check_name(self, node: ast.Call) -> None:
        """Find the names of instructions that a loop body gives more than once."""
        given = next((k.value for k in node.keywords if k.arg == "name"), None)
        is_op = dotted(node.func).rpartition(".")[0] in _ISA
        if self._names is None or not is_op or not isinstance(given, ast.Constant):
            return
        if given.value in self._names or self._python_loops:
            self.report("NKI044", node, str(given.value))
        self._names.add(str(given.value))


def kind_of(node: ast.AST, kinds: Mapping[str, str]) -> str:
    """Return what kind of value of the device an expression is; '' if nothing is known."""
    if isinstance(node, ast.Name):
        return kinds.get(node.id, "")
    if isinstance(node, ast.Subscript):
        return "tensor" if kind_of(node.value, kinds) == "tensor" else ""
    if isinstance(node, ast.IfExp):
        both = {kind_of(node.body, kinds), kind_of(node.orelse, kinds)}
        return both.pop() if len(both) == 1 else ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        sides = {kind_of(node.left, kinds), kind_of(node.right, kinds)}
        return "scalar" if "scalar" in sides and not sides - {"scalar", ""} else ""
    if isinstance(node, ast.Call):
        module, _, name = dotted(node.func).rpartition(".")
        if isinstance(node.func, ast.Name):
            return kinds.get(f"{name}()", "")
        if module in _LANGUAGE and name in _TENSORS:
            return "tensor"
        if module in _ISA and name in ("register_alloc", "scalar_load"):
            return "register" if name == "register_alloc" else "scalar"
        if isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
            return "tensor" if kind_of(node.func.value, kinds) == "tensor" else ""
    return ""


def results_of(tree: ast.Module) -> dict[str, str]:
    """Return the kinds of what the functions of a file return, where it is always the same."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    results: dict[str, str] = {}
    for _ in range(3):  # functions that return what functions return
        for node in functions:
            kinds = _kinds_in(node, {f"{name}()": kind for name, kind in results.items()}, "")
            parts = list(_without_functions(node.body))
            found = {
                "" if part.value is None else kind_of(part.value, kinds)
                for part in parts
                if isinstance(part, ast.Return)
            }
            is_plain = not any(isinstance(part, ast.Yield | ast.YieldFrom) for part in parts)
            if len(found) == 1 and is_plain and not node.decorator_list:
                results[node.name] = found.pop()
    return {name: kind for name, kind in results.items() if kind}


def _kinds_in(node: FunctionNode, outer: Mapping[str, str], loop: str) -> dict[str, str]:
    """Return the kinds of the names that a function sees."""
    kinds = dict(outer)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    for number, argument in enumerate(arguments):
        if loop and number == 0:
            kinds[argument.arg] = "counter" if loop == "fori_loop" else "register"
        elif _is_tensor_type(argument.annotation) or (
            is_jitted(node) and argument.arg in _names_with_shape(node)
        ):
            kinds[argument.arg] = "tensor"
    assigned: dict[str, list[ast.expr | None]] = {}
    for part in _without_functions(node.body):
        for name, value in _bindings(part):
            assigned.setdefault(name, []).append(value)
    for _ in range(3):  # names that are made of names
        for name, values in assigned.items():
            found = {"" if value is None else kind_of(value, kinds) for value in values}
            if name in kinds and name in {argument.arg for argument in arguments}:
                found.add(kinds[name])
            kinds[name] = found.pop() if len(found) == 1 else ""
    return {name: kind for name, kind in kinds.items() if kind}


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Give the names that a statement binds, with the expression if it is one name to one."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from _pairs(target, node.value)
            elif isinstance(target, ast.Tuple | ast.List):
                yield from _stored(target)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        if isinstance(node.target, ast.Name):
            yield node.target.id, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield from _stored(node.target)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _stored(node.optional_vars)


def _pairs(target: ast.Tuple, value: ast.Tuple) -> Iterator[tuple[str, ast.expr | None]]:
    """Give the names of a tuple of targets with what each of them gets."""
    has_star = any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts))
    if has_star or len(target.elts) != len(value.elts):
        yield from _stored(target)
        return
    for part, given in zip(target.elts, value.elts, strict=True):
        if isinstance(part, ast.Name):
            yield part.id, given
        else:
            yield from _stored(part)


def _stored(node: ast.AST) -> Iterator[tuple[str, None]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id, None


def _without_functions(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Walk statements, but not into functions and classes defined there."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop(0)
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending.extend(ast.iter_child_nodes(node))


def _changed_in_place(node: ast.AST) -> str:
    """Return the name whose object a statement changes, '' if it changes none."""
    target: ast.AST | None = None
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
        target = node
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _GROWS
    ):
        target = node.func.value
    while isinstance(target, ast.Subscript | ast.Attribute):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return an argument given by position or by name."""
    if len(call.args) > position:
        return call.args[position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_tensor_type(annotation: ast.AST | None) -> bool:
    return annotation is not None and last_name(annotation) in _TENSOR_TYPES


def _names_with_shape(node: ast.AST) -> set[str]:
    """Return the names whose `.shape` a function reads."""
    return {
        part.value.id
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and part.attr == "shape"
        and isinstance(part.value, ast.Name)
    }
