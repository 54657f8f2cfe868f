"""What the fused decode layer is compiled for, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.chip import PARTITIONS, core, fitted_sbuf_bytes, most_sbuf_bytes
from nki_kernels.common.formula import ExpertFormula, RouterFormula
from nki_kernels.common.memory import table_bytes, tiles_bytes
from nki_kernels.common.rank_sums import ALONE, RankSum, check_rank_sum
from nki_kernels.common.router_choice import check_router_formula
from nki_kernels.decode.config import DecodeConfig, DecodeRequest, DecodeSizes, WeightForm
from nki_kernels.decode.fit import SMALL_TILES_BYTES
from nki_kernels.decode.layout import weight_shapes
from nki_kernels.decode.memory import ends_table, token_table
from nki_kernels.decode.norm import norm_bytes
from nki_kernels.decode.options import make_decode_config
from nki_kernels.decode.router import choice_bytes, router_parts, router_table
from nki_kernels.decode.shared import make_shared_config, shared_bytes

_ROUTER_DTYPES = ("bfloat16", "float32")
# Norm and router in front of the experts, per launch and per token: simulated, seven models.
_FRONT_NS, _FRONT_TOKEN_NS = 6000.0, 80.0
_SILU = ExpertFormula()


@dataclass(frozen=True)
class LayerForm(NKIObject):
    """What a layer has around its router and its routed experts.

    Attributes:
        has_norm: RMSNorm in front.
        norm_eps: its epsilon.
        router_dtype: of the router's weight: bfloat16, or float32 (four passes of the tensor
            engine).
        shared_width: intermediate size of this rank's share of the shared experts; 0: there are
            none.
        shared_formula: what these compute.
        shared_format: of their weights: bfloat16, or 8 bits without scales.
        has_shared_gate: a sigmoid gate scales them, token by token.
        has_residual: a residual is added at the end.
        returns_routing: affinities and index are returned too.
        ranks: what becomes of the partial sums of several ranks.
        has_padding: some tokens are padding, which chooses no routed expert.
    """

    has_norm: bool = False
    norm_eps: float = 1e-6
    router_dtype: str = "bfloat16"
    shared_width: int = 0
    shared_formula: ExpertFormula = _SILU
    shared_format: str = "bfloat16"
    has_shared_gate: bool = False
    has_residual: bool = False
    returns_routing: bool = False
    ranks: RankSum = ALONE
    has_padding: bool = False


_BARE, _PLAIN, _AUTO = LayerForm(), WeightForm(), DecodeRequest()


@dataclass(frozen=True)
class LayerConfig(NKIObject):
    """Compile-time constants of `decode_layer`; see `make_layer_config`.

    Attributes:
        moe: the routed experts of this rank.
        router: over the experts of all ranks.
        form: what is around them.
        shared: the shared experts; that of the routed ones if there are none.
        router_parts: cores that share the router's experts.
    """

    moe: DecodeConfig
    router: RouterFormula
    form: LayerForm
    shared: DecodeConfig
    router_parts: int


def make_layer_config(
    sizes: DecodeSizes,
    router: RouterFormula,
    formula: ExpertFormula,
    form: LayerForm = _BARE,
    weights: WeightForm = _PLAIN,
    request: DecodeRequest = _AUTO,
) -> LayerConfig:
    """Return what `decode_layer` is compiled for.

    Args:
        sizes: of a step on one rank; K is the router's.
        router: over the experts of all ranks.
        formula: what a routed expert computes.
        form: norm, shared experts, residual and what is returned.
        weights: layout of the routed experts' weights in HBM.
        request: as for `make_decode_config`; the time in front of the experts is known here.

    Raises:
        ValueError: a value outside the limits of the kernel.
    """
    check_layer_form(form, sizes.T)
    check_router_formula(router, sizes.num_experts)
    if sizes.K != router.top_k:
        raise ValueError(f"K={sizes.K}: must be top_k={router.top_k} of the router.")
    front_ns = (_FRONT_NS + _FRONT_TOKEN_NS * sizes.T) * core(request.chip).steps
    routed = make_decode_config(sizes, formula, weights, replace(request, front_ns=front_ns))
    weight_bytes = 4 if form.router_dtype == "float32" else 2
    parts = router_parts(routed.num_experts, routed.H, weight_bytes, routed.num_cores)
    config = LayerConfig(routed, router, form, routed, parts)
    needed = _front_bytes(config)
    most = most_sbuf_bytes(request.chip)
    if form.shared_width:
        room = fitted_sbuf_bytes(request.chip) - needed
        shared = make_shared_config(
            routed, form.shared_width, form.shared_formula, form.shared_format, room
        )
        config = replace(config, shared=shared)
        needed += shared_bytes(shared)
    if needed > most:
        raise ValueError(
            f"T={routed.T}, H={routed.H}, num_experts={routed.num_experts}: norm, router and shared"
            f" experts need {needed} bytes of SBUF per partition, must be at most"
            f" {most}. Use fewer tokens, a bfloat16 router, or router_topk and"
            " decode_moe one after the other."
        )
    if form.ranks.collective == "all_reduce" and _last_bytes(routed) > most:
        raise ValueError(
            f"T={routed.T}, H={routed.H}: sums over ranks need {_last_bytes(routed)} bytes of SBUF"
            f" per partition, must be at most {most}. Use fewer tokens, or add up after the launch."
        )
    return config


def _last_bytes(moe: DecodeConfig) -> int:
    """Return the bytes of SBUF per partition alive at once where ranks are added up on chip."""
    ends, total = ends_table(moe), token_table(moe).total
    rows = 2 * tiles_bytes(ends.stored)  # of a rank, and of all
    return tiles_bytes(total) + tiles_bytes(ends.received) + rows + SMALL_TILES_BYTES


def check_layer_form(form: LayerForm, num_tokens: int) -> None:
    """Raise ValueError unless the kernel takes this form with T tokens."""
    check_rank_sum(form.ranks, num_tokens, form.has_residual)
    if form.router_dtype not in _ROUTER_DTYPES:
        raise ValueError(
            f"router_dtype={form.router_dtype!r}: must be one of {', '.join(_ROUTER_DTYPES)}."
            " Convert the router's weight; float32 is exact for every type."
        )
    if form.shared_width < 0:
        raise ValueError(f"shared_width={form.shared_width}: must not be negative. 0 is for none.")
    if form.has_shared_gate and not form.shared_width:
        raise ValueError(
            "has_shared_gate=True: there are no shared experts to scale. Give shared_width."
        )


def _router_weight_shape(config: LayerConfig) -> tuple[int, ...]:
    """Return [P, h, H/h, N/P], the shape of the router's weight in HBM."""
    parts, axis = config.router_parts, config.moe.h_axis
    return parts, axis.rows, axis.count, config.moe.num_experts // parts


def _front_bytes(config: LayerConfig) -> int:
    """Return the bytes of SBUF per partition alive at once before the routed experts.

    Their own weights take the place of norm and router when these are done.
    """
    moe, is_wide = config.moe, config.form.router_dtype == "float32"
    dtype = nl.float32 if is_wide else nl.bfloat16
    operands = router_table(_router_weight_shape(config), dtype, moe.T, config.router)
    kept = tiles_bytes(token_table(moe).transposed) + table_bytes(operands) + SMALL_TILES_BYTES
    kept += choice_bytes(moe.T, moe.num_experts, config.router)
    norm = norm_bytes(moe.T, moe.h_axis, config.form.has_norm)
    wide = 4 * moe.h_axis.count * min(PARTITIONS, moe.T) if is_wide else 0
    return kept + max(norm, wide)


def check_decode_layer(config: LayerConfig, operands: dict[str, Any]) -> None:
    """Raise ValueError unless the operands are those the layer is compiled for.

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


_Expected = dict[str, tuple[tuple[int, ...] | None, tuple[str, ...]]]
_FLOATS = ("bfloat16", "float32", "float16")


def expected_operands(config: LayerConfig) -> _Expected:
    """Return shape (None: must be absent) and allowed types of every operand of the front.

    The experts' own operands are those of `decode_moe`.
    """
    moe, router, form = config.moe, config.router, config.form
    T, H, N = moe.T, moe.H, moe.num_experts
    bf16, float32, shared = ("bfloat16",), ("float32",), (form.shared_format,)
    matrix = (moe.h_axis.rows, moe.h_axis.count)
    gate_up, down = weight_shapes(config.shared)
    return {
        "hidden": ((T, H), bf16),
        "first_expert": ((1, 1), ("int32",)),
        "router_weight": (_router_weight_shape(config), (form.router_dtype,)),
        "norm_weight": ((1, H) if form.has_norm else None, _FLOATS),
        "router_bias": ((1, N) if router.has_bias else None, float32),
        "selection_bias": ((1, N) if router.has_selection_bias else None, float32),
        "shared_gate_up": (gate_up if form.shared_width else None, shared),
        "shared_down": (down if form.shared_width else None, shared),
        "shared_gate": ((1, *matrix, 1) if form.has_shared_gate else None, bf16),
        "residual": ((T, H) if form.has_residual else None, ("bfloat16", "float32")),
        "is_real": ((T, 1) if form.has_padding else None, ("int32",)),
    }
