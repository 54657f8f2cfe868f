"""Kernels as operators: what graphs are given of them is what they do."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from neuron_moe.backends.nki import launch, operators
from nki_kernels.combine import CombineDims
from nki_kernels.index import NO_WORK_TILES, BlockDims
from nki_kernels.outputs import outputs_of
from nki_sim.language import api as nl
from tests.golden.layer_cases import case_names, draw_case, make_layer, run_step

EVERY = 9  # of the layers for the nki backend


def listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, tuple) else [values]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Any], Any]]:
    """Every launch from now on: the kernel's name, its arguments in order, and its outputs."""
    seen: list[tuple[str, list[Any], Any]] = []
    call = launch._call

    def watch(kernel: Any, num_cores: int, arguments: dict[str, Any]) -> Any:
        found = call(kernel, num_cores, arguments)
        seen.append((operators.name_of(kernel), list(arguments.items()), found))
        return found

    monkeypatch.setattr(launch, "_call", watch)
    return seen


@pytest.mark.long
def test_shapes_are_those_of_the_outputs_and_records_survive_as_text(
    launches: list[tuple[str, list[Any], Any]],
) -> None:
    for name in case_names("nki")[::EVERY]:
        case = draw_case(name)
        with contextlib.suppress(ValueError):  # what kernels refuse is tested elsewhere
            layer = make_layer(case)
            for number in range(len(case.steps)):
                run_step(layer, case, number)
    assert {name for name, _, _ in launches} == set(operators.NAMES)
    for name, arguments, outputs in launches:
        records = {key: value for key, value in arguments if dataclasses.is_dataclass(value)}
        shapes = {key: tuple(value.shape) for key, value in arguments if isinstance(value, Tensor)}
        for record in records.values():
            assert operators.record_of(operators.record_text(record)) == record
        for vector in {"norm_weight", "router_bias", "selection_bias"} & shapes.keys():
            assert shapes[vector][0] == 1, (name, vector)
        shown = outputs_of(name, shapes, records)
        for one, real in zip(listed(shown), listed(outputs), strict=True):
            assert (one.shape, getattr(torch, one.dtype)) == (tuple(real.shape), real.dtype), name


def test_a_graph_is_told_what_an_operator_returns_before_any_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(kernel: Any, *_: object) -> Any:
        raise AssertionError(kernel)

    monkeypatch.setattr(operators, "NAMESPACE", "neuron_moe_told")
    made = operators.register(run)
    dims = operators.record_text(CombineDims(nl.float16, has_no_expert=False))
    with FakeTensorMode():
        slots_PSH = torch.empty(2, 24, 64, dtype=torch.bfloat16)
        index_TK = torch.empty(5, 3, dtype=torch.int32)
        beside = [None] * 4
        (shown,) = made["combine"](2, slots_PSH, index_TK, torch.empty(5, 3), dims, *beside)
        assert isinstance(shown, FakeTensor)
        assert (shown.shape, shown.dtype) == ((5, 64), torch.float16)
        records = (BlockDims(num_experts=7, block_size=128, num_blocks=3), NO_WORK_TILES)
        shown = made["index_blocks"](1, index_TK, *map(operators.record_text, records))
    sizes = [(3 * 128,), (3 * 128,), (3,), (1,), (7,), (5, 3)]
    assert [(each.shape, each.dtype) for each in shown] == [(size, torch.int32) for size in sizes]


def test_a_record_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CombineDims: not a record .* out_dtype.*again"):
        operators.record_of('{"record":"CombineDims","out_dtype":{"element":"float32"}}')
    for name in ("Unknown", "int", "str"):
        with pytest.raises(ValueError, match=f"{name}: not a record"):
            operators.record_of(f'{{"record":"{name}"}}')
