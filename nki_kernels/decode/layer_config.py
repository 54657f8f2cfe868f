"""What the decode block is compiled for, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nki.language import NKIObject

from nki_kernels.common.plans import PARTITIONS
from nki_kernels.common.router_choice import RouterFormula, check_router_formula
from nki_kernels.decode.config import DecodeConfig
from nki_kernels.decode.fit import SBUF_BYTES, SMALL_TILES_BYTES
from nki_kernels.decode.norm import norm_bytes
from nki_kernels.decode.options import make_decode_config
from nki_kernels.decode.router import router_bytes, router_parts
from nki_kernels.decode.shared import (
    make_shared_config,
    shared_bytes,
    shared_shapes,
)

ROUTER_DTYPES = ("bfloat16", "float32")
# Norm and router in front of the experts, per launch and per token: simulated, seven models.
FRONT_NS, FRONT_TOKEN_NS = 6000.0, 80.0


@dataclass
class LayerConfig(NKIObject):
    """Compile-time constants of `decode_layer`; see `make_layer_config`.

    Attributes:
        moe: the routed experts of this rank.
        formula: the router over the experts of all ranks, and the norm.
        shared: the shared experts; that of the routed ones if there are none.
        has_shared: whether there are.
        has_shared_gate: whether a sigmoid gate scales them, token by token.
        has_residual: whether a residual is added at the end.
        returns_routing: whether affinities and index are returned too.
        router_dtype: element type of the router's weight.
        router_parts: cores that share the router's experts.
    """

    moe: DecodeConfig
    formula: RouterFormula
    shared: DecodeConfig
    has_shared: bool
    has_shared_gate: bool
    has_residual: bool
    returns_routing: bool
    router_dtype: str
    router_parts: int


def make_layer_config(
    formula: RouterFormula,
    *,
    router_dtype: str = "bfloat16",
    shared_width: int = 0,
    shared_activation: str = "silu",
    has_shared_gate: bool = False,
    has_residual: bool = False,
    returns_routing: bool = False,
    **moe: Any,
) -> LayerConfig:
    """Return what `decode_layer` is compiled for.

    Args:
        formula: the router, and whether a norm is in front.
        router_dtype: bfloat16, or float32 (four passes of the tensor engine).
        shared_width: intermediate size of this rank's share of the shared experts; 0 for none.
        shared_activation: theirs.
        has_shared_gate: whether a sigmoid gate scales them.
        has_residual: whether a residual is added.
        returns_routing: whether affinities and index are returned too.
        **moe: the arguments of `make_decode_config`, without K, which is the formula's.

    Raises:
        ValueError: a value outside the limits of the kernel.
    """
    if router_dtype not in ROUTER_DTYPES:
        raise ValueError(
            f"router_dtype={router_dtype!r}: must be one of {', '.join(ROUTER_DTYPES)}."
            " Convert the router's weight; float32 is exact for every type."
        )
    if shared_width < 0:
        raise ValueError(f"shared_width={shared_width}: must not be negative. Use 0 for none.")
    if has_shared_gate and not shared_width:
        raise ValueError(
            "has_shared_gate=True: there are no shared experts to scale. Give shared_width."
        )
    if formula.returns_logits:
        raise ValueError(
            "returns_logits=True: the decode block keeps logits on chip. Use router_topk for them."
        )
    check_router_formula(formula, moe["num_experts"])
    front_ns = FRONT_NS + FRONT_TOKEN_NS * moe["T"]
    routed = make_decode_config(K=formula.top_k, front_ns=front_ns, **moe)
    weight_bytes = 4 if router_dtype == "float32" else 2
    parts = router_parts(routed.num_experts, routed.H, weight_bytes, routed.num_cores)
    shared = routed
    needed = _front_bytes(routed, formula, weight_bytes, parts)
    if shared_width:
        room = SBUF_BYTES - needed
        shared = make_shared_config(routed, shared_width, shared_activation, room)
        needed += shared_bytes(shared)
    if needed > SBUF_BYTES:
        raise ValueError(
            f"T={routed.T}, H={routed.H}, num_experts={routed.num_experts}: norm, router and shared"
            f" experts need {needed} bytes of SBUF per partition, must be at most {SBUF_BYTES}. Use"
            " fewer tokens, a bfloat16 router, or router_topk and decode_moe one after the other."
        )
    return LayerConfig(
        routed, formula, shared, shared_width > 0, has_shared_gate, has_residual,
        returns_routing, router_dtype, parts,
    )  # fmt: skip


def _front_bytes(moe: DecodeConfig, formula: RouterFormula, weight_bytes: int, parts: int) -> int:
    """Return the bytes of SBUF per partition alive at once before the routed experts.

    Their own weights take the place of norm and router when these are done.
    """
    count, experts = moe.h_axis.count, moe.num_experts
    kept = 2 * count * moe.T + count * (experts // parts) * weight_bytes
    kept += router_bytes(moe.T, experts, formula) + SMALL_TILES_BYTES
    norm = norm_bytes(moe.T, moe.h_axis, formula.has_norm)
    wide = 4 * count * min(PARTITIONS, moe.T) if weight_bytes == 4 else 0
    return kept + max(norm, wide)


def check_decode_layer(config: LayerConfig, operands: dict[str, Any]) -> None:
    """Raise ValueError unless the operands are those the block is compiled for.

    Args:
        config: of `make_layer_config`.
        operands: arrays by the names of `decode_layer`'s parameters; None or absent for none.
    """
    for name, (shape, dtypes) in expected_operands(config).items():
        array = operands.get(name)
        if shape is None:
            if array is not None:
                raise ValueError(
                    f"{name}: is given, but the configuration has none. Leave it out, or say so in"
                    " make_layer_config()."
                )
            continue
        if array is None:
            raise ValueError(
                f"{name}: is missing, must be {list(shape)}. Pass it, or leave it out of"
                " make_layer_config()."
            )
        if tuple(array.shape) != shape:
            raise ValueError(
                f"{name}: shape {list(array.shape)} must be {list(shape)}. {_way_out(name)}"
            )
        if str(array.dtype) not in dtypes:
            raise ValueError(
                f"{name}: dtype {array.dtype} must be {' or '.join(dtypes)}. Convert it first."
            )


def _way_out(name: str) -> str:
    if name.startswith("router_weight") or name == "shared_gate":
        return "Use pack_router_weight() with axis and parts of the configuration."
    if name.startswith("shared"):
        return "Use pack_shared_experts() with the configuration."
    return "Build the configuration from the same sizes."


Expected = dict[str, tuple[tuple[int, ...] | None, tuple[str, ...]]]
_FLOATS = ("bfloat16", "float32", "float16")


def expected_operands(config: LayerConfig) -> Expected:
    """Return shape (None: must be absent) and allowed types of every operand of the front.

    The experts' own operands are those of `decode_moe`.
    """
    moe, formula = config.moe, config.formula
    T, H, N = moe.T, moe.H, moe.num_experts
    bf16, float32 = ("bfloat16",), ("float32",)
    matrix = (moe.h_axis.rows, moe.h_axis.count)
    gate_up, down = shared_shapes(config.shared)
    return {
        "hidden": ((T, H), bf16),
        "first_expert": ((1, 1), ("int32",)),
        "router_weight": (
            (config.router_parts, *matrix, N // config.router_parts),
            (config.router_dtype,),
        ),
        "norm_weight": ((1, H) if formula.has_norm else None, _FLOATS),
        "router_bias": ((1, N) if formula.has_bias else None, float32),
        "selection_bias": ((1, N) if formula.has_selection_bias else None, float32),
        "shared_gate_up": (gate_up if config.has_shared else None, bf16),
        "shared_down": (down if config.has_shared else None, bf16),
        "shared_gate": ((1, *matrix, 1) if config.has_shared_gate else None, bf16),
        "residual": ((T, H) if config.has_residual else None, ("bfloat16", "float32")),
    }
