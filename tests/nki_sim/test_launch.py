"""Launching kernels: modules, arguments, grids, results, ranks and modes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import nki_sim
from nki_sim import SimOptions, TensorSpec, isa
from nki_sim.language import api as nl
from nki_sim.machine.system import System

X = np.arange(512, dtype=np.float32).reshape(8, 64)


def double(x: Any) -> Any:
    tile = nl.ndarray(x.shape, x.dtype)
    isa.dma_copy(tile, x)
    isa.tensor_tensor(tile, tile, tile, nl.add)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    isa.dma_copy(out, tile)
    return out


# Modules

MODULES = [
    "nki",
    "nki.isa",
    "nki.isa.constants",
    "nki.language",
    "nki.collectives",
    "nki.typing",
    "nki.dtype",
    "nki.compiler",
    "nki.tensor",
    "neuronxcc.nki",
    "neuronxcc.nki.isa",
    "neuronxcc.nki.language",
    "neuronxcc.nki.typing",
]


def run_python(code: str, path: Path | None = None) -> str:
    """Run code in a fresh interpreter that finds this package, and `path` before it."""
    root = str(Path(nki_sim.__file__).parents[1])
    paths = [str(path), root] if path else [root]
    prefix = f"import sys; sys.path[:0] = {paths!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", prefix + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_provide_answers_to_the_vendors_module_names() -> None:
    imports = "\n".join(f"import {name}" for name in MODULES)
    code = f"""
import importlib.util
import nki_sim
assert nki_sim.provide() and nki_sim.provide()
for name in {["nki", "neuronxcc", *MODULES]!r}:
    spec = importlib.util.find_spec(name)
    assert spec.origin == "nki_sim" and name.endswith(spec.name), spec
{imports}
import nki.language as nl
from nki.isa import dma_copy, oob_mode
from nki.isa.constants import dge_mode
from neuronxcc.nki.typing import mutable_tensor, tensor
import neuronxcc.nki.language
assert neuronxcc.nki.language is nl
assert nki.isa.constants.dge_mode is nki.isa.dge_mode
assert nl.bool is nl.bool_ and nl.range is range
annotation: tensor[128, 512] = None
print(importlib.util.find_spec("nki.absent"), importlib.import_module("nki"))
"""
    assert run_python(code) == "None <module 'nki' (nki_sim)>"


def test_the_empty_package_of_the_registry_does_not_count_as_the_vendors(tmp_path: Path) -> None:
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text("__version__ = '0.0.0'\n")
    code = "import nki_sim; print(nki_sim.provide()); import nki.isa; print(nki.isa.dma_copy)"
    assert run_python(code, tmp_path).startswith("True")


def test_the_vendors_package_wins(tmp_path: Path) -> None:
    (tmp_path / "nki" / "isa").mkdir(parents=True)
    (tmp_path / "nki" / "__init__.py").write_text("jit = 'the vendor'\n")
    (tmp_path / "nki" / "isa" / "__init__.py").write_text("")
    code = "import nki_sim; print(nki_sim.provide()); import nki; print(nki.jit)"
    assert run_python(code, tmp_path) == "False\nthe vendor"
    forced = "import nki_sim; print(nki_sim.provide(force=True)); import nki; print(nki.simulate)"
    assert run_python(forced, tmp_path).startswith("True\n<function simulate")


# Arguments and results


def test_a_jit_kernel_called_with_arrays_is_simulated() -> None:
    kernel = nki_sim.jit(double)
    assert np.array_equal(kernel(X), 2 * X)
    assert np.array_equal(nki_sim.jit(mode="trace", debug_kernel=True)(double)(X), 2 * X)
    assert np.array_equal(nki_sim.simulate(double)(X), 2 * X)
    assert np.array_equal(nki_sim.run(double, X).outputs, 2 * X)


def test_jit_refuses_an_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="speed"):
        nki_sim.jit(double, speed=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_torch_in_means_torch_out(dtype: torch.dtype) -> None:
    x = torch.arange(512).reshape(8, 64).to(dtype)
    result = nki_sim.simulate(double)(x)
    assert isinstance(result, torch.Tensor)
    assert result.dtype == dtype
    assert torch.equal(result, x + x)


def test_a_kernel_that_writes_an_input_is_told_of_and_leaves_the_callers_array() -> None:
    def kernel(cache: Any, row: Any) -> Any:
        isa.dma_copy(cache[2:3], row)
        return cache

    cache, row = np.zeros((4, 8), np.float32), np.ones((1, 8), np.float32)
    run = nki_sim.run(kernel, cache, row)
    assert np.array_equal(run.outputs.sum(axis=1), [0, 0, 8, 0])
    assert not cache.any()
    (finding,) = run.findings
    assert (finding.kind, finding.location.split(":")[0]) == ("written", __file__)
    assert "cache is an input that the kernel writes" in finding.text


def test_inputs_are_given_back_after_an_error_too() -> None:
    def kernel(cache: Any) -> None:
        isa.dma_copy(cache[2:3], cache[0:1])
        raise ValueError("stop")

    cache = np.arange(32, dtype=np.float32).reshape(4, 8)
    with pytest.raises(ValueError, match="stop"):
        nki_sim.run(kernel, cache)
    assert np.array_equal(cache, np.arange(32, dtype=np.float32).reshape(4, 8))


class Mode(Enum):
    PLAIN = 1
    SCALED = 2


class Sizes(NamedTuple):
    rows: int
    columns: int


@dataclass
class Config(nl.NKIObject):
    """Fields without a default may be missing: the compiler makes them None."""

    scale: float
    missing: int
    tensors: Any = None
    shift: float = 1.5

    def __post_init__(self) -> None:
        self.total = self.scale + self.shift


@dataclass(frozen=True)
class Frozen(nl.NKIObject):
    size: int
    other: int


def test_objects_enums_and_tuples_are_compile_time_arguments() -> None:
    def kernel(config: Any, mode: Any, sizes: Any, pair: Any, flag: bool = False) -> Any:
        assert flag
        assert mode == Mode.SCALED
        assert config.missing is None
        assert (sizes.rows, sizes.columns) == (8, 64)
        tile = nl.ndarray(tuple(sizes), nl.float32)
        isa.dma_copy(tile, config.tensors[0])
        other = nl.ndarray(tuple(sizes), nl.float32)
        isa.dma_copy(other, pair[1])
        isa.scalar_tensor_tensor(tile, tile, nl.multiply, config.total, nl.add, other)
        out = nl.ndarray(tuple(sizes), nl.float32, buffer=nl.shared_hbm)
        isa.dma_copy(out, tile)
        return {"sum": out, "note": "kept"}

    config = Config(scale=0.5, tensors=(X,))  # type: ignore[call-arg]
    result = nki_sim.simulate(kernel)(config, Mode.SCALED, Sizes(8, 64), (None, X + 1), flag=True)
    assert np.array_equal(result["sum"], 2 * X + X + 1)
    assert result["note"] == "kept"


def test_a_frozen_record_may_lack_fields_too() -> None:
    record = Frozen(size=3)  # type: ignore[call-arg]
    assert (record.size, record.other) == (3, None)
    with pytest.raises(TypeError, match="takes 2 fields"):
        Frozen(1, 2, 3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="sise"):
        Frozen(sise=3)  # type: ignore[call-arg]


def test_a_kernel_called_by_a_kernel_is_a_function() -> None:
    inner = nki_sim.jit(double)

    def kernel(x: Any) -> Any:
        return inner(inner(x))

    assert np.array_equal(nki_sim.simulate(kernel)(X), 4 * X)


def test_an_instruction_outside_a_kernel_says_how_to_run_one() -> None:
    with pytest.raises(RuntimeError, match="simulate"):
        nl.ndarray((8, 8), nl.float32)
    with pytest.raises(RuntimeError, match="simulate"):
        isa.dma_copy(None, None)  # type: ignore[arg-type]


def test_a_tensor_returned_in_part_is_reported_and_filled() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray((8, 64), nl.float32, buffer=nl.shared_hbm)
        isa.dma_copy(out[0:6], x[0:6])
        return out

    run = nki_sim.run(kernel, X)
    assert np.isnan(run.outputs[6:]).all()
    assert [finding.kind for finding in run.findings] == ["output"]
    assert "128 of 512" in run.findings[0].text


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_inputs_of_64_bits_are_narrowed_and_reported(dtype: Any) -> None:
    run = nki_sim.run(double, X.astype(dtype))
    assert run.outputs.dtype == {np.int64: np.int32, np.float64: np.float32}[dtype]
    assert np.array_equal(run.outputs, 2 * X)
    assert [finding.kind for finding in run.findings] == ["input"]


# Grids


def test_the_program_knows_its_core() -> None:
    def kernel() -> Any:
        return nl.program_id(0), nl.num_programs(0), nl.program_ndim()

    kernel = nki_sim.jit(kernel)
    assert nki_sim.run(kernel).outputs == (0, 1, 0)
    assert nki_sim.run(kernel[1]).outputs == (0, 1, 1)
    assert nki_sim.run(kernel[2]).outputs == (0, 2, 1)
    assert nki_sim.simulate(kernel)[2]() == (0, 2, 1)
    with pytest.raises(ValueError, match="1 or 2 cores"):
        kernel[3]


def test_private_tensors_are_private_and_shared_ones_shared() -> None:
    def kernel() -> Any:
        core = nl.program_id(0)
        private = nl.ndarray((1, 4), nl.float32, buffer=nl.private_hbm)
        tile = nl.ndarray((1, 4), nl.float32)
        isa.memset(tile, float(core + 1))
        isa.dma_copy(private, tile)
        out = nl.ndarray((2, 4), nl.float32, buffer=nl.shared_hbm, name="out")
        isa.core_barrier(out, (0, 1))
        isa.dma_copy(out[core : core + 1], private)
        return out

    assert nki_sim.run(kernel, lnc=2).outputs.tolist() == [[1] * 4, [2] * 4]


def test_cores_must_make_the_same_shared_tensors() -> None:
    def kernel() -> Any:
        return nl.ndarray((1 + nl.program_id(0), 4), nl.float32, buffer=nl.shared_hbm)

    with pytest.raises(nki_sim.CapacityError, match="same shape and dtype on every core"):
        nki_sim.run(kernel, lnc=2)


def test_cores_must_make_the_same_number_of_shared_tensors() -> None:
    def kernel() -> Any:
        out = nl.ndarray((1, 4), nl.float32, buffer=nl.shared_hbm)
        if nl.program_id(0) == 1:
            nl.ndarray((1, 4), nl.float32, buffer=nl.shared_hbm)
        return out

    with pytest.raises(nki_sim.DivergenceError, match="same shared_hbm allocations") as caught:
        nki_sim.run(kernel, lnc=2)
    assert f"{__file__}:{kernel.__code__.co_firstlineno + 3}" in str(caught.value)
    for text in ("the allocations of core 0 ({'': 1})", "{'': 2} on core 1"):
        assert text in str(caught.value)


@pytest.mark.parametrize("is_one_line", [False, True])
def test_shared_tensors_of_other_names_are_told_where_the_first_core_makes_them(
    is_one_line: bool,
) -> None:
    def kernel() -> Any:
        core = nl.program_id(0)
        if is_one_line or core == 0:
            return nl.ndarray((1, 4), nl.float32, buffer=nl.shared_hbm, name=f"of_{core}")
        return nl.ndarray((1, 4), nl.float32, buffer=nl.shared_hbm, name="other")

    with pytest.raises(nki_sim.DivergenceError, match="of_0") as caught:
        nki_sim.run(kernel, lnc=2)
    assert f"{__file__}:{kernel.__code__.co_firstlineno + 3}" in str(caught.value)


@pytest.mark.parametrize("core", [0, 1])
def test_a_loop_of_one_core_is_named(core: int) -> None:
    def kernel() -> Any:
        out = nl.ndarray((1, 4), nl.float32, buffer=nl.shared_hbm)
        if nl.program_id(0) == core:
            nl.fori_loop(0, isa.register_alloc(2), lambda _: None)
        return out

    with pytest.raises(nki_sim.DivergenceError, match=r"loop at .* on one core only") as caught:
        nki_sim.run(kernel, lnc=2)
    assert f"{__file__}:{kernel.__code__.co_firstlineno + 3}" in str(caught.value)


def test_a_failure_on_one_core_ends_the_launch() -> None:
    def kernel() -> Any:
        out = nl.ndarray((1, 4), nl.float32, buffer=nl.shared_hbm)
        if nl.program_id(0) == 1:
            raise ZeroDivisionError("on core 1")
        isa.core_barrier(out, (0, 1))
        return out

    with pytest.raises(ZeroDivisionError, match="on core 1"):
        nki_sim.run(kernel, lnc=2)


# Targets and modes


@pytest.mark.parametrize(
    ("target", "generation", "bytes_"),
    [("trn1", 2, 180_224), ("trn2", 3, 212_984), ("trn3", 4, 245_752)],
)
def test_the_target_decides_generation_and_sizes(target: str, generation: int, bytes_: int) -> None:
    def kernel() -> Any:
        return isa.get_nc_version().value, nl.tile_size.sbuf_fmax_bytes, nl.tile_size.pmax

    assert nki_sim.run(kernel, options=SimOptions(target=target)).outputs == (
        generation,
        bytes_,
        128,
    )


def test_the_languages_own_variable_chooses_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel() -> Any:
        return isa.get_nc_version()

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen4")
    assert nki_sim.run(kernel).outputs is isa.nc_version.gen4
    assert nki_sim.run(kernel, options=SimOptions(target="trn2")).outputs is isa.nc_version.gen3
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(ValueError, match="trn9"):
        nki_sim.run(kernel)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "fast"},
        {"fill": 256},
        {"preempt": 1.5},
        {"nki": "0.5"},
        {"uninitialized": "x"},
        {"numbers": "error"},
        {"capacity": "none"},
    ],
    ids=lambda w: next(iter(w)),
)
def test_options_refuse_what_they_do_not_know(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SimOptions(**wrong)
    with pytest.raises(ValueError, match=r'races=\'no\': must be "error", "report" or "off"'):
        SimOptions(races="no")  # type: ignore[arg-type]


def test_indices_mode_needs_no_float_values_and_gives_the_same_trace() -> None:
    full = nki_sim.run(double, X)
    fast = nki_sim.run(double, TensorSpec(X.shape, "float32"), options=SimOptions(mode="indices"))
    assert fast.outputs == TensorSpec((8, 64), nl.float32)
    assert list(full.trace) == list(fast.trace)


def test_indices_mode_does_not_allocate_float_tensors() -> None:
    """Inputs and outputs of 64 GiB each: nothing may touch their bytes."""

    def kernel(x: Any, i: Any) -> Any:
        rows = nl.ndarray((128, 1), nl.int32)
        isa.dma_copy(rows, i)
        tile = nl.ndarray((128, 4096), nl.bfloat16)
        isa.dma_copy(tile, x.ap([[4096, 128], [1, 4096]], vector_offset=rows))
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        isa.dma_copy(out.ap([[4096, 128], [1, 4096]], vector_offset=rows), tile)
        return out

    x = TensorSpec((1 << 23, 4096), "bfloat16")
    ids = np.arange(128, dtype=np.int32)[:, None] * 60_000
    options = SimOptions(mode="indices", uninitialized="off")
    assert nki_sim.run(kernel, x, ids, options=options).outputs == x


def address_of(numbers: Any) -> Any:
    """Load float numbers and make an address of the first one."""
    values, where = nl.ndarray(numbers.shape, nl.float32), nl.ndarray((1, 1), nl.int32)
    isa.dma_copy(values, numbers)
    isa.tensor_copy(where, values[:, 0:1])
    return where


def row_at(x: Any, where: Any) -> Any:
    out = nl.ndarray((1, 64), nl.float32, buffer=nl.shared_hbm)
    isa.dma_copy(out, x.ap([[64, 1], [1, 64]], scalar_offset=where))
    return out


@pytest.mark.parametrize(
    ("numbers", "is_followed"),
    [
        (np.full((1, 8), 3.0, np.float32), True),
        (np.full((1, 9), 3.0, np.float32), False),
        (TensorSpec((1, 8), "float32"), False),
    ],
    ids=["small", "larger", "unknown"],
)
def test_indices_mode_follows_small_inputs_alone(numbers: Any, is_followed: bool) -> None:
    def kernel(x: Any, numbers: Any) -> Any:
        return row_at(x, address_of(numbers))

    options = SimOptions(mode="indices", small_elements=8)
    if is_followed:
        nki_sim.run(kernel, X, numbers, options=options)
        whole = nki_sim.run(kernel, X, numbers, options=SimOptions(mode="indices"))
        assert np.array_equal(whole.outputs, X[3:4])
    else:
        with pytest.raises(nki_sim.UnknownValue, match="mode='full'"):
            nki_sim.run(kernel, X, numbers, options=options)


def test_indices_mode_knows_what_overwrites_the_unknown() -> None:
    def kernel(x: Any, numbers: Any, rows: Any) -> Any:
        where = address_of(numbers)
        isa.dma_copy(where, rows)
        return row_at(x, where)

    unknown, rows = TensorSpec((1, 1), "float32"), np.array([[3]], np.int32)
    found = nki_sim.run(kernel, X, unknown, rows, options=SimOptions(mode="indices"))
    assert np.array_equal(found.outputs, X[3:4])


def test_indices_mode_copies_constants_whatever_their_size() -> None:
    """A fill of a large tensor waits until it is read; a copy of it does not."""

    def kernel(x: Any) -> Any:
        filled, copied = (nl.ndarray((128, 256), nl.float32) for _ in range(2))
        isa.memset(filled, 3.0)
        isa.tensor_copy(copied, filled)
        where = nl.ndarray((1, 1), nl.int32)
        isa.tensor_copy(where, copied[0:1, 5:6])
        return row_at(x, where)

    options = SimOptions(mode="indices", small_elements=1 << 20)
    assert np.array_equal(nki_sim.run(kernel, X, options=options).outputs, X[3:4])


@pytest.mark.parametrize(("lnc", "ranks", "preempt"), [(1, 1, 0.0), (1, 2, 0.5), (2, 2, 0.5)])
def test_only_cores_side_by_side_interrupt_each_other(lnc: int, ranks: int, preempt: float) -> None:
    assert System(SimOptions(preempt=0.5), lnc, ranks).preempt == preempt


# Ranks


def test_each_rank_has_its_own_inputs_and_outputs() -> None:
    run = nki_sim.run_ranks(double, [(X,), (X + 1,), {"x": X + 2}])
    for rank in range(3):
        assert np.array_equal(run.outputs[rank], 2 * (X + rank))


# Schedules


def test_named_instructions_may_be_ordered_by_hand() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        a, b = nl.ndarray(x.shape, x.dtype), nl.ndarray(x.shape, x.dtype)
        first = isa.dma_copy(a, x, name="load a")
        isa.dma_copy(b, x, name="load b").depends_on(first)
        isa.dma_copy(out, a, name="store")
        return out

    scheduled = nki_sim.jit(kernel).with_schedule([("store", ["load b"])])
    trace = nki_sim.run(scheduled, X).trace
    assert trace.after == {1: (0,), 2: (1,)}
    both = nki_sim.run(scheduled, X, lnc=2).trace
    assert sorted(both.after.values()) == [(0,), (1,), (3,), (4,)]
    with pytest.raises(ValueError, match="no instruction is named 'lode'"):
        nki_sim.run(nki_sim.jit(kernel).with_schedule([("lode", "store")]), X)


def test_unwritten_memory_holds_the_fill_where_nobody_asks_for_it() -> None:
    def kernel() -> Any:
        part = nl.ndarray((4, 8), nl.uint8, buffer=nl.private_hbm)
        out = nl.ndarray((4, 8), nl.uint8, buffer=nl.shared_hbm)
        isa.dma_compute(out, [part, part], nl.add)
        return out

    options = SimOptions(uninitialized="off", fill=3)
    assert nki_sim.run(kernel, options=options).outputs.tolist() == [[6] * 8] * 4


def test_three_calls_that_led_to_a_line_are_kept() -> None:
    def fill(x: Any) -> None:
        isa.memset(x, 0.0)

    def second(x: Any) -> None:
        fill(x)

    def third(x: Any) -> None:
        second(x)

    def fourth(x: Any) -> None:
        third(x)

    def kernel(is_deep: bool) -> None:
        (fourth if is_deep else fill)(nl.ndarray((4, 8), nl.float32))

    for is_deep, count in ((True, 3), (False, 1)):
        done = nki_sim.run(kernel, is_deep, options=SimOptions(callers=True))
        assert [len(calls) for calls in done.trace.callers if calls] == [count]
