"""neuron-moe compile: plan, files, refusals, and a hand-over to a planted SDK."""

import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_moe import nxd_compat
from neuron_moe.configs import load_config
from neuron_moe.models.sample_checkpoint import make_checkpoint
from neuron_moe.parallel.topology import INSTANCES
from neuron_moe.sharded.rank_files import read_layout
from neuron_moe.tools import cli
from neuron_moe.tools.commands import compile as command
from neuron_moe.tools.compile import nxdi
from neuron_moe.tools.compile.request import find_request
from tests.rows import thinned
from tests.tools.commands import sdk_stub
from tests.tools.pages.asks import check_page

LENGTHS = '[{"tokens": 160, "block_size": 64}]'
SETTINGS = ("tp=2", "ep=2", "batch=2", "max_length=256", f"buckets={LENGTHS}")
SMALL = ("--config", "trn2.3xlarge", *(word for each in SETTINGS for word in ("--set", each)))
SDK = ("torch_neuronx", "neuronx_distributed", "neuronx_distributed_inference", "neuronx-cc", "nki")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one compilation of the small checkpoint."""
    out = tmp_path_factory.mktemp("out")
    assert command.main(["--model", str(checkpoint), *SMALL, "--out", str(out)]) == 3
    return out


def run(
    capsys: pytest.CaptureFixture[str], status: int, *options: str
) -> tuple[dict[str, Any], str]:
    """Return the object of the last line, and what was said on standard error."""
    assert cli.main(["compile", *options, "--json"]) == status
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured.err


def test_without_the_sdk_all_is_done_and_what_is_missing_is_said(
    checkpoint: Path, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, errors = run(capsys, 3, "--model", str(checkpoint), *SMALL, "--out", str(built))
    assert report["fits"]
    assert report["ranks"] == 4
    for name in SDK:
        assert any(name in each for each in report["missing"]), name
        assert name in errors
    assert not any("weights" in each for each in report["missing"])
    steps = [(each["phase"], each["tokens"], each["context"]) for each in report["buckets"]]
    assert steps == [("prefill", 160, 160), ("decode", 2, 160), ("decode", 2, 256)]
    assert report["memory_bytes"]["needed"] < report["memory_bytes"]["hbm"]


def test_the_plan_names_its_kernels_and_adds_up(built: Path) -> None:
    report = json.loads((built / "plan.json").read_text())
    prefill, decode, _ = report["buckets"]
    named = {each["kernel"] for each in prefill["kernels"]}
    assert named == {"router_topk", "prefill_layer"}
    assert {each["kernel"] for each in decode["kernels"]} == {"decode_layer"}
    for bucket in report["buckets"]:
        layers = {each["layers"]: each["count"] for each in bucket["kernels"]}
        assert sum(layers.values()) == 4  # all layers of the checkpoint
        rows = [*bucket["kernels"], *bucket["parts"], *bucket["collectives"]]
        assert {row["kind"] for row in rows} == {"simulated", "computed"}
        total = sum(row["count"] * row["us"] for row in rows)
        assert bucket["us"] == pytest.approx(total)
        assert bucket["us_simulated"] + bucket["us_computed"] == pytest.approx(total)
        assert "because" in "".join(bucket["why"].values())


def test_a_second_run_keeps_what_has_not_changed(
    checkpoint: Path, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((built / "plan.json").read_text())
    files = {path: path.stat().st_mtime_ns for path in (built / "weights").iterdir()}
    again, _ = run(capsys, 3, "--model", str(checkpoint), *SMALL, "--out", str(built))
    assert again["weights"] == {"files": len(files), "reused": True}
    assert {path: path.stat().st_mtime_ns for path in (built / "weights").iterdir()} == files
    assert again["reused_simulations"] == len(list((built / "kernels").iterdir())) == 2
    assert again["buckets"] == before["buckets"]


@pytest.mark.long
def test_another_batch_simulates_its_decode_alone(
    checkpoint: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "kernels").symlink_to(built / "kernels")
    changed, _ = run(
        capsys, 3, "--model", str(checkpoint), *SMALL, "--set", "batch=4", "--out", str(out)
    )
    assert changed["reused_simulations"] == 1


def test_weights_are_cut_for_the_ranks_and_the_manifest_knows_every_file(
    checkpoint: Path, built: Path
) -> None:
    layout = read_layout(built / "weights")
    assert (layout.tp, layout.ep) == (2, 2)
    manifest = json.loads((built / "manifest.json").read_text())
    source = next(checkpoint.glob("*.safetensors"))
    assert manifest["inputs"]["weights"][source.name]["bytes"] == source.stat().st_size
    written = {"plan.json", "index.html", "neuron_config.json"}
    written |= {f"weights/{path.name}" for path in (built / "weights").iterdir()}
    assert set(manifest["outputs"]) == written
    assert all(len(each["sha256"]) == 64 for each in manifest["outputs"].values())


@pytest.mark.long
def test_a_file_that_changed_is_cut_anew(
    checkpoint: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    (out / "kernels").symlink_to(built / "kernels")
    for path in checkpoint.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    options = ("--model", str(model), *SMALL, "--out", str(out))
    run(capsys, 3, *options)
    source = next(model.glob("*.safetensors"))
    data = bytearray(source.read_bytes())
    data[-1] ^= 1
    source.write_bytes(data)
    report, _ = run(capsys, 3, *options)
    assert not report["weights"]["reused"]
    assert report["weights"]["files"] > 0


def test_the_page_says_what_the_plan_says(built: Path) -> None:
    page = (built / "index.html").read_text()
    check_page(page)
    for text in ("router_topk", "decode_layer", "neuronx-cc", "KV cache", "kernels, simulated"):
        assert text in page, text


REFUSED = {
    "memory": (
        ("--config", "gpt-oss-120b@trn2.3xlarge"),
        "needs .* GiB, must be at most .* The nearest that works is tp=4, ep=16 on trn2.48xlarge",
    ),
    "trn1": (("--config", "gpt-oss-20b@trn1.32xlarge"), "our kernels do not run there: .*SBUF"),
    "trn3": (("--config", "trn3", "--model", "gpt_oss_20b"), "our kernels do not run there"),
    "lnc": (("--config", "gpt-oss-20b-lnc3"), r"lnc=3: must be 1 or 2.*Use 2\.$"),
    "machine": (("--config", "trn2.24xlarge"), "Did you mean 'trn2.48xlarge'"),
    "model": (("--config", "gpt-oss-12b"), "config='gpt-oss-12b'.*Did you mean 'gpt_oss_120b'"),
    "no model": (("--config", "trn2.48xlarge"), "names no model. Add --model"),
    "no model at all": ((), "compile: no model. Add --model"),
    "setting": (("--config", "gpt-oss-20b", "--set", "bach=4"), "Did you mean 'batch'"),
    "no value": (("--config", "gpt-oss-20b", "--set", "batch"), "must be NAME=VALUE"),
    "layout": (("--config", "gpt-oss-20b", "--set", "tp=7"), "The nearest that works is tp="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = REFUSED[case]
    assert cli.main(["compile", *options, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_refusal_is_an_object_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = run(capsys, 2, *REFUSED["memory"][0], "--out", str(tmp_path))
    assert report["fits"] is False
    assert report["memory_bytes"]["needed"] > report["memory_bytes"]["hbm"]


@pytest.fixture
def sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Plant an SDK; give the list of calls that it records."""
    sdk_stub.plant(tmp_path / "sdk")
    monkeypatch.syspath_prepend(str(tmp_path / "sdk"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'sdk' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))
    monkeypatch.setattr(nxdi, "IS_SIMULATED", False)
    before = set(sys.modules)
    yield importlib.import_module("neuronx_distributed_inference.calls").CALLS
    nxd_compat.uninstall()
    for name in set(sys.modules) - before:
        if name.split(".")[0].startswith("neuronx_distributed"):
            del sys.modules[name]


def test_with_the_sdk_nxdi_compiles_and_loads_with_our_layer(
    checkpoint: Path, built: Path, sdk: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = run(capsys, 0, "--model", str(checkpoint), *SMALL, "--out", str(built))
    assert report["missing"] == []
    names = [call[0] for call in sdk]
    assert names == [
        "neuron_config",
        "load_pretrained_config",
        "config",
        "application",
        "compile",
        "load",
    ]
    calls = dict(zip(names, sdk, strict=True))
    folder, compiled = str(checkpoint), str(built / "compiled")
    assert calls["neuron_config"][1] == {
        "tp_degree": 4,
        "moe_tp_degree": 2,
        "moe_ep_degree": 2,
        "batch_size": 2,
        "ctx_batch_size": 1,
        "seq_len": 256,
        "max_context_length": 160,
        "torch_dtype": torch.bfloat16,
        "logical_nc_config": 2,
        "sequence_parallel_enabled": True,
        "enable_bucketing": True,
        "context_encoding_buckets": [160],
        "token_generation_buckets": [160, 256],
        "save_sharded_checkpoint": True,
        "blockwise_matmul_config": nxd_compat.BlockwiseMatmulConfig(block_size=64),
    }
    assert calls["config"][1:] == ("NeuronConfig", ("reads", folder))
    assert calls["application"][1:] == (folder, "InferenceConfig")
    assert calls["compile"][1:] == (compiled, "neuron_moe.nxd_compat.nxdi")
    assert calls["load"][1:] == (compiled,)
    modeling = sys.modules["neuronx_distributed_inference.models.modeling"]
    assert modeling.initialize_moe_module.__module__.startswith("neuronx_distributed_inference")


def test_plan_only_stops_before_the_hand_over(
    checkpoint: Path, built: Path, sdk: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", str(checkpoint), *SMALL, "--out", str(built), "--plan-only")
    run(capsys, 0, *options)
    assert sdk == []


def test_an_environment_that_overrides_the_cores_is_refused(
    checkpoint: Path,
    built: Path,
    sdk: list[tuple[Any, ...]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    options = ("--model", str(checkpoint), *SMALL, "--out", str(built))
    assert cli.main(["compile", *options]) == 2
    assert "NEURON_LOGICAL_NC_CONFIG=1: overrides lnc=2" in capsys.readouterr().err
    assert sdk == []


@pytest.mark.long
def test_one_core_a_rank_has_twice_the_ranks(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", str(checkpoint), *SMALL, "--set", "lnc=1", "--set", "ep=4")
    report, _ = run(capsys, 3, *options, "--out", str(tmp_path))
    assert report["ranks"] == 8
    assert report["memory_bytes"]["hbm"] == 12 << 30


def test_a_checkpoint_of_published_sizes_gets_the_published_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_config("gpt_oss_20b")))
    request = find_request(str(tmp_path), "trn2.48xlarge", ["batch=4"])
    named = find_request(None, "gpt-oss-20b", ["batch=4"])
    assert request.deployment.buckets == named.deployment.buckets
    assert request.deployment.memory() == named.deployment.memory()
    assert request.folder == tmp_path
    assert named.folder is None


# The first two in every run of CI: a fused norm, and ranks that expect fewer rows than may come.
NAMES = [
    "gpt-oss-120b",
    "deepseek-v3",
    "gpt-oss-20b",
    "gpt-oss-20b@trn2.3xlarge",
    "llama4-scout",
    "llama4-maverick",
    "qwen3-235b-a22b",
]


@pytest.mark.long
@pytest.mark.parametrize("name", thinned(NAMES, len(NAMES), pytest.mark.slow))
def test_a_published_model_has_a_complete_plan(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = run(capsys, 3, "--config", name, "--out", str(tmp_path))
    assert report["fits"]
    assert {each["phase"] for each in report["buckets"]} == {"prefill", "decode"}
    for bucket in report["buckets"]:
        assert bucket["us_simulated"] > 0
        assert bucket["us_computed"] > 0
        assert bucket["instructions"] < 5_000_000


PAGE = (Path(__file__).parents[3] / "docs" / "compile.md").read_text()
PUBLISHED_WEIGHTS = "DIR"  # stands for a folder in the page's commands


def commands() -> list[list[str]]:
    return [
        shlex.split(line)[1:] for line in PAGE.splitlines() if line.startswith("    neuron-moe ")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(commands())))
def test_the_commands_of_the_page_run(
    number: int, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(checkpoint) if word == PUBLISHED_WEIGHTS else word for word in commands()[number]]
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 3
    assert (tmp_path / words[words.index("--out") + 1] / "index.html").is_file()


def test_buckets_of_other_block_sizes_are_told(tmp_path: Path) -> None:
    buckets = [{"tokens": 1024, "block_size": 128}, {"tokens": 8192, "block_size": 256}]
    changes = [f"buckets={json.dumps(buckets)}", "max_length=16384"]
    deployment = find_request(None, "gpt_oss_20b", changes).deployment
    assert nxdi.neuron_settings(deployment)["blockwise_matmul_config"] == {"block_size": 256}
    assert "1024 tokens with 128" in nxdi.block_size_remark(deployment)
    alike = replace(deployment, buckets=deployment.buckets[1:])
    assert nxdi.block_size_remark(alike) == ""


def test_the_settings_of_the_page_are_a_deployment(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    path = tmp_path / "settings.json"
    path.write_text(block)
    deployment = find_request(None, str(path), []).deployment
    assert (deployment.model, deployment.instance) == ("gpt_oss_20b", "trn2.3xlarge")
    assert deployment.memory().fits
    named = set(
        re.findall(r"`(\w+)`", PAGE.split("| setting | means |")[1].split("| machine |")[0])
    )
    assert named == set(json.loads(block)) - {"instance", "model"}


def test_the_hand_over_of_the_page_is_the_one_that_runs(
    checkpoint: Path, built: Path, sdk: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    block = block.replace('"DIR"', repr(str(checkpoint))).replace('"build/', f'"{built}/')
    exec(compile(block, "docs/compile.md", "exec"), {})
    of_page = [*sdk]
    sdk.clear()
    run(capsys, 0, "--model", str(checkpoint), *SMALL, "--out", str(built))
    assert [call[0] for call in sdk] == [call[0] for call in of_page]
    assert sdk[1:] == of_page[1:]
    assert sdk[0][1] == {**of_page[0][1], "torch_dtype": torch.bfloat16}


def test_the_machines_of_the_page_are_those_that_are_known() -> None:
    for name, machine in INSTANCES.items():
        rows = [row for row in PAGE.splitlines() if row.startswith("| trn") and name in row]
        assert rows, name
        assert ("refused" in rows[0]) == bool(machine.refuses)
        assert str(machine.logical_cores(machine.lncs[-1])) in rows[0]
