"""neuron-moe compare: planted faults are found in their layer, and nothing else is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from neuron_moe.models.layerwise import LayerwiseModel
from neuron_moe.models.loader import find_model_file, load_model
from neuron_moe.tools.cli import main
from neuron_moe.tools.compare.transformers_model import TransformersModel
from tests.models.families import FAMILIES, names, reference_of, write_checkpoint

NUM_LAYERS = 5
IDS = torch.arange(48).view(2, 24) * 7 % 290


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE checkpoint of five layers."""
    folder = tmp_path_factory.mktemp("good")
    write_checkpoint(FAMILIES["qwen3_moe"].config(num_hidden_layers=NUM_LAYERS), folder, seed=0)
    return folder


def broken(good: Path, folder: Path, fault: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a checkpoint with a fault in its tensors."""
    folder.mkdir()
    shutil.copy(good / "config.json", folder)
    tensors = load_file(good / "model.safetensors")
    fault(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def swap_gate_and_up(tensors: dict[str, Any]) -> None:
    expert = "model.layers.3.mlp.experts.5."
    gate, up = expert + "gate_proj.weight", expert + "up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def turn_router(tensors: dict[str, Any]) -> None:
    name = "model.layers.2.mlp.gate.weight"
    tensors[name] = tensors[name].roll(1, dims=0).contiguous()


def scale_norm(tensors: dict[str, Any]) -> None:
    name = "model.layers.1.input_layernorm.weight"
    tensors[name] = tensors[name] * 1.25


def scale_head(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.25


def compare(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its status and its JSON line."""
    status = main(["compare", *args, "--json"])
    record: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return status, record


FAULTS = {
    "gate-and-up-of-one-expert": (swap_gate_and_up, "3"),
    "router": (turn_router, "2"),
    "norm": (scale_norm, "1"),
    "head": (scale_head, "logits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_its_layer(
    fault: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, where = FAULTS[fault]
    bad = broken(good, tmp_path / "bad", plant)
    status, record = compare(capsys, "--model", str(bad), "--reference", str(good))
    assert (status, record["first_over"], record["within_rule"]) == (1, where, False)
    over = [row["name"] for row in record["layers"] if row["exceeds"]]
    assert over == [where]  # each layer is judged by itself


def test_a_model_is_within_the_rule_of_transformers(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "new" / "picture.png"
    args = ("--model", str(good), "--reference", "transformers", "--picture", str(picture))
    status, record = compare(capsys, *args)
    assert (status, record["first_over"], record["tokens"]) == (0, None, 128)
    stages = ["embedding", *map(str, range(NUM_LAYERS)), "logits"]
    assert [row["name"] for row in record["layers"]] == stages
    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(maxcolors=1 << 20)
    assert len(colours) > 50


def test_the_table_names_the_layer(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = broken(good, tmp_path / "bad", swap_gate_and_up)
    main(["compare", "--model", str(bad), "--reference", str(good), "--tokens", "16"])
    out = capsys.readouterr().out
    assert "first over: layer 3, " in out
    (line,) = (line for line in out.splitlines() if line.endswith("over"))
    assert line.startswith("3 ")


ALONE = [
    each
    for each in names(slow=FAMILIES.keys() - {"qwen3_moe", "nemotron_h", "gemma4_text", "afmoe"})
    if find_model_file(FAMILIES[each.values[0]].model_type).Model.runs_layers_alone
]


@pytest.mark.parametrize("name", ALONE)
@torch.inference_mode()
def test_layers_one_by_one_are_the_whole_model(name: str, tmp_path: Path) -> None:
    write_checkpoint(FAMILIES[name].config(), tmp_path, seed=1)
    wholes = load_model(tmp_path, dtype=torch.float32)(IDS), reference_of(tmp_path)(IDS).logits
    for kind, whole in zip((LayerwiseModel, TransformersModel), wholes, strict=True):
        model = kind(tmp_path, torch.float32)
        hidden = model.embed(IDS)
        for index in range(model.num_layers):
            hidden = model.run_layer(index, hidden).hidden_USH
        torch.testing.assert_close(model.compute_logits(hidden), whole, rtol=1e-4, atol=1e-4)


def test_layers_that_none_can_run_alone_are_refused(tmp_path: Path) -> None:
    write_checkpoint(FAMILIES["deepseek_v4"].config(), tmp_path, seed=1)
    with pytest.raises(ValueError, match="model_type='deepseek_v4' take more than one residual"):
        LayerwiseModel(tmp_path, torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("name", ["granitemoehybrid", "nemotron_h", "gemma4_text"])
def test_families_with_layers_of_their_own_are_within_the_rule(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(FAMILIES[name].config(), tmp_path, seed=1)
    status, report = compare(
        capsys, "--model", str(tmp_path), "--reference", "transformers", "--tokens", "8"
    )
    assert (status, report["first_over"]) == (0, None)


@torch.inference_mode()
def test_memory_holds_one_layer(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(good, dtype=torch.float32)
    most = max(sum(p.numel() for p in layer.parameters()) for layer in whole.layers)
    theirs = TransformersModel(good, torch.float32)
    frame = whole.norm.weight.numel()
    assert sum(p.numel() for p in theirs._read(2).parameters()) == most + frame
    ours = LayerwiseModel(good, torch.float32)
    for index in range(ours.num_layers):
        ours.run_layer(index, torch.randn(1, 4, 64))
    assert all(p.is_meta for p in ours._model.parameters())


def write_small(folder: Path, **sizes: int) -> Path:
    write_checkpoint(FAMILIES["qwen3_moe"].config(**sizes), folder, seed=0)
    return folder


BAD: dict[str, tuple[list[str], str]] = {
    "no-model": (["--model", "nowhere", "--reference", "transformers"], "there is no such folder"),
    "no-reference": (["--reference", "nowhere"], "model=nowhere: there is no such folder"),
    "sizes": (["--reference", "{small}"], "num_hidden_layers=5 of the model, 3 of the reference"),
    "families": (["--reference", "{other}"], "'qwen3_moe' of the model, 'mixtral' of the refer"),
    "words": (["--prompt-ids", "1,two"], "prompt-ids='1,two': must be whole numbers"),
    "outside": (["--prompt-ids", "1,300"], "prompt-ids holds 300: must be below vocab_size=300"),
    "no-tokens": (["--tokens", "0"], "tokens=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_use_is_told_in_one_sentence(
    case: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, message = BAD[case]
    small = str(write_small(tmp_path)) if case == "sizes" else ""
    other = str(tmp_path)
    if case == "families":
        write_checkpoint(FAMILIES["mixtral"].config(), tmp_path, seed=0)
    args = [part.format(small=small, other=other) for part in given]
    capsys.readouterr()
    for name, value in (("--model", str(good)), ("--reference", str(good))):
        args += [] if name in args else [name, value]
    assert main(["compare", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
