"""Names of older dialects in source text, wherever they stand: decorators and host code too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, NamedTuple

from nki_sim.dialects import MODULE, OLD_NAMES, OLD_PARAMETERS, Old
from nki_sim.lint.scope import dotted

_MODULES: Final = {
    "nki": "nki",
    "nl": "nl",
    "language": "nl",
    "nisa": "nisa",
    "isa": "nisa",
    "compiler": "compiler",
    "constants": "constants",
}
_OLD_PACKAGE: Final = "neuronxcc"
# `dtype` and `num_channels` are parameters of some instruction or helper of today.
_SURELY_OLD: Final = frozenset({"mask", "dst_rmw_op", "use_gpsimd_dma"})


class OldUse(NamedTuple):
    """One use of an older dialect: the rule, the place, the name, and what is known of it."""

    rule: str
    node: ast.AST
    name: str
    old: Old


def old_uses(tree: ast.AST) -> Iterator[OldUse]:
    """Give the uses of older dialects in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module, _, name = dotted(node).rpartition(".")
            yield from _named(node, module, name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[:2] == [_OLD_PACKAGE, "nki"]:
                    yield OldUse("NKI048", node, alias.name, MODULE)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            parts = node.module.split(".")
            if parts[:2] == [_OLD_PACKAGE, "nki"] or (parts == [_OLD_PACKAGE] and "nki" in names):
                yield OldUse("NKI048", node, node.module, MODULE)
            if "nki" in parts:
                for name in names:
                    yield from _named(node, node.module, name)
        elif isinstance(node, ast.Call) and _module(dotted(node.func).rpartition(".")[0]) in (
            "nisa",
            "nl",
        ):
            for keyword in node.keywords:
                if keyword.arg in _SURELY_OLD:
                    name = f"{dotted(node.func)}({keyword.arg}=)"
                    yield OldUse("NKI047", node, name, OLD_PARAMETERS[keyword.arg])


def _module(name: str) -> str:
    """Return the short name of a module by the last part of its name; '' for others."""
    return _MODULES.get(name.rpartition(".")[2], "")


def _named(node: ast.AST, module: str, name: str) -> Iterator[OldUse]:
    found = OLD_NAMES.get(_module(module), {}).get(name)
    if found is not None:
        yield OldUse("NKI047", node, f"{module}.{name}", found)
