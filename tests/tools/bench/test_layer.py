"""`neuron-moe bench layer`: rows of both phases and splits, what lies outside, the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from neuron_moe import SharedExperts
from neuron_moe.configs import load_config
from neuron_moe.tools.bench.comparison.sources import Sources
from neuron_moe.tools.bench.layer import main
from neuron_moe.tools.bench.layer import work as layer_work
from neuron_moe.tools.bench.layer.command import _earlier, summarise
from neuron_moe.tools.bench.layer.vendor import VendorChain
from neuron_moe.tools.bench.layer.work import Row, has_vendor
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary

SMALL = {
    "hidden_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "num_hidden_layers": 1,
}  # fmt: skip


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
    assert len(rows) == 8  # two splits, two phases, two corners
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
        model="gpt_oss_20b", split="TP8", phase="prefill", T=1024, corner="vendor", layer_us=500.0,
        launches=("prefill_layer",), vendor_us=900.0, vendor_parts={"moe_cte": 900.0},
    )  # fmt: skip
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


def test_a_chain_without_its_shared_experts_is_gone_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_work, "_has_shared", lambda model: model == "llama4_scout")
    row = Row(model="llama4_scout", split="TP8", phase="prefill", T=64, corner="vendor")
    routed = replace(row, vendor_parts={"moe_cte": 900.0})
    assert not has_vendor(row)
    assert not has_vendor(routed)
    assert has_vendor(replace(routed, model="gpt_oss_20b"))
    assert has_vendor(replace(row, vendor_why="mlp: does not fit"))
    shared = SharedExperts(256, 512, 1, "silu", device="meta")
    chain = VendorChain(cast(VendorLibrary, None), "llama4_scout", 8, 1, shared)
    monkeypatch.setattr(chain, "_every_token", lambda *_: {"vendor": 100.0})
    found = chain.times(np.zeros((64, 1), np.int32), ["vendor"], {"vendor": routed.vendor_parts})
    assert found == {"vendor": {"moe_cte": 900.0, "mlp": 100.0}}
    assert has_vendor(replace(routed, vendor_parts=found["vendor"]))


@pytest.mark.long
def test_what_does_not_fit_says_why(tmp_path: Path) -> None:
    rows = _run(tmp_path / "r.json", "--tokens", "99999", "--splits", "TP8", "--phases", "prefill")
    assert all(row["layer_us"] is None and "Route longer" in row["why"] for row in rows["rows"])


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        main(["--tokens", "0"])
    with pytest.raises(ValueError, match="Name it with --json"):
        main(["--resume"])
