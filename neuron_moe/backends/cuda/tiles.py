"""How large the tiles of the cuda kernels are, by the rows an expert has."""

import math
from dataclasses import dataclass, replace

from neuron_moe.backends.cuda.tuned_tiles import HOPPER_TILES

ROW_TILES = (16, 32, 64, 128)
MOST_PAIRS_UNSORTED = 512
_WIDE = 2560  # hidden sizes from which a copy of the rows pays for sums over rows


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


@dataclass(frozen=True)
class HopperTile:
    """How a product runs in `hopper`, in tiles of 128 rows.

    Attributes:
        group: row tiles of one expert, at most, side by side that share columns.
        producer_warps: that load, where no rows are gathered.
        gathers: reads rows by token; else a copy of them in their order, made before.
        width: columns of the result.
        stages: steps loaded ahead.
    """

    group: int = 8
    producer_warps: int = 4
    gathers: bool = True
    width: int = 256
    stages: int = 4


def hopper_tile(product: str, hidden_size: int, intermediate_size: int) -> HopperTile:
    """Return how a product of a layer's experts runs on a Hopper GPU.

    Args:
        product: 'first', 'second', gradients of their rows 'first_back' and 'second_back', or of
            their weights, 'first_weights' and 'second_weights'.
        hidden_size: H.
        intermediate_size: I.
    """
    measured = HOPPER_TILES.get((product, hidden_size, intermediate_size))
    if measured is not None:
        return HopperTile(*measured)
    is_wide = hidden_size >= _WIDE
    return HopperTile(gathers=not (is_wide and product.endswith("weights")))


def elementwise_tile(columns: int) -> tuple[int, int, int]:
    """Return the columns, rows and warps of a program that works element by element.

    Whole rows where they are powers of two, else parts of 256: the fastest measured on an H200.

    Args:
        columns: of all.
    """
    if columns in (1024, 2048):
        return columns, 1, columns // 256
    return min(256, 1 << (columns - 1).bit_length()), 2, 4


def rows_of_tile(num_pairs: int, num_experts: int) -> int:
    """Return the rows of a tile: the smallest that a mean expert fills at most once."""
    mean = num_pairs / num_experts
    return next((rows for rows in ROW_TILES if mean <= rows), ROW_TILES[-1])


def product_tile(rows: int, element_bytes: int, form: str = "plain") -> Tile:
    """Return the tile of [R, depth] @ [E, depth, width].

    128 x 256 x 64 was the fastest form measured on an H200 for 16-bit types; few rows are bound by
    the weights, which narrow tiles spread over more programs.

    Args:
        rows: of a row tile.
        element_bytes: of the operands.
        form: of the weights, see `records.Form`; a line of MXFP4 is a depth of two.
    """
    if element_bytes > 2:
        return Tile(rows, 64, 32, 8, 4, 2)
    depth = 32 if form == "mxfp4" else 64
    if rows < 64:
        return Tile(rows, 128, depth, 8, 4, 4)
    return Tile(rows, 256, depth, 8, 8, 3)


def transposed_tile(rows: int, element_bytes: int) -> Tile:
    """Return the tile of an expert's rows transposed times its rows; `depth` divides `rows`.

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
_DECODE_WIDTH, _DECODE_DEPTH, _LEAST_STEPS = 128, 128, 2
_DECODE_STAGES = 3


def decode_tile(experts: int, depth: int, width: int, form: str = "plain") -> DecodeTile:
    """Return the tile that spreads the weights of some experts evenly over the GPU.

    Args:
        experts: whose weights are read, at most.
        depth: lines of their matrices.
        width: of the product.
        form: of the weights, see `records.Form`.
    """
    # Bytes loaded ahead stay in registers where groups of them are decoded: other programs wait.
    block, stages = (64, 1) if form == "mxfp4" else (_DECODE_DEPTH, _DECODE_STAGES)
    return _spread(experts, depth, width, DecodeTile(16, _DECODE_WIDTH, block, 0, stages=stages))


def token_tile(experts: int, depth: int, width: int) -> DecodeTile:
    """Return the tile for one token's plain weights: a half or a quarter, the fastest on an H200.

    Args:
        experts: whose weights are read.
        depth: lines of their matrices.
        width: of the product.
    """
    half = _DECODE_WIDTH // 2
    if experts * math.ceil(width / half) <= _DECODE_PROGRAMS:
        return _spread(experts, depth, width, DecodeTile(16, half, _DECODE_DEPTH // 2, 0, warps=2))
    return _spread(experts, depth, width, DecodeTile(16, _DECODE_WIDTH, _DECODE_DEPTH // 2, 0))


def _spread(experts: int, depth: int, width: int, tile: DecodeTile) -> DecodeTile:
    """Return a tile whose programs take such parts of the depth that they fill the GPU."""
    programs = experts * math.ceil(width / tile.width)
    parts = max(1, min(_DECODE_PROGRAMS // programs, depth // (_LEAST_STEPS * tile.depth)))
    steps = math.ceil(depth / parts / tile.depth)
    return replace(tile, depth_part=steps * tile.depth)
