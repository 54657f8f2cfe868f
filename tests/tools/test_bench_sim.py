"""The benchmark of the simulator's overhead: small run, real limits."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def bench(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "neuron_moe.tools.cli", "bench", "sim", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode == 0) == record["within_limits"]
    return record


def test_overheads_stay_under_their_limits() -> None:
    record = bench("--count", "200", "--repeats", "7")
    assert record["command"] == "bench sim"
    assert record["kind"] == "measured"
    assert {row["instruction"] for row in record["rows"]} >= {"nc_matmul bf16", "dma_copy bf16"}
    assert record["full_overhead_us"] < record["full_limit_us"] == 50
    assert record["indices_us"] < record["indices_limit_us"] == 15


@pytest.mark.skipif(
    "NKI_LIBRARY_PATH" not in os.environ,
    reason="NKI_LIBRARY_PATH is not set: it names a checkout of the vendor's kernel library",
)
def test_a_whole_prefill_stays_under_its_limits() -> None:
    record = bench("--count", "20", "--repeats", "2", "--library", os.environ["NKI_LIBRARY_PATH"])
    assert record["prefill_instructions"] > 10_000
    assert record["prefill_seconds"] < record["prefill_limit_seconds"] == 120
    assert record["prefill_peak_gib"] < record["prefill_limit_gib"] == 6
