"""The sum over a token's slots, of `combine`: how it is cut, and about how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, exp

from nki_kernels.common.chip import PARTITIONS, chip_in_force, core

_ROWS_BYTES = 75_000  # per partition for the gathered rows of one tile; two tiles are in flight
_BESIDE_NS = 7_000.0  # simulated: before its first gather and after its last
_ROWS_OF_AN_ITERATION = 6  # gathered tiles of rows, where a fold has fewer pairs
# Simulated: to move pairs to the front, in all and of each that a token may have; before and after
# the loops over folds; an iteration beyond its gathers.
_FRONT_NS, _COLUMN_NS, _FOLDS_NS, _ITERATION_NS = 5_000.0, 1_000.0, 18_000.0, 6_000.0
_TERMS = 2  # of a weight beside bfloat16 slots


def piece_size(hidden_size: int, rows_per_token: int, slots_bytes: int) -> int:
    """Return how many columns of H to gather at once: all, or equal multiples of 64."""
    pieces = 1
    while rows_per_token * ((hidden_size + pieces - 1) // pieces) * slots_bytes > _ROWS_BYTES:
        pieces += 1
    return max(1, (hidden_size // 64 + pieces - 1) // pieces) * 64


def spread_of(num_pairs: float, top_k: int, chance: float, num_rows: int) -> tuple[float, ...]:
    """Return how many rows have 0, 1, ... K pairs here, on average.

    Args:
        num_pairs: of all rows.
        top_k: K.
        chance: that a choice of a token, wherever it goes, falls here.
        num_rows: that are here: all tokens, or those with a pair.
    """
    tokens = num_pairs / (top_k * chance)
    some = [
        tokens * comb(top_k, count) * chance**count * (1.0 - chance) ** (top_k - count)
        for count in range(1, top_k + 1)
    ]
    return (max(0.0, num_rows - sum(some)), *some)


def sum_ns(
    spread: Sequence[float], columns: int, hidden_size: int, num_parts: int, num_cores: int
) -> float:
    """Return about how long a launch with bfloat16 slots takes: its bytes of HBM, the descriptors
    of its gathers or its products, which are made for choices without an expert, too.

    Args:
        spread: tokens with 0, 1, ... K pairs.
        columns: C.
        hidden_size: H.
        num_parts: P.
        num_cores: physical cores of the launch.
    """
    chip = chip_in_force()
    num_tokens = round(sum(spread))
    rows = num_parts * sum(min(pairs, columns) * many for pairs, many in enumerate(spread))
    tokens = -(-num_tokens // num_cores)  # of a core
    tiles = -(-tokens // PARTITIONS)
    gathers = tiles * columns * num_parts
    pieces = -(-hidden_size // piece_size(hidden_size, columns * num_parts, 2))
    named_ns = gathers * pieces * (chip.swdge_ns + tokens / tiles * chip.swdge_index_ns)
    product_ns = gathers * _TERMS * hidden_size / chip.tensor_clock_ghz
    moved_ns = (rows + num_tokens) * hidden_size * 2 / chip.hbm_bytes_per_ns
    return _BESIDE_NS * core().transfers + max(moved_ns, named_ns, product_ns)


def best_sum_ns(
    spread: Sequence[float], num_experts: int, hidden_size: int, num_parts: int, num_cores: int
) -> tuple[int, float]:
    """Return the columns of the fastest sum, 0 for one of each choice, and about how long it takes.

    Args:
        spread, hidden_size, num_parts, num_cores: as of `sum_ns`.
        num_experts: E, of this rank.
    """
    top_k = len(spread) - 1
    sizes, most = (hidden_size, num_parts, num_cores), min(top_k, num_experts)
    found = [(0, sum_ns(spread, top_k, *sizes))]
    if spread[0] > 0 or most < top_k or sum(spread[1:top_k]) > 0:
        columns = range(1, most + 1) if num_parts == 1 else (most,)
        found += [(count, front_ns(spread, count, most, *sizes)) for count in columns]
    return min(found, key=lambda each: each[1])


def front_ns(
    spread: Sequence[float],
    columns: int,
    most: int,
    hidden_size: int,
    num_parts: int,
    num_cores: int,
) -> float:
    """Return about how long it takes to move pairs to the front, fold those of tokens with more
    than C, and sum.

    Args:
        spread, hidden_size, num_parts, num_cores: as of `sum_ns`.
        columns: C.
        most: pairs that a token may have.
    """
    chip, made = chip_in_force(), core()
    total = sum_ns(spread, columns, hidden_size, num_parts, num_cores)
    total += (_FRONT_NS + _COLUMN_NS * most) * made.steps
    if columns == most:
        return total
    total += _FOLDS_NS * made.transfers
    gather_ns = chip.swdge_ns + PARTITIONS * chip.swdge_index_ns
    gather_ns = max(gather_ns, PARTITIONS * hidden_size * 2 * num_cores / chip.hbm_bytes_per_ns)
    begin = 0
    for pairs in range(most, columns, -1):
        size = tiles_of_iteration(pairs)
        end = _most_of_a_partition(sum(spread[pairs:]) / (PARTITIONS * num_cores), num_cores)
        iterations = -(-max(0, end - begin) // size)
        begin += iterations * size
        total += iterations * (size * pairs * gather_ns + _ITERATION_NS * made.transfers)
    return total


def _most_of_a_partition(mean: float, num_cores: int) -> int:
    """Return how many a partition has at most, as likely as not, of what each has so many of."""
    below, chance, most = exp(-mean), exp(-mean), 0
    while below < 0.5 ** (1.0 / (PARTITIONS * num_cores)):
        most += 1
        chance *= mean / most
        below += chance
    return most


def tiles_of_iteration(pairs: int) -> int:
    """Return how many tiles of folds of so many pairs an iteration adds up."""
    return max(1, _ROWS_OF_AN_ITERATION // pairs)


def fold_tiles(tiles: int) -> int:
    """Return the tiles of folds of a core with so many tiles of tokens; max8 takes 8 at least, and
    loops may end some tiles beyond.
    """
    beyond = sum(tiles_of_iteration(pairs) - 1 for pairs in range(2, _ROWS_OF_AN_ITERATION))
    return -(-(tiles + beyond) // 8) * 8
