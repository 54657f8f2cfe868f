"""Rotary frequencies and rotation against transformers, bit for bit."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import GptOssConfig as ReferenceConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig, apply_rope, rope_frequencies, rope_tables

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "truncated": {**YARN, "truncate": True},
    "truncate-left-out": YARN,
    "short-context": {**YARN, "factor": 8.0, "original_max_position_embeddings": 16},
    "narrow-blend": {**YARN, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
    "given-attention-factor": {**YARN, "attention_factor": 0.75},
    "mscales": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7},
    "factor-one": {**YARN, "factor": 1.0},
    "llama-3.1": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "scout": {**LLAMA3, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
    "llama-short-context": {
        **LLAMA3,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 0.5,
        "high_freq_factor": 2.0,
    },
}


def read(config: dict[str, object]) -> RopeConfig:
    return RopeConfig.from_hf(ConfigReader(config, "config.json"))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [150000.0, 500000.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_scaled_frequencies_are_those_of_transformers(
    variant: str, theta: float, head_dim: int
) -> None:
    values = {"rope_scaling": VARIANTS[variant], "rope_theta": theta}
    reference = ReferenceConfig.from_dict({**deepcopy(values), "head_dim": head_dim})
    compute = ROPE_INIT_FUNCTIONS[VARIANTS[variant]["rope_type"]]
    expected, expected_scale = compute(reference, torch.device("cpu"))
    frequencies, scale = rope_frequencies(read(values), head_dim)
    assert torch.equal(frequencies, expected)
    assert scale == expected_scale


def test_interleaved_rotation_is_that_of_transformers() -> None:
    config = read({"rope_theta": 500000})
    cos, sin = rope_tables(config, 64, torch.tensor([[0, 1, 2, 127], [3, 4096, 5000, 131071]]))
    query, key = torch.randn(2, 4, 4, 64), torch.randn(2, 4, 2, 64)
    expected = apply_rotary_emb(query, key, torch.complex(cos, sin))
    for part, wanted in zip((query, key), expected, strict=True):
        rotated = apply_rope(part, cos, sin, is_interleaved=True)
        assert torch.allclose(rotated, wanted, rtol=1e-6, atol=1e-6)


def test_plain_frequencies_are_the_geometric_series() -> None:
    frequencies, scale = rope_frequencies(read({"rope_theta": 10000}), 8)
    assert torch.allclose(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert scale == 1.0


def test_rotation_is_that_of_transformers() -> None:
    config = read({"rope_scaling": VARIANTS["published"], "rope_theta": 150000})
    positions = torch.tensor([[0, 1, 2, 127, 128], [3, 4096, 5000, 100000, 131071]])
    cos, sin = rope_tables(config, 64, positions)
    query, key = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 2, 64)
    expected = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    assert torch.equal(apply_rope(query, cos, sin), expected[0])
    assert torch.equal(apply_rope(key, cos, sin), expected[1])


def test_both_spellings_read_alike() -> None:
    old = read({"rope_scaling": VARIANTS["published"], "rope_theta": 150000})
    new = read({"rope_parameters": {**VARIANTS["published"], "rope_theta": 150000.0}})
    assert old == new


BAD = {
    "unknown-type": ({"rope_scaling": {"rope_type": "yam"}, "rope_theta": 1e4}, "rope_type='yam'"),
    "no-base": ({"rope_scaling": YARN}, "rope_theta is missing"),
    "no-factor": ({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1e4}, "factor is missing"),
    "misspelt": (
        {"rope_scaling": {**YARN, "beta_fats": 3.0}, "rope_theta": 1e4},
        "beta_fats=3.0 .did you mean 'beta_fast'",
    ),
    "yarn-key-on-plain": (
        {"rope_scaling": {"rope_type": "default", "factor": 2.0}, "rope_theta": 1e4},
        "factor=2.0",
    ),
    "shrinking": ({"rope_scaling": {**YARN, "factor": 0.5}, "rope_theta": 1e4}, "factor=0.5"),
    "small-base": ({"rope_theta": 1.0}, "rope_theta=1.0: must be larger than 1"),
    "two-sections": (
        {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}},
        "the two spellings disagree",
    ),
    "wrong-type": ({"rope_theta": "10000"}, "rope_theta='10000': must be float, not str"),
}


def test_factors_of_frequency_that_cross_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"low_freq_factor=4\.0, high_freq_factor=1\.0: must be pos"
    ):
        RopeConfig(theta=1e4, low_freq_factor=4.0, high_freq_factor=1.0)


@pytest.mark.parametrize("case", BAD)
def test_bad_rope_sections_are_refused_by_name(case: str) -> None:
    config, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        read(config)
