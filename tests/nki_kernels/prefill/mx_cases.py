"""Inputs, launch and references of a prefill with MX weights, for the tests of `blockwise_moe`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import nki_sim
from nki_kernels.common.mx_layout import pack_mx_down, pack_mx_gate_up
from nki_kernels.prefill import PrefillConfig
from nki_kernels.prefill.config import mx_form
from tests.nki_kernels.decode.mx_cases import draw_words
from tests.nki_kernels.prefill.cases import Prefill


@dataclass
class MxPrefill(Prefill):
    """A problem whose weights are words; `weight_format` is one of its options."""

    def _quantise(self) -> None:
        name, E, H, I = self.options["weight_format"], self.E, self.H, self.I  # noqa: E741
        rng = np.random.default_rng(self.seed + 1)
        self.in_words = draw_words(rng, (E, 2 * I, H), name, H**-0.5)
        self.out_words = draw_words(rng, (E, H, I), name, I**-0.5)
        self.gate_up_scale = self.down_scale = None
        self.gate_up = self.in_words[2].transpose(0, 2, 1)
        self.down = self.out_words[2].transpose(0, 2, 1)
        self.options = {"chip": "trn3", **self.options}

    def weights(self, config: Any) -> tuple[Any, Any]:
        """Return the words as the kernel wants them in HBM."""
        form = mx_form(config)
        gate_up = pack_mx_gate_up(form, *self.in_words[:2], self.gate_up_bias)
        return gate_up, pack_mx_down(form, *self.out_words[:2])

    def launch(self, sim_options: nki_sim.SimOptions | None = None) -> Any:
        """Run the kernel on the simulator of a trn3; return the run."""
        return super().launch(replace(sim_options or nki_sim.SimOptions(), target="trn3"))

    def optional(self, config: PrefillConfig) -> dict[str, Any]:
        """Return the operands that not every configuration has: biases of gate and up are words."""
        found = super().optional(config)
        found.pop("gate_up_bias", None)
        return found
