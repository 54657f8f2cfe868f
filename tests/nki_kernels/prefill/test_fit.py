"""Buffers of the prefill kernel fit SBUF, whatever the model."""

from __future__ import annotations

import pytest

from nki_kernels.common.chip import SBUF_BYTES
from nki_kernels.prefill.memory import sbuf_bytes
from tests.nki_kernels.prefill.cases import config_of
from tests.rows import thinned

MODELS = {  # hidden, intermediate, experts: of the published configurations
    "gpt-oss-120b": (2880, 2880, 128),
    "gpt-oss-20b": (2880, 2880, 32),
    "llama4-scout": (5120, 8192, 16),
    "llama4-maverick": (5120, 8192, 128),
    "qwen3-30b-a3b": (2048, 768, 128),
    "qwen3-235b-a22b": (4096, 1536, 128),
    "deepseek-v3": (7168, 2048, 256),
    "mixtral-8x7b": (4096, 14336, 8),
}


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", thinned(MODELS, 3))
def test_every_model_fits_at_every_degree(name: str, tp: int) -> None:
    hidden, intermediate, experts = MODELS[name]
    for weight_format in ("bfloat16", "float8_e5m2"):
        config = config_of(
            H=hidden,
            I=intermediate // tp,
            E=experts,
            block_size=128,
            num_slots=128 * (256 + experts),
            num_tokens=8192,
            weight_format=weight_format,
            has_gate_up_bias=True,
            has_down_bias=True,
            has_scales=weight_format != "bfloat16",
        )
        assert sbuf_bytes(config) <= SBUF_BYTES
