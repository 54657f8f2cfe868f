"""`neuron-moe bench layer`: rows of both phases and splits, what lies outside, the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from lab.bench.comparison.attempts import Attempt
from lab.bench.layer import main
from lab.bench.layer import work as layer_work
from lab.bench.layer.command import _earlier, summarise
from lab.bench.layer.vendor import ChainError, chain_parts
from lab.bench.layer.work import Case, Row, VendorAround, has_vendor
from lab.bench.prefill import vendor
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.configs import load_config
from neuron_moe.tools.timing.layers import choose_experts
from neuron_moe.tools.timing.runs import MeasuredRun
from neuron_moe.tools.timing.sources import Sources
from neuron_moe.tools.timing.timelines import exactly

SMALL = {
    "hidden_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 1,
}


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_small(name: str) -> tuple[dict[str, Any], None]:
        return {**load_config(name), **SMALL}, None

    monkeypatch.setattr(layer_work, "read_model", read_small)


def _run(path: Path, *more: str) -> dict[str, Any]:
    options = ["--models", "qwen3_30b_a3b", "--json", str(path), *more]
    assert main(options) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.long
def test_each_row_is_timed_and_adds_up(tmp_path: Path) -> None:
    picture = tmp_path / "layer.png"
    rows = _run(tmp_path / "rows.json", "--tokens", "64", "--picture", str(picture))["rows"]
    assert len(rows) == 4  # two splits, two phases
    for row in rows:
        assert 0 < row["experts_us"] < row["layer_us"]
        assert row["outside"] == pytest.approx(1 - row["experts_us"] / row["layer_us"])
        assert row["apart_us"] == pytest.approx(sum(row["parts"].values()))
        assert "router_topk" in row["parts"]
        assert not row["why"]
    assert picture.stat().st_size > 10_000


@pytest.mark.long
def test_a_miss_is_named(tmp_path: Path) -> None:
    result = _run(
        tmp_path / "rows.json", "--tokens", "128", "--splits", "TP8", "--phases", "prefill"
    )
    shares = [row[name] for row in result["rows"] for name in ("outside", "sequence_outside")]
    expected = [share for share in shares if share > 0.15]
    assert [miss["value"] for miss in result["misses"]] == expected
    assert expected  # two experts of so small a layer take less than their router


@pytest.mark.long
def test_resuming_runs_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    options = ("--tokens", "32", "--splits", "TP8", "--phases", "decode")
    first = _run(path, *options)

    def fail(*_arguments: Any) -> None:
        raise AssertionError("simulated again")

    monkeypatch.setattr(layer_work, "times_of", fail)
    assert _run(path, *options, "--resume") == first


def test_the_vendors_times_outlive_a_change_of_our_kernels(tmp_path: Path) -> None:
    path, now = (
        tmp_path / "rows.json",
        Sources(coefficients="chip", simulator="simulator", kernels="kernels", library="library"),
    )
    row = Row(
        model="gpt_oss_20b",
        split="TP8",
        phase="prefill",
        T=1024,
        corner="likely",
        layer_us=500.0,
        launches=("prefill_layer",),
        vendor_us=900.0,
        vendor_parts={"moe": 900.0},
        vendor_plan="v",
        vendor_variants=[Attempt(name="v", bound_us=1.0, us=900.0)],
    )
    alone = replace(row, layer_us=None, launches=())
    for made_with, kept in {
        now: row,
        replace(now, kernels="older"): alone,
        replace(now, simulator="older"): replace(alone, vendor_by="older"),
        replace(now, library="older"): None,
        replace(now, coefficients="older"): None,
    }.items():
        path.write_text(json.dumps(summarise([row], made_with)))
        assert list(_earlier(path, now).values()) == ([kept] if kept else [])


def attempt(name: str, us: float | None, why: str = "") -> Attempt:
    return Attempt(name=name, bound_us=1.0, us=us, why=why)


INDEX_US = {"find_nonzero_indices": exactly(20.0), "indexed_flatten B=128": exactly(5.0)}


def test_a_chain_is_the_fastest_variant_behind_its_lists() -> None:
    fast = [attempt("shard_on_block B=128", 100.0), attempt("moe_tkg selective", 120.0)]
    assert chain_parts(fast, INDEX_US) == ("moe_tkg selective", {"moe": 120.0})
    slow = [attempt("shard_on_block B=128", 90.0), attempt("moe_tkg selective", 120.0)]
    assert chain_parts(slow, INDEX_US) == (
        "shard_on_block B=128",
        {"find_nonzero_indices": 20.0, "indexed_flatten": 5.0, "moe": 90.0},
    )
    with pytest.raises(ChainError, match="moe_tkg selective: does not run: too large"):
        chain_parts([attempt("moe_tkg selective", None, "does not run: too large")], INDEX_US)


class FakeLaunches:
    """Stands in for the vendor's launches: times by variant."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.times, self.asked = times, list[str]()
        around = VendorAround(
            choose_experts("uniform", 64, 8, 2), {"likely": {"router_topk": 8.0, "mlp": 2.0}}
        )
        more = {"B=256": 6.0, "B=512": 7.0, "B=1024": 8.0}
        index = INDEX_US | {f"indexed_flatten {size}": exactly(us) for size, us in more.items()}
        monkeypatch.setattr(layer_work, "vendor_around", lambda *_: around)
        monkeypatch.setattr(vendor, "index_times", lambda *_: index)
        monkeypatch.setattr(vendor, "launch_vendor", self._launch)

    def _launch(self, library: Any, model: Any, index: Any, variant: Any, options: Any) -> Any:
        self.asked.append(variant.name)
        us = self.times.get(variant.name)
        if us is None:
            raise NotImplementedError("too large for it")
        return MeasuredRun(us)

    def rows(self, known: dict[Any, Row] | None = None) -> list[Row]:
        case = Case(
            "mixtral_8x7b",
            "EP8",
            "prefill",
            64,
            ["likely"],
            cast(VendorLibrary, self),
            known or {TIMED.key: TIMED},
        )
        case.take_vendor()
        while (task := case.next_task()) is not None:
            case.take(task, task.compute())
        return case.rows


TIMED = Row(
    model="mixtral_8x7b", split="EP8", phase="prefill", T=64, corner="likely", layer_us=500.0
)


def test_the_vendors_time_comes_once_its_variants_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLaunches(monkeypatch, {"shard_on_block B=128": 9e4, "shard_on_h B=256": 8e4})
    (row,) = fake.rows()
    assert (row.vendor_plan, row.layer_us) == ("shard_on_h B=256", 500.0)
    assert row.vendor_us == 8.0 + 2.0 + 20.0 + 6.0 + 8e4
    assert row.vendor_parts is not None
    assert sum(row.vendor_parts.values()) == row.vendor_us
    assert not row.only_slowest_fits
    assert has_vendor(row)
    fake.asked.clear()
    half = replace(row, vendor_us=None, vendor_variants=row.vendor_variants[:3])
    (again,) = fake.rows({row.key: half})  # was stopped: what ran is kept
    assert again == row
    assert not {a.name for a in half.vendor_variants} & set(fake.asked)


def test_a_layer_that_only_the_slowest_kernel_takes_stands_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = FakeLaunches(monkeypatch, {"shard_on_block B=128": 9e4}).rows()
    assert row.only_slowest_fits
    fair = replace(row, only_slowest_fits=False, model="qwen3_30b_a3b", T=128, vendor_us=900.0)
    sources = Sources(coefficients="", simulator="", kernels="", library="")
    means = summarise([replace(row, T=128), fair], sources)["beside_vendor"]
    assert [(one["only_slowest_fits"], one["rows"]) for one in means] == [(False, 1), (True, 1)]
    assert means[0]["geometric_mean"] == pytest.approx(900.0 / 500.0)


@pytest.mark.long
def test_what_does_not_fit_says_why(tmp_path: Path) -> None:
    rows = _run(tmp_path / "r.json", "--tokens", "99999", "--splits", "TP8", "--phases", "prefill")
    assert all(row["layer_us"] is None and "Route longer" in row["why"] for row in rows["rows"])


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        main(["--tokens", "0"])
    with pytest.raises(ValueError, match="Name it with --json"):
        main(["--resume"])
