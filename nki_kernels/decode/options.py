"""From what a caller asks for to what the decode kernels are compiled for."""

from __future__ import annotations

from nki_kernels.common.plans import tile_axis
from nki_kernels.decode.config import (
    DecodeConfig,
    check_choices,
    check_sizes,
    packed_axis,
)
from nki_kernels.decode.fit import SBUF_BYTES, choose_decode
from nki_kernels.prefill.config import limits


def make_decode_config(
    *,
    T: int,
    H: int,
    I: int,  # noqa: E741  the axis letter
    E: int,
    K: int,
    num_experts: int,
    num_cores: int = 2,
    mode: str = "auto",
    shard: str = "auto",
    weight_layout: str = "ehi",
    weight_format: str = "bfloat16",
    activation: str = "silu",
    gate_limits: tuple[float | None, float | None] = (None, None),
    up_limits: tuple[float | None, float | None] = (None, None),
    up_offset: float = 0.0,
    scaling: str = "post",
    has_gate_up_bias: bool = False,
    has_down_bias: bool = False,
    has_scales: bool = False,
    down_scale: str = "none",
    output_dtype: str = "float32",
    chunks: int = 0,
    weight_buffers: int = 0,
    reserved_bytes: int = 0,
    front_ns: float = 0.0,
) -> DecodeConfig:
    """Return what `decode_moe` is compiled for.

    Args:
        T: tokens of a step, 1 to 256.
        H: hidden size.
        I: intermediate size of this rank.
        E: experts of this rank.
        K: choices of a token, 1 to 16.
        num_experts: experts of all ranks.
        num_cores: physical cores of the launch (LNC), 1 or 2.
        mode: selective (read the touched experts), all, or auto.
        shard: whether the cores split the experts or the intermediate axis, or auto.
        weight_layout: ehi ([E, H, 2I] and [E, I, H]) or packed.
        weight_format: bfloat16, float8_e4m3 or float8_e5m2.
        activation: silu, gelu, gelu_tanh, relu, or swiglu_oai (x * sigmoid(1.702 x)).
        gate_limits, up_limits: (lower, upper) clamps of the projections.
        up_offset: added to the up projection after its clamp (1 for SwiGLU-OAI).
        scaling: what the affinity multiplies: the expert's output (post), its input (pre), nothing.
        has_gate_up_bias, has_down_bias: which biases there are.
        has_scales: whether the gate and up weights have a scale per output channel.
        down_scale: whether the down weights have a scale, per expert or per output channel.
        output_dtype: float32 or bfloat16.
        chunks, weight_buffers: parts of an expert, and parts on chip at once; 0 lets the cost model choose.
        reserved_bytes: SBUF per partition to leave to others.
        front_ns: time until the choices are on chip, where the same launch makes them.

    Raises:
        ValueError: a value outside the limits of the kernel.

    Example:
        >>> config = make_decode_config(T=1, H=2880, I=360, E=128, K=4, num_experts=128)
        >>> config.mode
        'selective'
    """
    check_sizes(T, H, I, E, K, num_experts, num_cores)
    check_choices(
        mode=mode, shard=shard, weight_layout=weight_layout, weight_format=weight_format,
        activation=activation, scaling=scaling, down_scale=down_scale, output_dtype=output_dtype,
    )  # fmt: skip
    if weight_format == "bfloat16" and (has_scales or down_scale != "none"):
        raise ValueError(
            f"has_scales={has_scales}, down_scale={down_scale!r}: bfloat16 weights have none. "
            "Use a float8 format."
        )
    h_axis = packed_axis(H) if weight_layout == "packed" else tile_axis(H)
    config = DecodeConfig(
        T, H, I, E, K, num_experts, num_cores, mode, shard, weight_layout, weight_format,
        activation, limits(*gate_limits), limits(*up_limits), up_offset, scaling,
        has_gate_up_bias, has_down_bias, has_scales, down_scale, output_dtype,
        1, 2, 2, False, h_axis, tile_axis(I), "",
    )  # fmt: skip
    return choose_decode(config, chunks, weight_buffers, SBUF_BYTES - reserved_bytes, front_ns)
