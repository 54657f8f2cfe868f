"""`neuron-moe bench layer`: deployed layouts, the busiest rank, its bound, the vendor's chains."""

from __future__ import annotations

import json
import types
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from lab.bench.layer import command, layouts, main, vendor, work
from lab.bench.layer.command import summarise
from lab.bench.layer.layouts import layouts_of, planned
from lab.bench.layer.published import PUBLISHED
from lab.bench.layer.vendor import Chain, Layer, VendorSide, only_slowest_fits
from lab.bench.layer.work import Case, blank_row, busiest, time_ours
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.backends.nki.times import draw_choices
from neuron_moe.configs import load_config
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.plan import Step
from neuron_moe.tools.timing.sources import Sources
from neuron_moe.tools.timing.useful_work import layer_work
from nki_sim.hardware import TRN2
from nki_sim.time.estimate import NOTHING, Estimate

SMALL = {
    "hidden_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 1,
}
SOURCES = Sources(coefficients="chip", simulator="simulator", kernels="kernels", library="library")
ROW = replace(
    blank_row("qwen3_30b_a3b", "TP 8", (8, 1), "prefill", 1024),
    ours_us=500.0,
    ours_low_us=400.0,
    ours_high_us=600.0,
    launches=("prefill_layer",),
)


def small(name: str) -> tuple[dict[str, Any], None]:
    return {**load_config(name), **SMALL}, None


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "read_model", small)
    monkeypatch.setattr(command, "layouts_of", lambda *_: [("TP 8", (8, 1)), ("NxDI's", (64, 1))])


def _run(path: Path, *more: str) -> dict[str, Any]:
    options = ["--models", "qwen3_30b_a3b", "--json", str(path), *more]
    assert main(options) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.usefixtures("small_model")
def test_each_layout_has_a_time_a_range_and_a_bound_below_it_and_is_timed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = tmp_path / "rows.json", ("--tokens", "4")
    result = _run(path, *options)
    rows = result["rows"]
    assert [(row["tp"], row["phase"]) for row in rows] == [
        (8, "prefill"),
        (64, "prefill"),
        (8, "decode"),
        (64, "decode"),
    ]
    launch_us = TRN2.launch_cost_ns(2) / 1e3
    for row in rows:
        assert 0 < row["bound_us"] < row["ours_us"] - launch_us
        assert row["ours_low_us"] <= row["ours_us"] <= row["ours_high_us"]
        assert row["collective_us"] > 0
        assert not row["why"]
    monkeypatch.setattr(work, "time_ours", None)  # kept, so not called
    assert _run(path, *options, "--resume") == result


def test_what_another_simulator_timed_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = replace(ROW, vendor_us=900.0, chains=(Chain(name="v", us=900.0),))
    for made_with in (SOURCES, replace(SOURCES, simulator="older")):
        path.write_text(json.dumps(summarise([row], made_with)))
        kept = [row] if made_with == SOURCES else []
        assert list(command._earlier(path, SOURCES).values()) == kept


@pytest.mark.usefixtures("small_model")
def test_what_does_not_fit_says_why() -> None:
    row, _ = time_ours(blank_row("qwen3_30b_a3b", "TP 8", (8, 1), "prefill", 99_999))
    assert row.ours_us is None
    assert "Route longer" in row.why


def test_layouts_that_are_alike_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    best = {"prefill": (8, 1), "decode": (64, 1)}
    monkeypatch.setattr(layouts, "planned", lambda _: best)
    assert list(layouts_of("m", "prefill")) == [("TP 8, planner's", (8, 1)), ("NxDI's", (64, 1))]
    assert list(layouts_of("m", "decode")) == [("TP 8", (8, 1)), ("planner's, NxDI's", (64, 1))]


def test_the_planners_layout_uses_all_ranks() -> None:
    assert all(tp * ep == 64 for tp, ep in planned("mixtral_8x7b").values())


def test_the_busiest_rank_has_the_most_work() -> None:
    parts = RankLayer(small("qwen3_30b_a3b")[0], "small", ep=8, backend="nki").parts(
        Step("decode", 5)
    )
    index_TK = draw_choices(5, 64, 2)
    held = parts.weights.num_experts
    found = busiest(parts, index_TK, 8)
    bounds = [
        layer_work(replace(parts, first_expert=rank * held), index_TK).roofline_us()
        for rank in range(8)
    ]
    assert layer_work(found, index_TK).roofline_us() == max(bounds) > min(bounds)


def test_a_ratio_has_both_sides_at_the_same_end() -> None:
    theirs = {"vendor_low_us": 800.0, "vendor_us": 900.0, "vendor_high_us": 1500.0}
    assert ROW.ratios is None
    assert replace(ROW, **theirs).ratios == (1.8, 1.8, 2.5)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: f"{one.model} {one.machine}")
def test_a_published_time_is_of_a_layer_that_splits_so(published: Any) -> None:
    parts = RankLayer(
        load_config(published.model), published.model, tp=published.tp, backend="nki"
    ).parts(Step("decode", 1))
    layer = Layer.of(published.model, "decode", parts, draw_choices(1, parts.num_experts, 4))
    assert layer.model.I * published.tp == parts.spec.intermediate_size
    if "moe_block_tkg" in published.what:
        assert (layer.model.H, layer.whole.E, layer.model.I) == (4096, 128, 384)


def us(value: float) -> Estimate:
    return Estimate(low_us=value / 2, us=value, high_us=2 * value)


AROUND = {
    "router_topk": us(8.0),
    "find_nonzero_indices": us(20.0),
    **{f"indexed_flatten B={size}": us(6.0) for size in (128, 256, 512, 1024)},
}


class FakeLaunches:
    """Stands in for the vendor's launches: times by the name of their variant or mode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.times, self.asked = times, list[str]()
        monkeypatch.setattr(vendor, "around", lambda *_: AROUND)
        monkeypatch.setattr(vendor, "launch_vendor", self._variant)
        monkeypatch.setattr(vendor, "_launch_block", self._block)
        monkeypatch.setattr(vendor, "time_of", us)
        monkeypatch.setattr(vendor, "program", lambda launches: sum(launches, NOTHING))

    def _variant(self, library: Any, model: Any, index: Any, variant: Any, options: Any) -> Any:
        return self._launch(variant.name)

    def _block(self, library: Any, layer: Any, mode: str) -> Any:
        return self._launch(f"moe_block_tkg {mode}")

    def _launch(self, name: str) -> Any:
        self.asked.append(name)
        if name not in self.times:
            raise NotImplementedError("too large for it")
        return types.SimpleNamespace(timeline=self.times[name])

    def side(self, phase: str, tokens: int, ep: int = 1, known: Any = ()) -> VendorSide:
        rank = RankLayer(load_config("mixtral_8x7b"), "mixtral_8x7b", ep=ep, backend="nki")
        parts = rank.parts(Step(phase, tokens))
        layer = Layer.of("mixtral_8x7b", phase, parts, draw_choices(tokens, 8, 2))
        return VendorSide(cast(VendorLibrary, self), layer, known)

    def chains(self, *arguments: Any) -> dict[str, Chain]:
        side = self.side(*arguments)
        while (task := side.next_task()) is not None:
            side.take(task, task.compute())
        assert side.is_done
        return {chain.name: chain for chain in side.chains}


def test_a_chain_has_all_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLaunches(monkeypatch, {"shard_on_h B=256": 8e4, "shard_on_block B=128": 9e4})
    found = fake.chains("prefill", 1024)
    fast = found["shard_on_h B=256"]
    assert (fast.low_us, fast.us, fast.high_us) == (40017.0, 80034.0, 160068.0)
    assert found["shard_on_block B=128"].us == 90034.0
    assert found["moe_tkg all_experts"].why == "does not run: takes up to 128 tokens"
    assert "too large for it" in found["shard_on_h B=512"].why


def test_what_cannot_be_the_fastest_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLaunches(monkeypatch, {"shard_on_i_hybrid B=256 known": 1.0})
    found = fake.chains("prefill", 1024)
    assert "runs the blocks of" in found["shard_on_i_hybrid B=256"].why
    assert "us at least" in found["shard_on_h B=512"].why
    assert "shard_on_h B=512" not in fake.asked


def test_no_block_is_larger_than_it_need_be(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLaunches(
        monkeypatch, {"shard_on_h B=128": 9e4, "shard_on_i_hybrid B=256 known": 9e4}
    )
    found = fake.chains("prefill", 256)
    sizes = {(name.split()[0], name.split()[1]) for name in fake.asked}
    assert sizes == {
        *(("shard_on_h", f"B={size}") for size in (128, 256, 512, 1024)),  # fewer empty ones
        ("shard_on_block", "B=128"),
        ("shard_on_i_hybrid", "B=256"),
    }
    assert found["shard_on_block B=256"].why == "the tokens of any expert fit a smaller block"


def test_decode_is_one_launch_where_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLaunches(monkeypatch, {"moe_block_tkg selective": 5e4, "moe_tkg selective": 4e4})
    found = fake.chains("decode", 16)
    assert found["moe_block_tkg selective"].us == 5e4
    assert "needs no launch for the router" in found["moe_tkg selective"].why
    del fake.times["moe_block_tkg selective"]
    assert fake.chains("decode", 16)["moe_tkg selective"].us == 4e4 + 8.0


def test_only_all_experts_are_for_a_rank_that_holds_some(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLaunches(monkeypatch, {"moe_block_tkg all_experts": 5e4})
    found = fake.chains("decode", 16, 8)
    assert found["moe_block_tkg selective"].why == "does not run: takes experts of all ranks"
    assert fake.asked == ["moe_block_tkg all_experts"]


def test_a_run_that_was_cut_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLaunches(monkeypatch, {"shard_on_h B=256": 8e4, "shard_on_block B=128": 9e4})
    whole = fake.chains("prefill", 1024)
    known = list(whole.values())[:3]
    fake.asked.clear()
    assert fake.chains("prefill", 1024, 1, known) == whole
    assert not {chain.name for chain in known} & set(fake.asked)


def test_a_layer_that_only_the_slowest_kernel_takes_stands_apart() -> None:
    refused = [
        Chain(name=f"{name} B=256", why="does not run: too large")
        for name in ("shard_on_h", "shard_on_i_hybrid")
    ]
    refused.append(Chain(name="moe_tkg all_experts", why="does not run: takes up to 128 tokens"))
    slowest = Chain(name="shard_on_block B=128", us=900.0)
    assert only_slowest_fits([*refused, slowest])
    assert not only_slowest_fits(refused)
    assert not only_slowest_fits([slowest, *refused[1:]])
    theirs = {"vendor_low_us": 800.0, "vendor_us": 900.0, "vendor_high_us": 1000.0}
    fair = replace(ROW, **theirs)
    apart = replace(fair, model="mixtral_8x7b", only_slowest_fits=True)
    means = summarise([fair, apart], SOURCES)["beside_vendor"]
    assert [(one["only_slowest_fits"], one["rows"]) for one in means] == [(False, 1), (True, 1)]
    assert means[0]["mean"] == pytest.approx(1.8)


def test_a_case_keeps_the_fastest_chain_at_each_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLaunches(monkeypatch, {"shard_on_h B=256": 8e4, "shard_on_block B=128": 9e4})
    low = {8e4: 5e4, 9e4: 3e4}  # another one is the fastest at the low end
    monkeypatch.setattr(
        vendor, "time_of", lambda us: Estimate(low_us=low[us], us=us, high_us=2 * us)
    )
    case = Case(replace(ROW, model="mixtral_8x7b"), cast(VendorLibrary, fake))
    while (task := case.next_task()) is not None:
        case.take(task, task.compute())
    assert (case.row.vendor_plan, case.row.vendor_us) == ("shard_on_h B=256", 80034.0)
    assert (case.row.vendor_low_us, case.row.vendor_high_us) == (30017.0, 160068.0)
    assert (case.row.ours_us, case.size) == (500.0, 0.0)
    assert json.loads(json.dumps(asdict(case.row)))["chains"]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        main(["--tokens", "0"])
    with pytest.raises(ValueError, match="Name it with --json"):
        main(["--resume"])
