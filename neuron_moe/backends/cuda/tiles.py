"""How large the tiles of the cuda kernels are, by the rows an expert has."""

import math
from dataclasses import dataclass

ROW_TILES = (16, 32, 64, 128)
MOST_PAIRS_UNSORTED = 512


@dataclass(frozen=True, slots=True)
class Tile:
    """One product's tile.

    Attributes:
        rows: of the left operand.
        width: columns of the result.
        depth: of one step.
        group: row tiles side by side that share columns.
        warps: of a program.
        stages: steps loaded ahead.
    """

    rows: int
    width: int
    depth: int
    group: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class HopperTile:
    """One product's tile in `hopper`, 128 rows by 64 of depth.

    Attributes:
        width: columns of the result.
        group: row tiles side by side that share columns.
        stages: steps loaded ahead.
        skew: steps by which one of two consumers starts later.
        pieces: of a half tile, stored one after the other.
        consumers: 2, a warpgroup each, or one of two warpgroups.
        producer_warps: of the warps that load.
        lag: steps between asking for gathered rows and handing them on, at most stages - 2.
    """

    width: int = 256
    group: int = 8
    stages: int = 4
    skew: int = 0
    pieces: int = 1
    consumers: int = 2
    producer_warps: int = 4
    lag: int = 2


def rows_of_tile(num_pairs: int, num_experts: int) -> int:
    """Return the rows of a tile: the smallest that a mean expert fills at most once."""
    mean = num_pairs / num_experts
    return next((rows for rows in ROW_TILES if mean <= rows), ROW_TILES[-1])


def product_tile(rows: int, element_bytes: int) -> Tile:
    """Return the tile of [R, depth] @ [E, depth, width].

    128 x 256 x 64 was the fastest form measured on an H200 for 16-bit types; few rows are bound by
    the weights, which narrow tiles spread over more programs.

    Args:
        rows: of a row tile.
        element_bytes: of the operands.
    """
    if element_bytes > 2:
        return Tile(rows, 64, 32, 8, 4, 2)
    if rows < 64:
        return Tile(rows, 128, 64, 8, 4, 4)
    return Tile(rows, 256, 64, 8, 8, 3)


def turned_tile(rows: int, element_bytes: int) -> Tile:
    """Return the tile of an expert's rows turned times its rows; `depth` divides `rows`.

    Args:
        rows: of a row tile of the layout.
        element_bytes: of the operands.
    """
    if element_bytes > 2:
        return Tile(64, 64, min(rows, 32), 8, 4, 2)
    return Tile(128, 256, min(rows, 64), 8, 8, 5)  # row numbers loaded ahead take two stages


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """One product's tile for few tokens.

    Attributes:
        rows: pairs of one expert.
        width: columns of the result.
        depth: of one step.
        depth_part: of one program, a multiple of `depth`.
        warps: of a program.
        stages: steps loaded ahead.
    """

    rows: int
    width: int
    depth: int
    depth_part: int
    warps: int = 4
    stages: int = 4


_DECODE_PROGRAMS = 400  # about three on each multiprocessor
_DECODE_WIDTH, _DECODE_DEPTH, _LEAST_STEPS = 128, 64, 4


def decode_tile(experts: int, depth: int, width: int) -> DecodeTile:
    """Return the tile that spreads the weights of some experts evenly over the GPU.

    Args:
        experts: whose weights are read, at most.
        depth: of the product.
        width: of the product.
    """
    programs = experts * math.ceil(width / _DECODE_WIDTH)
    parts = max(1, min(_DECODE_PROGRAMS // programs, depth // (_LEAST_STEPS * _DECODE_DEPTH)))
    steps = math.ceil(depth / parts / _DECODE_DEPTH)
    return DecodeTile(16, _DECODE_WIDTH, _DECODE_DEPTH, steps * _DECODE_DEPTH)
