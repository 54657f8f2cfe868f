"""neuron-moe place: a trace in, a placement and its balance out."""

import json
from pathlib import Path

import numpy as np
import pytest

from neuron_moe.models.routing_trace import RoutingTrace
from neuron_moe.parallel.placement import load_placements
from neuron_moe.tools import cli
from neuron_moe.train.balance import zipf_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    layers = [zipf_trace(6000, 64, 4, seed=seed).numpy() for seed in range(3)]
    path = tmp_path / "trace.npz"
    RoutingTrace(
        expert_index_LTK=np.stack(layers).astype(np.uint8),
        sequence_starts=np.array([0], dtype=np.int32),
        num_experts=64,
    ).save(path)
    return path


def test_each_layer_is_placed_and_better_balanced_on_later_tokens(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, picture = tmp_path / "placement.json", tmp_path / "balance.png"
    words = ["place", "--trace", str(trace), "--ranks", "8", "--extra-experts", "8", "--json"]
    assert cli.main([*words, "--output", str(output), "--picture", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["kind"] == "measured"
    assert report["extra_share"] == 0.125
    assert len(report["layers"]) == 3
    for layer in report["layers"]:
        assert layer["after"]["busiest_over_mean"] < 1.10 < layer["before"]["busiest_over_mean"]
    placements = load_placements(output)
    assert [(p.num_experts, p.num_physical, p.num_ranks) for p in placements] == [(64, 72, 8)] * 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_experts_that_do_not_divide_are_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["place", "--trace", str(trace), "--ranks", "8", "--extra-experts", "3"]
    assert cli.main([*args, "--output", str(tmp_path / "p.json")]) == 2
    assert "Use extra_experts=8." in capsys.readouterr().err
