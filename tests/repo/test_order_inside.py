"""Inside each package: no circle of imports, and rooms that know only what is below them."""

from collections.abc import Iterator

import pytest

from tests.repo import source
from tests.repo.source import PACKAGES, Module

_SIM_BASE = {
    "errors",
    "dialects",
    "options",
    "dtypes",
    "constants",
    "hardware",
    "hardware_file",
    "targets",
    "trace",
}
_SIM_CHIP = _SIM_BASE | {"machine", "isa", "language"}
_SIM_TOP = _SIM_CHIP | {"collectives", "launch", "provide", "testing", "time"}
# What each folder or file directly under a package may import of the same package.
ALLOWED: dict[str, dict[str, set[str]]] = {
    "nki_sim": {
        **dict.fromkeys(_SIM_BASE, _SIM_BASE),
        "machine": _SIM_BASE,
        "isa": _SIM_BASE | {"machine"},
        "language": _SIM_BASE | {"machine", "isa"},
        "time": {"trace", "hardware"},
        "lint": {"dialects"},
        **dict.fromkeys(
            ("collectives", "launch", "provide", "testing", "own_kernel", "pytest_plugin"),
            _SIM_TOP,
        ),
        "__main__": _SIM_TOP | {"lint", "own_kernel", "precedent", "vendor_tests"},
        "precedent": _SIM_BASE | {"machine", "isa"},
        "neuron_dtypes": {"dtypes"},
        "vendor_library": _SIM_BASE,
        "vendor_tests": _SIM_TOP | {"neuron_dtypes", "vendor_library"},
    },
    "nki_kernels": {
        "objects": set(),
        "provided": set(),
        "common": {"objects"},
        **{
            name: {"common", "provided"}
            for name in ("route", "index", "prefill", "decode", "combine")
        },
        "layer": {"common", "provided", "route", "index", "prefill", "combine"},
        "outputs": {"common", "route", "index", "prefill", "decode", "combine", "layer"},
    },
}
# neuron_moe, lowest first: files import what stands above their own line here, or in it. The
# longest prefix counts, so that a file of a folder can stand elsewhere than the folder.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "versions", "device"),
    ("tuned", "verdicts"),
    ("spec", "quantize", "blocks"),
    ("passes",),
    ("activations", "choices", "paths", "checkpoint", "fused_decode"),
    ("parallel",),
    ("weights",),
    ("router", "shared_experts"),
    ("router_losses",),
    ("explain", "plan"),
    ("backends", "dispatch"),
    ("experts", "latent", "transformers_experts"),
    ("layer_checks",),
    ("moe",),
    ("train", "sharded", "planner"),
    ("nxd_compat",),
    (
        "routing",
        "moe_configs",
        "expert_mlps_v2",
        "parallel_layers",
        "modules",
    ),  # NxD's module paths
    ("public",),
)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_imports(package: str) -> None:
    graph = {module.name: _neighbours(module) for module in source.modules(package)}
    circles = sorted(sorted(part) for part in _strongly_connected(graph) if len(part) > 1)
    assert not circles, "\n".join(f"{len(part)} files: {', '.join(part)}" for part in circles)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_rooms(package: str) -> None:
    graph: dict[str, set[str]] = {module.room: set() for module in _rooms(package)}
    for module in _rooms(package):
        rooms = {source.room_of(name) for name in _neighbours(module)}
        graph[module.room] |= rooms - {"", module.room}
    circles = [sorted(part) for part in _strongly_connected(graph) if len(part) > 1]
    assert not circles


@pytest.mark.parametrize("package", ALLOWED)
def test_rooms_import_only_what_lies_below(package: str) -> None:
    wrong, allowed = [], ALLOWED[package]
    for module in _rooms(package):
        assert module.room in allowed, f"{module.name}: give it a place in ALLOWED"
        for name, line in source.imports(module).items():
            room = source.room_of(name)
            is_ours = name.split(".")[0] == package and room != module.room
            if is_ours and room not in allowed[module.room]:
                wrong.append(f"{module.path.relative_to(source.ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_files_of_neuron_moe_import_only_what_lies_below() -> None:
    wrong = []
    for module in _rooms("neuron_moe"):
        level = _level(module.name)
        if level is None:
            wrong.append(f"{module.name}: give it a place in LEVELS")
            continue
        for name, line in source.imports(module).items():
            if name.split(".")[0] != "neuron_moe":
                continue
            other = _level(name)
            if other is not None and other > level:
                wrong.append(f"{module.path.relative_to(source.ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_tables_name_nothing_that_is_gone() -> None:
    for package, allowed in ALLOWED.items():
        rooms = {module.room for module in source.modules(package)}
        assert set(allowed) <= rooms, set(allowed) - rooms
    names = source.every_module()
    gone = [entry for level in LEVELS for entry in level if f"neuron_moe.{entry}" not in names]
    assert not gone, gone


def _rooms(package: str) -> Iterator[Module]:
    """Yield the files of a package but its face, which may know all of them."""
    yield from (module for module in source.modules(package) if module.name != package)


def _level(name: str) -> int | None:
    """Return the line of LEVELS in which a file stands; above all for the package's face."""
    if name == "neuron_moe":
        return len(LEVELS)
    found = [
        (len(entry), number)
        for number, level in enumerate(LEVELS)
        for entry in level
        if f"{name}.".startswith(f"neuron_moe.{entry}.")
    ]
    return max(found)[1] if found else None


def _neighbours(module: Module) -> set[str]:
    """Return what a file imports of its package.

    A package's face that a file of it imports back counts as well, whether or not Python would
    stumble over it.
    """
    package = module.name.split(".")[0]
    return {name for name in source.imports(module) if name.split(".")[0] == package}


def _strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return sets of files that reach each other (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            cut = stack.index(name)
            found.append(set(stack[cut:]))
            del stack[cut:]

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert [part for part in _strongly_connected(graph) if len(part) > 1] == [{"b", "c"}]
