"""neuron-moe tune: simulates the best few, writes what a model loads, goes on where it stopped."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from neuron_moe.configs import load_config
from neuron_moe.models.deployment import Deployment
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.models.routing_trace import RoutingTrace
from neuron_moe.spec import Tuning
from neuron_moe.tools.tune import main
from neuron_moe.tools.tune import work as tune_work
from neuron_moe.tools.tune.problem import draw_routing
from neuron_moe.tools.tune.work import Kept, PrefillWork, SureWork
from neuron_moe.tuned import read_tuned
from tests.tools.pages.asks import check_page


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return the path of a configuration of a small model."""
    config = load_config("qwen3_30b_a3b") | {
        "hidden_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def run(model: str, folder: Path, *args: str) -> dict[str, Any]:
    arguments = ["--model", model, "--tp", "2", "--buckets", "256", "--simulate", "2"]
    arguments += ["--jobs", "1", "--cache", str(folder / "cache"), "--json", str(folder / "t.json")]
    assert main([*arguments, "--out", str(folder / "t.yaml"), *args]) == 0
    found: dict[str, Any] = json.loads((folder / "t.json").read_text())
    return found


@pytest.mark.long
def test_a_model_started_with_the_file_reports_the_tuned_plan(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = ["--picture", str(tmp_path / "t.png"), "--report", str(tmp_path / "t.html")]
    report = run(model, tmp_path, "--decode", "4", *written)
    (bucket,) = report["buckets"]
    times = [tried["us"] for tried in bucket["tried"]]
    assert bucket["chosen_us"] == min(times)
    assert bucket["chosen_us"] <= min(bucket["untuned_us"], bucket["default_512_us"])
    assert {tried["block_size"] for tried in bucket["tried"]} >= {32, 64, 128, 512}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    check_page((tmp_path / "t.html").read_text())
    tuned = read_tuned(tmp_path / "t.yaml")
    config = json.loads(Path(model).read_text())
    layer = RankLayer(config, "m", tp=2, backend="nki", tuning=Tuning(tuned=tuned.plans))
    assert layer.plan("prefill", 256).explain().to_dict()["plan"] == bucket["chosen"]
    (step,) = report["decode"]
    assert layer.plan("decode", 4).path == step["mode"] == min(step["us"], key=step["us"].get)
    assert "256 tokens:" in capsys.readouterr().out  # how sure it is


@pytest.mark.slow
def test_results_are_kept_and_nothing_runs_twice(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(model, tmp_path, "--quick")

    def refuse(*_: object) -> None:
        raise AssertionError("simulated again")

    monkeypatch.setattr(tune_work, "_simulate", refuse)
    assert run(model, tmp_path, "--quick") == first


def test_what_is_done_stays_after_an_interruption(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = tune_work._simulate, [0]

    def interrupted(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(tune_work, "_simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, "--quick")
    (bucket,) = json.loads((tmp_path / "t.json").read_text())["buckets"]
    assert len(bucket["tried"]) == 2
    assert read_tuned(tmp_path / "t.yaml").plans.prefill[0].to_dict() == bucket["chosen"]


@dataclass(frozen=True)
class Spot:
    """A point whose block size is that of all others."""

    name: str
    block_size: int = 64


class Chosen:
    """A length of prompts whose points were simulated, the best one first."""

    def __init__(self, times_us: dict[Spot, float]) -> None:
        self.name, self.problem = "prefill", None
        self.times = dict(times_us)

    def best(self) -> Spot:
        return next(iter(self.times))

    def rivals(self) -> list[Spot]:
        return list(self.times)[1:]

    def _name_of(self, point: Spot) -> str:
        return point.name

    def _seconds(self, point: Spot) -> float:
        return 1.0


def test_a_choice_flips_for_its_rival_and_not_for_a_tie() -> None:
    choice, rival = Spot("choice"), Spot("rival")
    sure = SureWork(cast(PrefillWork, Chosen({choice: 10.0, rival: 10.5})), Kept(None))
    first, second = sure.next_task(), sure.next_task()
    assert first is not None
    assert second is not None
    assert sure.next_task() is None
    sure.take(second, {"": 10.5e3, "a x2": 10.5e3, "b x2": 23.3e3, "c x2": 19.94e3})
    sure.take(first, {"": 10e3, "a x2": 12e3, "b x2": 20e3, "c x2": 20e3})
    assert [(point, scaled) for point, scaled, _ in sure.flips()] == [(rival, "a x2")]


def test_routings_are_those_that_were_named(tmp_path: Path) -> None:
    even = draw_routing("balanced", None, 32, 8, 2)
    assert (np.bincount(even.ravel()) == 8).all()
    skewed = np.bincount(draw_routing("zipf:1.5", None, 500, 8, 2).ravel(), minlength=8)
    uniform = np.bincount(draw_routing("uniform", None, 500, 8, 2).ravel(), minlength=8)
    assert skewed.max() > 1.5 * uniform.max()
    trace = RoutingTrace(
        expert_index_LTK=np.array([[[0, 1], [0, 2]]], np.uint8),
        sequence_starts=np.array([0], np.int32),
        num_experts=8,
    )
    assert draw_routing("balanced", trace, 3, 8, 2).tolist() == [[0, 1], [0, 2], [0, 1]]
    with pytest.raises(ValueError, match="is of a model with 8 experts"):
        draw_routing("balanced", trace, 3, 16, 2)


@pytest.mark.parametrize("routing", ["even", "zipf", "zipf:x", "zipf:-1"])
def test_other_routings_are_refused(routing: str) -> None:
    with pytest.raises(ValueError, match=f"--routing {routing}"):
        draw_routing(routing, None, 4, 8, 2)


def test_a_deployment_takes_the_file_of_its_own_ranks(tmp_path: Path) -> None:
    from neuron_moe.configs.deployments import load_deployments

    values = load_deployments("trn2_3xlarge")["qwen3_30b_a3b"]
    deployment = Deployment.read(values, model="qwen3_30b_a3b", machine="trn2.3xlarge")
    text = """model: qwen3_30b_a3b
tp: {tp}
ep: 1
lnc: 2
prefill:
- {{tokens: 2048, block_size: 64, shard_plan: balanced, loop_plan: sorted, work_tile: 4,
   loaded_parts: [1, 1], weight_buffers: 2, weights: plain}}
"""
    path = tmp_path / "tuned.yaml"
    path.write_text(text.format(tp=deployment.tp))
    tuned = deployment.tuned_by(path)
    assert tuned.buckets[0].block_size == 64
    assert tuned.tuning.tuned.prefill == tuned.buckets
    path.write_text(text.format(tp=32))
    with pytest.raises(ValueError, match="Tune for --tp 4"):
        deployment.tuned_by(path)


@pytest.mark.slow
def test_a_short_prompt_is_held_against_the_decode_kernel(model: str, tmp_path: Path) -> None:
    (bucket,) = run(model, tmp_path, "--quick", "--buckets", "16")["buckets"]
    assert bucket["untuned"] == {"tokens": 16, "mode": "all_experts"}
    assert bucket["chosen_us"] == min(bucket["untuned_us"], bucket["in_blocks_us"])
    tuned = read_tuned(tmp_path / "t.yaml").plans
    assert (tuned.for_prefill(16) is None) == (bucket["chosen"] == bucket["untuned"])


@pytest.mark.slow
def test_a_plan_of_long_prompts_is_not_for_short_ones(model: str, tmp_path: Path) -> None:
    run(model, tmp_path, "--quick")
    tuned = read_tuned(tmp_path / "t.yaml").plans
    config = json.loads(Path(model).read_text())
    layer = RankLayer(config, "m", tp=2, backend="nki", tuning=Tuning(tuned=tuned))
    assert layer.plan("prefill", 200).path == "blockwise"
    assert layer.plan("prefill", 16).path != "blockwise"
