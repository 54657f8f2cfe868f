"""`neuron-moe bench prefill`: rows, roofline, routings; the vendor's side only with its library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuron_moe.tools import bench_prefill
from neuron_moe.tools.prefill_cases import MODELS, ROUTINGS, choose_experts, roofline_us

# us, for uniform routing, computed by hand from the formula in the docstring of `roofline_us`.
ROOFLINES = {
    ("gpt-oss-120b", 8192): 1944.0,
    ("qwen3-30b", 8192): 1365.0,
    ("deepseek-v3", 8192): 5994.0,
    ("llama4-maverick", 8192): 926.0,
}


@pytest.mark.parametrize(("name", "tokens"), list(ROOFLINES))
def test_the_roofline_is_weights_once_and_three_passes(name: str, tokens: int) -> None:
    model = next(model for model in MODELS if model.name == name)
    choice = choose_experts("uniform", tokens, model.E, model.K)
    assert roofline_us(model, choice) == pytest.approx(ROOFLINES[name, tokens], rel=0.01)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_token_chooses_different_experts(routing: str) -> None:
    choice = choose_experts(routing, 256, 32, 4)
    assert (np.diff(np.sort(choice, axis=1), axis=1) > 0).all()
    counts = np.sort(np.bincount(choice.reshape(-1), minlength=32))[::-1]
    share = counts[:8].sum() / counts.sum()
    low, high = {"balanced": (0.25, 0.25), "uniform": (0.25, 0.45), "skewed": (0.7, 0.85)}[routing]
    assert low <= share <= high


def test_the_command_writes_rows(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    path = tmp_path / "prefill.json"
    arguments = ["--models", "gpt-oss-20b", "--tokens", "16", "--routings", "uniform"]
    assert bench_prefill.main([*arguments, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["model"], row["tp"], row["T"], row["routing"]) == ("gpt-oss-20b", 8, 16, "uniform")
    assert row["vendor_us"] is None
    assert 0.3 < row["roofline_us"] / row["ours_us"] < 1.0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["kind"] == "simulated"


def test_tokens_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"--tokens \[0\]: must be positive"):
        bench_prefill.main(["--tokens", "0"])
