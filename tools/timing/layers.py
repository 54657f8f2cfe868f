"""The layers that both benchmarks compute, and how their tokens choose experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Two NeuronCore-v3 of a Trainium 2: 128 x 128 cells at 2.4 GHz each, a quarter of 2.9 TB/s
# (architecture guide, hardware page). The roofline is computed with these, not with the simulator.
PE_CYCLES_PER_US = 2400.0
HBM_BYTES_PER_US = 725e3
BF16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The routed experts of one layer on one rank.

    Attributes:
        name: short name.
        tp: ranks of tensor parallelism.
        H, I, E, K: hidden size, intermediate size of the rank, experts, experts per token.
        options: what `make_config` needs beside sizes.
        vendor: what the vendor's kernel needs for the same layer.
    """

    name: str
    tp: int
    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    K: int
    options: dict[str, Any]
    vendor: dict[str, Any]


_OAI = {
    "activation": "swiglu_oai",
    "gate_limits": (None, 7.0),
    "up_limits": (-7.0, 7.0),
    "up_offset": 1.0,
    "has_gate_up_bias": True,
    "has_down_bias": True,
}
_OAI_VENDOR = {
    "act_fn": "Swish",
    "bias": True,
    "gate_upper": 7.0,
    "up_upper": 8.0,
    "up_lower": -6.0,
}
_PRE = {"scaling": "pre"}


def _model(name: str, tp: int, sizes: tuple[int, ...], options: Any, vendor: Any) -> Model:
    H, intermediate, E, K = sizes
    return Model(
        name=name, tp=tp, H=H, I=intermediate // tp, E=E, K=K, options=options, vendor=vendor
    )


MODELS = (
    _model("gpt-oss-120b", 8, (2880, 2880, 128, 4), _OAI, _OAI_VENDOR),
    _model("gpt-oss-20b", 8, (2880, 2880, 32, 4), _OAI, _OAI_VENDOR),
    _model("llama4-scout", 16, (5120, 8192, 16, 1), _PRE, {"scaling": "PRE_SCALE"}),
    _model("llama4-maverick", 64, (5120, 8192, 128, 1), _PRE, {"scaling": "PRE_SCALE"}),
    _model("qwen3-30b", 8, (2048, 768, 128, 8), {}, {}),
    _model("deepseek-v3", 16, (7168, 2048, 256, 8), {}, {}),
    _model("mixtral-8x7b", 8, (4096, 14336, 8, 2), {}, {}),
)


def choose_experts(routing: str, T: int, E: int, K: int, seed: int = 0) -> NDArray[np.int32]:
    """Return [T, K] different experts of each token.

    balanced: in turn. uniform: drawn alike. skewed: a quarter of the experts, drawn alike, gets
    about 80 % of the choices.
    """
    if routing == "balanced":
        return ((np.arange(T)[:, None] * K + np.arange(K)) % E).astype(np.int32)
    rng = np.random.default_rng(seed)
    weight_E = np.ones(E)
    if routing == "skewed":
        weight_E[: max(1, E // 4)] = 12.0  # 0.25 * 12 : 0.75 * 1 = 80 % : 20 %
        weight_E = rng.permutation(weight_E)
    keys = np.log(weight_E) + rng.gumbel(size=(T, E))
    return np.argsort(-keys, axis=1)[:, :K].astype(np.int32)
