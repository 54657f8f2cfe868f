"""Checkpoints of quantised weights: logits are those of the values that the codes stand for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuron_moe.models.loader import load_model
from tests.models.families import FAMILIES, reference_of, write_checkpoint

Stored = tuple[dict[str, Tensor], Tensor]  # by what follows `weight`; the values they stand for


def _fp8(weight: Tensor, scale: Tensor, told: Tensor) -> Stored:
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": told}, codes.float() * scale


def of_rows(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return _fp8(weight, scale, scale)


def of_rows_without_columns(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return _fp8(weight, scale, scale.flatten())


def of_tensors(weight: Tensor) -> Stored:
    scale = weight.abs().max() / 448
    return _fp8(weight, scale, scale.view(1))


def int4(weight: Tensor) -> Stored:
    parts = weight.unflatten(1, (-1, 32))
    scale = (parts.abs().amax(-1) / 7).to(torch.bfloat16)
    codes = (parts / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    values = (codes * scale.float().unsqueeze(-1)).flatten(1)
    digits = (codes.flatten(1).long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    words = digits.sum(-1).to(torch.uint32).view(torch.int32)
    return {"_packed": words, "_scale": scale, "_shape": torch.tensor(weight.shape)}, values


FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FORMS: dict[str, tuple[Callable[[Tensor], Stored], str, dict[str, object]]] = {
    "rows": (of_rows, "float-quantized", FLOAT),
    "rows without columns": (of_rows_without_columns, "float-quantized", FLOAT),
    "tensors": (of_tensors, "naive-quantized", {**FLOAT, "strategy": "tensor"}),
    "int4": (int4, "pack-quantized", INT),
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_values(form: str, tmp_path: Path) -> None:
    encode, name, weights = FORMS[form]
    write_checkpoint(FAMILIES["deepseek_v3-kimi"].config(), tmp_path, seed=3)
    stored, values = {}, load_file(tmp_path / "model.safetensors")
    for key, weight in values.items():
        if ".experts." in key:  # [32, 64] and [64, 32]
            codes, values[key] = encode(weight.float())
            stored |= {key + suffix: part.contiguous() for suffix, part in codes.items()}
        else:
            stored[key] = weight
    folder, config = tmp_path / "codes", json.loads((tmp_path / "config.json").read_text())
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": name,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    ids = torch.arange(20)[None] * 7 % 290
    with torch.no_grad():
        theirs = reference_of(tmp_path)(input_ids=ids).logits
        ours = load_model(folder, dtype=torch.float32)(ids)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
