"""The decode problems of the benchmark: models, tokens, routings, formats, and their HBM bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_moe.tools.timing.layers import (
    HBM_BYTES_PER_US,
    MODELS,
    PE_CYCLES_PER_US,
    Model,
    choose_experts,
)

BATCHES = (1, 4, 16, 64, 128)
ROUTINGS = ("uniform", "zipf")
FORMATS = ("bf16", "fp8")
KERNELS = ("decode_moe", "decode_block")
WEIGHT_BYTES = {"bf16": 2, "fp8": 1}
# MXFP4 checkpoints are re-coded as e5m2 with a power of two per expert for the down projection;
# the others are e4m3 with a scale for each output channel.
FP8_FORMATS = {
    "gpt-oss-120b": ("float8_e5m2", "expert"),
    "gpt-oss-20b": ("float8_e5m2", "expert"),
}
CHANNEL_SCALES = ("float8_e4m3", "channel")
MIN_COLUMNS = 64  # a matmul of fewer moving columns takes as long (architecture guide)
START_US = 5.0  # what no launch is without: first bytes in, last ones out, two DMA latencies each
_OAI_ROUTER = {"act_fn": "softmax", "act_over_topk": True, "has_bias": True}
_RENORMALISED = {"act_fn": "softmax", "renormalize": True}
# What both blocks can compute: theirs knows no groups and no selection bias.
ROUTERS: dict[str, dict[str, Any]] = {
    "gpt-oss-120b": _OAI_ROUTER,
    "gpt-oss-20b": _OAI_ROUTER,
    "llama4-scout": {"act_fn": "sigmoid"},
    "llama4-maverick": {"act_fn": "sigmoid"},
    "qwen3-30b": _RENORMALISED,
    "deepseek-v3": {"act_fn": "sigmoid", "renormalize": True},
    "mixtral-8x7b": _RENORMALISED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """One line of the benchmark.

    Attributes:
        kernel: decode_moe, or decode_block with norm and router in front.
        model: the layer on one rank.
        B: tokens of the step.
        routing: one of ROUTINGS.
        format: bf16 or fp8.
    """

    kernel: str
    model: Model
    B: int
    routing: str
    format: str

    @property
    def name(self) -> str:
        """The case in words."""
        return (
            f"{self.kernel} {self.model.name} TP{self.model.tp} B={self.B} {self.routing} "
            f"{self.format}"
        )

    @property
    def weight_format(self) -> str:
        """The kernels' name of the format."""
        return "bfloat16" if self.format == "bf16" else self._fp8[0]

    @property
    def down_scale(self) -> str:
        """What the scales of the down projection belong to."""
        return "none" if self.format == "bf16" else self._fp8[1]

    @property
    def _fp8(self) -> tuple[str, str]:
        return FP8_FORMATS.get(self.model.name, CHANNEL_SCALES)

    def expert_index(self) -> NDArray[np.int32]:
        """Return [B, K] int32, the experts of each token, the same for both formats."""
        return choose(self.routing, self.B, self.model.E, self.model.K)


def choose(routing: str, tokens: int, experts: int, top_k: int) -> NDArray[np.int32]:
    """Return [T, K] int32 different experts of each token.

    uniform: drawn alike. zipf: the r-th expert of a random order with weight 1/r.
    """
    if routing != "zipf":
        return choose_experts(routing, tokens, experts, top_k)
    rng = np.random.default_rng(0)
    weight_E = rng.permutation(1.0 / np.arange(1, experts + 1))
    keys_TE = np.log(weight_E) + rng.gumbel(size=(tokens, experts))
    return np.argsort(-keys_TE, axis=1)[:, :top_k].astype(np.int32)


def expert_bytes(model: Model, format: str) -> int:
    """Return the bytes of one expert: weights, biases, scales."""
    total = 3 * model.H * model.I * WEIGHT_BYTES[format]
    if model.options.get("has_down_bias"):
        total += 2 * model.I * 4 + model.H * 2
    if format == "fp8":
        total += 2 * model.I * 4
        channels = FP8_FORMATS.get(model.name, CHANNEL_SCALES)[1] == "channel"
        total += 4 * (model.H if channels else 1)
    return total


def hbm_bound_us(case: DecodeCase, touched: int) -> float:
    """Return the least time to move what the layer needs, at the HBM rate of two cores (computed).

    The weights of the touched experts, the hidden states in and out; for the block also the
    router's weight and the norm's.
    """
    model = case.model
    total = touched * expert_bytes(model, case.format) + 2 * case.B * model.H * 2
    if case.kernel == "decode_block":
        total += model.H * model.E * 2 + model.H * 2
    return total / HBM_BYTES_PER_US


def array_us(model: Model, B: int, touched: int) -> float:
    """Return the tensor engines' least time: each 128 x 128 weights once, B columns (computed)."""
    tiles = touched * 3 * -(-model.H // 128) * -(-model.I // 128)
    return tiles * max(MIN_COLUMNS, B) / PE_CYCLES_PER_US / 2


def is_weight_bound(model: Model, B: int, touched: int) -> bool:
    """Whether reading weights takes most of the time even in fp8 (computed).

    It must take longer than the tensor engines need, and be at least four fifths of all that
    cannot overlap with it.
    """
    weights_us = touched * 3 * model.H * model.I / HBM_BYTES_PER_US
    return weights_us >= array_us(model, B, touched) and weights_us >= 4 * START_US


def find_model(name: str) -> Model:
    """Return the layer of a model."""
    return next(model for model in MODELS if model.name == name)
