"""From what a caller requests to what the decode kernels are compiled for."""

from __future__ import annotations

from nki_kernels.common.axes import AxisTiles, tile_axis, tile_axis_in_fours
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.formula import EXPERT_ACTIVATIONS, ExpertFormula, why_no_expert
from nki_kernels.common.mx import is_mx_format
from nki_kernels.common.tiles import needs_product
from nki_kernels.common.weight_formats import MX_GROUP, MX_WORD_BYTES, WEIGHT_FORMATS
from nki_kernels.decode.config import (
    MAX_EXPERTS,
    MAX_TOKENS,
    MAX_TOP_K,
    DecodeConfig,
    DecodeRequest,
    DecodeSizes,
    WeightForm,
    may_give_rows,
)
from nki_kernels.decode.fit import fit_decode

_PLAIN, _AUTO = WeightForm(), DecodeRequest()
_SWIGLU_SCALES = (1.0, 1.702)  # what the Scalar engine has in one instruction
_ALLOWED = {
    "mode": ("auto", "selective", "all"),
    "shard": ("auto", "experts", "intermediate"),
    "layout": ("ehi", "packed"),
    "format": (*WEIGHT_FORMATS, *MX_WORD_BYTES),
    "scaling": ("post", "pre", "none"),
    "down_scale": ("none", "expert", "channel"),
    "output_dtype": ("float32", "bfloat16"),
    "sums": ("auto", "sbuf"),
    "chip": ("trn2", "trn3"),
}


def make_decode_config(
    sizes: DecodeSizes,
    formula: ExpertFormula,
    weights: WeightForm = _PLAIN,
    request: DecodeRequest = _AUTO,
) -> DecodeConfig:
    """Return what `decode_moe` is compiled for.

    Args:
        sizes: of a step on one rank.
        formula: what an expert computes.
        weights: layout of its weights in HBM.
        request: mode, split and buffers as far as the cost model is not to choose them.

    Raises:
        ValueError: a value outside the limits of the kernel.

    Example:
        >>> sizes = DecodeSizes(T=1, H=2880, I=360, E=128, K=4, num_experts=128)
        >>> make_decode_config(sizes, ExpertFormula()).mode
        'selective'
    """
    _check_sizes(sizes)
    _check_formula(formula, weights, request)
    _check_names(mode=request.mode, shard=request.shard)
    _check_names(chip=request.chip)
    _check_names(layout=weights.layout, format=weights.format, down_scale=weights.down_scale)
    _check_names(scaling=request.scaling, output_dtype=request.output_dtype)
    if weights.format == "bfloat16" and (weights.has_scales or weights.down_scale != "none"):
        raise ValueError(
            f"has_scales={weights.has_scales}, down_scale={weights.down_scale!r}: bfloat16 weights"
            " have none. Use a float8 format."
        )
    if is_mx_format(weights.format):
        _check_mx(sizes, weights, request)
    H, I = sizes.H, sizes.I  # noqa: E741
    h_axis = _hidden_axis(H, weights)
    draft = DecodeConfig(
        sizes.T,
        H,
        I,
        sizes.E,
        sizes.K,
        sizes.num_experts,
        sizes.num_cores,
        formula,
        weights,
        request.mode,
        request.shard,
        request.scaling,
        request.output_dtype,
        chunks=1,
        weight_buffers=2,
        unroll=2,
        h_axis=h_axis,
        i_axis=tile_axis(I),
        chip=request.chip,
        gives_rows=may_give_rows(sizes.T, H, h_axis, weights),
    )
    return fit_decode(draft, request)


def why_not_decoded(formula: ExpertFormula) -> str:
    """Say why the decode kernels do not compute a formula; '' if they do."""
    names = ("sigmoid",) if formula.gates_itself else EXPERT_ACTIVATIONS
    scales = _SWIGLU_SCALES if formula.gates_itself else (1.0,)
    if formula.has_gate and formula.activation in names and formula.scale in scales:
        return ""
    return (
        f"activation={formula.activation!r}, scale={formula.scale:g},"
        f" has_gate={formula.has_gate}, gates_itself={formula.gates_itself}: the decode kernel"
        f" has gated experts with {', '.join(EXPERT_ACTIVATIONS)} and scale 1, and"
        " gates_itself=True with sigmoid and scale"
        f" {' or '.join(f'{scale:g}' for scale in _SWIGLU_SCALES)}."
    )


def _check_formula(formula: ExpertFormula, weights: WeightForm, request: DecodeRequest) -> None:
    """Raise ValueError unless the kernel computes this formula."""
    reason = why_not_decoded(formula)
    if reason:
        raise ValueError(f"{reason} Compute other experts with blockwise_moe or in torch.")
    why = why_no_expert(formula)
    if why:
        raise ValueError(why)
    is_capped = formula.up_softcap != 0.0 and weights.down_scale == "expert"
    if is_capped or (needs_product(formula) and request.scaling == "pre"):
        raise ValueError(
            f"up_softcap={formula.up_softcap:g}, gate_softcap={formula.gate_softcap:g},"
            f" activation={formula.activation!r}: the decode kernel has no tile for them beside"
            f" down_scale={weights.down_scale!r} and scaling={request.scaling!r}. Use a scale per"
            " channel and scaling='post', or blockwise_moe."
        )


def _hidden_axis(size: int, weights: WeightForm) -> AxisTiles:
    """Cut the hidden axis as the weights are stored."""
    if is_mx_format(weights.format) or weights.in_fours:
        return tile_axis_in_fours(size)
    return _packed_axis(size) if weights.layout == "packed" else tile_axis(size)


def _packed_axis(size: int) -> AxisTiles:
    """Cut an axis into the fewest tiles, a partition owning consecutive elements.

    The last partition may own fewer: the packed layout fills up with zeros.
    """
    count = -(-size // PARTITIONS)
    return AxisTiles(size, -(-size // count), count, size // count, True)


def _check_mx(sizes: DecodeSizes, weights: WeightForm, request: DecodeRequest) -> None:
    """Raise ValueError unless the kernel takes MX weights so."""
    if request.chip != "trn3":
        raise ValueError(
            f"format={weights.format!r}: {request.chip} multiplies no MX words. Set chip='trn3', or"
            " re-code the weights as float8_e5m2, which loses nothing of MXFP4."
        )
    if weights.layout != "packed" or weights.has_scales or weights.down_scale != "none":
        raise ValueError(
            f"layout={weights.layout!r}, has_scales={weights.has_scales},"
            f" down_scale={weights.down_scale!r}: MX words have scales of their own and are packed."
            " Set layout='packed', and leave the others."
        )
    if sizes.H % MX_GROUP:
        raise ValueError(f"H={sizes.H}: must be a multiple of {MX_GROUP}, the group of MX formats.")


def _check_sizes(sizes: DecodeSizes) -> None:
    """Raise ValueError unless the kernel takes these sizes."""
    T, H, E, K, num_experts = sizes.T, sizes.H, sizes.E, sizes.K, sizes.num_experts
    if not 1 <= T <= MAX_TOKENS:
        raise ValueError(
            f"T={T}: must be 1 to {MAX_TOKENS}. Use the prefill kernel for more tokens."
        )
    if H < 64 or H % 16:
        raise ValueError(f"H={H}: must be a multiple of 16, at least 64. Pad the weights.")
    if sizes.I < 1:
        raise ValueError(f"I={sizes.I}: must be at least 1.")
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(
            f"E={E}: must be 1 to {MAX_EXPERTS} experts of a rank. Use more expert parallelism."
        )
    if num_experts < E:
        raise ValueError(f"num_experts={num_experts}: must be at least E={E}.")
    if not 1 <= K <= min(MAX_TOP_K, num_experts):
        raise ValueError(f"K={K}: must be 1 to {MAX_TOP_K}, and at most num_experts.")
    if sizes.num_cores not in (1, 2):
        raise ValueError(f"num_cores={sizes.num_cores}: must be 1 or 2.")


def _check_names(**choices: str) -> None:
    """Raise ValueError for an option whose value the kernel does not know."""
    for name, value in choices.items():
        if value not in _ALLOWED[name]:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(_ALLOWED[name])}.")
