"""Tiny GPT-OSS checkpoints and the transformers model of the same files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssForCausalLM
from transformers.utils import logging

from neuron_moe.models.sample_checkpoint import make_checkpoint, sample_config

logging.set_verbosity_error()
logging.disable_progress_bar()


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Two layers, eight experts, a window of eight tokens; a key changed to None is left out."""
    small = {
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "sliding_window": 8,
        "vocab_size": 300,
    }
    merged = {**sample_config(), **small, **changes}
    return {key: value for key, value in merged.items() if value is not None}


@pytest.fixture
def config_of() -> Callable[..., dict[str, Any]]:
    """Return `tiny_config`."""
    return tiny_config


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write the tiny checkpoint with some keys changed, once for the same changes."""
    made: dict[str, Path] = {}

    def make(*, expert_format: str = "mxfp4", **changes: Any) -> Path:
        key = repr((expert_format, sorted(changes.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("gpt_oss")
            config = tiny_config(**changes)
            made[key] = make_checkpoint(folder, config, expert_format=expert_format, seed=1)
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference_of() -> Callable[..., GptOssForCausalLM]:
    """Load a checkpoint with transformers; going from bfloat16 to float32 is exact."""

    def load(folder: Path, dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
        model = GptOssForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return model.to(dtype).eval()

    return load
