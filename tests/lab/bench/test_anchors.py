"""Strangers' chip times: read from checkouts, dealt into halves, and met by the estimates.

Tests over the library need a checkout of it; whole models run with -m slow.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nki_sim
from lab.bench.anchors import main
from lab.bench.anchors import points as anchor_points
from lab.bench.anchors.models import ANCHORS, DEEPSEEK, FAMILY, QWEN35, Anchor, measure
from lab.bench.anchors.points import OutOfTimeError, Point, find_points, half, kept_trace
from lab.bench.anchors.report import Row, draw, summaries, table
from lab.check.vendor_cases.library import VendorLibrary
from nki_sim.hardware import TRN2
from nki_sim.time.estimate import estimate
from tests.nki_sim.timing.conftest import TraceBuilder

LIBRARY = os.environ.get("NKI_LIBRARY_PATH", "")
NEEDS_LIBRARY = pytest.mark.skipif(
    not LIBRARY, reason="NKI_LIBRARY_PATH names no checkout of nki-library"
)
KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def matmul_lhsT_rhs_nkigym(lhs_T, rhs):
    out = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=rhs[0:128, 0:512])
    nisa.dma_copy(dst=out, src=tile)
    return out
"""

BENCHMARKS = {
    "__init__": """
from dataclasses import dataclass, field

@dataclass(frozen=True)
class TorchReference:
    function: object
    parameters: tuple
    bound_kwargs: dict = field(default_factory=dict)
    subscript: int | None = None
""",
    "nakb_tiny": """
from enum import IntEnum
from types import SimpleNamespace

import numpy as np

from benchmark import TorchReference

class NormType(IntEnum):
    RMS_NORM = 7  # the library numbers them otherwise

def fives(input_specs, seed):
    return {name: np.full(shape, 5, dtype) for name, (shape, dtype) in input_specs.items()}

kargs = SimpleNamespace(norm=NormType.RMS_NORM, eps=1e-6)
settings = {"kargs": kargs, "scale": None, "later": 1, "x": None}
reference = TorchReference(print, ("x", "weights"), settings, 1)
specs = {"x": ((128, 64), "float32"), "weights": ((1, 1), "float32")}
WORKLOADS = (
    {"torch_ref": reference, "input_specs": specs, "input_generator": fives,
     "nakb_latency_ms": 0.0125},
)
""",
    "nakb_newer": """
from benchmark import TorchReference
WORKLOADS = (
    {"torch_ref": TorchReference(print, ("x",)), "input_specs": {"x": ((2, 64), "int32")},
     "input_generator": None, "nakb_latency_ms": 0.02},
)
""",
}
TINY_LIBRARY = """
from dataclasses import dataclass
from enum import Enum

import nki
import nki.isa as nisa
import nki.language as nl

class NormType(Enum):
    NO_NORM = 0
    RMS_NORM = 1

@dataclass
class Args:
    norm: NormType = NormType.NO_NORM
    eps: float = 0.0

@nki.jit
def tiny(x, weights, kargs: Args, scale: float = 2.0, state=None):
    assert isinstance(kargs, Args) and kargs.norm is NormType.RMS_NORM and kargs.eps == 1e-6
    assert scale == 2.0
    value = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    where = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    out = nl.ndarray((1, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=value, src=weights)
    nisa.tensor_copy(dst=where, src=value)
    nisa.dma_copy(dst=out, src=x.ap([[64, 1], [1, 64]], scalar_offset=where))
    return out
"""


def row(**changed: Any) -> Row:
    values: dict[str, Any] = {
        "kernel": "k 1",
        "family": "k",
        "source": "s.py",
        "chip_us": 100.0,
        "low_us": 90.0,
        "estimate_us": 95.0,
        "high_us": 120.0,
        "half": "held_out",
    }
    return Row(**values | changed)


def test_a_family_is_dealt_by_the_hash_of_its_name_but_for_one_of_two_mlps() -> None:
    for family in ("mlp_cte", "qkv_tkg", "rmsnorm_quant", "attention_cte", "matmul", "cumsum"):
        is_odd = int(hashlib.sha256(family.encode()).hexdigest(), 16) % 2
        assert half(family) == ("held_out" if is_odd else "fitted")
    assert half("mlp_tkg") == "fitted" != half("mlp_cte")


def test_times_stand_in_names_of_files_and_doubt_in_repetition(tmp_path: Path) -> None:
    path = tmp_path / "kernel_library/matmul/lhsT_rhs/kernel_hand_90.92mfu.py"
    path.parent.mkdir(parents=True)
    path.write_text(KERNEL)
    [point] = find_points(None, tmp_path)
    assert point.chip_us == pytest.approx(240.27, abs=0.01)
    assert (point.half, point.doubt, point.order) == ("fitted", "", "source")
    assert len(point.trace()) == 2
    twice = anchor_points._doubted([point, point])
    assert all("beside 2 kernels" in each.doubt for each in twice)


def test_a_benchmark_of_the_library_runs_its_kernel_on_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, checkout = tmp_path / "library", tmp_path / "checkout"
    (library / "src/tiny_library").mkdir(parents=True)
    (library / "src/tiny_library/kernels.py").write_text(TINY_LIBRARY)
    (checkout / "benchmark").mkdir(parents=True)
    for name, text in BENCHMARKS.items():
        (checkout / f"benchmark/{name}.py").write_text(text)
    monkeypatch.setattr(anchor_points, "_PLACES", ("src/tiny_library",))
    monkeypatch.setattr(sys, "path", [str(library / "src"), *sys.path])
    for name in [n for n in sys.modules if n.split(".")[0] == "benchmark"]:
        monkeypatch.delitem(sys.modules, name)
    nki_sim.provide()
    newer, tiny = anchor_points._benchmark_points(checkout, library)
    assert tiny.kernel == (
        "tiny x=128x64:float32 weights=1x1:float32 norm=RMS_NORM eps=1e-06 later=1 cores=1"
    )
    assert (tiny.family, tiny.source, tiny.order) == ("tiny", "benchmark/nakb_tiny.py", "source")
    assert tiny.chip_us == pytest.approx(12.5)
    trace = tiny.trace()  # the row is chosen by the weights' numbers
    assert len(trace) == 3
    assert newer.kernel.endswith("cores=2")
    with pytest.raises(LookupError, match="newer: the library has no kernel of this name"):
        newer.trace()
    for us, names in ((12.5, ["test", newer.kernel]), (12.6, [tiny.kernel, "test", newer.kernel])):
        known = Point(kernel="test", family="tiny", source="s", chip_us=us, trace=tiny.trace)
        monkeypatch.setattr(anchor_points, "_library_points", lambda *_, known=known: [known])
        monkeypatch.setattr(anchor_points, "_LIBRARY", {"tiny": "module"})
        monkeypatch.setattr(anchor_points, "answer_imports", lambda _: None)
        assert [point.kernel for point in find_points(library, checkout)] == names


def test_a_trace_is_kept_and_a_slow_kernel_given_up(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.load(builder.tile(512), builder.hbm(128, 512), slice(0, 128), slice(0, 512))
    calls: list[int] = []

    def traced(is_slow: bool) -> Any:
        calls.append(1)
        while is_slow:
            pass
        return builder.trace

    one = Point(kernel="k", family="k", source="s", chip_us=1.0, trace=lambda: traced(False))
    first, again = (kept_trace(one, tmp_path, 10.0) for _ in range(2))
    assert len(calls) == 1
    assert estimate(first) == estimate(again)
    slow = Point(kernel="slow", family="k", source="s", chip_us=1.0, trace=lambda: traced(True))
    with pytest.raises(OutOfTimeError):
        kept_trace(slow, tmp_path, 0.05)


def test_an_estimate_lies_in_its_range_and_counts_a_launch_for_a_program_alone() -> None:
    builder = TraceBuilder()
    for _ in range(4):
        builder.load(builder.tile(512), builder.hbm(128, 512), slice(0, 128), slice(0, 512))
    alone, inside = estimate(builder.trace), estimate(builder.trace, is_alone=False)
    assert inside.low_us < inside.us < inside.high_us
    assert alone.us - inside.us == pytest.approx(TRN2.launch_ns / 1e3)
    assert TRN2.launch_cost_ns(2) == TRN2.launch_ns + TRN2.launch_pair_ns
    assert str(alone).startswith(f"{alone.us:.1f} us (")


def test_doubtful_rows_count_apart(tmp_path: Path) -> None:
    rows = [row(), row(chip_us=200.0), row(chip_us=9.0, doubt="shared")]
    family, every, doubtful = summaries(rows)
    assert (family.points, every.points, doubtful.points) == (2, 2, 1)
    assert family.median_error == pytest.approx((0.05 + 0.525) / 2)
    assert (family.near_share, family.inside_share) == (0.5, 0.5)
    assert "held_out: k" in table(rows)
    assert draw(rows, tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@NEEDS_LIBRARY
def test_the_command_runs_the_librarys_own_tests(tmp_path: Path) -> None:
    only = "mlp_tkg vnc_degree=2 batch=1 seqlen=1 hidden=4096 intermediate=128"
    command = [sys.executable, "-m", "neuron_moe.tools.cli", "bench", "anchors", "--only", only]
    command += ["--library", LIBRARY, "--json", str(tmp_path / "rows.json")]
    # The suite's modules take names of the standard library: a process of their own.
    subprocess.run(command, check=True, capture_output=True)
    [found] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (found["family"], found["half"]) == ("mlp_tkg", "fitted")
    assert found["low_us"] < found["estimate_us"] < found["high_us"]
    assert found["estimate_us"] == pytest.approx(found["chip_us"], rel=0.3)


def test_the_command_runs_kernels_in_processes_and_counts_what_fails(tmp_path: Path) -> None:
    folder = tmp_path / "kernel_library/matmul"
    for path, name in (
        ("lhsT_rhs/kernel_hand_90.92mfu.py", "matmul_lhsT_rhs_nkigym"),
        ("lhs_rhs/kernel_handtuned_89.26mfu.py", "of_another_name"),
    ):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(KERNEL.replace("matmul_lhsT_rhs_nkigym", name))
    out = tmp_path / "rows.json"
    assert main(["--autotune", str(tmp_path), "--jobs", "1", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    [one] = found["rows"]
    assert (one["family"], one["half"]) == ("matmul", "fitted")
    assert one["low_us"] < one["estimate_us"] < one["chip_us"]
    assert found["missed"] == {"matmul_lhs_rhs_nkigym: AttributeError": 1}


def test_the_command_needs_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match="--library: name a checkout"):
        main([])


def parameters() -> list[object]:
    marks = {True: [pytest.mark.slow, NEEDS_LIBRARY], False: [NEEDS_LIBRARY]}
    return [
        pytest.param(
            anchor, marks=marks["TTFT" in anchor.name or "32768" in anchor.name], id=anchor.name
        )
        for anchor in ANCHORS
    ]


@pytest.mark.parametrize("anchor", parameters())
def test_a_time_met_before_is_met_again(anchor: Anchor) -> None:
    found = measure(anchor, VendorLibrary(Path(LIBRARY)))
    assert (found.family, found.half) == (FAMILY, "fitted")
    if anchor.limit == "at most":
        assert found.estimate_us < anchor.published_us
    else:
        assert found.error < 0.1
    assert 0.0 < anchor.rest_us < 0.25 * anchor.published_us


def test_fewer_tokens_than_experts_leave_the_routing_open() -> None:
    """Which experts have a block depends on the padding, unless every one of them has."""
    for anchor in ANCHORS:
        assert anchor.source
        assert anchor.reason
        if "TTFT" in anchor.name:
            few = any(f"shard on I, {tokens} tokens" in anchor.name for tokens in (16, 64))
            assert (anchor.most is not None) == (anchor.limit == "between") == few


def test_the_rest_of_a_layer_grows_with_tokens() -> None:
    for layers in (DEEPSEEK, QWEN35):
        assert 10.0 < layers.rest_us(1) < layers.rest_us(512)
