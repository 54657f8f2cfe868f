"""What a product for Hopper GPUs is compiled for.

Axes: E experts, R rows, H hidden, I intermediate.
"""

import math
from dataclasses import dataclass

from neuron_moe.backends.cuda.records import KernelFormula
from neuron_moe.backends.cuda.tiles import HopperTile

BLOCK_ROWS, PART_ROWS, BLOCK_DEPTH = 128, 64, 64  # of a tile, of a consumer, of a step
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Product:
    """One compiled form of `hopper.multiply`.

    Attributes:
        tile: its sizes.
        num_experts: E.
        height: rows of an expert's result, where rows are summed.
        depth: of the product; 0 where rows are summed.
        width: columns of the result, gates and ups both.
        top_k: pairs of a token.
        programs: multiprocessors.
        formula: of the experts.
        gathers: operand whose rows are read by token: 'none', 'left' or 'right'.
        sums_rows: each expert's left rows, transposed, times its right rows.
        right_is_transposed: matrices are stored as [E, width, depth].
        has_bias: of the columns.
        activates: stores the activation.
        keeps: stores the product as well.
        copies: stores the gathered left rows, in their order, as well.
    """

    tile: HopperTile
    num_experts: int
    height: int
    depth: int
    width: int
    top_k: int
    programs: int
    formula: KernelFormula
    gathers: str = "none"
    sums_rows: bool = False
    right_is_transposed: bool = False
    has_bias: bool = False
    activates: bool = False
    keeps: bool = False
    copies: bool = False

    @property
    def is_paired(self) -> bool:
        """Columns are gates, then ups, and a tile takes as many of both."""
        return self.activates and self.formula.has_gate

    @property
    def columns(self) -> int:
        """Columns that tiles walk over: of the gates alone, where paired."""
        return self.width // 2 if self.is_paired else self.width

    @property
    def span(self) -> int:
        """Those columns of a tile."""
        return self.tile.width // 2 if self.is_paired else self.tile.width

    @property
    def column_tiles(self) -> int:
        """Tiles side by side."""
        return math.ceil(self.columns / self.span)

    @property
    def piece_width(self) -> int:
        """Columns that one store takes."""
        return self.tile.width // 4

    @property
    def producer_warps(self) -> int:
        """Warps that load; gathers take them all."""
        return self.tile.producer_warps if self.gathers == "none" else 4

    @property
    def arrivals(self) -> int:
        """Arrivals that fill a stage: of TMA, and of each thread whose gathered rows are there."""
        return 1 if self.gathers == "none" else 1 + 32 * self.producer_warps

    @property
    def loaded_bytes(self) -> int:
        """Bytes of a step that TMA loads."""
        left = 0 if self.gathers == "left" else BLOCK_ROWS
        right = 0 if self.gathers == "right" else self.tile.width
        return (left + right) * BLOCK_DEPTH * _ELEMENT_BYTES

    @property
    def gathered_rows(self) -> int:
        """Rows of a step that are read by token."""
        return BLOCK_DEPTH if self.sums_rows else BLOCK_ROWS

    @property
    def gathered_columns(self) -> int:
        """Columns of a step that are read by token."""
        if not self.sums_rows:
            return BLOCK_DEPTH
        return BLOCK_ROWS if self.gathers == "left" else self.tile.width

    @property
    def line(self) -> int:
        """Elements from one token's row to the next."""
        if not self.sums_rows:
            return self.depth
        return self.height if self.gathers == "left" else self.width

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread; what the producers leave."""
        return 232 if self.gathers == "none" else 216

    @property
    def producer_registers(self) -> int:
        """Registers of a producer's thread."""
        return 40 if self.gathers == "none" else 72

    @property
    def left_block(self) -> list[int]:
        """Elements of the left operand that a step takes."""
        return [BLOCK_DEPTH, BLOCK_ROWS] if self.sums_rows else [BLOCK_ROWS, BLOCK_DEPTH]

    @property
    def right_block(self) -> list[int]:
        """Elements of the right operand that one load takes."""
        return [self.span, BLOCK_DEPTH] if self.right_is_transposed else [BLOCK_DEPTH, self.span]

    @property
    def right_operand(self) -> list[int]:
        """Elements of the right operand that a step takes, gates and ups side by side."""
        width = self.tile.width
        return [width, BLOCK_DEPTH] if self.right_is_transposed else [BLOCK_DEPTH, width]

    @property
    def stored_block(self) -> list[int]:
        """Elements that one store takes."""
        return [PART_ROWS, self.piece_width]
