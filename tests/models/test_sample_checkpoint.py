"""The small checkpoint: published names, types and files; the same seed, the same bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from neuron_moe.models.sample_checkpoint import make_checkpoint, make_tokenizer, sample_config
from tests.models import published

ConfigOf = Callable[..., dict[str, Any]]


def test_tensors_have_the_published_names_shapes_and_types(
    config_of: ConfigOf, tmp_path: Path
) -> None:
    tensors = load_file(make_checkpoint(tmp_path, config_of()) / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == dict(published.gpt_oss(config_of()))
    for name, tensor in tensors.items():
        packed = name.endswith(("_blocks", "_scales"))
        assert tensor.dtype == (torch.uint8 if packed else torch.bfloat16)


def test_nothing_that_could_be_forgotten_is_neutral(config_of: ConfigOf, tmp_path: Path) -> None:
    tensors = load_file(make_checkpoint(tmp_path, config_of()) / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("bias", "sinks")):
            assert tensor.abs().min() > 0 or tensor.float().std() > 0.1
        if name.endswith("norm.weight"):
            assert tensor.float().std() > 0.1


def test_the_same_seed_writes_the_same_bytes(config_of: ConfigOf, tmp_path: Path) -> None:
    folders = [
        make_checkpoint(tmp_path / name, config_of(), seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] != weights[2]


def test_every_token_of_the_vocabulary_decodes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab_size = sample_config()["vocab_size"]
    assert len(tokenizer) == vocab_size
    assert all(tokenizer.convert_ids_to_tokens(token) for token in range(vocab_size))
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"] == vocab_size - 1
    assert tokenizer.pad_token_id == config["pad_token_id"] == vocab_size - 2


def test_a_large_vocabulary_is_filled_up() -> None:
    assert make_tokenizer(3000).get_vocab_size() == 3000


BAD = {
    "format": ({}, "int4", "expert_format='int4'"),
    "groups": ({"intermediate_size": 100}, "mxfp4", "intermediate_size=100: must be a multiple of"),
    "vocabulary": ({"vocab_size": 100}, "mxfp4", "vocab_size=100: must be at least 259"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused(case: str, config_of: ConfigOf, tmp_path: Path) -> None:
    changes, expert_format, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make_checkpoint(tmp_path, config_of(**changes), expert_format=expert_format)
