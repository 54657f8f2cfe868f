"""`neuron-moe bench decode`: rows, the bound, what is kept, the switch between modes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.bench.comparison.attempts import Attempt
from lab.bench.decode import command as bench_decode
from lab.bench.decode import work as decode_work
from lab.bench.decode.cases import (
    MODELS,
    ROUTERS,
    ROUTINGS,
    DecodeCase,
    choose,
    expert_bytes,
    find_model,
    hbm_bound_us,
    is_weight_bound,
)
from lab.bench.decode.ours import config_of, decode_plan, launch_ours
from lab.bench.decode.picture import draw_switch
from lab.bench.decode.results import (
    Book,
    Row,
    compared,
    read,
    row_of,
    summarise,
    with_gains,
)
from lab.bench.decode.router_inputs import RouterInputs
from lab.bench.decode.vendor import bound_us
from neuron_moe.tools.timing.sources import Sources
from neuron_moe.tools.timing.timelines import exactly, overhead
from nki_kernels.common.formula import RouterFormula
from nki_kernels.common.router_reference import rms_norm, route
from tests.nki_kernels.traces import measured_cost

SOURCES = Sources(coefficients="c", simulator="s", kernels="k", library="l")
# us in bf16, of as many experts, computed by hand: 3 H I 2 B each at 725 GB/s.
BOUNDS = {("mixtral-8x7b", 8): 486.0, ("deepseek-v3", 256): 1944.0, ("llama4-scout", 1): 21.7}


def case(name: str = "gpt-oss-20b", kernel: str = "decode_moe", **changes: Any) -> DecodeCase:
    given = {"B": 4, "routing": "uniform", "format": "bf16", **changes}
    return DecodeCase(kernel=kernel, model=find_model(name), **given)


def small(kernel: str, **changes: Any) -> DecodeCase:
    """Return a case of a layer that simulates in no time."""
    model = dataclasses.replace(find_model("qwen3-30b"), H=256, I=64, E=16, K=2)
    return dataclasses.replace(case(kernel=kernel, **changes), model=model)


def row(**changes: Any) -> Row:
    return dataclasses.replace(row_of(case(B=16), 30), **changes)


def ours(us: float, modes: dict[str, float] | None = None, **changes: Any) -> Row:
    modes = modes or {"selective": us}
    time = exactly(us) + overhead()
    return row(ours=time, ours_mode="selective", ours_modes=modes, **changes)


def ran(name: str, us: float) -> Attempt:
    return Attempt(name=name, bound_us=1.0).taking(exactly(us))


@pytest.mark.parametrize(("name", "touched"), list(BOUNDS))
def test_the_bound_is_the_touched_experts_once(name: str, touched: int) -> None:
    assert hbm_bound_us(case(name, B=1), touched) == pytest.approx(BOUNDS[name, touched], rel=0.01)


def test_the_block_also_reads_its_router() -> None:
    moe, block = case("deepseek-v3"), case("deepseek-v3", "decode_block")
    extra = hbm_bound_us(block, 8) - hbm_bound_us(moe, 8)
    assert extra == pytest.approx((256 + 1) * 7168 * 2 / 725e3)


@pytest.mark.parametrize("name", [model.name for model in MODELS])
def test_fp8_halves_the_bytes_but_for_scales(name: str) -> None:
    model = find_model(name)
    assert 0.5 < expert_bytes(model, "fp8") / expert_bytes(model, "bf16") < 0.53


def test_few_bytes_and_many_columns_are_not_weight_bound() -> None:
    mixtral, maverick = find_model("mixtral-8x7b"), find_model("llama4-maverick")
    assert is_weight_bound(mixtral, 16, 8)
    assert not is_weight_bound(mixtral, 128, 8)  # the tensor engine takes longer in fp8
    assert not is_weight_bound(maverick, 1, 1)  # over before a launch is


def test_zipf_touches_fewer_experts_than_uniform() -> None:
    touched = {name: len(np.unique(choose(name, 64, 128, 4))) for name in ROUTINGS}
    assert touched["zipf"] < 0.8 * touched["uniform"]


@pytest.mark.parametrize("name", [model.name for model in MODELS])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_blocks_inputs_choose_the_cases_experts(name: str, routing: str) -> None:
    one = case(name, "decode_block", B=16, routing=routing)
    front = RouterInputs.of(one, one.model.H)
    x_TH = rms_norm(front.hidden_TH.astype(np.float64), np.ones(one.model.H), 1e-6)
    logits_TE = x_TH @ front.weight_EH.astype(np.float64).T
    _, index_TK = route(logits_TE, RouterFormula(top_k=one.model.K, **ROUTERS[name]))
    np.testing.assert_array_equal(index_TK, one.expert_index())


@pytest.mark.parametrize("kernel", ["decode_moe", "decode_block"])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_both_modes_of_both_kernels_run(kernel: str, format: str, layout: str) -> None:
    one = small(kernel, format=format)
    for mode in ("selective", "all"):
        plan = decode_plan(one, mode, layout)
        run, config = launch_ours(one, plan, decode_work.OPTIONS), config_of(plan)
        assert (config.mode, config.output_dtype) == (mode, "float32")  # as the product asks
        assert config.weights.layout == {"packed": "packed", "plain": "ehi"}[layout]
        assert run.timeline.total_us > hbm_bound_us(one, len(np.unique(one.expert_index())))


def test_the_block_reads_the_experts_that_its_router_chooses() -> None:
    few, many = small("decode_block", B=1), small("decode_block", B=8)
    runs = [
        launch_ours(one, decode_plan(one, "selective"), decode_work.OPTIONS) for one in (few, many)
    ]
    reads = [measured_cost(run.trace).read_bytes for run in runs]
    more = len(np.unique(many.expert_index())) - len(np.unique(few.expert_index()))
    assert reads[1] - reads[0] >= more * expert_bytes(few.model, "bf16") > 0


def test_a_mode_cannot_be_faster_than_its_bytes() -> None:
    mixtral = find_model("mixtral-8x7b")
    every_us = bound_us(mixtral, "all_experts", 4)
    assert every_us == pytest.approx(486.0, rel=1e-3)
    assert bound_us(mixtral, "selective", 1) == pytest.approx(every_us / 4)


def test_the_better_mode_of_the_vendor_counts() -> None:
    attempts = [ran("all_experts", 300.0), ran("selective", 200.0)]
    found = compared(ours(100.0, {"selective": 100.0, "all": 98.0}), attempts)
    assert (found.theirs, found.vendor_plan) == (exactly(200.0) + overhead(), "selective")
    assert found.ratio == (exactly(200.0) + overhead()).over(exactly(100.0) + overhead())
    assert found.switch_loss == pytest.approx(100 / 98 - 1)


def test_the_summary_names_what_misses_a_target() -> None:
    slow = ours(100.0, {"selective": 100.0, "all": 90.0}, hbm_bound_us=60.0)
    fast = ours(80.0, {"selective": 80.0}, hbm_bound_us=60.0, format="fp8", is_weight_bound=True)
    attempts = [ran("selective", 95.0)]
    rows = {r.key: compared(r, attempts) for r in (slow, fast)}
    result = summarise(with_gains(rows), Book(), SOURCES)
    targets = sorted(miss["target"] for miss in result["misses"])
    assert targets == ["bound_share", "fp8_gain", "switch_loss", "times as fast"]
    low_us = overhead().low_us
    least = (95.0 + low_us) / (100.0 + low_us)
    assert result["by_kernel"]["decode_moe"]["least_low"] == pytest.approx(least)
    assert result["least_bound_share_bf16_from_16"] == pytest.approx(0.6)
    assert result["least_fp8_gain_weight_bound"] == pytest.approx(1.25)
    assert result["switch_loss"] == pytest.approx(1 / 9)


def test_the_file_keeps_the_vendors_times(tmp_path: Path) -> None:
    book, path = Book(), tmp_path / "decode.json"
    book.keep_vendor(case(), [ran("selective", 2.0)])
    path.write_text(json.dumps(summarise([ours(5.0)], book, SOURCES)))
    again = read(path, SOURCES, "--resume")
    assert again.known_vendor(case(routing="zipf"))[0].us == 2.0  # whatever the routing
    assert again.known_vendor(case(B=16)) == []
    no_library = dataclasses.replace(SOURCES, library="")
    assert summarise([], again, no_library)["sources"]["library"] == "l"
    assert list(again.rows.values()) == [ours(5.0)]
    with pytest.raises(ValueError, match="was simulated with another coefficients"):
        read(path, dataclasses.replace(SOURCES, coefficients="d"), "--resume")


def test_the_command_writes_rows(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    path = tmp_path / "decode.json"
    arguments = ["--models", "llama4-scout", "--batches", "1", "--kernels", "decode_moe"]
    arguments += ["--layout", "packed"]
    assert bench_decode.main([*arguments, "--routings", "uniform", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(r["model"], r["tp"], r["B"], r["format"]) for r in rows] == [
        ("llama4-scout", 16, 1, "bf16"),
        ("llama4-scout", 16, 1, "fp8"),
    ]
    for found in rows:
        assert found["theirs"] is None
        assert found["ours_mode"] == "selective"
        assert 0.3 < found["bound_share"] < 1.0
    assert rows[1]["fp8_gain"] > 1.0
    assert not capsys.readouterr().out.splitlines()[-1].startswith("{")


@pytest.mark.long
def test_the_chosen_mode_is_near_the_better(tmp_path: Path) -> None:
    points = []
    for B in (1, 4, 64):
        one = case("llama4-maverick" if B == 1 else "llama4-scout", B=B)
        points.append(bench_decode.switch_point(one, SOURCES, "packed"))
        assert points[-1]["loss"] <= 0.03
    assert points[0]["chosen"] == "selective"
    assert points[0]["selective_us"] < points[0]["all_us"]
    picture = draw_switch(points, tmp_path / "switch.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--batches \[0\]: must be 1 to 256"):
        bench_decode.main(["--batches", "0"])
    with pytest.raises(ValueError, match="--resume: continues a result file"):
        bench_decode.main(["--resume"])


def test_beside_fp8_the_vendors_faster_format_counts() -> None:
    book, fp8 = Book(), case(format="fp8")
    assert book.rivals(fp8) == []
    book.keep_vendor(fp8, [ran("selective", 20.0)])
    bf16 = [ran("selective", 15.0)]
    book.keep_vendor(case(), bf16)
    found = compared(row_of(fp8, 4), book.rivals(fp8))
    assert (found.theirs, found.vendor_plan) == (exactly(15.0) + overhead(), "selective in bf16")
    assert book.rivals(case()) == bf16


def test_one_run_gives_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    path = tmp_path / "decode.json"
    arguments = ["--models", "gpt-oss-20b", "--batches", "1", "--kernels", "decode_moe"]
    arguments += ["--routings", "uniform", "--formats", "bf16", "--json", str(path)]
    assert bench_decode.main([*arguments, "--jobs", "2"]) == 0
    rows = {row["layout"]: row["ours"] for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["plain", "packed"]
    assert rows["packed"]["us"] < rows["plain"]["us"]
    for time in rows.values():
        assert time["low_us"] < time["us"] < time["high_us"]
    monkeypatch.setattr(decode_work, "launch_ours", None)  # kept, so not called
    assert bench_decode.main([*arguments, "--resume"]) == 0
