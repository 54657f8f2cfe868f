"""Cases of the fused decode layer: operands, the formula in float64, and a run of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import ml_dtypes
import numpy as np

import nki_sim
from nki_kernels.common.formula import ExpertFormula, RouterFormula
from nki_kernels.decode.config import DecodeSizes, loads_bias
from nki_kernels.decode.layer_config import (
    LayerConfig,
    LayerForm,
    check_decode_layer,
    expected_operands,
    make_layer_config,
)
from nki_kernels.decode.layer_kernel import decode_layer
from nki_kernels.decode.layer_reference import LayerArrays, LayerResult, decode_layer_ref
from nki_kernels.decode.layout import pack_down, pack_gate_up, weight_shapes
from nki_kernels.decode.router import pack_router_weight
from nki_kernels.decode.shared import pack_shared_experts
from nki_sim import SimOptions, TensorSpec
from tests.nki_kernels.decode.cases import Records, records
from tests.nki_kernels.drawing import GPT_OSS, SITU

BF16 = ml_dtypes.bfloat16
Array = np.ndarray[Any, Any]
OAI = {**GPT_OSS, "has_gate_up_bias": True, "has_down_bias": True}
FORM = {entry.name for entry in fields(LayerForm)}
# Router families and what goes with them; N experts in all are given by the case.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt-oss": ({"top_k": 4, "act_over_topk": True, "has_bias": True}, OAI),
    "qwen3": ({"top_k": 8, "renormalize": True}, {}),
    "deepseek": (
        {
            "top_k": 8,
            "act_fn": "sigmoid",
            "has_selection_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "renormalize": True,
            "routed_scaling_factor": 2.5,
        },
        {"shared_width": 48},
    ),
    "llama4": ({"top_k": 1, "act_fn": "sigmoid"}, {"scaling": "pre", "shared_width": 96}),
    "qwen2-moe": ({"top_k": 4}, {"shared_width": 80, "has_shared_gate": True}),
    "mixtral": ({"top_k": 2, "renormalize": True}, {}),
    "kimi-k3": (
        {"top_k": 16, "act_fn": "sigmoid", "has_selection_bias": True, "renormalize": True},
        {**SITU, "shared_width": 48, "shared_formula": ExpertFormula(**SITU)},
    ),
}


@dataclass(frozen=True)
class Case:
    """A layer: T tokens, E of N experts from `first` on."""

    family: str
    T: int
    N: int = 16
    E: int = 16
    first: int = 0
    H: int = 192
    I: int = 48  # noqa: E741
    router_dtype: Any = BF16
    has_norm: bool = True
    num_cores: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def router(self) -> RouterFormula:
        """The router of the family."""
        return RouterFormula(**FAMILIES[self.family][0])

    @property
    def settings(self) -> dict[str, Any]:
        """What the family and the case say beside sizes and router."""
        return {**FAMILIES[self.family][1], **self.options}

    @property
    def form(self) -> LayerForm:
        """What is around router and routed experts."""
        given = {name: value for name, value in self.settings.items() if name in FORM}
        dtype = np.dtype(self.router_dtype).name
        return LayerForm(has_norm=self.has_norm, norm_eps=1e-5, router_dtype=dtype, **given)

    @property
    def records(self) -> Records:
        """Formula of the experts, form of their weights, and request."""
        return records({name: value for name, value in self.settings.items() if name not in FORM})

    def config(self, **changes: Any) -> LayerConfig:
        """Return what the kernel is compiled for; changes are of its form."""
        sizes = DecodeSizes(
            self.T, self.H, self.I, self.E, self.router.top_k, self.N, self.num_cores
        )
        formula, weights, request = self.records
        form = replace(self.form, **changes)
        return make_layer_config(sizes, self.router, formula, form, weights, request)


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
    router, settings = case.router, case.settings
    if case.has_norm:
        arrays["norm_weight"] = np.asarray(1 + 0.2 * rng.normal(size=(1, H)), BF16)
    if router.has_bias:
        arrays["router_bias"] = matrix(1, N, fan=1, dtype=np.float32)
    if router.has_selection_bias:
        arrays["selection_bias"] = matrix(1, N, fan=100, dtype=np.float32)
    if settings.get("has_gate_up_bias"):
        arrays["gate_up_bias"] = matrix(E, 2 * I, fan=4, dtype=np.float32)
    if settings.get("has_down_bias"):
        arrays["down_bias"] = matrix(E, H, fan=4)
    width = settings.get("shared_width", 0)
    if width:
        dtype = settings.get("shared_format", BF16)
        arrays["gate"] = matrix(width, H, fan=H, dtype=dtype)
        arrays["up"] = matrix(width, H, fan=H, dtype=dtype)
        arrays["shared_down"] = matrix(H, width, fan=width, dtype=dtype)
    if settings.get("has_shared_gate"):
        arrays["shared_gate"] = matrix(1, H, fan=H)
    if settings.get("has_residual"):
        arrays["residual"] = matrix(T, H, fan=1)
    if settings.get("has_scales"):
        narrow(arrays, settings)
    return arrays


def narrow(arrays: dict[str, Array], settings: dict[str, Any]) -> None:
    """Replace the experts' weights by float8 codes and scales."""
    dtype = np.dtype(settings["format"])
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
    shared = None
    if "gate" in wide:
        shared = (wide["gate"], wide["up"], wide["shared_down"])
    vectors = ("norm_weight", "router_bias", "selection_bias", "shared_gate")
    rows = {name: wide[name][0] if name in wide else None for name in vectors}
    layer = LayerArrays(
        hidden_TH=wide["hidden"],
        router_weight_NH=wide["router_weight"],
        gate_up_EH2I=wide["gate_up"],
        down_EIH=wide["down"],
        gate_up_bias_E2I=wide.get("gate_up_bias"),
        down_bias_EH=wide.get("down_bias"),
        norm_weight_H=rows["norm_weight"],
        router_bias_N=rows["router_bias"],
        selection_bias_N=rows["selection_bias"],
        shared=shared,
        shared_gate_H=rows["shared_gate"],
        residual_TH=wide.get("residual"),
    )
    formula, _, request = case.records
    return decode_layer_ref(
        layer,
        case.router,
        formula,
        case.form,
        first_expert=case.first,
        scaling=request.scaling,
        rounds_to=rounds_to,
    )


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
    if moe.weights.layout == "packed":
        extras = [given.pop(name, None) for name in ("gate_up_bias", "gate_up_scale", "down_scale")]
        given["gate_up"] = pack_gate_up(moe, arrays["gate_up"], *extras)
        bias = None if loads_bias(moe) else given.pop("down_bias", None)
        given["down"] = pack_down(moe, arrays["down"], bias)
    return given


def specs_of(config: LayerConfig) -> dict[str, Any]:
    """Return operands without values, of bfloat16 experts."""
    named = expected_operands(config).items()
    specs = {
        name: TensorSpec(shape, dtypes[0]) for name, (shape, dtypes) in named if shape is not None
    }
    for name, shape in zip(("gate_up", "down"), weight_shapes(config.moe), strict=True):
        specs[name] = TensorSpec(shape, "bfloat16")
    return specs


def run(
    config: LayerConfig, operands: dict[str, Any], options: SimOptions | None = None
) -> nki_sim.Run:
    """Run the kernel on its operands by name."""
    given = dict(operands)
    check_decode_layer(config, given)
    first = [
        given.pop(name) for name in ("hidden", "router_weight", "gate_up", "down", "first_expert")
    ]
    return nki_sim.run(
        decode_layer,
        *first,
        config,
        lnc=config.moe.num_cores,
        options=options or SimOptions(),
        **given,
    )


def run_case(case: Case, arrays: dict[str, Array]) -> Array:
    """Run the kernel on the arrays of a case; return its output."""
    config = case.config()
    output: Array = run(config, operands_of(config, arrays, case.first)).outputs
    return output
