"""NxD and NxDI themselves beside ours; skipped where they cannot be imported.

docs/nxdi.md has the lines that set up an environment for them.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NEEDS_NXD = pytest.mark.skipif(
    importlib.util.find_spec("neuronx_distributed") is None, reason="NxD cannot be imported"
)
NEEDS_NXDI = pytest.mark.skipif(
    importlib.util.find_spec("neuronx_distributed_inference") is None,
    reason="NxDI cannot be imported",
)
NEEDS_TRANSFORMERS_4 = pytest.mark.skipif(
    not importlib.metadata.version("transformers").startswith("4."),
    reason="NxDI needs transformers 4",
)


def run(module: str, *arguments: str) -> dict[str, Any]:
    """Run a script of this folder in a process of its own; return its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.nxd.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@NEEDS_NXD
@pytest.mark.parametrize("ranks", [1, 4])
def test_nxds_layer_and_ours_give_the_same(ranks: int) -> None:
    found = run("compare", "--ranks", str(ranks))
    assert found["cases"] >= 25
    assert len(found["compared"]) == {1: 1, 4: 4}[ranks]
    assert found["largest_difference"] <= 1e-5


UNIT_TESTS = json.loads(Path(__file__).with_name("unit_tests.json").read_text())


def listed(who: str) -> set[int]:
    """Return the numbers of NxD's own unit tests that NxD, or ours in its place, does not pass."""
    return {number for numbers in UNIT_TESTS[f"not_passed_by_{who}"].values() for number in numbers}


def test_ours_pass_of_nxds_unit_tests_all_but_a_few() -> None:
    nxd, ours = listed("nxd"), listed("ours")
    assert not nxd & ours
    assert len(ours) <= 0.05 * (UNIT_TESTS["tests"] - len(nxd))


@pytest.mark.slow
@NEEDS_NXD
@pytest.mark.skipif(
    importlib.util.find_spec("parameterized") is None, reason="NxD's tests need parameterized"
)
@pytest.mark.parametrize("who", ["nxd", "ours"])
def test_nxds_own_unit_tests_pass_with_our_names_in_place(who: str) -> None:
    passed = set(run("unit_tests", *(["--ours"] if who == "ours" else []))["passed"])
    expected = set(range(UNIT_TESTS["tests"])) - listed("nxd")
    assert passed == expected - (listed("ours") if who == "ours" else set())


@pytest.mark.slow
@NEEDS_NXDI
@NEEDS_TRANSFORMERS_4
def test_nxdis_models_give_their_own_tokens_with_our_layer() -> None:
    found = run("models", "--ranks", "1", "--ranks", "2")
    rows = found["rows"]
    assert {row["model"] for row in rows} == {"gpt_oss", "qwen3_moe", "mixtral", "dbrx", "llama4"}
    assert len(rows) == 15
    assert all(row["tokens_equal"] for row in rows)
    assert found["kernels"]["ours"] <= 1.5 * found["kernels"]["own"]


@pytest.mark.slow
@NEEDS_NXDI
@NEEDS_TRANSFORMERS_4
def test_nxds_quantised_layer_and_ours_give_the_same() -> None:
    found = run("quantized")
    assert found["rows"] >= 500
    assert found["wrong"] == 0
    assert found["against"]["NxD"] >= 150
    assert found["against"]["NxDI"] == 6
    assert found["largest"]["layers"] <= 1e-5
    assert found["largest"]["models"] <= 1e-5


@pytest.mark.slow
@NEEDS_NXD
@pytest.mark.parametrize("backend", ["torch", "nki"])
def test_one_rank_is_traced_for_all(backend: str) -> None:
    found = run("traced", "--backend", backend)
    assert found["rows"] >= {"torch": 400, "nki": 60}[backend]
    assert found["wrong"] == 0
    assert found["not_beside_nxd"] <= found["rows"] // 10


@pytest.mark.slow
@NEEDS_NXDI
@NEEDS_TRANSFORMERS_4
def test_nxdis_builder_traces_its_models_with_our_layer() -> None:
    rows = run("build_models")["rows"]
    assert {row["model"] for row in rows} == {"gpt_oss", "qwen3_moe", "mixtral", "dbrx", "llama4"}
    assert len(rows) == 24
    for row in rows:
        has_codes = "codes" in row["layout"]
        assert all((trace["codes"] > 0) == has_codes for trace in row["traces"]), row
        assert [trace["tokens"] for trace in row["traces"]] == [[1, 192], [1, 256], [1, 1]]
        assert all(trace["kernels"] for trace in row["traces"]), row["model"]
        of_prefill = [trace["block_sizes"] for trace in row["traces"][:-1]]
        assert of_prefill == [[64]] * 2, row  # that of blockwise_matmul_config


@pytest.mark.slow
@NEEDS_NXDI
def test_nxdi_takes_the_settings_of_compile_as_they_are_meant() -> None:
    report = run("settings")
    assert report["found"] == report["given"]
    assert report["buckets"] == {
        "context_encoding_model": [160],
        "token_generation_model": [160, 256],
    }
    assert report["rebound"] >= 5


@pytest.mark.slow
@NEEDS_NXDI
def test_nxdis_applications_of_all_families_take_the_hand_over() -> None:
    rows = run("hand_over")["rows"]
    assert len({row["application"] for row in rows}) == 5
    assert [row["held"] for row in rows] == [row["planned"] for row in rows]
