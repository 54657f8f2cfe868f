"""Idioms of the official tutorials run; names of older dialects end in one error that helps."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import OldDialectError, SimOptions, isa
from nki_sim.dialects import OLD_NAMES
from nki_sim.language import api as nl
from nki_sim.lint.linter import lint_kernel, lint_source

X = np.arange(32, dtype=np.float32).reshape(4, 8)
MODULES = {
    "nki": "nki",
    "nl": "nki.language",
    "constants": "nki.language.constants",
    "nisa": "nki.isa",
    "compiler": "nki.compiler",
}


def copied(x: Any, dtype: Any = None) -> Any:
    tile, other = nl.ndarray(x.shape, x.dtype), nl.ndarray(x.shape, nl.bfloat16)
    isa.dma_copy(tile, x)
    isa.tensor_copy(other, tile, dtype=dtype)
    out = nl.ndarray(x.shape, nl.bfloat16, buffer=nl.shared_hbm)
    isa.dma_copy(out, other)
    return out


# Idioms of tutorials.


@pytest.mark.parametrize("dtype", [nl.bfloat16, nl.float32])
def test_the_type_that_tensor_copy_names_changes_nothing(dtype: Any) -> None:
    run = nki_sim.run(copied, X, dtype)
    assert np.array_equal(run.outputs.astype(np.float32), X)
    (finding,) = run.findings
    assert (finding.kind, "of dst, bfloat16, says it" in finding.text) == ("deprecated", True)


def test_jit_takes_the_chip_to_simulate() -> None:
    def generation(x: Any) -> Any:
        return isa.get_nc_version().value

    for kernel in (
        nki_sim.jit(generation, platform_target="trn3"),
        nki_sim.jit(platform_target="trn3")(generation),
    ):
        run = nki_sim.run(kernel, X)
        assert run.outputs == 4
        assert [each.kind for each in run.findings] == ["deprecated"]
        assert nki_sim.run(kernel[2], X).outputs == 4
        assert nki_sim.run(kernel, X, options=SimOptions(target="trn1")).outputs == 2


def test_jit_takes_the_configurations_of_nki_0_7() -> None:
    nki_sim.provide()
    compiler = importlib.import_module("nki.compiler")
    config = compiler.CompileConfig(address_rotation=compiler.AddressRotation.ENABLE)
    tracing = compiler.SpecializationConfig(allow_nested_config_override=True)
    kernel = nki_sim.jit(compile_config=config, specialization_config=tracing)(copied)
    assert np.array_equal(kernel(X).astype(np.float32), X)


def test_a_grid_of_two_axes_runs_each_of_its_programs() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm)
        tile = nl.ndarray((2, 4), nl.float32)
        i, j = nl.program_id(0), nl.program_id(1)
        assert (nl.num_programs(0), nl.num_programs((0, 1)), nl.program_ndim()) == (2, 4, 2)
        rows, columns = slice(2 * i, 2 * i + 2), slice(4 * j, 4 * j + 4)
        isa.dma_copy(tile, x[rows, columns])
        isa.tensor_scalar(tile, tile, nl.add, float(10 * i + j))
        isa.dma_copy(out[rows, columns], tile)
        return out

    run = nki_sim.run(nki_sim.jit(kernel)[2, 2], X)
    expected = X + np.kron(np.array([[0, 1], [10, 11]]), np.ones((2, 4)))
    assert np.array_equal(run.outputs, expected)
    assert run.timeline.total_us > 0
    (finding,) = run.findings
    assert "NEURON_LOGICAL_NC_CONFIG" in finding.text
    for grid in ((0, 2), (9, 9), 3, (4,)):
        with pytest.raises(ValueError, match="grid="):
            nki_sim.jit(kernel)[grid]
    with pytest.raises(ValueError, match="grid=3: must be 1 or 2 cores"):
        nki_sim.run(kernel, X, lnc=3)


def test_a_kernel_may_have_parameters_called_as_those_of_run() -> None:
    def kernel(kernel: Any, lnc: Any, options: Any, args: Any) -> Any:
        return nl.num_programs(0), lnc, options, args

    jitted, mine = nki_sim.jit(kernel), {"kernel": 1, "lnc": 5, "options": "fast", "args": 2}
    for found in (
        nki_sim.run(jitted[2], **mine).outputs,
        jitted[2](**mine),
        nki_sim.simulate(jitted)[2](**mine),
    ):
        assert found == (2, 5, "fast", 2)
    settings = SimOptions(mode="indices")
    run = nki_sim.run(jitted, 1, 5, "slow", 2, options=settings)
    assert (run.outputs, run.options) == ((1, 5, "slow", 2), settings)


# Older dialects.


def fault_of(kernel: Any) -> OldDialectError:
    with pytest.raises(OldDialectError) as caught:
        nki_sim.run(kernel, X)
    return caught.value


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module in OLD_NAMES for name in OLD_NAMES[module] if name != "par_dim"],
)
def test_an_old_name_says_its_age_and_todays_form(module: str, name: str) -> None:
    nki_sim.provide()
    for package in ("", "neuronxcc."):
        found = getattr(importlib.import_module(package + MODULES[module]), name)
        for use in (lambda old: old(128), lambda old: old[0:128]):
            error = fault_of(lambda x, use=use, old=found: use(old))
            assert (error.operand, error.expected) == (
                f"{module}.{name}",
                OLD_NAMES[module][name].instead,
            )
            assert re.search(r"gone since NKI 0\.\d$", error.found)
            assert error.location.startswith(f"{__file__}:")
    decorated = f"{module}.{name}(128)"
    (finding,) = lint_source(f"def f(x):\n    return {decorated}\n")
    assert (finding.rule, finding.line, finding.severity) == ("NKI047", 2, "error")
    assert f"`{module}.{name}`: it is of" in str(finding)
    assert f"Use {OLD_NAMES[module][name].instead}." in str(finding)


def test_par_dim_marks_a_first_axis_and_no_other() -> None:
    def kernel(x: Any, *blocks: int) -> Any:
        tile = nl.ndarray((*blocks, nl.par_dim(4), 8), x.dtype)  # type: ignore[attr-defined]
        isa.dma_copy(tile, x)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        isa.dma_copy(out, tile)
        return out

    assert np.array_equal(nki_sim.run(kernel, X).outputs, X)
    error = fault_of(lambda x: kernel(x, 2))
    assert error.operand == "nl.par_dim"


OLD_CALLS = {
    "mask": (lambda x: isa.tensor_copy(x, x, mask=1), "nisa.tensor_copy(mask=)"),  # type: ignore[call-arg]
    "dtype": (
        lambda x: isa.activation(x, nl.exp, x, dtype=1),  # type: ignore[call-arg]
        "nisa.activation(dtype=)",
    ),
    "no-dst": (lambda x: isa.activation(op=nl.exp, data=x), "nisa.activation without dst"),  # type: ignore[call-arg]
    "operator": (lambda x: nl.add(x, x, mask=1), "operator of nl(mask=)"),
    "helper": (lambda x: nl.load(x, mask=1), "nl.load(mask=)"),  # type: ignore[attr-defined]
    "range": (
        lambda x: nl.affine_range(4, precise_schedule=1),  # type: ignore[call-arg]
        "nl.affine_range(precise_schedule=)",
    ),
    "rmw": (lambda x: isa.dma_copy(x, x, dst_rmw_op=nl.add), "nisa.dma_copy(dst_rmw_op=)"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", OLD_CALLS)
def test_a_call_of_an_older_dialect_says_so(name: str) -> None:
    call, operand = OLD_CALLS[name]
    error = fault_of(call)
    assert (error.operand, "gone since NKI" in error.found) == (operand, True)
    assert error.location.startswith(f"{__file__}:")


def test_a_wrong_call_of_today_stays_a_type_error() -> None:
    def tensor_part(x: Any) -> Any:
        return x

    for call in (
        lambda x: isa.tensor_copy(x),  # type: ignore[call-arg]
        lambda x: isa.tensor_copy(x, x, speed=1),  # type: ignore[call-arg]
        lambda x: tensor_part(x, mask=1),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match=r"tensor_copy: .* It takes dst, src|tensor_part\(\)"):
            nki_sim.run(call, X)


OLD_FILE = """\
from neuronxcc import nki
import neuronxcc.nki.language as nl
from neuronxcc.nki.language import par_dim

@nki.benchmark(warmup=1)
def kernel(x):
    i = nl.arange(128)[:, None]
    return nl.load(x[i, nl.mgrid[0:2]], mask=i < 5)
"""


@pytest.mark.parametrize("dialect", ["0.7", "0.6", "house"])
def test_the_linter_names_all_of_an_old_file(dialect: Any) -> None:
    found = [(each.line, each.rule) for each in lint_source(OLD_FILE, dialect=dialect)]
    old, module = "NKI047", "NKI048"
    assert [each for each in found if each[1] in (old, module)] == [
        *[(1, module), (2, module), (3, old), (3, module), (5, old), (7, old), (8, old), (8, old)]
    ]


def old_kernel(x: Any) -> Any:
    return nl.arange(128)  # type: ignore[attr-defined]


def test_the_linter_names_them_in_a_function_too() -> None:
    (finding,) = lint_kernel(old_kernel)
    line = old_kernel.__code__.co_firstlineno + 1
    assert (finding.rule, finding.line, Path(finding.path).name) == (
        "NKI047",
        line,
        Path(__file__).name,
    )
