"""Inputs, launch and float64 reference of one decode step, for the tests of `decode_moe`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch

import nki_sim
from neuron_moe.backends.chosen_experts import chosen_experts
from neuron_moe.weights import LocalRouting
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.decode.config import (
    DecodeConfig,
    DecodeRequest,
    DecodeSizes,
    WeightForm,
    loads_bias,
)
from nki_kernels.decode.kernel import decode_moe
from nki_kernels.decode.layout import pack_down, pack_gate_up
from nki_kernels.decode.options import make_decode_config
from nki_kernels.decode.reference import decode_moe_ref
from tests.nki_kernels.drawing import make_records, torch_weights
from tests.nki_kernels.routings import choose_experts, sizes_in

BF16 = ml_dtypes.bfloat16
DTYPES = {
    "bfloat16": BF16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
Records = tuple[ExpertFormula, WeightForm, DecodeRequest]


def records(options: dict[str, Any]) -> Records:
    """Return the records that options make, by the names of their fields."""
    formula, weights, request = make_records((ExpertFormula, WeightForm, DecodeRequest), options)
    return formula, weights, request


@dataclass
class Decode:
    """One problem: sizes, fields of the kernel's records, and everything derived from a seed.

    `rank` of `ranks` holds E of the num_experts = E * ranks experts.
    """

    T: int
    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    K: int
    ranks: int = 1
    rank: int = 0
    routing: str = "uniform"
    has_bias: bool = False
    num_cores: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        T, H, I, E = self.T, self.H, self.I, self.E  # noqa: E741
        self.num_experts = E * self.ranks
        self.first = E * self.rank
        routing = "uniform" if self.routing == "no-hit" else self.routing
        self.index_TK = choose_experts(routing, T, self.num_experts, self.K, rng)
        if self.routing == "no-hit":
            others = [e for e in range(self.num_experts) if not 0 <= e - self.first < E]
            self.index_TK = np.array(others, np.int32)[self.index_TK % len(others)]
        affinities = rng.random((T, self.K)).astype(np.float32) + 0.1
        self.affinities_TK = affinities / affinities.sum(1, keepdims=True)
        self.hidden_TH = rng.normal(size=(T, H)).astype(BF16)
        self.gate_up = (rng.normal(size=(E, H, 2 * I)) / np.sqrt(H)).astype(np.float32)
        self.down = (rng.normal(size=(E, I, H)) / np.sqrt(I)).astype(np.float32)
        self.gate_up_bias = self.down_bias = None
        if self.has_bias:
            self.gate_up_bias = rng.normal(size=(E, 2 * I)).astype(BF16).astype(np.float32)
            self.down_bias = rng.normal(size=(E, H)).astype(BF16)
        self._quantise(rng)

    def _quantise(self, rng: np.random.Generator) -> None:
        """Round the weights to the format; keep codes, scales and the values they stand for."""
        dtype = DTYPES[self.options.get("format", "bfloat16")]
        self.gate_up_scale = self.down_scale = None
        gate_up_scale: Any = 1.0
        down_scale: Any = 1.0
        if self.options.get("has_scales"):
            self.gate_up_scale = (np.abs(self.gate_up).max(1) / 200).astype(np.float32)
            gate_up_scale = self.gate_up_scale[:, None]
        if self.options.get("down_scale") == "channel":
            self.down_scale = (np.abs(self.down).max(1) / 200).astype(np.float32)
            down_scale = self.down_scale[:, None]
        elif self.options.get("down_scale") == "expert":
            self.down_scale = 2.0 ** rng.integers(-8, 3, (self.E, 1)).astype(np.float32)
            down_scale = self.down_scale[:, :, None]
        self.gate_up_codes = (self.gate_up / gate_up_scale).astype(dtype)
        self.down_codes = (self.down / down_scale).astype(dtype)
        self.gate_up = self.gate_up_codes.astype(np.float32) * gate_up_scale
        self.down = self.down_codes.astype(np.float32) * down_scale

    def records(self) -> Records:
        """Return formula, form of the weights and request."""
        has = {"has_gate_up_bias": self.has_bias, "has_down_bias": self.has_bias}
        return records({**self.options, **has})

    def config(self) -> DecodeConfig:
        """Return what the kernel is compiled for."""
        sizes = DecodeSizes(
            self.T, self.H, self.I, self.E, self.K, self.num_experts, self.num_cores
        )
        return make_decode_config(sizes, *self.records())

    def launch(self, sim_options: nki_sim.SimOptions | None = None) -> Any:
        """Run the kernel on the simulator; return the run."""
        config = self.config()
        gate_up, down = self.gate_up_codes, self.down_codes
        optional: dict[str, Any] = {
            "gate_up_bias": self.gate_up_bias,
            "gate_up_scale": self.gate_up_scale,
            "down_scale": self.down_scale,
        }
        if config.weights.layout == "packed":
            gate_up, down = (
                pack_gate_up(config, gate_up, *optional.values()),
                pack_down(config, down, self.down_bias),
            )
            optional = {}
        optional["down_bias"] = self.down_bias if loads_bias(config) else None
        return nki_sim.run(
            decode_moe,
            self.hidden_TH,
            gate_up,
            down,
            self.index_TK,
            self.affinities_TK,
            np.array([[self.first]], np.int32),
            config,
            lnc=config.num_cores,
            options=sim_options,
            **optional,
        )

    def expected(self, *, in_words: bool = False) -> Any:
        """Return [T, H] float64, the formula; in words as a kernel quantises its activations."""
        has = self.gate_up_bias is not None
        formula, _, request = self.records()
        return decode_moe_ref(
            self.hidden_TH.astype(np.float64),
            self.gate_up.astype(np.float64),
            self.down.astype(np.float64),
            self.index_TK - self.first,
            self.affinities_TK.astype(np.float64),
            formula,
            scaling=request.scaling,
            gate_up_bias_E2I=self.gate_up_bias.astype(np.float64) if has else None,
            down_bias_EH=self.down_bias.astype(np.float64) if has else None,
            in_words=in_words,
        )

    def torch_output(self) -> Any:
        """Return [T, H] float64 as the torch backend computes it in bfloat16."""
        formula, _, request = self.records()
        local_TK = self.index_TK - self.first
        is_local = (local_TK >= 0) & (local_TK < self.E)
        given = self.affinities_TK
        if request.scaling == "none":
            given = np.ones_like(given)
        routing = LocalRouting(
            torch.from_numpy(np.where(is_local, local_TK, -1).astype(np.int32)),
            torch.from_numpy(np.where(is_local, given, 0).astype(np.float32)),
            request.scaling == "pre",
        )
        hidden = torch.from_numpy(self.hidden_TH.astype(np.float32)).bfloat16()
        return chosen_experts(hidden, routing, torch_weights(self, formula)).double().numpy()

    def touched(self) -> int:
        """Return the local experts that some token chose."""
        local = np.unique(self.index_TK - self.first)
        return int(((local >= 0) & (local < self.E)).sum())


def sized(name: str, **more: Any) -> Decode:
    """Return the problem whose sizes a name tells, as T1-H128-I64-E8-K2."""
    return Decode(**sizes_in(name), **more)
