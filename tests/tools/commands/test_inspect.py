"""neuron-moe inspect, called as the command does."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from neuron_moe.configs import load_config
from neuron_moe.models.sample_checkpoint import make_checkpoint
from neuron_moe.tools.commands import inspect


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, Any]:
    """Return what was printed for people, and the object of the last line."""
    assert inspect.main([*options, "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def test_a_checkpoint_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, report = run(capsys, "--model", str(folder))
    tensors = load_file(folder / "model.safetensors")
    assert report["stored"] == {
        "expert_format": "mxfp4",
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "kind": "measured",
        "num_tensors": len(tensors),
    }
    assert "[measured]" in text
    assert "all names and shapes as they must be" in text


@pytest.mark.parametrize("source", ["file", "name"])
def test_a_bare_configuration_is_computed(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(load_config("gpt_oss_120b")))
    model = str(path) if source == "file" else "gpt_oss_120b"
    text, report = run(capsys, "--model", model, "--tp", "8", "--ep", "4")
    assert report["model_type"] == "gpt_oss"
    assert report["router"] == (
        "top 4 of 128, softmax over the chosen, linear layer with bias, float32"
    )
    assert report["stored"]["kind"] == report["memory_per_rank"]["kind"] == "computed"
    memory = report["memory_per_rank"]
    assert (memory["tp"], memory["ep"], memory["ranks"]) == (8, 4, 32)
    assert memory["weight_bytes"]["mxfp4"] < memory["weight_bytes"]["bf16"] < 8 * 2**30
    assert "18 x sliding_attention, 18 x full_attention" in text
    assert "[measured]" not in text


def test_paths_are_those_of_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    _, whole = run(capsys, "--model", "gpt_oss_20b")
    _, part = run(capsys, "--model", "gpt_oss_20b", "--ep", "32")
    last_whole, last_part = whole["paths"][-1], part["paths"][-1]
    assert last_whole["path"] == last_part["path"] == "blockwise"
    assert last_part["num_blocks"] == 8192 // last_part["block_size"]
    assert last_part["num_blocks"] < last_whole["num_blocks"]


def test_shapes_that_are_not_those_of_the_config_are_refused(folder: Path) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["intermediate_size"] *= 2
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"gate_up_proj.*must be \[16"):
        inspect.main(["--model", str(folder)])


def test_help_names_configurations_that_can_be_inspected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        inspect.main(["--help-all"])
    text = capsys.readouterr().out
    assert "gpt_oss_20b" in text
    assert "deepseek_v3" in text
