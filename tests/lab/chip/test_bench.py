"""chip bench: the benchmark's result file with times of a device."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lab.check.vendor_cases.library import LIBRARY_VARIABLE
from lab.chip.bench import BENCHES, filled, main
from nki_sim import TensorSpec

needs_library = pytest.mark.skipif(
    LIBRARY_VARIABLE not in os.environ,
    reason=f"{LIBRARY_VARIABLE} is not set: it names a checkout of the vendor's kernel library",
)


@pytest.mark.long
def test_a_table_has_times_of_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decode.json"
    argv = ["decode", "--against", "sim:2", "--models", "qwen3-30b", "--batches", "1"]
    argv += ["--kernels", "decode_moe", "--formats", "bf16", "--routings", "uniform"]
    assert main([*argv, "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert (content["kind"], content["device"]) == ("simulated", "sim:2")
    assert "ours and vendor simulated" in capsys.readouterr().out
    for row in content["rows"]:
        assert row["hbm_bound_us"] / 2 < row["ours"]["us"] < 200.0
        assert row["ours"]["low_us"] == row["ours"]["us"] == row["ours"]["high_us"]
        assert row["ours_mode"]


CASE = ["--models", "qwen3-30b", "--routings", "uniform", "--layout", "plain"]
ONE_OF = {
    "prefill": [*CASE, "--tokens", "32"],
    "decode": [*CASE, "--batches", "4", "--kernels", "decode_moe", "--formats", "bf16"],
}


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


@pytest.mark.long
@pytest.mark.parametrize("bench", ONE_OF)
def test_rows_are_those_of_the_benchmark(
    bench: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    device, usual = tmp_path / "device.json", tmp_path / "usual.json"
    assert main([bench, "--against", "sim:2", *ONE_OF[bench], "--json", str(device)]) == 0
    assert BENCHES[bench]([*ONE_OF[bench], "--json", str(usual)]) == 0
    (found,), (known,) = rows_of(device), rows_of(usual)
    assert found.keys() == known.keys()
    timed = {"bottleneck", *(name for name in known if "ours" in name or "share" in name)}
    for name in known.keys() - timed:
        assert found[name] == known[name], name
    assert 0.4 < found["ours"]["us"] / known["ours"]["us"] < 2.0
    assert found["ours"] != known["ours"]


@needs_library
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the vendor's code
@pytest.mark.parametrize("bench", ONE_OF)
def test_the_vendors_kernels_are_launched_beside_ours(bench: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    library = ["--library", os.environ[LIBRARY_VARIABLE]]
    assert main([bench, "--against", "sim:2", *ONE_OF[bench], *library, "--json", str(path)]) == 0
    (row,) = rows_of(path)
    assert row["theirs"]["us"] > row["ours"]["us"] > 0
    assert row["ratio"]["likely"] == pytest.approx(row["theirs"]["us"] / row["ours"]["us"])


def test_options_of_simulated_times_are_refused() -> None:
    with pytest.raises(ValueError, match="--hardware: is of simulated times"):
        main(["prefill", "--against", "sim:1", "--hardware", "measured.json"])
    with pytest.raises(ValueError, match="--jobs: one process"):
        main(["prefill", "--against", "sim:1", "--jobs", "2"])


def test_tensors_without_values_are_filled_for_a_chip() -> None:
    found = filled({"x": TensorSpec((3, 5), "bfloat16"), "n": 4})
    assert found["n"] == 4
    assert found["x"].shape == (3, 5)
    assert str(found["x"].dtype) == "bfloat16"
    assert abs(found["x"].astype(float)).max() <= 0.05
