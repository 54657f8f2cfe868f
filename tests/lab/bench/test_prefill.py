"""`neuron-moe bench prefill`: rows, roofline, routings; the vendor's side only with its library."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nki_sim
from lab.bench.comparison.attempts import Attempt
from lab.bench.comparison.corners import expectation
from lab.bench.comparison.spread import UNKNOWN, kept_range
from lab.bench.prefill import command as bench_prefill
from lab.bench.prefill import vendor as prefill_vendor
from lab.bench.prefill import work as prefill_work
from lab.bench.prefill.cases import ROUTINGS, roofline_us
from lab.bench.prefill.ours import prefill_plan, time_ours
from lab.bench.prefill.results import Row, compared, read, summarise, without_ours
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
from nki_sim import isa
from nki_sim.hardware import TRN2
from nki_sim.language import api as nl

RESULTS = Path(__file__).parents[3] / "docs" / "results"
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
    (found,) = time_ours(plan, CHOICE, ["in-order"]).values()
    apart = {name: run.timeline.total_us for name, run in plan_runs(in_stages(plan), CHOICE)}
    assert list(apart) == ["index_blocks", "blockwise_moe", "combine"]
    assert found.ours_given_us == pytest.approx(apart["blockwise_moe"] + apart["combine"])
    few = prefill_plan(SMALL, 64, "plain")
    (found,) = time_ours(few, CHOICE[:64], ["in-order"]).values()
    assert found.ours_given_us == found.ours_us  # the decode kernel needs no lists


def test_the_command_writes_rows(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    path = tmp_path / "prefill.json"
    arguments = ["--models", "gpt-oss-20b", "--tokens", "16", "--routings", "uniform"]
    arguments += ["--corner", "in-order", "--layout", "packed"]
    assert bench_prefill.main([*arguments, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["model"], row["tp"], row["T"], row["routing"]) == ("gpt-oss-20b", 8, 16, "uniform")
    assert (row["format"], row["corner"], row["layout"]) == ("bf16", "in-order", "packed")
    assert row["vendor_us"] is None
    assert 0.3 < row["roofline_us"] / row["ours_us"] < 1.0
    assert not capsys.readouterr().out.splitlines()[-1].startswith("{")
    assert " busy " in row["bottleneck"]


def test_tokens_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"--tokens \[0\]: must be positive"):
        bench_prefill.main(["--tokens", "0"])


SMALL = dataclasses.replace(
    next(model for model in MODELS if model.name == "gpt-oss-20b"), H=512, I=128, E=8, K=2
)
CHOICE = choose_experts("balanced", 512, SMALL.E, SMALL.K)  # 128 tokens for each expert
SLOW_US = 1e4
INDEX_US = {"find_nonzero_indices": 7.0} | {
    f"indexed_flatten B={size}": size / 1e3 for size in (128, 256, 512, 1024)
}


class FakeVendor:
    """Stands in for the vendor's kernels: times by variant, and what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.times, self.asked = times, list[str]()
        monkeypatch.setattr(prefill_vendor, "launch_vendor", self._launch)
        monkeypatch.setattr(prefill_vendor, "index_times", self._index)
        monkeypatch.setattr(prefill_vendor, "corner_timelines", self._timelines)
        monkeypatch.setattr(bench_prefill, "VendorLibrary", lambda path: path)

    def _launch(self, library: Any, model: Any, index: Any, variant: Any, options: Any) -> Any:
        self.asked.append(variant.name)
        us = self.times.get(variant.name, SLOW_US)
        if us < 0:
            raise NotImplementedError("too large for it")
        return types.SimpleNamespace(total_us=us)

    def _index(self, library: Any, model: Any, index: Any, experts: int, corners: Any) -> Any:
        self.asked.append("index")
        return {corner: dict(INDEX_US) for corner in corners}

    def _timelines(self, run: Any, corners: Any) -> Any:
        """Time a run; the vendor's corner halves it."""
        for corner in corners:
            us = run.total_us if corner == "in-order" else run.total_us / 2
            yield corner, types.SimpleNamespace(total_us=us)

    def attempts(self, known: Known | None = None) -> dict[str, Attempt]:
        """Run all variants on the small layer."""
        side = VendorSide(
            self,  # type: ignore[arg-type]
            SMALL,
            CHOICE,
            {"in-order": known or Known()},
            chip=TRN2,
        )
        while (task := side.next_task()) is not None:
            side.take(task, task.compute())
        return {attempt.name: attempt for attempt in side.attempts("in-order")}


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
    vendor = FakeVendor(monkeypatch, {"shard_on_block B=128": 0.1})
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
    assert vendor.attempts(known=Known(known, INDEX_US)) == known
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
        Attempt(name="shard_on_block B=128", bound_us=1.0, us=90.0),
        Attempt(name="shard_on_block B=512 keep", bound_us=1.0, us=90.1),
        Attempt(name="moe_tkg selective", bound_us=1.0, us=92.0),
        Attempt(name="shard_on_h B=128", bound_us=1.0, why="does not run: too large"),
    ]
    row = compared(
        Row(
            model="m",
            tp=1,
            T=64,
            routing="uniform",
            ours_us=50.0,
            ours_given_us=45.0,
            roofline_us=20.0,
            vendor_variants=attempts,
            vendor_index_us=INDEX_US,
        )
    )
    assert (row.vendor_us, row.vendor_plan) == (92.0, "moe_tkg selective")  # it needs none
    assert (row.vendor_given_us, row.vendor_given_plan) == (90.0, "shard_on_block B=128")
    assert (row.speedup, row.given_speedup) == (92.0 / 50.0, 90.0 / 45.0)
    longer = compared(dataclasses.replace(row, vendor_variants=attempts[:2]))
    assert longer.vendor_us == 90.0 + 7.0 + 0.128
    assert not only_slowest_fits(attempts)


def test_lists_that_cannot_be_made_leave_what_needs_none() -> None:
    attempts = [
        Attempt(name="shard_on_block B=128", bound_us=1.0, us=90.0),
        Attempt(name="moe_tkg selective", bound_us=1.0, us=92.0),
    ]
    row = compared(
        Row(
            model="m",
            tp=1,
            T=64,
            routing="uniform",
            ours_us=50.0,
            roofline_us=20.0,
            vendor_variants=attempts,
            vendor_index_us={"IllegalOperand: too many": 0.0},
        )
    )
    assert (row.vendor_plan, row.vendor_given_plan) == ("moe_tkg selective", "shard_on_block B=128")
    alone = compared(dataclasses.replace(row, vendor_variants=attempts[:1]))
    assert alone.vendor_us is None
    assert "its lists: IllegalOperand: too many" in alone.vendor_plan


def test_rows_that_only_the_slowest_kernel_takes_are_in_no_mean() -> None:
    refused = ("shard_on_i_hybrid B=256", "shard_on_h B=128", "moe_tkg selective")
    alone = [Attempt(name="shard_on_block B=128", bound_us=1.0, us=900.0)] + [
        Attempt(name=name, bound_us=1.0, why="does not run: too large") for name in refused
    ]
    fair = [Attempt(name="shard_on_block B=128", bound_us=1.0, us=100.0)]
    rows = [
        compared(
            Row(
                model=name,
                tp=1,
                T=64,
                routing="uniform",
                ours_us=50.0,
                roofline_us=20.0,
                vendor_variants=attempts,
                vendor_index_us=INDEX_US,
            )
        )
        for name, attempts in (("a", alone), ("b", fair))
    ]
    sources = bench_prefill.Sources(coefficients="", simulator="", kernels="", library="")
    result = summarise(rows, sources)
    assert result["only_slowest_fits"] == ["a TP1 T=64"]
    assert [one["rows"] for one in result["by_corner"]] == [1]


ONE = ["--corner", "in-order", "--layout", "packed"]


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
    assert (row["ours_us"], row["vendor_given_us"]) == (None, SLOW_US)
    assert row["vendor_us"] == SLOW_US  # moe_tkg, which needs no lists
    vendor.asked.clear()
    second = tmp_path / "both.json"
    result = run_command(second, *library, "--vendor-from", str(first))
    (row,) = result["rows"]
    assert vendor.asked == []
    assert row["speedup"] == pytest.approx(SLOW_US / row["ours_us"])
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
    assert first["rows"][0]["vendor_given_us"] == SLOW_US
    assert first["vendor_variants_not_run"] == len(VARIANTS) - 5
    vendor.asked.clear()
    every = run_command(path, *options, *KERNEL_NAMES)
    assert every["rows"][0]["vendor_given_us"] == SLOW_US / 2
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
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("coefficients", "simulated with other coefficients"),
        ("case", "T=16 uniform: the earlier result is of another case"),
        ("library", "T=16 uniform: the earlier result is of another library"),
    ],
)
def test_times_that_mean_something_else_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    FakeVendor(monkeypatch, {})
    path = tmp_path / "vendor.json"
    library = ["--library", str(tmp_path)]
    run_command(path, *library, "--only", "vendor")
    change(path, name)
    with pytest.raises(ValueError, match=message):
        run_command(tmp_path / "both.json", *library, "--vendor-from", str(path))


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
    ],
)
def test_options_that_contradict_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match=message):
        bench_prefill.main(arguments)


def exchange_rows(x: Any) -> Any:
    """Load rows on both cores, exchange them, store those of the other one."""
    mine, other = nl.ndarray(x.shape, x.dtype), nl.ndarray(x.shape, x.dtype)
    isa.dma_copy(mine, x)
    isa.sendrecv(mine, other, 1 - nl.program_id(0), 1 - nl.program_id(0), 0)
    out = nl.ndarray((2, *x.shape), x.dtype, buffer=nl.shared_hbm)
    isa.dma_copy(out[nl.program_id(0)], other)
    return out


@pytest.mark.long
def test_every_ratio_has_a_range_and_what_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeVendor(monkeypatch, {})
    path, library = tmp_path / "rows.json", ["--library", str(tmp_path)]
    rows = nki_sim.run(exchange_rows, nki_sim.TensorSpec((128, 16), "bfloat16"), lnc=2)
    monkeypatch.setattr(prefill_work, "chain_runs", lambda *case: [rows, rows])
    result = run_command(path, *library, "--sensitivity")
    (row,), (figures,) = result["rows"], result["by_corner"]
    assert 0.0 < row["speedup_low"] < row["speedup_high"]
    assert "exchange x0.5" in row["low_with"]
    assert "exchange x2" in row["high_with"]
    assert figures["geometric_mean_low"] == pytest.approx(row["speedup_low"])
    assert figures["low_with"]["exchange x0.5"] == figures["rows_with_range"] == 1
    again = run_command(path, *library, "--resume")
    assert again["rows"] == result["rows"]


def test_the_expectation_is_the_vendors_corner_and_names_where_we_lose() -> None:
    def row(model: str, corner: str, layout: str, vendor: float) -> Row:
        return compared(
            Row(
                model=model,
                tp=1,
                T=8,
                routing="uniform",
                corner=corner,
                layout=layout,
                ours_us=10.0,
                roofline_us=1.0,
                vendor_variants=[Attempt(name="v", bound_us=1.0, us=vendor)],
            )
        )

    rows = [
        row("a", "vendor", "plain", 9.0),
        row("b", "vendor", "plain", 16.0),
        row("a", "in-order", "plain", 25.0),
        row("b", "vendor", "packed", 99.0),
    ]
    assert expectation(rows) == (
        "expected about 1.2x, range 0.90x to 2.5x; rows below 1 of 3 in both corners: a TP1 T=8 (1)"
    )
    assert expectation(rows[2:]) is None
    rows[0] = dataclasses.replace(rows[0], speedup_low=0.5, speedup_high=1.5)
    assert "; coefficients at half to double (1 of 3 rows): 0.50x (a TP1 T=8) to 1.5x;" in str(
        expectation(rows)
    )


def test_a_range_is_forgotten_with_the_time_it_belongs_to() -> None:
    row = Row(
        model="m",
        tp=1,
        T=8,
        routing="uniform",
        roofline_us=1.0,
        ours_us=2.0,
        speedup_low=0.5,
        low_with="DMA runs x2",
    )
    assert without_ours(row).speedup_low is None
    assert without_ours(row).low_with == ""
    assert kept_range(row, 2.0)["speedup_low"] == 0.5
    assert kept_range(row, 2.5) == kept_range(None, 2.0) == UNKNOWN


@pytest.mark.slow
def test_what_nxd_runs_by_default_stands_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = FakeVendor(monkeypatch, {"shard_on_h B=512": 2 * SLOW_US})
    monkeypatch.setattr(prefill_work, "launch_vendor", vendor._launch)
    monkeypatch.setattr(prefill_work, "corner_timelines", vendor._timelines)
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
    assert rows["qwen3-30b", 256]["deployed_us"] == 2 * SLOW_US
    # 32 experts of 3 * 2880 * 360 weights, two bytes each, at 725 GB/s.
    assert rows["gpt-oss-20b", 16]["deployed_us"] == pytest.approx(274.6, rel=1e-3)
    # ceil((256 * 4 - 31) / 512) + 31 blocks of 512 rows each, 78.6 multiplications in a ns.
    assert rows["gpt-oss-20b", 256]["deployed_us"] == pytest.approx(668.3, rel=1e-3)


def test_rows_below_one_are_listed_with_their_bottleneck() -> None:
    def row(T: int, vendor: float) -> Row:
        attempts = [Attempt(name="v", bound_us=1.0, us=vendor)]
        return compared(
            Row(
                model="m",
                tp=1,
                T=T,
                routing="uniform",
                ours_us=10.0,
                roofline_us=6.0,
                bottleneck="dma busy 99%",
                vendor_variants=attempts,
            )
        )

    sources = bench_prefill.Sources(coefficients="", simulator="", kernels="", library="")
    result = summarise([row(8192, 11.0), row(128, 9.0)], sources)
    assert result["least_roofline_share_at_8192"] == 0.6
    assert result["misses"] == [
        {
            "target": "no case below 1.0x",
            "row": "m TP1 T=128 uniform",
            "corner": "in-order",
            "layout": "packed",
            "value": 0.9,
            "bottleneck": "dma busy 99%",
        },
    ]


@pytest.mark.long
def test_one_run_gives_both_corners_and_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = FakeVendor(monkeypatch, {"shard_on_block B=256": SLOW_US / 4})
    path = tmp_path / "rows.json"
    arguments = ["--models", "gpt-oss-20b", "--tokens", "16", "--routings", "uniform"]
    arguments += ["--library", str(tmp_path), "--json", str(path)]
    assert bench_prefill.main(arguments) == 0
    result = json.loads(path.read_text())
    rows = {(row["layout"], row["corner"]): row for row in result["rows"]}
    assert list(rows) == [
        ("plain", "vendor"),
        ("plain", "in-order"),
        ("packed", "vendor"),
        ("packed", "in-order"),
    ]
    for layout in ("plain", "packed"):
        lists_us = 7.0 + 0.256
        assert rows[layout, "in-order"]["vendor_us"] == SLOW_US / 4 + lists_us
        assert rows[layout, "in-order"]["vendor_given_us"] == SLOW_US / 4
        assert rows[layout, "vendor"]["vendor_us"] == SLOW_US / 8 + lists_us
        assert rows[layout, "vendor"]["ours_us"] != rows[layout, "in-order"]["ours_us"]
    assert len(vendor.asked) == len(set(vendor.asked))
    assert [(one["corner"], one["rows"]) for one in result["by_corner"]] == [
        ("vendor", 1),
        ("vendor", 1),
        ("in-order", 1),
        ("in-order", 1),
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


def test_a_result_without_corners_is_in_order_and_packed() -> None:
    sources = bench_prefill.Sources.now(TRN2, None, ())
    rows = read(RESULTS / "prefill_trn2.json", sources, "--resume")
    assert {row.corner for row in rows} >= {"in-order"}
    assert {row.layout for row in rows} >= {"packed"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--jobs", "0"], "--jobs 0: must be"), (["--minutes", "0"], "--minutes 0: must be")],
)
def test_processes_and_minutes_must_be_positive(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_prefill.main(arguments)
