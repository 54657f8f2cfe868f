"""`neuron-moe bench prefill`: rows, roofline, routings; the vendor's side only with its library."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nki_sim
from lab.bench.comparison.attempts import Attempt
from lab.bench.comparison.figures import figure_lines
from lab.bench.prefill import command as bench_prefill
from lab.bench.prefill import vendor as prefill_vendor
from lab.bench.prefill import work as prefill_work
from lab.bench.prefill.cases import ROUTINGS, roofline_us
from lab.bench.prefill.ours import prefill_plan, time_ours
from lab.bench.prefill.results import Row, compared, read, summarise
from lab.bench.prefill.vendor import (
    KERNEL_NAMES,
    VARIANTS,
    Known,
    Variant,
    VendorSide,
    bound_us,
    only_slowest_fits,
)
from neuron_moe.backends.nki import launch
from neuron_moe.backends.nki.times import plan_runs
from neuron_moe.experts import RoutedExperts
from neuron_moe.spec import ExpertSpec
from neuron_moe.tools.timing.layers import MODELS, choose_experts
from neuron_moe.tools.timing.plans import formula_of, in_stages
from neuron_moe.tools.timing.runs import MeasuredRun
from neuron_moe.tools.timing.timelines import exactly, overhead
from nki_sim.hardware import TRN2
from nki_sim.time.estimate import Estimate

# us, for uniform routing: 3 H I multiplications for each of T K choices, on 2 x 128 x 128 cells.
ROOFLINES = {
    ("gpt-oss-120b", 8192): 1296.0,
    ("qwen3-30b", 8192): 491.5,
    ("deepseek-v3", 8192): 2293.8,
    ("llama4-maverick", 8192): 925.6,  # 128 experts of 3 H I weights, 8192 rows in, 8192 out
}


@pytest.mark.parametrize(("name", "tokens"), list(ROOFLINES))
def test_the_roofline_is_of_the_layers_own_work(name: str, tokens: int) -> None:
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


@pytest.mark.parametrize(
    "name",
    [
        "llama4-scout",
        pytest.param("gpt-oss-20b", marks=pytest.mark.long),
        pytest.param("mixtral-8x7b", marks=pytest.mark.long),
    ],
)
def test_the_launch_is_the_one_that_the_product_makes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel, what it is compiled for and its operands are those of a layer with weights."""
    model = dataclasses.replace(
        next(model for model in MODELS if model.name == name), H=256, I=64, E=8
    )
    calls = list[tuple[str, int, dict[str, Any]]]()
    original = nki_sim.run

    def record(kernel: Any, *args: Any, lnc: int, options: Any = None, **named: Any) -> Any:
        bound = inspect.signature(kernel).bind(*args, **named).arguments
        operands = {n: form(value) for n, value in bound.items() if value is not None}
        calls.append((kernel.__name__, lnc, operands))
        return original(kernel, *args, lnc=lnc, options=options, **named)

    def form(value: Any) -> Any:
        if isinstance(value, nki_sim.TensorSpec | np.ndarray | torch.Tensor):
            return tuple(value.shape), str(value.dtype).removeprefix("torch.")
        return value

    monkeypatch.setattr(launch.nki_sim, "run", record)
    experts = RoutedExperts(
        ExpertSpec(
            num_experts=8,
            top_k=model.K,
            hidden_size=256,
            intermediate_size=64,
            formula=formula_of(model),
            scales_input=model.options.get("scaling") == "pre",
        ),
        backend="nki",
        dtype=torch.bfloat16,
    )
    index_TK = choose_experts("uniform", 200, 8, model.K)
    with torch.no_grad():
        experts(
            torch.zeros(200, 256, dtype=torch.bfloat16),
            torch.ones(200, model.K),
            torch.from_numpy(index_TK),
            2,
        )
    product = calls.copy()
    calls.clear()
    for _ in plan_runs(prefill_plan(model, 200, "plain"), index_TK, run=record):
        pass
    assert calls == product


def test_with_lists_given_counts_what_comes_behind_them() -> None:
    plan = prefill_plan(SMALL, len(CHOICE), "plain")
    found, own_us = time_ours(plan, CHOICE), overhead().us
    apart = {name: run.timeline.total_us for name, run in plan_runs(in_stages(plan), CHOICE)}
    assert list(apart) == ["index_blocks", "blockwise_moe", "combine"]
    given_us = apart["blockwise_moe"] + apart["combine"] + own_us
    assert found.ours_given.us == pytest.approx(given_us)
    assert found.ours.low_us < found.ours.us < found.ours.high_us
    found = time_ours(prefill_plan(SMALL, 64, "plain"), CHOICE[:64])
    assert found.ours_given == found.ours  # the decode kernel needs no lists


def test_the_command_writes_rows(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    path = tmp_path / "prefill.json"
    (row,) = run_command(path)["rows"]
    assert (row["model"], row["tp"], row["T"], row["routing"]) == ("gpt-oss-20b", 8, 16, "uniform")
    assert (row["format"], row["layout"]) == ("bf16", "packed")
    assert row["theirs"] is None
    assert 0.3 < row["roofline_us"] / row["ours"]["us"] < row["roofline_share"] < 1.0
    assert not capsys.readouterr().out.splitlines()[-1].startswith("{")
    assert " busy " in row["bottleneck"]


SMALL = dataclasses.replace(
    next(model for model in MODELS if model.name == "gpt-oss-20b"), H=512, I=128, E=8, K=2
)
CHOICE = choose_experts("balanced", 512, SMALL.E, SMALL.K)  # 128 tokens for each expert
SLOW_US = 1e4
OWN_US = overhead().us
INDEX = {"find_nonzero_indices": exactly(7.0)} | {
    f"indexed_flatten B={size}": exactly(size / 1e3) for size in (128, 256, 512, 1024)
}


NO_SOURCES = bench_prefill.Sources(coefficients="", simulator="", kernels="", library="")
ONE = ["--layout", "packed"]


def ran(name: str, us: float) -> Attempt:
    return Attempt(name=name, bound_us=1.0).taking(exactly(us))


def row_of(attempts: list[Attempt], **changes: Any) -> Row:
    """Return a row of a layer that takes 50 us where 20 are possible, beside some attempts."""
    given = {"model": "m", "tp": 1, "T": 64, "routing": "uniform", "roofline_us": 20.0, **changes}
    return compared(Row(**{"ours": exactly(50.0), **given}, vendor_variants=attempts))


class FakeVendor:
    """Stands in for the vendor's kernels: times by variant, and what was requested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.times, self.asked = times, list[str]()
        monkeypatch.setattr(prefill_vendor, "launch_vendor", self._launch)
        monkeypatch.setattr(prefill_vendor, "index_times", self._index)
        monkeypatch.setattr(bench_prefill, "VendorLibrary", lambda path: path)

    def _launch(self, library: Any, model: Any, index: Any, variant: Any, options: Any) -> Any:
        self.asked.append(variant.name)
        us = self.times.get(variant.name, SLOW_US)
        if us < 0:
            raise NotImplementedError("too large for it")
        return MeasuredRun(us)

    def _index(self, library: Any, model: Any, index: Any, experts: int) -> Any:
        self.asked.append("index")
        return dict(INDEX)

    def attempts(self, known: Known | None = None) -> dict[str, Attempt]:
        """Run all variants on the small layer."""
        side = VendorSide(
            self,  # type: ignore[arg-type]
            SMALL,
            CHOICE,
            known or Known(),
            chip=TRN2,
        )
        while (task := side.next_task()) is not None:
            side.take(task, task.compute())
        return {attempt.name: attempt for attempt in side.attempts()}


def test_a_bound_is_weights_of_blocks_or_multiplications_of_their_rows() -> None:
    cells = 3 * 512 * 128
    by_name = {v.name: bound_us(SMALL, CHOICE, v, TRN2) for v in VARIANTS}
    memory_us = 8 * cells * 2 / 716.0 / 1e3
    assert by_name["shard_on_block B=128"] == pytest.approx(memory_us)
    work_us = 8 * 512 * cells / (2 * 128 * 128 * 2.4) / 1e3
    assert work_us > memory_us
    assert by_name["shard_on_block B=512 keep"] == pytest.approx(work_us)


def test_variants_that_cannot_win_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    best_us = bound_us(SMALL, CHOICE, VARIANTS[0], TRN2) * 1.01
    vendor = FakeVendor(monkeypatch, {"shard_on_block B=128": best_us})
    found = vendor.attempts()
    assert set(found) == {variant.name for variant in VARIANTS}
    assert found["shard_on_block B=512 keep"].why.startswith("needs ")
    assert "shard_on_block B=512 keep" not in vendor.asked
    assert found["shard_on_block B=128"].us == best_us
    assert found["shard_on_block B=128 keep"].us == SLOW_US


def test_the_dynamic_kernel_runs_where_its_flattered_form_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vendor = FakeVendor(monkeypatch, {"shard_on_i_hybrid B=512 known": -1})
    found = vendor.attempts()
    assert "and a loop besides" in found["shard_on_i_hybrid B=256"].why
    assert "shard_on_i_hybrid B=256" not in vendor.asked
    assert found["shard_on_i_hybrid B=512"].us == SLOW_US


def test_a_run_below_its_bound_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = FakeVendor(monkeypatch, {})
    run = types.SimpleNamespace(timeline=MeasuredRun(0.1))
    monkeypatch.setattr(prefill_vendor, "launch_vendor", lambda *_: run)
    with pytest.raises(RuntimeError, match="less than its bound"):
        vendor.attempts()


def test_a_variant_that_does_not_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = FakeVendor(monkeypatch, {"shard_on_block B=128": -1})
    attempt = vendor.attempts()["shard_on_block B=128"]
    assert attempt.us is None
    assert "too large for it" in attempt.why


def test_known_attempts_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = FakeVendor(monkeypatch, {"shard_on_block B=128": 100.0})
    known = vendor.attempts()
    vendor.asked.clear()
    assert vendor.attempts(known=Known(known, INDEX)) == known
    assert vendor.asked == []


def test_kernels_that_cannot_compute_a_layer_are_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vendor = FakeVendor(monkeypatch, {})
    found = vendor.attempts()  # of 512 tokens, with biases and clamps
    assert "neither biases nor clamps" in found["shard_on_h B=128"].why
    assert "up to 128 tokens" in found["moe_tkg all_experts"].why
    assert not any(name.startswith(("shard_on_h", "moe_tkg")) for name in vendor.asked)
    plain = dataclasses.replace(SMALL, vendor={})
    assert not Variant("shard_on_h", 1024).why_not(plain, 512)
    assert not Variant("moe_tkg", 0, "selective").why_not(SMALL, 128)


def test_a_kernel_of_all_blocks_has_their_bound() -> None:
    few = choose_experts("balanced", 16, SMALL.E, SMALL.K)  # 4 tokens for each expert
    kernels = ("shard_on_block", "shard_on_h")
    live, every = (bound_us(SMALL, few, Variant(kernel, 256), TRN2) for kernel in kernels)
    assert live == every  # so few choices fill no second block
    many = choose_experts("balanced", 512, SMALL.E, SMALL.K)  # half of each expert's block
    live, every = (bound_us(SMALL, many, Variant(kernel, 256), TRN2) for kernel in kernels)
    assert every > live


def test_the_published_time_has_the_vendors_lists_in_front() -> None:
    attempts = [
        ran("shard_on_block B=128", 90.0),
        ran("shard_on_block B=512 keep", 90.1),
        ran("moe_tkg selective", 92.0),
        Attempt(name="shard_on_h B=128", bound_us=1.0, why="does not run: too large"),
    ]
    row = row_of(
        attempts,
        ours=exactly(50.0 + OWN_US),
        ours_given=exactly(45.0 + OWN_US),
        vendor_index=INDEX,
    )
    assert (row.vendor_plan, row.vendor_given_plan) == ("moe_tkg selective", "shard_on_block B=128")
    assert row.theirs is not None
    assert row.theirs_given is not None
    assert row.ratio is not None
    assert (row.theirs.us, row.theirs_given.us) == (92.0 + OWN_US, 90.0 + OWN_US)  # one needs none
    assert row.ratio.likely == (92.0 + OWN_US) / (50.0 + OWN_US)
    assert row.roofline_share == pytest.approx(20.0 / 50.0)
    longer = compared(dataclasses.replace(row, vendor_variants=attempts[:2]))
    assert longer.theirs is not None
    assert longer.theirs.us == pytest.approx(90.0 + 7.0 + 0.128 + OWN_US)
    assert not only_slowest_fits(attempts)


def test_lists_that_cannot_be_made_leave_what_needs_none() -> None:
    attempts = [ran("shard_on_block B=128", 90.0), ran("moe_tkg selective", 92.0)]
    row = row_of(attempts, vendor_index={"IllegalOperand: too many": exactly(0.0)})
    assert (row.vendor_plan, row.vendor_given_plan) == ("moe_tkg selective", "shard_on_block B=128")
    alone = compared(dataclasses.replace(row, vendor_variants=attempts[:1]))
    assert alone.theirs is None
    assert "its lists: IllegalOperand: too many" in alone.vendor_plan


def test_rows_that_only_the_slowest_kernel_takes_are_in_no_mean() -> None:
    refused = ("shard_on_i_hybrid B=256", "shard_on_h B=128", "moe_tkg selective")
    alone = [ran("shard_on_block B=128", 900.0)] + [
        Attempt(name=name, bound_us=1.0, why="does not run: too large") for name in refused
    ]
    fair = [ran("shard_on_block B=128", 100.0)]
    rows = [
        row_of(attempts, model=name, vendor_index=INDEX)
        for name, attempts in (("a", alone), ("b", fair))
    ]
    result = summarise(rows, NO_SOURCES)
    assert result["only_slowest_fits"] == ["a TP1 T=64"]
    assert [one["rows"] for one in result["by_layout"]] == [1]


def run_command(path: Path, *more: str) -> dict[str, Any]:
    arguments = ["--models", "gpt-oss-20b", "--tokens", "16", "--routings", "uniform", *ONE]
    assert bench_prefill.main([*arguments, *more, "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.long
def test_vendor_times_are_taken_from_an_earlier_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = FakeVendor(monkeypatch, {})
    first = tmp_path / "vendor.json"
    library = ["--library", str(tmp_path)]
    (row,) = run_command(first, *library, "--only", "vendor")["rows"]
    assert (row["ours"], row["theirs_given"]["us"]) == (None, SLOW_US + OWN_US)
    assert row["theirs"]["us"] == SLOW_US + OWN_US  # moe_tkg, which needs no lists
    vendor.asked.clear()
    second = tmp_path / "both.json"
    result = run_command(second, *library, "--vendor-from", str(first))
    (row,) = result["rows"]
    assert vendor.asked == []
    assert row["ratio"]["likely"] == pytest.approx((SLOW_US + OWN_US) / row["ours"]["us"])
    assert result["vendor_rows_by_another_simulator"] == 0
    monkeypatch.setattr(prefill_work, "time_ours", None)  # kept, so not called
    assert run_command(second, *library, "--resume")["rows"] == result["rows"]


@pytest.mark.long
def test_the_vendors_kernels_can_be_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = FakeVendor(monkeypatch, {"shard_on_i_hybrid B=256 known": SLOW_US / 2})
    path = tmp_path / "vendor.json"
    options = ["--library", str(tmp_path), "--only", "vendor", "--resume", "--vendor-kernels"]
    first = run_command(path, *options, "shard_on_block")
    assert first["rows"][0]["theirs_given"]["us"] == SLOW_US + OWN_US
    assert first["vendor_variants_not_run"] == len(VARIANTS) - 5
    vendor.asked.clear()
    every = run_command(path, *options, *KERNEL_NAMES)
    assert every["rows"][0]["theirs_given"]["us"] == SLOW_US / 2 + OWN_US
    assert "vendor_variants_not_run" not in every
    assert vendor.asked
    assert not any(name.startswith(("shard_on_block", "index")) for name in vendor.asked)


def change(path: Path, name: str) -> None:
    content = json.loads(path.read_text())
    if name == "coefficients":
        content["sources"][name] = "0"
    else:
        content["rows"][0][name] = "0"
    path.write_text(json.dumps(content))


@pytest.mark.long
def test_times_that_mean_something_else_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeVendor(monkeypatch, {})
    path, other = tmp_path / "vendor.json", tmp_path / "other.json"
    library = ["--library", str(tmp_path)]
    run_command(path, *library, "--only", "vendor")
    for name, message in (
        ("coefficients", "simulated with other coefficients"),
        ("case", "T=16 uniform: the earlier result is of another case"),
        ("library", "T=16 uniform: the earlier result is of another library"),
    ):
        shutil.copy(path, other)
        change(other, name)
        with pytest.raises(ValueError, match=message):
            run_command(tmp_path / "both.json", *library, "--vendor-from", str(other))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume: continues a result file"),
        (["--only", "vendor"], "--only vendor: needs a checkout"),
        (
            ["--resume", "--json", "a.json", "--vendor-from", "b.json"],
            "--resume: contradicts --vendor-from",
        ),
        (["--vendor-from", "none.json"], "--vendor-from none.json: not a result"),
        (["--tokens", "0"], r"--tokens \[0\]: must be positive"),
        (["--jobs", "0"], "--jobs 0: must be"),
        (["--minutes", "0"], "--minutes 0: must be"),
    ],
)
def test_wrong_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match=message):
        bench_prefill.main(arguments)


def test_both_sides_are_compared_under_one_assumption() -> None:
    ours = Estimate(low_us=10.0, us=20.0, high_us=40.0)
    theirs = ran("v", 30.0).taking(Estimate(low_us=18.0, us=30.0, high_us=90.0))
    row = row_of([theirs], ours=ours + overhead(), roofline_us=1.0)
    own = overhead()
    ends = [
        (18.0 + own.low_us) / (10.0 + own.low_us),
        (30.0 + own.us) / (20.0 + own.us),
        (90.0 + own.high_us) / (40.0 + own.high_us),
    ]
    assert row.ratio is not None
    assert row.ratio.likely == pytest.approx(ends[1])
    assert (row.ratio.low, row.ratio.high) == (pytest.approx(min(ends)), pytest.approx(max(ends)))
    (figures,) = summarise([row], NO_SOURCES)["by_layout"]
    assert figures["least_low"] == figures["geometric_mean_low"] == pytest.approx(min(ends))
    assert f"least {min(ends):.2f}x, 0 below 1" in figure_lines([figures])


def test_a_variant_that_is_not_chosen_has_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    found = FakeVendor(monkeypatch, {"shard_on_block B=256": SLOW_US / 4}).attempts()
    assert found["shard_on_block B=256"].time == exactly(SLOW_US / 4)
    order = [attempt for attempt in found.values() if attempt.us == SLOW_US]
    assert any(attempt.time is None for attempt in order)


@pytest.mark.slow
def test_what_nxd_runs_by_default_stands_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = FakeVendor(monkeypatch, {"shard_on_h B=512": 2 * SLOW_US})
    monkeypatch.setattr(prefill_work, "launch_vendor", vendor._launch)
    arguments = ["--models", "qwen3-30b", "gpt-oss-20b", "--tokens", "16", "256", *ONE]
    arguments += ["--routings", "uniform", "--only", "vendor", "--deployed"]
    path = tmp_path / "rows.json"
    library = ["--library", str(tmp_path), "--json", str(path)]
    assert bench_prefill.main([*arguments, *library]) == 0
    rows = {(row["model"], row["T"]): row for row in json.loads(path.read_text())["rows"]}
    plans = {key: row["deployed_plan"] for key, row in rows.items()}
    assert plans == {
        ("qwen3-30b", 16): "all experts in torch, at least",
        ("qwen3-30b", 256): "shard_on_h B=512",
        ("gpt-oss-20b", 16): "all experts in torch, at least",
        ("gpt-oss-20b", 256): "blocks of 512 in torch, at least",
    }
    assert rows["qwen3-30b", 256]["deployed_us"] == 2 * SLOW_US + OWN_US
    # 32 experts of 3 * 2880 * 360 weights, two bytes each, at 725 GB/s.
    assert rows["gpt-oss-20b", 16]["deployed_us"] == pytest.approx(274.6, rel=1e-3)
    # ceil((256 * 4 - 31) / 512) + 31 blocks of 512 rows each, 78.6 multiplications in a ns.
    assert rows["gpt-oss-20b", 256]["deployed_us"] == pytest.approx(668.3, rel=1e-3)


def test_rows_below_one_are_listed_with_their_bottleneck() -> None:
    def row(T: int, vendor: float) -> Row:
        ours = exactly(10.0) + overhead()
        beside = {"ours": ours, "roofline_us": 6.0, "bottleneck": "dma busy 99%"}
        return row_of([ran("v", vendor)], T=T, **beside)

    result = summarise([row(8192, 11.0), row(128, 9.0)], NO_SOURCES)
    low_us = overhead().low_us
    assert result["misses"] == [
        {
            "target": "no case below 1.0x",
            "row": "m TP1 T=128 uniform",
            "layout": "packed",
            "value": pytest.approx((9.0 + low_us) / (10.0 + low_us)),
            "bottleneck": "dma busy 99%",
        },
    ]


@pytest.mark.long
def test_one_run_gives_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = FakeVendor(monkeypatch, {"shard_on_block B=256": SLOW_US / 4})
    path = tmp_path / "rows.json"
    arguments = ["--models", "gpt-oss-20b", "--tokens", "16", "--routings", "uniform"]
    arguments += ["--library", str(tmp_path), "--json", str(path)]
    assert bench_prefill.main(arguments) == 0
    result = json.loads(path.read_text())
    assert [row["layout"] for row in result["rows"]] == ["plain", "packed"]
    for row in result["rows"]:
        assert row["theirs"]["us"] == pytest.approx(SLOW_US / 4 + 7.0 + 0.256 + OWN_US)
        assert row["theirs_given"]["us"] == SLOW_US / 4 + OWN_US
        assert row["ours"]["low_us"] < row["ours"]["us"] < row["ours"]["high_us"]
    assert len(vendor.asked) == len(set(vendor.asked))
    assert [(one["layout"], one["rows"]) for one in result["by_layout"]] == [
        ("plain", 1),
        ("packed", 1),
    ]


@pytest.mark.long
def test_a_run_in_pieces_is_the_run_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeVendor(monkeypatch, {})
    pieces, whole = tmp_path / "pieces.json", tmp_path / "whole.json"
    library = ["--library", str(tmp_path)]
    run_command(pieces, *library, "--only", "ours", "--jobs", "2")
    kernels = ["--vendor-kernels", "shard_on_block"]
    run_command(pieces, *library, "--resume", *kernels, "--minutes", "5", "--jobs", "2")
    resumed = run_command(pieces, *library, "--resume", "--jobs", "2")
    assert resumed["rows"] == run_command(whole, *library)["rows"]


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    row = row_of([ran("moe_tkg selective", 92.0)], vendor_index=INDEX)
    sources, path = bench_prefill.Sources.now(TRN2, None, ()), tmp_path / "rows.json"
    path.write_text(json.dumps(summarise([row], sources)))
    assert read(path, sources, "--resume") == [row]
