"""`neuron-moe bench host`: what is counted and compared; nothing here depends on a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nki_sim
from lab.bench.host import command as host
from lab.bench.host import probe as host_probe
from lab.bench.host.worker import ROOT
from neuron_moe.models.layers import build_router, gated_moe
from neuron_moe.spec import RouterFormula


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[host_probe.Stub]:
    for name, size in {"HIDDEN": 128, "INTERMEDIATE": 64, "EXPERTS": 4, "TOP_K": 2}.items():
        monkeypatch.setattr(host_probe, name, size)
    monkeypatch.setattr(host_probe, "PREFILL_TOKENS", 160)
    stub = host_probe.Stub(nki_sim.run)
    monkeypatch.setattr(nki_sim, "run", stub)
    return stub


@pytest.mark.parametrize("case", host_probe.CASES)
def test_later_calls_launch_nothing_and_give_the_simulated_output(
    case: str, stub: host_probe.Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = host_probe.Probe(case, stub)
    monkeypatch.setattr(stub, "run", None)  # kept, so not called
    answer = probe.measure(3)
    assert torch.equal(probe.call(), probe.expected_BSH)
    assert probe.expected_BSH.abs().max() > 0
    assert answer["launches"] >= 1
    assert answer["launches"] == 1 or case != "fused decode"
    assert [len(answer[name]) for name in ("times_ms", "stub_ms")] == [3, 3]


def test_a_layer_that_keeps_a_state_is_seen(stub: host_probe.Stub) -> None:
    probe = host_probe.Probe("decode", stub)
    probe.expected_BSH += 1
    with pytest.raises(RuntimeError, match="differs from its first one"):
        probe.measure(1)


def test_eight_bit_weights_lose_nothing(stub: host_probe.Stub) -> None:
    plain, packed = (host_probe.build_layer(case) for case in host_probe.CASES[:2])
    assert "float8" in str(packed.explain("prefill", 64))
    assert "float8" not in str(plain.explain("prefill", 64))
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, packed.state_dict()[name]), name


def test_switches_are_calls_into_another_file_of_the_package(stub: host_probe.Stub) -> None:
    walk = host_probe.Probe("prefill", stub).walk()
    assert walk[0][0] == "moe.py"
    for caller, file, function in walk:
        assert caller != file
        assert (host_probe.PACKAGE / file).is_file()
        assert function
    assert not any(file.startswith("tools/") for _, file, _ in walk)


@pytest.mark.parametrize(("case", "most"), [("prefill", 9), ("decode", 9), ("fused decode", 7)])
def test_a_call_on_one_rank_enters_few_files(case: str, most: int, stub: host_probe.Stub) -> None:
    probe = host_probe.Probe(case, stub)
    formula = RouterFormula(top_k=host_probe.TOP_K, act_over_topk=True, has_bias=True)
    router = build_router(host_probe.EXPERTS, host_probe.HIDDEN, formula)
    layer = gated_moe(router, host_probe.INTERMEDIATE, torch.bfloat16, "nki").eval()
    layer.return_router_logits = not case.startswith("fused")
    probe.layer = layer
    probe.call()
    files = {file for _, file, _ in probe.walk()} | {"moe.py"}
    assert len(files) <= most, " ".join(sorted(files))


@pytest.mark.long
def test_the_command_compares_two_checkouts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cases", "decode", "--repeats", "2", "--walk", "--before", str(ROOT), "--json"]
    assert host.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    record: dict[str, Any] = json.loads(printed[-1])
    assert (record["command"], record["kind"]) == ("bench host", "measured")
    (row,) = record["rows"]
    assert row["case"] == "decode"
    for name in ("launches", "switches", "files"):
        assert row[name] == row["before"][name] > 0
    assert row["ratio"] == pytest.approx(row["before"]["host_ms"] / row["host_ms"])
    assert printed[0] == f"decode: {row['switches']} switches of file"


def side(**changes: Any) -> host.Side:
    given = {"host_ms": 0.1, "spread_ms": 0.0, "least_ms": 0.1, "stub_ms": 0.0}
    return host.Side(**{**given, "launches": 1, "switches": 10, "files": 5, **changes})


def test_cases_that_miss_a_target_are_named() -> None:
    found = {
        "prefill": side(host_ms=0.5),
        "fused decode": side(host_ms=0.04, files=11),
        "prefill 8-bit": side(host_ms=9.0, files=99),  # has no target
    }
    missed = [(miss["case"], miss["target"], miss["value"]) for miss in host.misses(found)]
    assert missed == [("prefill", "host_ms", 0.5), ("fused decode", "files", 11)]


def test_both_halves_know_the_same_cases() -> None:
    assert host.CASES == host_probe.CASES
    assert set(host.TARGETS_MS) <= set(host.CASES)


@pytest.mark.long
def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no neuron_moe/__init__.py in it"):
        host.main(["--before", str(tmp_path)])
