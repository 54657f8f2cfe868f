"""The benchmark of the simulator's overhead: what it reports, and what it marks as too slow.

Nothing here depends on a time: limits are tried on made-up measurements.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.bench import sim

# instruction, NumPy, full, overhead, indices, timeline, reordering
WITHIN = {
    "numpy_us": 20.0,
    "full_us": 40.0,
    "full_overhead_us": 20.0,
    "indices_us": 10.0,
    "timeline_us": 5.0,
    "reorder_us": 4.0,
}
PREFILL = {
    "prefill_seconds": 100.0,
    "prefill_peak_gib": 5.0,
    "prefill_timeline_us": 15.0,
    "prefill_reorder_us": 4.0,
}


@pytest.fixture(autouse=True)
def _in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # so that the command does not start another


def bench(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    """Return exit status, JSON record and table of the command."""
    status = sim.main([*options, "--json"])
    table, last = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    return status, json.loads(last), table


def bench_apart(*options: str) -> tuple[int, dict[str, Any], str]:
    """Return the same of the command in a process of its own, which starts another one."""
    command = [sys.executable, "-m", "neuron_moe.tools.cli", "bench", "sim", *options, "--json"]
    env = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    table, last = done.stdout.rstrip().rsplit("\n", 1)
    return done.returncode, json.loads(last), table


@pytest.mark.long
def test_every_instruction_is_measured() -> None:
    status, record, table = bench_apart("--count", "3", "--repeats", "1")
    assert (record["command"], record["kind"]) == ("bench sim", "measured")
    assert (record["count"], record["repeats"]) == (3, 1)
    names = {row["instruction"] for row in record["rows"]}
    assert names == {case.name for case, _ in sim.cases()}
    assert names >= {"nc_matmul bf16", "dma_copy bf16"}
    for row in record["rows"]:
        assert row["instruction"] in table
        assert set(row) == {"instruction", *WITHIN}
        assert row["full_overhead_us"] == max(0.0, row["full_us"] - row["numpy_us"])
    for name in ("full_overhead_us", "indices_us"):
        assert record[name] == max(row[name] for row in record["rows"])
    assert (status == 0) == record["within_limits"]


@pytest.mark.parametrize(
    ("changes", "is_within"),
    [
        ({}, True),
        ({"full_overhead_us": 24.9, "indices_us": 11.9}, True),
        ({"full_us": 1e6}, True),  # NumPy's own work is no overhead
        ({"full_overhead_us": 25.0}, False),
        ({"indices_us": 12.0}, False),
        ({"reorder_us": 5.1}, False),
    ],
)
def test_an_overhead_beyond_its_limit_fails_the_command(
    changes: dict[str, float],
    is_within: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def made_up(case: sim.Instruction, *_: Any) -> dict[str, Any]:
        worst = changes if case.name == "activation fp32" else {}
        return {"instruction": case.name, **WITHIN, **worst}

    monkeypatch.setattr(sim, "measure", made_up)
    status, record, table = bench(capsys)
    assert (status, record["within_limits"]) == (0 if is_within else 1, is_within)
    assert (record["full_limit_us"], record["indices_limit_us"]) == (25, 12)
    worst = WITHIN | changes
    assert record["full_overhead_us"] == worst["full_overhead_us"]
    assert record["indices_us"] == worst["indices_us"]
    assert f"largest overhead: full {worst['full_overhead_us']:.1f} (limit 25)" in table
    assert f"indices {worst['indices_us']:.1f} (limit 12)" in table
    assert f"reordering {worst['reorder_us']:.1f} (limit 5)" in table


@pytest.mark.parametrize(
    ("changes", "is_within"),
    [
        ({}, True),
        ({"prefill_seconds": 120.0}, False),
        ({"prefill_peak_gib": 6.0}, False),
        ({"prefill_reorder_us": 6.0}, False),
    ],
)
def test_a_prefill_beyond_its_limits_fails_the_command(
    changes: dict[str, float],
    is_within: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sim, "measure", lambda case, *_: {"instruction": case.name, **WITHIN})
    monkeypatch.setattr(sim, "measure_prefill", lambda *_: PREFILL | changes)
    status, record, table = bench(capsys, "--library", str(tmp_path))
    assert (status, record["within_limits"]) == (0 if is_within else 1, is_within)
    assert record["prefill_seconds"] == (PREFILL | changes)["prefill_seconds"]
    assert "(limit 120)" in table
    assert "GiB (limit 6)" in table


@pytest.mark.skipif(
    "NKI_LIBRARY_PATH" not in os.environ,
    reason="NKI_LIBRARY_PATH is not set: it names a checkout of the vendor's kernel library",
)
def test_a_whole_prefill_fits_in_memory() -> None:
    options = ("--count", "3", "--repeats", "1", "--library", os.environ["NKI_LIBRARY_PATH"])
    status, record, _ = bench_apart(*options)
    assert (status == 0) == record["within_limits"]
    assert record["prefill_instructions"] > 10_000
    assert record["prefill_peak_gib"] < record["prefill_limit_gib"] == 6
    assert record["prefill_limit_seconds"] == 120
