"""The fit of a decode step: there is one for every model and split, and the mode is the faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_kernels.decode.config import DecodeConfig, DecodeSizes, loads_bias
from nki_kernels.decode.fit import decode_ns, expected_experts, skewed_experts
from nki_kernels.decode.kernel import decode_moe
from nki_kernels.decode.layout import weight_shapes
from nki_kernels.decode.options import make_decode_config
from nki_sim import SimOptions, TensorSpec
from tests.nki_kernels.decode.cases import records
from tests.nki_kernels.drawing import GPT_OSS
from tests.nki_kernels.routings import choose_experts

# H, I, E, K of the models' public configurations.
MODELS = {
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "llama4-scout": (5120, 8192, 16, 1),
    "llama4-maverick": (5120, 8192, 128, 1),
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
    "kimi-k2": (7168, 2048, 384, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "dbrx": (6144, 10752, 16, 4),
}
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float8_e4m3": {"has_scales": True, "down_scale": "channel"},
    "float8_e5m2": {"has_scales": True, "down_scale": "expert"},
}


def config_of(model: str, T: int, tp: int, ep: int = 1, **options: Any) -> DecodeConfig:
    """Return what a step of a model is compiled for."""
    H, I, E, K = MODELS[model]  # noqa: E741
    if "gpt-oss" in model:
        options |= {**GPT_OSS, "has_gate_up_bias": True, "has_down_bias": True}
    return make_decode_config(DecodeSizes(T, H, I // tp, E // ep, K, E), *records(options))


SHORT = ("gpt-oss-20b", "qwen3-235b")


@pytest.mark.parametrize(
    ("model", "weight_format"),
    [
        pytest.param(model, name, marks=[pytest.mark.long] * (model not in SHORT))
        for model in MODELS
        for name in FORMATS
        if model in SHORT or name != "float8_e5m2"  # whose scales take less room than e4m3's
    ],
)
@pytest.mark.parametrize("layout", ["ehi", "packed"])
def test_every_model_fits_at_every_split(model: str, layout: str, weight_format: str) -> None:
    _, I, E, _ = MODELS[model]  # noqa: E741
    options = {"layout": layout, "format": weight_format, **FORMATS[weight_format]}
    for degree in (1, 2, 4, 8, 16, 32, 64):
        for T in (1, 256):
            if I % degree == 0:
                config_of(model, T, degree, **options)
            if E % degree == 0:
                config_of(model, T, 1, degree, **options)


def simulated_us(config: DecodeConfig, routing: str) -> float:
    """Return the time of a step whose weights are packed."""
    T, H, E, K = config.T, config.H, config.E, config.K
    gate_up, down = (TensorSpec(shape, "bfloat16") for shape in weight_shapes(config))
    optional = {"down_bias": TensorSpec((E, H), "bfloat16")} if loads_bias(config) else {}
    index = choose_experts(routing, T, E, K, np.random.default_rng(1))
    affinities = np.full((T, K), 1.0 / K, np.float32)
    run = nki_sim.run(
        decode_moe,
        TensorSpec((T, H), "bfloat16"),
        gate_up,
        down,
        index,
        affinities,
        np.zeros((1, 1), np.int32),
        config,
        lnc=2,
        options=SimOptions(mode="indices"),
        **optional,
    )
    return float(run.timeline.total_us)


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
@pytest.mark.parametrize(
    ("model", "tp", "T"),
    [
        ("gpt-oss-20b", 8, 4),
        pytest.param("gpt-oss-20b", 8, 64, marks=pytest.mark.long),
        ("qwen3-30b", 8, 1),
        pytest.param("llama4-scout", 64, 128, marks=pytest.mark.long),
    ],
)
def test_the_mode_is_within_3_percent_of_the_faster(
    model: str, tp: int, T: int, routing: str
) -> None:
    times = {
        mode: simulated_us(config_of(model, T, tp, layout="packed", mode=mode), routing)
        for mode in ("selective", "all")
    }
    chosen = config_of(model, T, tp, layout="packed").mode
    assert times[chosen] <= 1.03 * min(times.values())


def test_touched_experts_are_between_those_of_one_token_and_all() -> None:
    for T in (1, 16, 256):
        config = config_of("qwen3-30b", T, 8)
        few, many = skewed_experts(config), expected_experts(config)
        assert 7.99 < few <= many + 1e-6 <= 128.01
        rng = np.random.default_rng(T)
        drawn = [len(np.unique(choose_experts("zipf", T, 128, 8, rng))) for _ in range(20)]
        assert abs(np.mean(drawn) - few) < 0.05 * 128


def test_the_reason_names_mode_and_split() -> None:
    config = config_of("gpt-oss-120b", 16, 8)
    assert config.reason.startswith("selective: 16 tokens touch about")
    assert config.reason.endswith("the cores split the experts")


def test_more_tokens_never_cost_less() -> None:
    times = []
    for T in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        config = config_of("deepseek-v3", T, 16, layout="packed")
        times.append(decode_ns(config, expected_experts(config)))
    assert times == sorted(times)
