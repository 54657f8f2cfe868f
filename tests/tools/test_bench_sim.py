"""The benchmark of the simulator's overhead: small run, real limits."""

import json
import subprocess
import sys


def test_overheads_stay_under_their_limits() -> None:
    command = [sys.executable, "-m", "neuron_moe.tools.cli", "bench", "sim"]
    command += ["--count", "200", "--repeats", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["command"] == "bench sim"
    assert record["kind"] == "measured"
    assert {row["instruction"] for row in record["rows"]} >= {"nc_matmul bf16", "dma_copy bf16"}
    assert record["full_overhead_us"] < record["full_limit_us"] == 50
    assert record["indices_us"] < record["indices_limit_us"] == 15
    assert (done.returncode == 0) == record["within_limits"]
