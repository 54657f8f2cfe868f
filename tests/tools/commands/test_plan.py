"""neuron-moe plan: the JSON holds what the table says, for every machine and model named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuron_moe.models.routing_trace import RoutingTrace
from neuron_moe.parallel import ParallelConfig
from neuron_moe.tools import cli
from neuron_moe.tools.commands import plan

FEW = ["--prefill-tokens", "1024", "--decode-tokens", "32"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, dict[str, Any]]:
    assert plan.main([*args, *FEW, "--table", "--json"]) == 0
    text = capsys.readouterr().out
    *_, last = text.strip().splitlines()
    return text, json.loads(last)


@pytest.mark.parametrize(
    "model",
    [
        "gpt_oss_120b",
        pytest.param("qwen3_235b_a22b", marks=pytest.mark.long),
        pytest.param("deepseek_v3", marks=pytest.mark.long),
    ],
)
def test_every_model_gets_a_layout_and_a_reason(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    text, report = run(capsys, "--model", model)
    assert report["kind"] == "computed"
    assert report["ranks"] == 64
    assert {row["ep"] for row in report["layer_layouts"]} == {1, 2, 4, 8, 16, 32, 64}
    assert {"uniform", "zipf"} <= {row["routing"] for row in report["layer_layouts"]}
    assert {row["is_balanced"] for row in report["layer_layouts"]} == {False, True}
    for phase, best in report["best"].items():
        same = [
            row["total_us"]
            for row in report["layer_layouts"]
            if (row["phase"], row["routing"]) == (phase, report["decisive_routing"])
        ]
        assert best["total_us"] == min(same)
        assert best["reasons"]
        assert best["layout"] in text
        assert best["reasons"][0] in text
    assert all(
        {"value", "unit", "kind", "source"} <= c.keys() for c in report["coefficients"].values()
    )
    config = ParallelConfig(**report["parallel_config"])
    config.check_world(64)
    config.check_topology(report["instance"], report["lnc"], report["nodes"])
    assert f"ParallelConfig(tp={config.tp}" in text or f"ParallelConfig(ep={config.ep}" in text
    assert "[computed]" in text
    assert "assumed" in text


@pytest.mark.slow
def test_four_ultraserver_nodes_and_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    words = ("--model", "qwen3_235b_a22b", "--instance", "trn2u.48xlarge", "--nodes", "4")
    _, report = run(capsys, *words, "--picture", str(picture))
    assert report["ranks"] == 256
    assert max(row["ep"] for row in report["layer_layouts"]) == 128
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "must divide num_experts=128" in report["rejected"]["EP 256 x TP 1"]


def test_a_recorded_trace_decides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    weight = 1.0 / np.arange(1, 33)
    rows = [generator.choice(32, 4, replace=False, p=weight / weight.sum()) for _ in range(600)]
    trace = RoutingTrace(
        expert_index_LTK=np.array([rows], dtype=np.uint8),
        sequence_starts=np.array([0], dtype=np.int32),
        num_experts=32,
    )
    trace.save(tmp_path / "trace.npz")
    _, report = run(capsys, "--model", "gpt_oss_20b", "--trace", str(tmp_path / "trace.npz"))
    assert report["decisive_routing"] == "recorded"
    assert report["recorded_routing"] == "trace.npz, layer 0"
    skew = [
        row["busiest_over_mean"]
        for row in report["layer_layouts"]
        if (row["routing"], row["ep"], row["is_balanced"]) == ("recorded", 32, False)
    ]
    assert max(skew) > 2.0


def test_placement_is_reported_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = run(capsys, "--model", "deepseek_v3")
    rows = {(row["routing"], row["ep"]): row for row in report["placement"]}
    for ep in (8, 16, 32):
        row = rows["zipf", ep]
        assert row["extra_share"] <= 0.125
        assert row["busiest_over_mean_after"] < row["busiest_over_mean_before"]


def test_sizes_may_be_given_as_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = run(capsys, "--model", "H=2048,I=768,E=128,K=8,L=48", "--instance", "trn2.3xlarge")
    assert (report["ranks"], report["model"]["num_experts"]) == (4, 128)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "H=2048,E=128"], "five whole numbers such as"),
        (
            ["--model", "gpt_oss_120b", "--instance", "trn2.49xlarge"],
            "Did you mean 'trn2.48xlarge'",
        ),
        (["--model", "gpt_oss_120b", "--nodes", "4"], "joins at most 1"),
        (["--model", "gpt_oss_120b", "--decode-tokens", "0"], "must be at least 1"),
        (["--model", "deepseek_v3", "--instance", "trn2.3xlarge"], "no layout fits"),
        (["--model", "no_such_model"], "there is no such folder"),
    ],
    ids=["numbers", "instance", "nodes", "tokens", "memory", "model"],
)
def test_bad_input_ends_with_a_message(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert cli.main(["plan", *args]) == 2
    assert message in capsys.readouterr().err
