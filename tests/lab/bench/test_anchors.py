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
    assert main(["--autotune", str(tmp_path), "--jobs", "2", "--json", str(out)]) == 0
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
