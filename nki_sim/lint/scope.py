"""Which code runs inside a kernel, and which names it can see: the syntax side of the linter."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_BY_NAME = frozenset({"core_barrier", "sendrecv"})  # instructions that files import by name
_DEVICE_MODULES = frozenset({"nki.isa", "nki.collectives", "neuronxcc.nki.isa"})
_BODY_TAKERS = frozenset({"fori_loop", "while_loop"})


def dotted(node: ast.AST) -> str:
    """`nl.fori_loop` for the expression of that name, otherwise the empty string."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    """Last part of a dotted name."""
    return dotted(node).rpartition(".")[2]


def loop_bodies(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names handed to fori_loop or while_loop anywhere in a function, with the loop's name."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and last_name(call.func) in _BODY_TAKERS:
            for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
                if isinstance(value, ast.Name):
                    yield value.id, last_name(call.func)


def _stored_names(node: ast.AST) -> set[str]:
    return {
        name.id
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def local_names(node: ast.AST) -> set[str]:
    """Names that a function binds: parameters, assignments, loop variables, inner functions."""
    names = _stored_names(node)
    names |= {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
    return names | {
        inner.name for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef | ast.ClassDef)
    }


def module_names(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            names |= _stored_names(node)
    return names


def _device_aliases(tree: ast.Module) -> set[str]:
    """Names under which the file knows nki.isa and nki.collectives, or operations of theirs."""
    aliases = set(_DEVICE_MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                alias.asname
                for alias in node.names
                if alias.asname and alias.name in _DEVICE_MODULES
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                is_module = f"{node.module}.{alias.name}" in _DEVICE_MODULES
                is_instruction = node.module in _DEVICE_MODULES and alias.name in _BY_NAME
                if is_module or is_instruction:
                    aliases.add(alias.asname or alias.name)
    return aliases


def is_jitted(node: FunctionNode) -> bool:
    """Whether nki.jit decorates a function."""
    return any(last_name(decorator) == "jit" for decorator in node.decorator_list)


def _issues_instructions(node: ast.AST, aliases: set[str]) -> bool:
    called = (dotted(call.func) for call in ast.walk(node) if isinstance(call, ast.Call))
    return any(name in aliases or name.rpartition(".")[0] in aliases for name in called)


def _is_record(node: ast.ClassDef) -> bool:
    return any(last_name(base) == "NKIObject" for base in node.bases)


def kernel_side(tree: ast.Module) -> list[FunctionNode | ast.ClassDef]:
    """Functions and record classes of a file that run inside a kernel, in file order."""
    top = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    aliases = _device_aliases(tree)
    pending: list[str] = []
    for name, node in top.items():
        if isinstance(node, ast.ClassDef):
            if _is_record(node):
                pending.append(name)
        elif is_jitted(node) or _issues_instructions(node, aliases):
            pending.append(name)
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        body: list[ast.AST] = (
            [*top[name].body] if isinstance(top[name], ast.ClassDef) else [top[name]]
        )
        references = (
            node.id for part in body for node in ast.walk(part) if isinstance(node, ast.Name)
        )
        pending.extend(
            reference for reference in references if reference in top and reference not in seen
        )
    return [node for name, node in top.items() if name in seen]


def unwrap(item: Any) -> Any:
    """The Python function inside a jit object or a staticmethod."""
    for _ in range(8):
        inner = (
            getattr(item, "__wrapped__", None)
            or getattr(item, "func", None)
            or getattr(item, "__func__", None)
        )
        if isinstance(item, types.FunctionType) or inner is None:
            break
        item = inner
    return item


def scope_of(item: Any) -> dict[str, Any]:
    """Names that a function sees outside itself."""
    if isinstance(item, types.FunctionType):
        scope = dict(item.__globals__)
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            try:
                scope[name] = cell.cell_contents
            except ValueError:  # an inner function that is not bound yet
                continue
        return scope
    return dict(vars(sys.modules[item.__module__])) if item.__module__ in sys.modules else {}


def references(node: ast.AST, scope: dict[str, Any]) -> Iterator[Any]:
    """Functions and record classes named in a function, if they are user code."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Name | ast.Attribute):
            continue
        first, *rest = dotted(part).split(".")
        value = scope.get(first)
        for attribute in rest:
            if not isinstance(value, types.ModuleType):
                break
            value = getattr(value, attribute, None)
        value = unwrap(value)
        is_code = isinstance(value, types.FunctionType) or (
            isinstance(value, type)
            and any(base.__name__ == "NKIObject" for base in value.__mro__[1:])
        )
        if is_code and _is_user_module(value.__module__):
            yield value


def _is_user_module(name: str | None) -> bool:
    package = (name or "").partition(".")[0]
    return package not in {"nki", "nki_sim", "numpy", "ml_dtypes", "neuronxcc"} and package not in (
        sys.stdlib_module_names - {"__main__"}
    )
