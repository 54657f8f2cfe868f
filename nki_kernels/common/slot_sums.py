"""The sum over a token's slots, of `combine`: how it is cut, and about how long it takes."""

from __future__ import annotations

from nki_kernels.common.chip import chip_in_force, core
from nki_kernels.common.token_tiles import split_tokens

_ROWS_BYTES = 75_000  # per partition for the gathered rows of one tile; two tiles are in flight
_BESIDE_NS = 7_000.0  # simulated: before its first gather and after its last
_ROWS_OF_A_TRIP = 6  # gathered tiles of rows, where a fold has fewer pairs
_TERMS = 2  # of a weight beside bfloat16 slots


def piece_size(hidden_size: int, rows_per_token: int, slots_bytes: int) -> int:
    """Return how many columns of H to gather at once: all, or equal multiples of 64."""
    pieces = 1
    while rows_per_token * ((hidden_size + pieces - 1) // pieces) * slots_bytes > _ROWS_BYTES:
        pieces += 1
    return ((hidden_size // 64 + pieces - 1) // pieces) * 64


def sum_ns(
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


def tiles_of_trip(pairs: int) -> int:
    """Return how many tiles of folds of so many pairs a trip adds up."""
    return max(1, _ROWS_OF_A_TRIP // pairs)


def fold_tiles(tiles: int) -> int:
    """Return the tiles of folds of a core with so many tiles of tokens; max8 takes 8 at least, and
    loops may end some tiles beyond.
    """
    beyond = sum(tiles_of_trip(pairs) - 1 for pairs in range(2, _ROWS_OF_A_TRIP))
    return -(-(tiles + beyond) // 8) * 8
