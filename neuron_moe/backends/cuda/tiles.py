"""How large the tiles of the cuda kernels are, by the rows an expert has."""

from dataclasses import dataclass

ROW_TILES = (16, 32, 64, 128)


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
