"""Layers that predict further tokens: left out where they are such, never a layer of the model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuron_moe.models.loader import load_model
from tests.models.families import FAMILIES, write_checkpoint

MODEL = "model.safetensors"
STEP_HEAD = ("transformer.shared_head.norm", "transformer.shared_head.output")
FRAME = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")


def write(folder: Path, family: str, *, predictions: int) -> dict[str, torch.Tensor]:
    """Write a model of 3 layers and some that predict further tokens, each a copy of layer 2."""
    write_checkpoint(FAMILIES[family].config(), folder, seed=2)
    tensors = load_file(folder / MODEL)
    last = {key: value for key, value in tensors.items() if key.startswith("model.layers.2.")}
    for layer in range(3, 3 + predictions):
        block = f"model.layers.{layer}."
        for key, value in last.items():
            tensors[key.replace("model.layers.2.", block)] = value.clone()
        tensors |= {f"{block}{name}.weight": torch.ones(4, 4) for name in FRAME}
    save_file(tensors, folder / MODEL)
    return tensors


def declare(folder: Path, *, layers: int, predictions: int) -> None:
    """Let config.json say so."""
    path = folder / "config.json"
    config = {
        **json.loads(path.read_text()),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": predictions,
    }
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "hy_v3", "glm_moe_dsa", "glm4_moe_lite"]
)
@pytest.mark.parametrize(("published", "declared"), [(0, 1), (1, 1), (2, 2)])
def test_declared_layers_are_left_out_whether_they_are_there_or_not(
    family: str, published: int, declared: int, tmp_path: Path
) -> None:
    write(tmp_path, family, predictions=published)
    declare(tmp_path, layers=3, predictions=declared)
    model = load_model(tmp_path)
    assert len(model.layers) == 3


def test_mimos_layers_that_predict_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(FAMILIES["mimo_v2_flash"].config(), tmp_path, seed=2)
    tensors = load_file(tmp_path / MODEL)
    block = "model.mtp.layers.0."
    tensors |= {f"{block}{name}.weight": torch.ones(4, 4) for name in ("enorm", "eh_proj")}
    tensors[block + "self_attn.attention_sink_bias"] = torch.ones(4)
    save_file(tensors, tmp_path / MODEL)
    assert len(load_model(tmp_path).layers) == 3


def test_layers_of_hy4_that_predict_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(FAMILIES["hy_v4"].config(), tmp_path, seed=2)
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [key for key in tensors if key.startswith("model.layers.2.") and "hc_" not in key]:
        name = key.replace("model.layers.2.", "model.mtp_layers.0.")
        tensors[name.replace("shared_experts.linear_gate", "shared_experts.gate_proj")] = (
            torch.ones(4)
        )
    names = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    tensors |= {f"model.mtp_layers.0.{name}.weight": torch.ones(4, 4) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    declare(tmp_path, layers=3, predictions=1)
    assert len(load_model(tmp_path).layers) == 3


def test_steps_layers_that_predict_and_its_vision_tower_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(FAMILIES["step3p5"].config(), tmp_path, seed=2)
    tensors = load_file(tmp_path / MODEL)
    block = "model.layers.4."
    dense = {key: value for key, value in tensors.items() if key.startswith("model.layers.0.")}
    tensors |= {key.replace("model.layers.0.", block): value for key, value in dense.items()}
    frame = ("enorm", "hnorm", "eh_proj", *STEP_HEAD)
    tensors |= {f"{block}{name}.weight": torch.ones(4, 4) for name in frame}
    save_file({key: value.clone() for key, value in tensors.items()}, tmp_path / MODEL)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any(key.startswith("vision_model.") for key in tensors)
    assert len(load_model(tmp_path).layers) == 4


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize(
    ("published", "layers", "declared", "match"),
    [
        (0, 2, 1, r"model\.layers\.2\..* \(left out only beside model\.layers\.2\.enorm\.weight"),
        (1, 2, 1, r"model\.layers\.3\."),
        (1, 2, 2, r"model\.layers\.2\.enorm\.weight \(config\.json declares its layer\)"),
        (1, 3, 2, r"model\.layers\.4\.enorm\.weight \(config\.json declares its layer\)"),
        (2, 3, 1, r"model\.layers\.4\."),
        (1, 3, 0, r"model\.layers\.3\."),
    ],
)
def test_a_wrong_number_of_layers_is_refused(
    family: str, published: int, layers: int, declared: int, match: str, tmp_path: Path
) -> None:
    write(tmp_path, family, predictions=published)
    declare(tmp_path, layers=layers, predictions=declared)
    with pytest.raises(ValueError, match=match):
        load_model(tmp_path)
