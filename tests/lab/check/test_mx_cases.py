"""neuron-moe check kernels --chip trn3: MX weights as stored, alone and in a block."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.check import kernels as check_kernels
from lab.check import menu as check
from lab.check.kernel_cases import decode
from lab.check.launcher import checking_for
from lab.check.outcomes import Outcome
from lab.check.vendor_cases.case import Case, Limits
from tests.lab.check.test_decode_cases import BLOCK, DECODE
from tests.lab.check.test_kernels import PREFILL

FOUR = {"quant_dtype": "float4_e2m1fn_x4", "quant_type": "MX"}
EIGHT = {"weight_dtype": "float8_e4m3fn_x4"}
# kernel, variant and params by name
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "all": ("moe_tkg", "all_expert_mx", DECODE | FOUR | {"top_k": None}),
    "selective": ("moe_tkg", "selective_mx", DECODE | FOUR | {"intermediate": 90}),
    "unrouted": ("moe_tkg", "all_expert_mx_dynamic", DECODE | FOUR | {"routed_token_ratio": 0.5}),
    "block": (
        "moe_block_tkg",
        "selective_mx",
        BLOCK | EIGHT | {"bias": True, "clamp": True, "hidden": 288, "has_shared_expert": True},
    ),
    "block-all": (
        "moe_block_tkg",
        "all_expert_mx",
        BLOCK | EIGHT | {"is_all_expert": True, "num_local_experts": 3},
    ),
    "prefill": ("moe_cte", "shard_on_block_mx", PREFILL | {"weight_dtype": "float8_e5m2_x4"}),
    "prefill-on-i": (
        "moe_cte",
        "shard_on_i_mx_hybrid",
        PREFILL | {"weight_dtype": "float4_e2m1fn_x4", "is_dynamic": True},
    ),
}


def entry(name: str) -> dict[str, Any]:
    """Return what a file of cases has of a case."""
    kernel, variant, params = CASES[name]
    sizes = {"id": name, "kernel": kernel, "variant": variant, "params": params}
    return sizes | {"platform": "trn3", "rtol": 0.05, "atol": 1e-5}


def case(name: str) -> Case:
    return Case.from_json(entry(name))


def outcome(name: str) -> Outcome:
    with checking_for("trn3"):
        return check_kernels.run_case(case(name), Limits())


@pytest.mark.parametrize("name", CASES)
def test_words_as_stored_agree(name: str) -> None:
    result = outcome(name)
    assert result.outcome == "passed", result.reason
    assert "words as stored" in result.reason
    assert "activations quantised" in result.reason


def test_on_a_trn2_they_are_coded_anew() -> None:
    result = check_kernels.run_case(case("all"), Limits())
    assert result.outcome == "passed", result.reason
    assert "re-coded as float8_e5m2" in result.reason


def test_a_scale_in_the_wrong_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.operands_of

    def moves_a_scale(weights: Any, config: Any) -> Any:
        words = weights.gate_up_words
        moved = dataclasses.replace(words, scales=np.roll(words.scales, 1, axis=-1))
        return right(dataclasses.replace(weights, gate_up_words=moved), config)

    monkeypatch.setattr(decode, "operands_of", moves_a_scale)
    result = outcome("all")
    assert result.outcome == "failed"
    assert "elements off" in result.reason


@pytest.mark.long
def test_the_command_runs_on_its_own(tmp_path: Path) -> None:
    path, out = tmp_path / "cases.json", tmp_path / "out.json"
    path.write_text(json.dumps([entry("all")]))
    command = [sys.executable, "-m", "neuron_moe.tools.cli", "check", "kernels", "--chip", "trn3"]
    command += ["--cases", str(path), "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    (row,) = json.loads(out.read_text())
    assert row["outcome"] == "passed", row


def test_other_chips_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        check.main(["kernels", "--cases", "any.json", "--chip", "trn9"])
    assert "trn9" in capsys.readouterr().err
