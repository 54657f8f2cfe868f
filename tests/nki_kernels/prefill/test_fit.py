"""Buffers of the prefill kernel fit SBUF, whatever the model."""

from __future__ import annotations

import pytest

from nki_kernels.common.chip import SBUF_BYTES
from nki_kernels.prefill.memory import sbuf_bytes
from tests.nki_kernels.decode.test_fit import MODELS
from tests.nki_kernels.prefill.cases import config_of
from tests.rows import thinned


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", thinned(MODELS, 5))
def test_every_model_fits_at_every_degree(name: str, tp: int) -> None:
    hidden, intermediate, experts, _ = MODELS[name]
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
