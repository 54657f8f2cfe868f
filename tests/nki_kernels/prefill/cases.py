"""Inputs, launch and float64 reference of one prefill, for the tests of `blockwise_moe`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

import nki_sim
from neuron_moe.backends.chosen_experts import chosen_experts
from neuron_moe.blocks import build_block_mapping
from neuron_moe.weights import LocalRouting
from nki_kernels.common.formula import ExpertFormula, num_projections
from nki_kernels.common.weight_formats import bias_terms, split_parts, three_terms
from nki_kernels.common.work_tiles import WorkTileLists
from nki_kernels.prefill import (
    ExpertSizes,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    blockwise_moe,
    blockwise_moe_ref,
    check_blockwise_moe,
    make_config,
    stored_parts,
    work_tiles_of,
)
from nki_kernels.prefill.config import with_loop
from tests.nki_kernels.drawing import make_records, torch_weights
from tests.nki_kernels.routings import choose_experts, sizes_in

BF16 = ml_dtypes.bfloat16
Records = tuple[ExpertFormula, ExpertSizes, PrefillWork, PlanRequest]


def records(**values: Any) -> Records:
    """Return the records that values make, by the names of their fields."""
    formula, sizes, work, request = make_records(
        (ExpertFormula, ExpertSizes, PrefillWork, PlanRequest), values
    )
    return formula, sizes, work, request


def config_of(**values: Any) -> PrefillConfig:
    """Return the configuration that values make, by the names of the records' fields."""
    return make_config(*records(**values))


@dataclass
class Prefill:
    """One problem: sizes, options of the kernel, and everything derived from a seed."""

    T: int
    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    K: int
    B: int = 128
    routing: str = "uniform"
    has_bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        T, H, I, E = self.T, self.H, self.I, self.E  # noqa: E741
        self.expert_index_TK = choose_experts(self.routing, T, E, self.K, rng)
        affinities = rng.random((T, self.K)).astype(np.float32) + 0.1
        self.affinities_TK = affinities / affinities.sum(1, keepdims=True)
        self.hidden_TH = rng.normal(size=(T, H)).astype(BF16)
        width = 2 * I if self.options.get("has_gate", True) else I
        self.gate_up = (rng.normal(size=(E, H, width)) / np.sqrt(H)).astype(np.float32)
        self.down = (rng.normal(size=(E, I, H)) / np.sqrt(I)).astype(np.float32)
        self.gate_up_bias = self.down_bias = None
        if self.has_bias:
            self.gate_up_bias = rng.normal(size=(E, width)).astype(BF16).astype(np.float32)
            self.down_bias = rng.normal(size=(E, H)).astype(BF16)
        mapping = build_block_mapping(torch.from_numpy(self.expert_index_TK), E, self.B)
        self.slots = mapping.token_position_to_id.numpy()
        self.pair_of_slot = mapping.pair_of_slot.numpy()
        self.block_to_expert = mapping.block_to_expert.numpy()
        self._quantise()

    def _quantise(self) -> None:
        """Round the weights to the format; keep codes, scales and the values they stand for."""
        name = self.options.get("weight_format", "bfloat16")
        dtype = {
            "bfloat16": BF16,
            "float8_e4m3": ml_dtypes.float8_e4m3,
            "float8_e5m2": ml_dtypes.float8_e5m2,
        }[name]
        self.gate_up_scale = self.down_scale = None
        if self.options.get("has_scales"):
            self.gate_up_scale = np.abs(self.gate_up).max(1) / 200
            self.down_scale = np.abs(self.down).max(1) / 200
            self.gate_up_codes = (self.gate_up / self.gate_up_scale[:, None]).astype(dtype)
            self.down_codes = (self.down / self.down_scale[:, None]).astype(dtype)
            self.gate_up = self.gate_up_codes.astype(np.float32) * self.gate_up_scale[:, None]
            self.down = self.down_codes.astype(np.float32) * self.down_scale[:, None]
            return
        self.gate_up_codes, self.down_codes = self.gate_up.astype(dtype), self.down.astype(dtype)
        self.gate_up = self.gate_up_codes.astype(np.float32)
        self.down = self.down_codes.astype(np.float32)

    def records(self) -> Records:
        """Return formula, sizes, work and request."""
        return records(
            H=self.H,
            I=self.I,
            E=self.E,
            block_size=self.B,
            num_slots=len(self.slots),
            num_tokens=self.T,
            has_gate_up_bias=self.has_bias,
            has_down_bias=self.has_bias,
            **self.options,
        )

    def config(self) -> PrefillConfig:
        """Return what the kernel is compiled for; `loop` overrides its choice of buffers."""
        config = make_config(*self.records())
        return with_loop(config, replace(config.loop, **self.loop))

    def work_tiles(self, config: PrefillConfig) -> WorkTileLists:
        """Return the work tiles."""
        return work_tiles_of(config, self.slots, self.block_to_expert)

    def launch(self, sim_options: nki_sim.SimOptions | None = None) -> Any:
        """Run the kernel on the simulator; return the run."""
        config = self.config()
        work_tiles, optional = self.work_tiles(config), self.optional(config)
        operands = self.hidden_TH, *self.weights(config), self.slots
        named = dict(zip(("hidden", "gate_up", "down", "slots"), operands, strict=True))
        check_blockwise_moe(config, work_tiles, named | optional)
        return nki_sim.run(
            blockwise_moe,
            *operands,
            *work_tiles,
            config,
            lnc=config.num_cores,
            options=sim_options,
            **optional,
        )

    def optional(self, config: PrefillConfig) -> dict[str, Any]:
        """Return the operands that not every configuration has."""
        found: dict[str, Any] = {}
        if self.has_bias:
            bias = self.down_bias
            if self.down_scale is not None:
                bias = bias_terms(bias, self.down_scale)
            found |= {"gate_up_bias": self.gate_up_bias, "down_bias": bias}
        if self.down_scale is not None:
            found["gate_up_scale"] = self.gate_up_scale.astype(np.float32)
            found["down_scale"] = three_terms(self.down_scale)
        if config.scaling != "none":
            found["slot_scale"] = self.slot_scale()
        return found

    def weights(self, config: Any) -> tuple[Any, Any]:
        """Return gate and up, and down weights as the kernel wants them in HBM."""
        if not config.loop.by_parts:
            return self.gate_up_codes, self.down_codes
        in_parts, out_parts = stored_parts(config)
        halves = num_projections(config.formula)
        return (
            split_parts(self.gate_up_codes, in_parts, halves),
            split_parts(self.down_codes, out_parts),
        )

    def slot_scale(self) -> Any:
        """Return the affinity of every slot, 0 for padding."""
        flat = self.affinities_TK.reshape(-1)[np.maximum(self.pair_of_slot, 0)]
        return np.where(self.pair_of_slot >= 0, flat, 0).astype(np.float32)

    def expected_slots(self, *, in_words: bool = False) -> Any:
        """Return [N*B, H] float64, what every slot should hold (0 for padding)."""
        live = self.slots >= 0
        rows = self.hidden_TH.astype(np.float64)[np.maximum(self.slots, 0)]
        scaling = self.options.get("scaling", "none")
        scale = self.slot_scale().astype(np.float64)[:, None]
        if scaling == "pre":
            rows = rows * scale
        has = self.gate_up_bias is not None
        result = blockwise_moe_ref(
            rows,
            np.repeat(self.block_to_expert, self.B),
            self.gate_up.astype(np.float64),
            self.down.astype(np.float64),
            self.records()[0],
            gate_up_bias_E2I=self.gate_up_bias.astype(np.float64) if has else None,
            down_bias_EH=self.down_bias.astype(np.float64) if has else None,
            in_words=in_words,
        )
        if scaling == "post":
            result = result * scale
        return np.where(live[:, None], result, 0.0)

    def slots_of(self, run: Any) -> Any:
        """Return the kernel's [N*B, H] as float64, partial sums added, 0 for padding."""
        total = run.outputs.astype(np.float64).sum(axis=0)
        return np.where((self.slots >= 0)[:, None], total[: len(self.slots)], 0.0)

    def torch_slots(self) -> Any:
        """Return [N*B, H] float64 as the torch backend computes it in bfloat16."""
        live = np.flatnonzero(self.slots >= 0)
        formula = self.records()[0]
        rows = torch.from_numpy(self.hidden_TH.astype(np.float32)[self.slots[live]]).bfloat16()
        expert = np.repeat(self.block_to_expert, self.B)[live]
        scale = self.slot_scale()[live]
        scaling = self.options.get("scaling", "none")
        ones = np.ones_like(scale)
        routing = LocalRouting(
            torch.from_numpy(expert.astype(np.int32)).reshape(-1, 1),
            torch.from_numpy(ones if scaling == "none" else scale).reshape(-1, 1),
            scaling == "pre",
        )
        result = chosen_experts(rows, routing, torch_weights(self, formula)).double()
        full = np.zeros((len(self.slots), self.H))
        full[live] = result
        return full


def sized(name: str, **more: Any) -> Prefill:
    """Return the problem whose sizes a name tells, as T500-H192-I60-E3-K2-B64; B is 128 if not."""
    return Prefill(**sizes_in(name), **more)
