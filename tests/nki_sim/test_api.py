"""The simulator's public names, parameters and defaults are those of NKI 0.6.

`data/nki_api.json` states the names, parameters and defaults of the vendor's documentation stubs. A
default of "..." is one that the stubs hide.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nki_sim

API: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "nki_api.json").read_text())
MODULES: dict[str, Any] = API["modules"]


def module_of(name: str) -> ModuleType:
    nki_sim.provide()
    return importlib.import_module(name)


def functions() -> Iterator[tuple[str, str, list[str]]]:
    for module, content in MODULES.items():
        for name, parameters in content["functions"].items():
            yield module, name, parameters


def classes() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for module, content in MODULES.items():
        for name, members in content["classes"].items():
            yield module, name, members


def public_names() -> list[tuple[str, str]]:
    return [
        (module, name)
        for module, content in MODULES.items()
        for name in [*content["functions"], *content["classes"], *content["constants"]]
    ]


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def check_signature(function: Any, expected: list[str], module: ModuleType, where: str) -> None:
    """Compare names, order and defaults; extra parameters are allowed at the end only."""
    found = parameters_of(function)
    names = [text.partition("=")[0] for text in expected]
    assert list(found)[: len(names)] == [name.lstrip("*") for name in names], where
    for text in expected:
        name, has_default, default = text.partition("=")
        parameter = found[name.lstrip("*")]
        if name.startswith("**"):
            assert parameter.kind is inspect.Parameter.VAR_KEYWORD, f"{where}: {name}"
        elif not has_default:
            assert parameter.default is inspect.Parameter.empty, f"{where}: {name} has a default"
        elif default == "...":
            assert parameter.default is not inspect.Parameter.empty, f"{where}: {name}"
        else:
            wanted = eval(default, {**vars(module_of("nki.language")), **vars(module)})
            assert parameter.default == wanted, f"{where}: {name}={parameter.default!r}"
    for extra in list(found.values())[len(names) :]:
        assert extra.default is not inspect.Parameter.empty, f"{where}: extra {extra.name}"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_exists(module: str) -> None:
    found = module_of(module)
    missing = [
        name for where, name in public_names() if where == module and not hasattr(found, name)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("module", "name", "expected"), functions(), ids=[f"{m}.{n}" for m, n, _ in functions()]
)
def test_a_function_has_the_documented_parameters(
    module: str, name: str, expected: list[str]
) -> None:
    found = module_of(module)
    check_signature(getattr(found, name), expected, found, f"{module}.{name}")


@pytest.mark.parametrize(
    ("module", "name", "expected"), classes(), ids=[f"{m}.{n}" for m, n, _ in classes()]
)
def test_a_class_has_the_documented_members(
    module: str, name: str, expected: dict[str, Any]
) -> None:
    found_module = module_of(module)
    found = getattr(found_module, name)
    for member, value in expected.get("members", {}).items():
        assert issubclass(found, Enum)
        assert found[member].value == value, f"{name}.{member}"
    for method, parameters in expected.get("methods", {}).items():
        check_signature(getattr(found, method), parameters, found_module, f"{name}.{method}")
    declared = {name for kind in found.__mro__ for name in getattr(kind, "__slots__", ())}
    declared |= {name for kind in found.__mro__ for name in vars(kind).get("__annotations__", ())}
    missing = [
        a for a in expected.get("attributes", []) if not hasattr(found, a) and a not in declared
    ]
    assert missing == []
