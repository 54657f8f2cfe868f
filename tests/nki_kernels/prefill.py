"""Inputs, launch and float64 reference of one prefill, for the tests of `blockwise_moe`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

import nki_sim
from neuron_moe.activations import ActivationSpec
from neuron_moe.backends import ExpertWeights, LocalRouting
from neuron_moe.backends.torch_backend import TorchBackend
from neuron_moe.blocks import build_block_mapping
from neuron_moe.config import GLUType
from nki_kernels.common.expert_reference import blockwise_moe_ref
from nki_kernels.common.visits import VisitLists
from nki_kernels.common.weight_formats import bias_terms, split_parts, three_terms
from nki_kernels.prefill.config import num_projections, stored_parts, with_loop
from nki_kernels.prefill.kernel import blockwise_moe
from nki_kernels.prefill.options import make_config, plan_on_host

BF16 = ml_dtypes.bfloat16
GPT_OSS = {
    "activation": "swiglu_oai",
    "gate_limits": (None, 7.0),
    "up_limits": (-7.0, 7.0),
    "up_offset": 1.0,
}


def choose_experts(routing: str, T: int, E: int, K: int, rng: np.random.Generator) -> Any:
    """Return [T, K] different experts of every token, int32."""
    if routing == "balanced":
        first = np.arange(T)[:, None] * K + np.arange(K)[None, :]
        return (first % E).astype(np.int32)
    weight_E = np.ones(E)
    if routing == "zipf":
        weight_E = 1.0 / np.arange(1, E + 1)
    elif routing == "one-expert":
        weight_E = np.where(np.arange(E) == E // 2, 1e9, 1.0)
    elif routing == "empty-experts":
        weight_E = np.where(np.arange(E) % 2 == 0, 1.0, 1e-9)
    keys = np.log(weight_E)[None, :] + rng.gumbel(size=(T, E))
    return np.argsort(-keys, axis=1)[:, :K].astype(np.int32)


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

    def config(self) -> Any:
        """Return what the kernel is compiled for; `loop` overrides its choice of buffers."""
        config = make_config(
            H=self.H, I=self.I, E=self.E, block_size=self.B, num_slots=len(self.slots),
            num_tokens=self.T, has_gate_up_bias=self.has_bias, has_down_bias=self.has_bias,
            **self.options,
        )  # fmt: skip
        # Rows that the gather turned serve one part only.
        turns = {"turns": "tensor"} if self.loop.get("in_parts", 1) > 1 else {}
        return with_loop(config, replace(config.loop, **turns, **self.loop))

    def plan(self, config: Any) -> VisitLists:
        """Return the visits."""
        return plan_on_host(config, self.slots, self.block_to_expert)

    def launch(self, sim_options: nki_sim.SimOptions | None = None) -> Any:
        """Run the kernel on the simulator; return the run."""
        config = self.config()
        optional: dict[str, Any] = {}
        if self.has_bias:
            bias = self.down_bias
            if self.down_scale is not None:
                bias = bias_terms(bias, self.down_scale)
            optional |= {"gate_up_bias": self.gate_up_bias, "down_bias": bias}
        if self.down_scale is not None:
            optional["gate_up_scale"] = self.gate_up_scale.astype(np.float32)
            optional["down_scale"] = three_terms(self.down_scale)
        if config.scaling != "none":
            optional["slot_scale"] = self.slot_scale()
        return nki_sim.run(
            blockwise_moe, self.hidden_TH, *self.weights(config), self.slots,
            *self.plan(config), config, lnc=config.num_cores, options=sim_options, **optional,
        )  # fmt: skip

    def weights(self, config: Any) -> tuple[Any, Any]:
        """Return gate and up, and down weights as the kernel wants them in HBM."""
        if not config.loop.by_parts:
            return self.gate_up_codes, self.down_codes
        in_parts, out_parts = stored_parts(config)
        halves = num_projections(config)
        return (
            split_parts(self.gate_up_codes, in_parts, halves),
            split_parts(self.down_codes, out_parts),
        )

    def slot_scale(self) -> Any:
        """Return the affinity of every slot, 0 for padding."""
        flat = self.affinities_TK.reshape(-1)[np.maximum(self.pair_of_slot, 0)]
        return np.where(self.pair_of_slot >= 0, flat, 0).astype(np.float32)

    def expected_slots(self) -> Any:
        """Return [N*B, H] float64, what every slot should hold (0 for padding)."""
        live = self.slots >= 0
        rows = self.hidden_TH.astype(np.float64)[np.maximum(self.slots, 0)]
        scaling = self.options.get("scaling", "none")
        scale = self.slot_scale().astype(np.float64)[:, None]
        if scaling == "pre":
            rows = rows * scale
        names = (
            "activation", "activation_scale", "has_gate", "gate_limits", "up_limits", "up_offset",
        )  # fmt: skip
        has = self.gate_up_bias is not None
        result = blockwise_moe_ref(
            rows,
            np.repeat(self.block_to_expert, self.B),
            self.gate_up.astype(np.float64),
            self.down.astype(np.float64),
            gate_up_bias_E2I=self.gate_up_bias.astype(np.float64) if has else None,
            down_bias_EH=self.down_bias.astype(np.float64) if has else None,
            **{name: self.options[name] for name in names if name in self.options},
        )
        if scaling == "post":
            result = result * scale
        return np.where(live[:, None], result, 0.0)

    def slots_of(self, run: Any) -> Any:
        """Return the kernel's [N*B, H] as float64, partial sums added, 0 for padding."""
        total = run.outputs.astype(np.float64).sum(axis=0)
        if self.options.get("stores") == "tokens":
            total = total[np.maximum(self.slots, 0)]
        return np.where((self.slots >= 0)[:, None], total, 0.0)

    def torch_slots(self) -> Any:
        """Return [N*B, H] float64 as the torch backend computes it in bfloat16."""
        live = np.flatnonzero(self.slots >= 0)
        o = self.options
        gate, up = o.get("gate_limits", (None, None)), o.get("up_limits", (None, None))
        name, factor = o.get("activation", "silu"), o.get("activation_scale", 1.0)
        if name == "swiglu_oai":
            name, factor = "swish", 1.702
        spec = ActivationSpec(
            hidden_act={"swish": "sigmoid", "gelu_tanh": "gelu_pytorch_tanh"}.get(name, name),
            glu_type=GLUType.SWIGLU if name == "swish" else GLUType.GLU,
            is_glu=o.get("has_gate", True), scale=factor, bias=o.get("up_offset", 0.0),
            gate_lower=gate[0], gate_upper=gate[1], up_lower=up[0], up_upper=up[1],
        )  # fmt: skip
        bf16 = torch.bfloat16
        weights = ExpertWeights(
            torch.from_numpy(self.gate_up).to(bf16), torch.from_numpy(self.down).to(bf16),
            None if self.gate_up_bias is None else torch.from_numpy(self.gate_up_bias).to(bf16),
            None if self.down_bias is None
            else torch.from_numpy(self.down_bias.astype(np.float32)).to(bf16),
            spec,
        )  # fmt: skip
        rows = torch.from_numpy(self.hidden_TH.astype(np.float32)[self.slots[live]]).to(bf16)
        expert = np.repeat(self.block_to_expert, self.B)[live]
        scale = self.slot_scale()[live]
        scaling = o.get("scaling", "none")
        ones = np.ones_like(scale)
        routing = LocalRouting(
            torch.from_numpy(expert.astype(np.int32)).reshape(-1, 1),
            torch.from_numpy(ones if scaling == "none" else scale).reshape(-1, 1),
            scaling == "pre",
        )
        result = TorchBackend(static=False).few_tokens(rows, routing, weights, "selective").double()
        full = np.zeros((len(self.slots), self.H))
        full[live] = result
        return full
