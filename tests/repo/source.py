"""The source as the rules of the repository read it: files, imports, functions.

Modules are named as they are imported, but for `models` and `tools`, which lose the `neuron_moe.`
in front: they are packages of their own, wherever their folder is.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "nki_sim",
    "nki_kernels",
    "neuron_moe",
    "models",
    "serving",
    "tools",
    "lab",
)  # lowest first
_INSIDE = ("models", "serving", "tools", "configs")  # of neuron_moe, as they are installed


@dataclass(frozen=True)
class Module:
    """A file.

    Attributes:
        name: dotted; that of the package for an `__init__.py`.
        path: where it is.
        package: one of PACKAGES.
        tree: what it says.
    """

    name: str
    path: Path
    package: str
    tree: ast.Module

    @property
    def is_face(self) -> bool:
        """Whether it is an `__init__.py`."""
        return self.path.name == "__init__.py"

    @property
    def room(self) -> str:
        """The folder or file directly under the package; '' for the package's face."""
        return room_of(self.name)


@dataclass(frozen=True)
class Function:
    """A function or method.

    Attributes:
        module: where it stands.
        name: with the classes and functions around it.
        node: the definition.
        is_public: no underscore in any part of its dotted name, the module's included.
    """

    module: Module
    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    is_public: bool

    @property
    def lines(self) -> int:
        """Lines of the definition, docstring included, decorators not."""
        assert self.node.end_lineno is not None
        return self.node.end_lineno - self.node.lineno + 1

    @property
    def place(self) -> str:
        """File, line and name, for messages."""
        return f"{self.module.path.relative_to(ROOT)}:{self.node.lineno} {self.name}"

    @property
    def arguments(self) -> list[ast.arg]:
        """Arguments, `self` and `cls` and collecting ones left out."""
        found = self.node.args
        names = [*found.posonlyargs, *found.args, *found.kwonlyargs]
        return [each for each in names if each.arg not in ("self", "cls")]

    @property
    def decorators(self) -> list[str]:
        """Decorators as they are written."""
        return [ast.unparse(each) for each in self.node.decorator_list]


def room_of(module: str) -> str:
    """Return the second part of a dotted name; '' if there is none."""
    return ([*module.split("."), ""])[1]


def canonical(name: str) -> str:
    """Return the name under which a module is known here."""
    parts = name.split(".")
    inside = len(parts) > 1 and parts[0] == "neuron_moe" and parts[1] in _INSIDE
    return ".".join(parts[1:] if inside else parts)


@cache
def modules(package: str) -> tuple[Module, ...]:
    """Return the files of a package, but for what an installation of it alone leaves."""
    folder = ROOT / package
    found = []
    for path in sorted(folder.rglob("*.py")):
        if path.is_relative_to(folder / "build"):
            continue
        parts = (package, *path.relative_to(folder).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, package, ast.parse(path.read_text())))
    assert found, folder
    return tuple(found)


@cache
def every_module() -> dict[str, Module]:
    """Return all files by name."""
    return {module.name: module for package in PACKAGES for module in modules(package)}


@cache
def imports(module: Module) -> dict[str, int]:
    """Return the modules of ours that a file imports anywhere, and the line.

    `from package import name` is an import of the file `package/name.py` if there is one, else of
    the package's face.
    """
    known = every_module()
    found: dict[str, int] = {}
    for node in ast.walk(module.tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [
                f"{base}.{alias.name}" if canonical(f"{base}.{alias.name}") in known else base
                for alias in node.names
            ]
        for name in map(canonical, names):
            if name in known and name != module.name:
                found.setdefault(name, node.lineno)
    return found


def functions(package: str) -> Iterator[Function]:
    """Yield every function of a package, methods and inner ones too."""
    for module in modules(package):
        hidden = any(part.startswith("_") for part in module.name.split("."))
        yield from _functions(module, module.tree, "", not hidden)


def _functions(module: Module, node: ast.AST, prefix: str, is_public: bool) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            special = child.name.startswith("__") and child.name.endswith("__")
            shown = is_public and (special or not child.name.startswith("_"))
            inner_is_public = shown and isinstance(child, ast.ClassDef)
            if not isinstance(child, ast.ClassDef):
                yield Function(module, name, child, shown)
            yield from _functions(module, child, f"{name}.", inner_is_public)
        else:
            yield from _functions(module, child, prefix, is_public)
