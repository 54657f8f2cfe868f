"""lab -> tools -> serving -> models -> neuron_moe -> nki_kernels -> nki_sim, and never upward."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = [
    "nki_sim",
    "nki_kernels",
    "neuron_moe",
    "models",
    "serving",
    "tools",
    "lab",
]  # lowest first
INSIDE = ("models", "serving", "tools")  # of neuron_moe, as it is imported
ALLOWED_IN_SIMULATOR = {"numpy", "ml_dtypes", "nki_sim"}
LAZY_IN_SIMULATOR = {"matplotlib", "torch", "nki", "nkilib", "neuronxcc", "rich"}


def _files(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def _imports(path: Path) -> list[tuple[str, bool]]:
    """Return (absolute module, is at the top level of the file)."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", id(node) in top))
    return found


def _layer_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] == "neuron_moe" and len(parts) > 1 and parts[1] in INSIDE:
        return parts[1]
    return parts[0] if parts[0] in LAYERS else None


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_imports_upward(layer: str) -> None:
    files = _files(layer)
    assert files, layer
    for path in files:
        for module, _ in _imports(path):
            target = _layer_of(module)
            # The package's face names `load` of the floor above, and imports it when asked.
            is_face = path == ROOT / "neuron_moe" / "__init__.py" and target == "models"
            if target is not None and not is_face:
                assert LAYERS.index(target) <= LAYERS.index(layer), f"{path} imports {module}"
            assert module.split(".")[0] not in ("configs", *INSIDE), f"{path}: {module}"
            assert module.split(".")[0] != "tests", f"{path} imports {module}"


def test_nxds_constructors_are_imported_by_nobody_inside() -> None:
    # The names that users import, NxD's module paths, and the two doors to NxDI.
    edge = {"public", "routing", "moe_configs", "expert_mlps_v2", "modules", "nxd_compat"}
    doors = {ROOT / "serving" / "plugin.py", ROOT / "tools" / "compile" / "nxdi.py"}
    for layer in ("neuron_moe", "models", "serving", "tools"):
        for path in set(_files(layer)) - doors:
            room = path.relative_to(ROOT / layer).with_suffix("").parts[0]
            if layer == "neuron_moe" and room in edge | {"__init__"}:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "neuron_moe":
                    # Any other name of the face brings all of `public`.
                    names = {each.name for each in node.names}
                    assert names == {"__version__"}, f"{path}:{node.lineno} imports {names}"
            for module, _ in _imports(path):
                parts = module.split(".")
                is_edge = parts[0] == "neuron_moe" and not edge.isdisjoint(parts[1:2])
                assert not is_edge, f"{path} imports {module}"


def test_models_reach_kernels_only_through_neuron_moe() -> None:
    for path in _files("models"):
        for module, _ in _imports(path):
            assert module.split(".")[0] not in ("nki_kernels", "nki_sim"), f"{path}: {module}"


def test_simulator_needs_numpy_and_ml_dtypes_only() -> None:
    import sys

    standard = sys.stdlib_module_names
    for path in _files("nki_sim"):
        for module, is_top in _imports(path):
            root = module.split(".")[0]
            allowed = ALLOWED_IN_SIMULATOR | (set() if is_top else LAZY_IN_SIMULATOR)
            if path.name in ("pytest_plugin.py", "vendor_tests.py"):  # plugins of pytest
                allowed = allowed | {"pytest"}
            assert root in standard or root in allowed, f"{path} imports {module}"
