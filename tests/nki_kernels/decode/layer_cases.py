"""Cases of the decode block: operands, the formula in float64, and a run of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import nki_sim
from nki_kernels.common.router_choice import RouterFormula
from nki_kernels.decode.layer_config import LayerConfig, check_decode_layer, make_layer_config
from nki_kernels.decode.layer_kernel import decode_layer
from nki_kernels.decode.layer_reference import LayerResult, decode_layer_ref
from nki_kernels.decode.layout import pack_down, pack_gate_up
from nki_kernels.decode.router import pack_router_weight
from nki_kernels.decode.shared import pack_shared_experts
from nki_sim import SimOptions

BF16 = ml_dtypes.bfloat16
Array = np.ndarray[Any, Any]
OAI = {
    "activation": "swiglu_oai", "gate_limits": (None, 7.0), "up_limits": (-7.0, 7.0),
    "up_offset": 1.0, "has_gate_up_bias": True, "has_down_bias": True,
}  # fmt: skip
# Router families and what goes with them; N experts in all are given by the case.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt-oss": ({"top_k": 4, "act_over_topk": True, "has_bias": True}, OAI),
    "qwen3": ({"top_k": 8, "renormalize": True}, {}),
    "deepseek": (
        {
            "top_k": 8, "act_fn": "sigmoid", "has_selection_bias": True, "n_group": 4,
            "topk_group": 2, "renormalize": True, "routed_scaling_factor": 2.5,
        },
        {"shared_width": 48},
    ),
    "llama4": ({"top_k": 1, "act_fn": "sigmoid"}, {"scaling": "pre", "shared_width": 96}),
    "qwen2-moe": ({"top_k": 4}, {"shared_width": 80, "has_shared_gate": True}),
    "mixtral": ({"top_k": 2, "renormalize": True}, {}),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A block: T tokens, E of N experts from `first` on."""

    family: str
    T: int
    N: int = 16
    E: int = 16
    first: int = 0
    H: int = 192
    I: int = 48  # noqa: E741
    router_dtype: Any = BF16
    has_norm: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def formula(self) -> RouterFormula:
        """The router and the norm."""
        terms = FAMILIES[self.family][0]
        return RouterFormula(**terms, has_norm=self.has_norm, norm_eps=1e-5)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of make_layer_config besides the sizes."""
        return {**FAMILIES[self.family][1], **self.options}

    def config(self, **changes: Any) -> LayerConfig:
        """Return what the kernel is compiled for."""
        return make_layer_config(
            self.formula, router_dtype=np.dtype(self.router_dtype).name, T=self.T, H=self.H,
            I=self.I, E=self.E, num_experts=self.N, **{**self.settings, **changes},
        )  # fmt: skip


def draw(case: Case) -> dict[str, Array]:
    """Draw the weights as a checkpoint has them, and tokens."""
    T, H, I, E, N = case.T, case.H, case.I, case.E, case.N  # noqa: E741
    rng = np.random.default_rng(T + 7 * H + 31 * N + case.first)

    def matrix(*shape: int, fan: int, dtype: Any = BF16) -> Array:
        return np.asarray(rng.normal(size=shape) / np.sqrt(fan), dtype)

    arrays = {
        "hidden": matrix(T, H, fan=1) * np.asarray(2, BF16),
        "router_weight": matrix(N, H, fan=H, dtype=case.router_dtype),
        "gate_up": matrix(E, H, 2 * I, fan=H),
        "down": matrix(E, I, H, fan=I),
    }
    formula, settings = case.formula, case.settings
    if formula.has_norm:
        arrays["norm_weight"] = np.asarray(1 + 0.2 * rng.normal(size=(1, H)), BF16)
    if formula.has_bias:
        arrays["router_bias"] = matrix(1, N, fan=1, dtype=np.float32)
    if formula.has_selection_bias:
        arrays["selection_bias"] = matrix(1, N, fan=100, dtype=np.float32)
    if settings.get("has_gate_up_bias"):
        arrays["gate_up_bias"] = matrix(E, 2 * I, fan=4, dtype=np.float32)
    if settings.get("has_down_bias"):
        arrays["down_bias"] = matrix(E, H, fan=4)
    width = settings.get("shared_width", 0)
    if width:
        arrays["gate"] = matrix(width, H, fan=H)
        arrays["up"] = matrix(width, H, fan=H)
        arrays["shared_down"] = matrix(H, width, fan=width)
    if settings.get("has_shared_gate"):
        arrays["shared_gate"] = matrix(1, H, fan=H)
    if settings.get("has_residual"):
        arrays["residual"] = matrix(T, H, fan=1)
    if settings.get("has_scales"):
        narrow(arrays, settings)
    return arrays


def narrow(arrays: dict[str, Array], settings: dict[str, Any]) -> None:
    """Replace the experts' weights by float8 codes and scales."""
    dtype = np.dtype(settings["weight_format"])
    for name in ("gate_up", "down"):
        wide = arrays[name].astype(np.float32)
        axes = (1, 2) if name == "down" and settings["down_scale"] == "expert" else (1,)
        scale = np.abs(wide).max(axes, keepdims=True) / np.float32(200)
        arrays[name] = (wide / scale).astype(dtype)
        arrays[f"{name}_scale"] = scale[:, 0]


def expected(case: Case, arrays: dict[str, Array], rounds_to: Any = BF16) -> LayerResult:
    """Return the formula's result in float64."""
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    for name in ("gate_up", "down"):
        if f"{name}_scale" in wide:
            wide[name] = wide[name] * wide[f"{name}_scale"][:, None]
    settings = case.settings
    names = ("activation", "gate_limits", "up_limits", "up_offset", "scaling")
    shared = None
    if "gate" in wide:
        shared = (wide["gate"], wide["up"], wide["shared_down"])
    vectors = ("norm_weight", "router_bias", "selection_bias", "shared_gate")
    rows = {name: wide[name][0] if name in wide else None for name in vectors}
    return decode_layer_ref(
        wide["hidden"], wide["router_weight"], wide["gate_up"], wide["down"], case.formula,
        case.first, norm_weight_H=rows["norm_weight"], router_bias_N=rows["router_bias"],
        selection_bias_N=rows["selection_bias"], shared=shared,
        shared_gate_H=rows["shared_gate"], residual_TH=wide.get("residual"), rounds_to=rounds_to,
        gate_up_bias_E2I=wide.get("gate_up_bias"), down_bias_EH=wide.get("down_bias"),
        **{name: settings[name] for name in names if name in settings},
    )  # fmt: skip


def operands_of(config: LayerConfig, arrays: dict[str, Array], first: int = 0) -> dict[str, Array]:
    """Return the kernel's operands by name."""
    given, axis, moe = dict(arrays), config.moe.h_axis, config.moe
    given["router_weight"] = pack_router_weight(arrays["router_weight"], axis, config.router_parts)
    given["first_expert"] = np.array([[first]], np.int32)
    if "gate" in given:
        packed = pack_shared_experts(
            config.shared, given.pop("gate"), given.pop("up"), given["shared_down"]
        )
        given["shared_gate_up"], given["shared_down"] = packed
    if "shared_gate" in given:
        given["shared_gate"] = pack_router_weight(arrays["shared_gate"], axis)
    if moe.weight_layout == "packed":
        extras = [given.pop(name, None) for name in
                  ("gate_up_bias", "gate_up_scale", "down_scale")]  # fmt: skip
        given["gate_up"] = pack_gate_up(moe, arrays["gate_up"], *extras)
        given["down"] = pack_down(moe, arrays["down"])
    return given


def run(
    config: LayerConfig, operands: dict[str, Any], options: SimOptions | None = None
) -> nki_sim.Run:
    """Run the kernel on its operands by name."""
    given = dict(operands)
    check_decode_layer(config, given)
    first = [given.pop(name) for name in
             ("hidden", "router_weight", "gate_up", "down", "first_expert")]  # fmt: skip
    return nki_sim.run(
        decode_layer, *first, config, lnc=config.moe.num_cores, options=options or SimOptions(),
        **given,
    )  # fmt: skip


def run_case(case: Case, arrays: dict[str, Array]) -> Array:
    """Run the kernel on the arrays of a case; return its output."""
    config = case.config()
    output: Array = run(config, operands_of(config, arrays, case.first)).outputs
    return output
