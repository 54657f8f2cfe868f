"""neuron-moe check kernels: small cases of every family, and faults it must see."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.check import kernels as check_kernels
from lab.check import menu as check
from lab.check import outcomes
from lab.check.kernel_cases import combine, prefill, router
from lab.check.kernel_cases.models import LAYERS, model_cases, rank_case
from lab.check.kernel_cases.models import ROUTINGS as MODEL_ROUTINGS
from lab.check.kernel_cases.routings import ROUTINGS, draw_routing
from lab.check.outcomes import Outcome, OutcomeFile, run_in_turn
from lab.check.vendor_cases.case import Case, Limits
from lab.check.vendor_cases.inputs import Draw

PREFILL = {
    "hidden": 128,
    "tokens": 40,
    "experts": 4,
    "block_size": 32,
    "top_k": 2,
    "intermediate": 64,
    "dtype": "bfloat16",
    "skip_mode": 1,
    "bias": True,
    "act_fn": "Swish",
    "affinity_scaling_mode": "POST_SCALE",
    "gate_clamp_upper": 7.0,
    "up_clamp_upper": 8.0,
    "up_clamp_lower": -7.0,
}
ROUTER = {"T": 20, "H": 256, "E": 16, "k": 4, "act_fn": "SOFTMAX", "has_bias": True}
# kernel, variant and params by name
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "block": ("moe_cte", "shard_on_block", PREFILL),
    "intermediate": ("moe_cte", "shard_on_i", PREFILL | {"act_fn": "SiLU", "bias": False}),
    "hybrid": ("moe_cte", "shard_on_i_hybrid", PREFILL),
    "hidden": ("moe_cte", "shard_on_h", PREFILL | {"affinity_scaling_mode": "NO_SCALE"}),
    "pre-scale": ("moe_cte", "shard_on_h", PREFILL | {"affinity_scaling_mode": "PRE_SCALE"}),
    "dropping": ("moe_cte", "shard_on_i_dropping", PREFILL | {"block_size": 2048, "bias": False}),
    "fp8-rows": ("moe_cte", "shard_on_i", PREFILL | {"quantize": "float8_e4m3", "bias": False}),
    "mxfp4": ("moe_cte", "shard_on_block_mx", PREFILL | {"weight_dtype": "float4_e2m1fn_x4"}),
    "mxfp8": ("moe_cte", "shard_on_i_mx", PREFILL | {"weight_dtype": "float8_e4m3fn_x4"}),
    "skewed": ("moe_cte", "", PREFILL | {"routing": "skewed"}),
    "softmax-over-chosen": ("router_topk", "unit", ROUTER),
    "sigmoid": ("router_topk", "unit", ROUTER | {"act_fn": "SIGMOID", "k": 1}),
    "softmax-over-all": ("router_topk", "unit", ROUTER | {"router_pre_norm": True}),
    "renormalised": (
        "router_topk",
        "unit",
        ROUTER | {"router_pre_norm": True, "norm_topk_prob": True},
    ),
    "groups": (
        "router_topk",
        "unit",
        ROUTER | {"act_fn": "SIGMOID", "n_group": 4, "topk_group": 2, "has_selection_bias": True},
    ),
    "norm": ("router_topk", "unit", ROUTER | {"has_norm": True}),
    "nonzero": ("find_nonzero_indices", "full", {"T": 300, "E": 16, "top_k": 4}),
    "columns": (
        "find_nonzero_indices",
        "column_subset",
        {"T": 300, "E": 16, "top_k": 4, "E_offset": 4, "E_local": 3},
    ),
    "one-row": ("find_nonzero_indices_with_count", "unit", {"T": 256, "fraction_nonzero": 0.15}),
    "flatten": ("indexed_flatten", "full", {"T": 256, "E": 3, "f_len": 128}),
    "reduce": ("topk_reduce", "unit", {"T": 4, "K": 4, "H": 128, "src_ranks": 8, "lnc": 1}),
}


def entry(name: str, **changes: Any) -> dict[str, Any]:
    kernel, variant, params = CASES[name]
    exact = kernel.startswith(("find", "indexed"))
    tolerance = 0.0 if exact else 0.05 if "fp8" in name or "mx" in name else 0.02
    return {
        "id": name,
        "kernel": kernel,
        "variant": variant,
        "params": params | changes,
        "rtol": tolerance,
        "atol": 0.0 if exact else 1e-5,
    }


def outcome(name: str, **changes: Any) -> Outcome:
    return check_kernels.run_case(Case.from_json(entry(name, **changes)), Limits())


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_small_cases_of_every_family_pass(name: str) -> None:
    result = outcome(name)
    assert result.outcome == "passed", result.reason
    assert result.simulated_us is not None
    assert result.simulated_us > 0


def test_a_file_of_cases_gives_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = entry("reduce") | {"id": "other", "kernel": "moe_bwd"}
    path, out = tmp_path / "cases.json", tmp_path / "out.json"
    path.write_text(json.dumps({"cases": [entry("nonzero"), entry("reduce"), other]}))
    assert check.main(["kernels", "--cases", str(path), "--json", str(out)]) == 0
    rows = {row["id"]: row for row in json.loads(out.read_text())}
    names = {"id", "kernel", "variant", "outcome", "reason", "simulated_us"}
    assert set(rows["nonzero"]) == names
    assert [row["outcome"] for row in rows.values()] == ["passed", "passed", "skipped"]
    assert "not a MoE, router or index kernel" in rows["other"]["reason"]
    assert "our kernels on nki_sim" in capsys.readouterr().out


def test_fewer_tokens_are_owned_up_to() -> None:
    case = Case.from_json(entry("block", tokens=4096))
    result = check_kernels.run_case(case, Limits(macs=7e6))
    assert (result.outcome, result.reason.split(";")[0]) == ("passed", "T 4096 -> 256 to fit")


def test_no_case_of_ours_starts_after_the_time_budget() -> None:
    (result,) = check_kernels.run_cases([Case.from_json(entry("nonzero"))], max_seconds=-1)
    assert result.outcome == "skipped"
    assert "time budget" in result.reason


@pytest.mark.long
def test_what_blockwise_moe_cannot_compute_is_skipped_with_the_reason() -> None:
    assert "bfloat16 only" in outcome("block", dtype="float32").reason
    assert "'int4': not a format" in outcome("block", weight_dtype="int4").reason
    assert outcome("flatten", row_offsets_start=2).outcome == "skipped"


def test_what_the_kernels_refuse_fails_with_their_message() -> None:
    result = outcome("block", hidden=100)
    assert result.outcome == "failed"
    assert "H=100: must be a positive multiple of 64" in result.reason


def test_wrong_outputs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prefill.launch

    def drops_a_row(*args: Any) -> tuple[np.ndarray, float]:
        output, time = right(*args)
        return np.where(np.arange(len(output))[:, None] == 7, 0, output), time

    monkeypatch.setattr(prefill, "launch", drops_a_row)
    result = outcome("block")
    assert result.outcome == "failed"
    assert "of 5120 elements off" in result.reason


def test_an_error_within_the_tolerance_but_above_that_of_torch_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = prefill.launch

    def scales(*args: Any) -> tuple[np.ndarray, float]:
        output, time = right(*args)
        return output * np.float32(1.01), time

    monkeypatch.setattr(prefill, "launch", scales)
    assert "that of the torch path" in outcome("hidden").reason


def test_wrong_choices_and_sums_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    route = router.reference.route
    monkeypatch.setattr(
        router.reference, "route", lambda *a, **k: (route(*a, **k)[0], route(*a, **k)[1][:, ::-1])
    )
    assert "20 of 20 tokens choose other experts" in outcome("softmax-over-chosen").reason
    total = combine.reference.combine_ref
    monkeypatch.setattr(combine.reference, "combine_ref", lambda *a: total(*a) * 1.1)
    assert outcome("reduce").outcome == "failed"


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings_give_different_experts_to_a_token(name: str) -> None:
    index_TK = draw_routing(Draw(3), name, 400, 16, 4)
    assert (np.diff(np.sort(index_TK, axis=1)) > 0).all()
    load = np.bincount(index_TK.reshape(-1), minlength=16) / index_TK.size
    expected = {"skewed": load[:4].sum() > 0.6, "one-expert": load[8] == 0.25}
    expected |= {"empty-experts": load[1::2].sum() == 0, "balanced": np.ptp(load) == 0}
    expected |= {"zipf": load[0] > 2 * load[15], "uniform": load.max() < 0.1}
    assert expected[name]


def test_models_are_split_every_way_over_up_to_64_ranks() -> None:
    cases = [case for case in model_cases(["gpt-oss-20b"], 1e9) if case.kernel == "moe_cte"]
    splits = {tuple(case.id.split("/")[1:3]) for case in cases}
    assert len(cases) == len(splits) * len(MODEL_ROUTINGS)
    # 64 ranks or fewer in powers of two, EP at most E = 32
    assert len(splits) == 27
    assert {tp for tp, _ in splits} == {f"tp{1 << bit}" for bit in range(7)}
    for case in cases:
        tp, ep = (int(part[2:]) for part in case.id.split("/")[1:3])
        assert case.params["hidden"] == LAYERS["gpt-oss-20b"].H
        assert case.params["intermediate"] * tp == LAYERS["gpt-oss-20b"].I
        assert case.params["E_local"] * ep == LAYERS["gpt-oss-20b"].E == case.params["experts"]


def test_fewer_experts_than_the_model_has_are_owned_up_to() -> None:
    for case in model_cases([], 1e9):
        if case.kernel == "moe_cte":
            layer = LAYERS[case.id.split("/")[0]]
            assert (case.params["experts"] < layer.E) == ("to fit" in case.variant)


MODEL_BUDGET = 3e8


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tp", "ep", "routing"),
    [
        ("gpt-oss-20b", 64, 1, "balanced"),
        ("gpt-oss-120b", 8, 8, "zipf"),
        ("llama4-scout", 64, 1, "one-expert"),
        ("llama4-maverick", 16, 8, "uniform"),
        ("qwen3-30b", 64, 1, "uniform"),
        ("qwen3-235b", 4, 16, "empty-experts"),
        ("deepseek-v3", 64, 1, "zipf"),
        ("mixtral-8x7b", 8, 8, "empty-experts"),
        ("dbrx", 64, 1, "balanced"),
    ],
)
def test_a_rank_of_every_model_is_right_whichever_core_is_first(
    name: str, tp: int, ep: int, routing: str
) -> None:
    case = rank_case(LAYERS[name], tp, ep, routing, MODEL_BUDGET)
    case.params["core_orders"] = 2
    result = check_kernels.run_case(case, check_kernels.NO_LIMITS)
    assert result.outcome == "passed", result.reason


@pytest.mark.long
def test_models_can_be_checked_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--models", "qwen3-30b", "--match", "router/T1", "--json", str(out)]
    assert check.main(["kernels", *arguments]) == 0
    rows = json.loads(out.read_text())
    assert [row["id"] for row in rows] == ["qwen3-30b/router/T1", "qwen3-30b/router/T130"]
    assert {row["outcome"] for row in rows} == {"passed"}
    arguments = ["--models", "qwen3-30b", "--match", "qwen3-30b/tp64/ep1/", "--json", str(out)]
    assert check.main(["kernels", *arguments, "--phase", "decode", "--max-seconds", "0"]) == 0
    kernels = {row["kernel"] for row in json.loads(out.read_text())}
    assert kernels == {"moe_tkg"}
    assert "our kernels on nki_sim" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--cases, --models: give one of them"),
        (["--models", "--cases", "a.json"], "--cases, --models: give one of them"),
        (["--models", "gpt-oss-20"], "--models gpt-oss-20: unknown"),
    ],
)
def test_either_a_file_or_models_are_checked(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_kernels.main(arguments)


def test_outputs_that_depend_on_the_order_of_cores_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = prefill.launch

    def leans(problem: Any, plans: Any, options: Any = prefill.DEFAULT_OPTIONS) -> Any:
        output, time = right(problem, plans, options)
        output[0, 0] += 1e-3 * options.start_core
        return output, time

    monkeypatch.setattr(prefill, "launch", leans)
    assert outcome("block", core_orders=2).reason.startswith(
        "output: 1 elements differ with the other core first"
    )


def test_cases_of_models_are_a_sample_of_all() -> None:
    known = model_cases(["gpt-oss-20b"], 1e9)
    few = check_kernels.sample(known)
    assert len(few) == check_kernels.QUICK < len(known)
    assert len({case.id for case in few}) == len(few)
    assert {case.kernel for case in few} == {case.kernel for case in known}
    assert check_kernels.sample(few[:3]) == few[:3]


@pytest.mark.long
def test_several_processes_find_the_same(tmp_path: Path) -> None:
    names = ("softmax-over-chosen", "sigmoid")
    cases = [Case.from_json(entry(name, T=9)) for name in names]
    alone, together = (check_kernels.run_cases(cases, jobs=jobs) for jobs in (1, 2))
    assert alone == together
    assert [outcome.outcome for outcome in alone] == ["passed", "passed"]


def test_a_lost_process_is_a_failed_case() -> None:
    def die(case: Case) -> Outcome:
        os._exit(9)

    (outcome,) = run_in_turn(numbered(1), die, jobs=2)
    assert (outcome.outcome, outcome.reason) == ("failed", "its process ended with status 9")


def numbered(count: int) -> list[Case]:
    row = {"kernel": "k", "variant": "v", "params": {}}
    return [Case.from_json(row | {"id": str(number)}) for number in range(count)]


def test_outcomes_are_on_disk_before_a_check_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_KEEP_EVERY_S", 0.0)
    file, seen = OutcomeFile(path=tmp_path / "out.json"), []

    def watch(case: Case) -> Outcome:
        seen.append(len(OutcomeFile.resumed(file.path).known))
        return Outcome.of(case, "passed", "")

    run_in_turn(numbered(3), watch, file=file)
    assert seen == [0, 1, 2]


def test_a_resumed_check_runs_what_has_not_run(tmp_path: Path) -> None:
    cases, path, ran = numbered(4), tmp_path / "out.json", []
    kinds = ("passed", "failed", "skipped")
    OutcomeFile(path=path).write([Outcome.of(*of, "") for of in zip(cases, kinds, strict=False)])

    def note(case: Case) -> Outcome:
        ran.append(case.id)
        return Outcome.of(case, "passed", "")

    found = run_in_turn(cases, note, file=OutcomeFile.resumed(path))
    assert sorted(ran) == ["2", "3"]
    assert [outcome.outcome for outcome in found] == ["passed", "failed", "passed", "passed"]
    assert OutcomeFile.resumed(path).known == tuple(found)


def test_resume_says_what_it_cannot_go_on_from(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"cases": []}')
    for file, said in ((None, "file of --json, which is missing"), (other, "no list of outcomes")):
        with pytest.raises(ValueError, match=said):
            OutcomeFile.resumed(file)
    assert OutcomeFile.resumed(tmp_path / "new.json").known == ()
