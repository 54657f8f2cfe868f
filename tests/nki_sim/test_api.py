"""The simulator's public names, parameters and defaults are those of NKI 0.7.

`data/nki_api.json` states the names, parameters and defaults of the vendor's documentation stubs. A
default of "..." is one that the stubs hide.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import SimOptions, isa
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute
from nki_sim.trace import ENGINE_NAMES
from tests.golden.calls import RIGHT, bound, made

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


# Which operations work: one legal call of each.


def two_cores(body: Callable[[Any], None]) -> None:
    """Run a body on the two cores of a launch."""
    nki_sim.run(lambda x: body(x), np.ones((2, 2), np.float32), lnc=2)


def exchange(x: Any) -> None:
    mine, other = nl.ndarray((2, 2), nl.float32), nl.ndarray((2, 2), nl.float32)
    isa.dma_copy(mine, x)
    isa.sendrecv(mine, other, 1 - nl.program_id(), 1 - nl.program_id(), 0)


def registers(dst: Any) -> None:
    first, second = isa.register_alloc(3), isa.register_alloc()
    isa.register_move(second, first)
    isa.register_store(dst, second)
    isa.register_load(first, dst)


REGISTERS = ("alloc", "move", "load", "store")


def scalars(dst: Any) -> None:
    isa.scalar_store(dst, isa.scalar_load(dst) + 1)


CELL = Tile(shape=(1, 1), dtype="int32")
ROWS = Tile(np.ones((32, 16), np.float32))
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Tile]]] = {
    **{name: bound(name, arguments) for name, arguments in RIGHT.items()},
    "nc_transpose": bound(
        "nc_transpose", RIGHT["nc_transpose"] | {"dst": made((16, 32), space="psum")}
    ),
    "get_nc_version": (isa.get_nc_version, {}),
    "get_nc_sub_version": (isa.get_nc_sub_version, {}),
    "dropout": (lambda x: isa.dropout(x, x, 0.5), {"x": ROWS}),
    "core_barrier": (lambda: two_cores(lambda x: isa.core_barrier(x, (0, 1))), {}),
    "sendrecv": (lambda: two_cores(exchange), {}),
    "scalar_load": (scalars, {"dst": Tile(np.ones((1, 1), np.int32))}),
    "scalar_store": (scalars, {"dst": Tile(np.ones((1, 1), np.int32))}),
    **{f"register_{verb}": (registers, {"dst": CELL}) for verb in REGISTERS},
}
NOT_IMPLEMENTED = {"dropout"}


def complaint(name: str) -> str | None:
    """Run a legal call; return the message if the operation is not implemented."""
    call, tiles = CALLS[name]
    try:
        if tiles:
            execute(call, options=SimOptions(target="trn3"), **tiles)
        else:
            call()
    except NotImplementedError as error:
        return str(error)
    return None


def test_all_operations_but_those_that_are_named_work() -> None:
    operations = list(MODULES["nki.isa"]["functions"])
    assert set(CALLS) == set(operations)
    complaints = {name: text for name in operations if (text := complaint(name)) is not None}
    assert set(complaints) == NOT_IMPLEMENTED
    assert all(f"nki.isa.{name}:" in text for name, text in complaints.items())


def test_the_documentation_lists_what_is_not_implemented() -> None:
    from nki_sim.language import math as language_math

    page = (Path(__file__).parents[2] / "docs" / "nki_sim.md").read_text()
    listed = set(re.findall(r"^\| `(n[a-zA-Z_.0-9]+)` \|", page, re.MULTILINE))
    expected = {f"nki.isa.{name}" for name in NOT_IMPLEMENTED}
    expected |= {f"nki.language.{name}" for name in language_math.NOT_IMPLEMENTED}
    expected |= {"nki.language.NkiTensor.indirect"}
    assert listed == expected


@pytest.mark.parametrize("name", ["divide", "mod", "fmod", "dropout"])
def test_a_language_helper_that_is_not_implemented_names_itself(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"nki.language.{name}:"):
        execute(lambda x: getattr(nl, name)(x, x), x=ROWS)


ENGINES = {
    "tensor": "nc_matmul nc_matmul_mx nc_transpose",
    "scalar": "activation activation_reduce activate2",
    "gpsimd": "tensor_partition_reduce iota affine_select local_gather nc_n_gather sequence_bounds "
    "nonzero_with_count topk rand_set_state rand_get_state core_barrier",
    "dma": "dma_copy dma_transpose dma_compute sendrecv",
    "sync": "register_move register_load register_store scalar_load scalar_store",
    "vector": "tensor_copy memset tensor_copy_predicated tensor_tensor tensor_scalar tensor_reduce "
    "tensor_scalar_cumulative bn_stats bn_aggr tensor_tensor_scan nc_stream_shuffle rng rand2 "
    "set_rng_seed exponential reciprocal max8 scalar_tensor_tensor tensor_scalar_reduce "
    "quantize_mx range_select select_reduce nc_find_index8 nc_match_replace8",
}
ENGINE_OF = {name: engine for engine, names in ENGINES.items() for name in names.split()}


@pytest.mark.parametrize("name", [n for n in CALLS if CALLS[n][1] and n not in NOT_IMPLEMENTED])
def test_an_operation_runs_on_its_documented_engine_and_alike_in_both_modes(name: str) -> None:
    call, tiles = CALLS[name]
    full, indices = (
        list(execute(call, options=SimOptions(target="trn3", mode=mode), **tiles).run.trace)  # type: ignore[arg-type]
        for mode in ("full", "indices")
    )
    assert [record[1:] for record in full] == [record[1:] for record in indices]
    engines = {ENGINE_NAMES[record.engine] for record in full if record.op == name}
    assert engines == ({ENGINE_OF[name]} if name in ENGINE_OF else set())


@pytest.mark.parametrize(
    "name", ["affine_range", "sequential_range", "static_range", "dynamic_range"]
)
@pytest.mark.usefixtures("nki_0_6")
def test_a_deprecated_loop_works_and_says_so(name: str) -> None:
    def body(x: Any) -> None:
        for _ in getattr(nl, name)(3):
            isa.tensor_scalar(x, x, nl.add, 1.0)

    with pytest.warns(DeprecationWarning, match=f"nl.{name} is deprecated") as caught:
        result = execute(body, x=ROWS)
    assert (result["x"] == 4).all()
    assert caught[0].filename == __file__
