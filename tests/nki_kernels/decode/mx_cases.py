"""Inputs, launch and references of a decode step with MX weights, for the tests of `decode_moe`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import nki_sim
from nki_kernels.common.mx_layout import pack_mx_down, pack_mx_gate_up
from nki_kernels.decode.items import mx_form
from nki_kernels.decode.kernel import decode_moe
from tests.nki_kernels.decode.cases import Decode

MXFP4, MXFP8, MXFP8_WIDE = "float4_e2m1fn_x4", "float8_e4m3fn_x4", "float8_e5m2_x4"
FOUR_BIT_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8 = {MXFP8: ml_dtypes.float8_e4m3fn, MXFP8_WIDE: ml_dtypes.float8_e5m2}


def draw_words(
    rng: np.random.Generator, shape: tuple[int, int, int], name: str, size: float
) -> tuple[Any, Any, Any]:
    """Return words [E, X, W], scales [E, X, W/8] and values [E, X, n], of about a magnitude.

    Elements past the end of n, up to a whole group, are zeros.
    """
    E, X, n = shape
    groups = -(-n // 32)
    if name == MXFP4:
        codes = rng.integers(0, 16, (E, X, groups * 32)).astype(np.uint8)
        codes[..., n:] = 0
        values = FOUR_BIT_VALUES[codes]
        nibbles = codes.astype(np.uint16).reshape(E, X, -1, 4) << np.array([0, 4, 8, 12], np.uint16)
        words, spread = nibbles.sum(-1).astype(np.uint16), 3.0
    else:
        stored = (rng.normal(size=(E, X, groups * 32)) * 32).astype(FP8[name])
        stored[..., n:] = 0
        values, spread = stored.astype(np.float64), 32.0
        words = np.ascontiguousarray(stored.view(np.uint8)).view("<u4")
    middle = 127 + round(np.log2(size / spread))
    scales = rng.integers(middle - 2, middle + 3, (E, X, groups)).astype(np.uint8)
    values = values * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)
    return words, scales, values[..., :n]


def assert_close_to_words(actual: Any, quantized: Any, exact: Any) -> None:
    """Assert a result close to the formula with activations in words, and to that without.

    Where float32 and float64 round to neighbours in 8 bits, an element of a word moves by 1/16: few
    do.
    """
    assert np.abs(actual - quantized).max() <= 0.02 * np.abs(quantized).max()
    loss = _rms(quantized - exact)  # what quantising the activations costs
    assert _rms(actual - quantized) <= 0.15 * loss
    assert _rms(actual - exact) <= 1.05 * loss


def _rms(values: Any) -> float:
    return float(np.sqrt(np.square(values).mean()))


@dataclass
class MxDecode(Decode):
    """A problem whose weights are words; `format` is one of its options."""

    def _quantise(self, rng: np.random.Generator) -> None:
        name, E, H, I = self.options["format"], self.E, self.H, self.I  # noqa: E741
        self.in_words = draw_words(rng, (E, 2 * I, H), name, H**-0.5)
        self.out_words = draw_words(rng, (E, H, I), name, I**-0.5)
        self.gate_up = self.in_words[2].transpose(0, 2, 1)
        self.down = self.out_words[2].transpose(0, 2, 1)
        self.options = {"layout": "packed", "chip": "trn3", **self.options}

    def launch(self, sim_options: nki_sim.SimOptions | None = None) -> Any:
        """Run the kernel on the simulator of a trn3; return the run."""
        config = self.config()
        options = replace(sim_options or nki_sim.SimOptions(), target="trn3")
        return nki_sim.run(
            decode_moe,
            self.hidden_TH,
            pack_mx_gate_up(mx_form(config), *self.in_words[:2], self.gate_up_bias),
            pack_mx_down(mx_form(config), *self.out_words[:2]),
            self.index_TK,
            self.affinities_TK,
            np.array([[self.first]], np.int32),
            config,
            lnc=config.num_cores,
            options=options,
            down_bias=self.down_bias,
        )
