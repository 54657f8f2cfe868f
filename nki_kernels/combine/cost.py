"""What a launch of combine moves and multiplies, and about how long that takes."""

from __future__ import annotations

from nki_kernels.combine.kernel import piece_size
from nki_kernels.common.chip import chip_in_force, core
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.token_tiles import split_tokens

_BESIDE_NS = 7_000.0  # simulated: before its first gather and after its last
_TERMS = 2  # of a weight beside bfloat16 slots


def cost_combine(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    num_parts: int = 1,
    slots_dtype: str = "bfloat16",
    out_dtype: str = "bfloat16",
    num_pairs: int | None = None,
    num_cores: int = 2,
) -> KernelCost:
    """Predict the work of a launch.

    Args:
        num_tokens: T.
        top_k: K.
        hidden_size: H.
        num_parts: P.
        slots_dtype: element type of slots_PSH.
        out_dtype: element type of output_TH.
        num_pairs: choices that have an expert; all by default.
        num_cores: physical cores of the launch.
    """
    pairs = num_tokens * top_k if num_pairs is None else num_pairs
    slots_bytes = 4 if slots_dtype == "float32" else 2
    out_bytes = 4 if out_dtype == "float32" else 2
    read = pairs * num_parts * hidden_size * slots_bytes + num_tokens * top_k * 8
    tiles = sum(split_tokens(num_tokens, core, num_cores).count for core in range(num_cores))
    terms = 1 if slots_dtype == "float32" else _TERMS
    columns = tiles * top_k * num_parts * terms * hidden_size
    return KernelCost(read, num_tokens * hidden_size * out_bytes, columns)


def estimate_combine_ns(
    num_tokens: int, top_k: int, hidden_size: int, num_parts: int, num_pairs: int, num_cores: int
) -> float:
    """Return about how long a launch with bfloat16 slots takes: its bytes of HBM, the descriptors
    of its gathers or its products, which are made for choices without an expert, too.

    Args:
        num_tokens: T.
        top_k: K.
        hidden_size: H.
        num_parts: P.
        num_pairs: choices that have an expert.
        num_cores: physical cores of the launch.
    """
    chip = chip_in_force()
    tokens = split_tokens(num_tokens, 0, num_cores)
    gathers = tokens.count * top_k * num_parts
    pieces = -(-hidden_size // piece_size(hidden_size, top_k * num_parts, 2))
    named_ns = gathers * pieces * (chip.swdge_ns + tokens.rows / tokens.count * chip.swdge_index_ns)
    product_ns = gathers * _TERMS * hidden_size / chip.tensor_clock_ghz
    moved_ns = (num_parts * num_pairs + num_tokens) * hidden_size * 2 / chip.hbm_bytes_per_ns
    return _BESIDE_NS * core().transfers + max(moved_ns, named_ns, product_ns)
