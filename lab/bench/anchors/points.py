"""Chip times that others published beside the source of their kernels, and how to run them.

Everything is read from the user's checkouts: the kernels, their inputs and the times. The vendor's
kernel library keeps a chip time in the parameters of its own tests (columns `tpbSgCyclesSum`,
`cyclesQoR`, `qor`: picoseconds, mean over runs of the slower core). Its tests are called with a
stand-in for their harness, which simulates the kernel without arithmetic and compares nothing.
nki-autotune states the utilisation of its matmuls in file names and notes, and its `benchmark` has
latencies of the library's kernels, taken as in the library's tests: sizes and settings stand beside
them, the kernels in the library's checkout.

The families are dealt into two halves by their name: coefficients of the clock are fitted to one,
the other only judges.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import pickle
import re
import signal
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal
from unittest.mock import MagicMock

import numpy as np

import nki_sim
from lab.bench.anchors.report import LATER
from nki_sim import SimOptions, TensorSpec
from nki_sim.errors import UnknownValue
from nki_sim.trace import Trace
from nki_sim.vendor_tests import answer_imports

OPTIONS: Final = SimOptions(
    nki="0.6",
    mode="indices",
    uninitialized="off",
    races="off",
    overlap="report",
    capacity="reorder",
    accumulate="report",
    scatter="report",
    target="trn2",
)
TIME_COLUMNS: Final = ("tpbSgCyclesSum", "cyclesQoR", "qor")
_PS_PER_US: Final = 1e6
_TESTS: Final = "test.integration.nkilib.core"
_LIBRARY: Final = {
    "mlp_tkg": f"{_TESTS}.mlp.test_mlp_tkg",
    "mlp_cte": f"{_TESTS}.mlp.test_mlp_cte",
    "qkv_tkg": f"{_TESTS}.qkv.test_qkv_tkg",
    "rmsnorm_quant": f"{_TESTS}.rmsnorm.test_rmsnorm_quant",
    "attention_cte": f"{_TESTS}.attention.test_attention_cte",
}

Half = Literal["fitted", "held_out"]


def half(family: str) -> Half:
    """Return the half of a family: even SHA-256 of its name is fitted, odd is held out.

    One exception, made before the first fit: both MLPs of the library are odd, and were to be in
    opposite halves; the one for decode is fitted.
    """
    if family == "mlp_tkg":
        return "fitted"
    return "held_out" if hashlib.sha256(family.encode()).digest()[-1] % 2 else "fitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A published time and how to get at it.

    Attributes:
        kernel: family and sizes.
        family: the kernel's name; all its points are in one half.
        source: the file of the checkout that states the time.
        chip_us: the time.
        trace: simulates the kernel.
        order: "source" where the time was taken with the compiler's scheduling off, else
            "compiler".
        doubt: why the time may not be one of this kernel; empty where nothing speaks against it.
    """

    kernel: str
    family: str
    source: str
    chip_us: float
    trace: Callable[[], Trace]
    order: Literal["source", "compiler"] = "source"
    doubt: str = ""

    @property
    def half(self) -> Half:
        """The half that its family was dealt to."""
        return half(self.family)


def find_points(library: Path | None, autotune: Path | None) -> list[Point]:
    """Return every point of the checkouts, the shortest first.

    Args:
        library: a checkout of aws-neuron/nki-library.
        autotune: a checkout of awslabs/nki-autotune.
    """
    points: list[Point] = []
    if library is not None:
        answer_imports(library.resolve())
        for family, module in _LIBRARY.items():
            points += _doubted(list(_library_points(family, module)))
    if autotune is not None:
        points += _autotune_points(autotune.resolve())
        if library is not None:  # some of its times are those of the library's tests
            known = {(point.family, round(point.chip_us, 3)) for point in points}
            found = _benchmark_points(autotune.resolve(), library.resolve())
            points += [p for p in found if (p.family, round(p.chip_us, 3)) not in known]
    return sorted(points, key=lambda point: point.chip_us)


def _doubted(points: Sequence[Point]) -> list[Point]:
    """Return points of a family, marked where a time stands beside several kernels."""
    shared = Counter(point.chip_us for point in points)
    marked = []
    for point in points:
        many = shared[point.chip_us]
        doubt = f"the same time stands beside {many} kernels" if many > 1 else ""
        marked.append(replace(point, doubt=doubt))
    return marked


# --- The vendor's library -------------------------------------------------------------------------


class _Harness:
    """Stands in for the library's test manager: simulates what a test would run."""

    trace: Trace | None = None

    def execute(self, test: Any, **_: Any) -> None:
        """Run the kernel of a test on shapes alone."""
        inputs = {
            name.removesuffix(".must_alias_input"): _shape_of(value)
            for name, value in test.kernel_input.items()
        }
        cores = test.compiler_input.logical_nc_config
        kernel = nki_sim.launch.jit(test.kernel_func)[cores]
        self.trace = nki_sim.run(kernel, options=OPTIONS, **inputs).trace


def _shape_of(value: Any) -> Any:
    """Return arrays of floating-point numbers as shapes: no kernel's course depends on them."""
    if not isinstance(value, np.ndarray) or value.dtype.kind in "biu" or value.dtype.names:
        return value
    return TensorSpec(value.shape, value.dtype.name)


def _library_points(family: str, module_name: str) -> Iterator[Point]:
    """Yield the points in the parameters of a module's tests."""
    module = importlib.import_module(module_name)
    source = module_name.replace(".", "/") + ".py"
    seen: set[str] = set()
    for words, ps, call in itertools.chain(_parametrized(module), _ranged(module)):
        kernel = f"{family} {words}"
        if kernel not in seen:
            seen.add(kernel)
            yield Point(
                kernel=kernel,
                family=family,
                source=source,
                chip_us=ps / _PS_PER_US,
                trace=partial(_traced, call),
            )


def _traced(call: Callable[[_Harness], None]) -> Trace:
    harness = _Harness()
    call(harness)
    if harness.trace is None:
        raise ValueError("the library's test launched no kernel.")
    return harness.trace


def _test_methods(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yield class and function of each test of a module."""
    for kind in vars(module).values():
        if inspect.isclass(kind) and kind.__module__ == module.__name__:
            for name, function in vars(kind).items():
                if name.startswith("test_"):
                    yield kind, function


def _arguments(function: Any, harness: _Harness, given: dict[str, Any]) -> dict[str, Any]:
    """Return what a test takes: its parameters, the harness, the chip, and stubs."""
    common = importlib.import_module("test.utils.common_dataclasses")
    fixed = {"test_manager": harness, "platform_target": common.Platforms.TRN2} | given
    names = list(inspect.signature(function).parameters)[1:]
    return {name: fixed[name] if name in fixed else MagicMock() for name in names}


def _parametrized(module: Any) -> Iterator[tuple[str, float, Callable[[_Harness], None]]]:
    """Yield words, picoseconds and call of each row of `pytest.mark.parametrize` with a time."""
    for kind, function in _test_methods(module):
        tables = [m for m in getattr(function, "pytestmark", ()) if m.name == "parametrize"]
        first: dict[str, Any] = {}  # of each table beside that of the times
        timed: list[dict[str, Any]] = []
        for mark in tables:
            names = _columns(mark.args[0])
            rows = [
                dict(zip(names, v if len(names) > 1 else (v,), strict=False)) for v in mark.args[1]
            ]
            if set(names) & set(TIME_COLUMNS):
                timed = rows
            else:
                first |= next(iter(rows), {})
        for row in timed:
            row = first | row
            ps = _picoseconds(next(row[name] for name in TIME_COLUMNS if name in row))
            if ps:

                def call(
                    harness: _Harness, kind: Any = kind, f: Any = function, r: Any = row
                ) -> None:
                    f(kind(), **_arguments(f, harness, r))

                yield _words(row), ps, call


def _ranged(module: Any) -> Iterator[tuple[str, float, Callable[[_Harness], None]]]:
    """Yield the same for tests over tables that a function of the module turns into cases.

    The function unpacks each row into named variables, the time among them.
    """
    makers = [
        f for n, f in vars(module).items() if n.startswith("create_") and inspect.isfunction(f)
    ]
    for make in makers:
        names = list(make.__code__.co_varnames)
        time = next((name for name in TIME_COLUMNS if name in names), None)
        if time is None:
            continue
        names = names[names.index("vnc_degree") :]
        kind, function = next(
            (k, f) for k, f in _test_methods(module) if f.__name__.endswith("_unit")
        )
        for row in _rows(module, names.index(time)):
            named = dict(zip(names, row, strict=False))
            ps = _picoseconds(named[time])
            if not ps:
                continue

            def call(
                harness: _Harness,
                row: Any = row,
                make: Any = make,
                kind: Any = kind,
                f: Any = function,
            ) -> None:
                case = (
                    make([row])
                    .global_tensor_configs.custom_generators[0]
                    .generate_ranges(None, {})[0]
                )
                for sizes in case.tensors.values():
                    sizes.setdefault("vnc_degree", row[0])
                f(kind(), **_arguments(f, harness, {"range_test_options": case}))

            yield _words(dict(zip(names, row, strict=False))), ps, call


def _rows(module: Any, time: int) -> Iterator[list[Any]]:
    """Yield the rows of a module's tables that have a number where the time stands."""
    for table in list(vars(module).values()):
        lists = table.values() if isinstance(table, dict) else [table]
        for rows in lists:
            for row in rows if isinstance(rows, list) else ():
                if isinstance(row, list) and len(row) > time and _picoseconds(row[time]):
                    yield row


def _columns(names: Any) -> list[str]:
    return [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)


def _picoseconds(value: Any) -> float:
    """Return a time of a table; 0 where there is none."""
    if isinstance(value, tuple):
        value = next((each for each in value if each), None)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if value > 1e6 else 0.0


def _words(row: dict[str, Any]) -> str:
    """Return a row as words, without its time and what has no short name."""
    words = []
    for name, value in row.items():
        if name in TIME_COLUMNS or value is None or value is False:
            continue
        text = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
        words.append(name if value is True else f"{name}={re.sub(r'[<( ].*', '', text)}")
    return " ".join(words)


# --- nki-autotune ---------------------------------------------------------------------------------

_SIZE: Final = 2048
_FLOPS_PER_US: Final = 128 * 128 * 2 * 2.4e3
_MATMULS: Final = {
    "kernel_library/matmul/lhsT_rhs/kernel_hand_90.92mfu.py": "matmul_lhsT_rhs_nkigym",
    "kernel_library/matmul/lhs_rhs/kernel_handtuned_89.26mfu.py": "matmul_lhs_rhs_nkigym",
    "kernel_transforms.py": "kernel_15",
}
_TUNED: Final = "examples/tune_matmul_lhsT_rhs.py"


def _autotune_points(checkout: Path) -> list[Point]:
    """Return the matmuls whose file names state a utilisation."""
    points = []
    for path, name in _MATMULS.items():
        share = re.search(r"([\d.]+)mfu", path)
        source, order, us = path, "source", 0.0
        if share is not None:
            us = 2 * _SIZE**3 / (float(share[1]) / 100 * _FLOPS_PER_US)
        elif (checkout / _TUNED).is_file():
            # The last kernel of the file; its time stands in the script that profiles it.
            source, order = _TUNED, "compiler"
            seconds = re.search(r"tuned \(.*?\) +(0\.\d+)", (checkout / _TUNED).read_text())
            us = float(seconds[1]) * 1e6 if seconds else 0.0
        if us and (checkout / path).is_file():
            points.append(
                Point(
                    kernel=f"{name} {_SIZE}",
                    family="matmul",
                    source=source,
                    chip_us=us,
                    trace=partial(_run_file, checkout, path, name),
                    order="source" if order == "source" else "compiler",
                )
            )
    return points


def _run_file(checkout: Path, path: str, name: str) -> Trace:
    """Run a kernel of a file on two square matrices, on one core."""
    nki_sim.provide()
    for place in (checkout, checkout / "nkigym" / "src", checkout / "autotune" / "src"):
        if str(place) not in sys.path:
            sys.path.append(str(place))
    spec = importlib.util.spec_from_file_location(f"autotune_{name}", checkout / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    matrices = [TensorSpec((_SIZE, _SIZE), "bfloat16")] * 2
    return nki_sim.run(getattr(module, name), *matrices, lnc=1, options=OPTIONS).trace


# --- nki-autotune's times of the library's kernels -----------------------------------------------

_PLACES: Final = ("src/nkilib_src/nkilib", "test/integration/nkilib")
_NAMES: Final = {  # of the library's functions, where they differ from the benchmark's
    "attention_tkg": "attn_tkg_wrapper",
    "depthwise_conv1d": "depthwise_conv1d_implicit_gemm",
    "mlp_tkg": "mlp",
    "rmsnorm_quant": "rmsnorm_quant_kernel",
    "rope": "RoPE",
}
# First inputs that the library tests on one core alone, and on one as on two (no sizes: all of the
# family). The others it tests on two.
_ON_ONE: Final = {
    "cascaded_max": ((1, 7, 3999), (4, 5, 8192)),
    "rotational_topk": ((20, 8192),),
}
_ON_EITHER: Final = {
    "cascaded_max": ((1, 1, 3168), (8, 5, 4058), (8, 5, 8192)),
    "rope_hf": (),
    "rotational_topk": ((40, 8192),),
}
_SMALL: Final = 2**20  # elements of inputs that choose what is loaded


def _benchmark_points(checkout: Path, library: Path) -> Iterator[Point]:
    """Yield the workloads of `benchmark/nakb_*.py`."""
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    for path in sorted((checkout / "benchmark").glob("nakb_*.py")):
        family = path.stem.removeprefix("nakb_")
        for workload in importlib.import_module(f"benchmark.{path.stem}").WORKLOADS:
            specs, reference = workload["input_specs"], workload["torch_ref"]
            first = next(iter(specs.values()))[0]
            cores = reference.subscript or (1 if first in _ON_ONE.get(family, ()) else 2)
            sizes = {n: f"{'x'.join(map(str, shape))}:{d}" for n, (shape, d) in specs.items()}
            row = sizes | _flat(reference.bound_kwargs) | sizes | {"cores": cores}
            yield Point(
                kernel=f"{family} {_words(row)}",
                family=family,
                source=f"benchmark/{path.name}",
                chip_us=workload["nakb_latency_ms"] * 1e3,
                trace=partial(_run_workload, library, family, workload, cores),
                doubt=_doubt(family, first),
            )


def _doubt(family: str, first: tuple[int, ...]) -> str:
    """Return what speaks against a workload's time as one of the kernel in the checkout.

    Twelve workloads name kernels that the public library of April 2026 lacks, so all were timed
    with a later one.
    """
    if family.startswith("cross_entropy"):
        return "its element type and chunks are left open"
    if family in _ON_EITHER and first in (_ON_EITHER[family] or (first,)):
        return "the library tests it on one core and on two"
    return LATER


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the fields of records among them, without tuples."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_record = isinstance(value, SimpleNamespace) or is_dataclass(value)
        flat |= vars(value) if is_record else {name: value}
    return {name: value for name, value in flat.items() if not isinstance(value, tuple)}


def _run_workload(library: Path, family: str, workload: dict[str, Any], cores: int) -> Trace:
    """Run the library's kernel on the sizes and settings of a workload."""
    kernel = _find_kernel(library, _NAMES.get(family, family))
    specs = workload["input_specs"]
    sizes = {name: TensorSpec(*spec) for name, spec in specs.items()}
    settings = {n: s for n, s in workload["torch_ref"].bound_kwargs.items() if s is not None}

    def run(small_elements: int) -> Trace:
        """Run with numbers in integers and small inputs; of the others the sizes do."""
        held = [n for n, s in sizes.items() if "int" in s.dtype or s.size <= small_elements]
        numbers = workload["input_generator"]({n: specs[n] for n in held}, 0) if held else {}
        given = settings | sizes | _made(family, kernel, settings | sizes, cores) | numbers
        inputs = {}
        for name, parameter in inspect.signature(kernel, eval_str=True).parameters.items():
            if name in given:
                inputs[name] = _as_library(given[name], parameter.annotation)
            elif parameter.default is parameter.empty:
                inputs[name] = None
        options = replace(OPTIONS, small_elements=small_elements)
        return nki_sim.run(nki_sim.launch.jit(kernel)[cores], options=options, **inputs).trace

    try:
        return run(0)
    except UnknownValue:  # a router: its numbers choose what is loaded
        return run(_SMALL)


@functools.cache
def _find_kernel(library: Path, name: str) -> Any:
    """Return a function of the library, or of its tests, by its name."""
    for place in _PLACES:
        for path in sorted((library / place).rglob("*.py")):
            if f"\ndef {name}(" in path.read_text():
                folder = library / "src" if place.startswith("src") else library
                module = ".".join(path.relative_to(folder).with_suffix("").parts)
                return getattr(importlib.import_module(module), name)
    raise LookupError(f"{name}: the library has no kernel of this name.")


def _as_library(value: Any, annotation: Any) -> Any:
    """Return a setting as the library's type that a parameter's annotation names."""
    kinds = [k for k in (annotation, *typing.get_args(annotation)) if isinstance(k, type)]
    for kind in kinds:
        if issubclass(kind, Enum):
            return kind[value.name] if isinstance(value, Enum) else kind(value)
        if is_dataclass(kind) and hasattr(value, "__dict__"):
            types = inspect.get_annotations(kind, eval_str=True)
            return kind(**{n: _as_library(each, types[n]) for n, each in vars(value).items()})
    if str(value).startswith("torch."):  # an element type
        return getattr(importlib.import_module("nki.language"), str(value).removeprefix("torch."))
    return value


def _made(family: str, kernel: Any, given: dict[str, Any], cores: int) -> dict[str, Any]:
    """Return arguments that the references do without, or take in another form: see the tests."""
    language = importlib.import_module("nki.language")
    if family == "router_topk":
        pairs_TE = TensorSpec((given["x"].shape[0], given["w"].shape[1]), given["x"].dtype)
        chosen_TK = TensorSpec((pairs_TE.shape[0], given["k"]), "uint32")
        names = ("router_logits", "expert_affinities")
        return dict.fromkeys(names, pairs_TE) | {"expert_index": chosen_TK}
    if family == "rope_hf":
        return {"q_out": given["q"], "k_out": given["k"]}
    if family == "attention_cte":
        bounds = {name: given[name] for name in ("bound_min", "bound_max") if name in given}
        return {n: replace(b, shape=b.shape[1:]) for n, b in bounds.items() if b.shape[0] == 1}
    if family == "attention_tkg":
        cfg = given["cfg"]
        shape = (cfg.bs, cfg.q_head, cfg.d_head, cfg.s_active)
        dtype = getattr(language, given["q"].dtype)
        return {"attn_out_shape": shape, "dtype": dtype, "lnc": cores, "DBG": False}
    if family.startswith("cross_entropy"):
        logits_TV = given["logits_hbm"]
        return {
            "lse_state_hbm": TensorSpec(logits_TV.shape[:1], logits_TV.dtype),
            "chunk_size": min(given["chunk_size"], logits_TV.shape[1]),
        }
    if family == "rotational_topk":
        module = sys.modules[kernel.func.__module__]
        inp_TV = given["inp"]
        config = module.create_topk_config(
            inp_shape=(inp_TV.shape[0], 1, inp_TV.shape[1]),
            inp_dtype=getattr(language, inp_TV.dtype),
            k=given["topk_k"],
            sorted=bool(given["topk_sorted"]),
            num_programs=cores,
        )
        config = module.create_rotational_topk_config(inp_shape=inp_TV.shape, topk_config=config)
        return {"config": module.prepare_rotational_constants(config)}
    return {}


# --- Traces kept ----------------------------------------------------------------------------------


class OutOfTimeError(Exception):
    """A kernel took longer to simulate than it may."""


def kept_trace(point: Point, folder: Path | None, seconds: float) -> Trace:
    """Return the trace of a point, from the folder where it was kept or by simulation.

    Raises:
        OutOfTimeError: simulating takes over `seconds` of processor time.
    """
    place = folder and folder / f"{hashlib.sha256(point.kernel.encode()).hexdigest()[:16]}.pickle"
    if place is not None and place.is_file():
        found: Trace = pickle.loads(gzip.decompress(place.read_bytes()))
        return found
    before = signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with contextlib.redirect_stdout(None):
            trace = point.trace()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_suffix(".part")
        unfinished.write_bytes(gzip.compress(pickle.dumps(trace), compresslevel=1))
        unfinished.rename(place)
    return trace


def _out_of_time(*_: Any) -> None:
    raise OutOfTimeError
