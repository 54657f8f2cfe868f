"""What the router kernel keeps in SBUF: the table that allocation and accounting both read."""

from __future__ import annotations

from typing import Any, NamedTuple

import nki.language as nl

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.memory import Tiles, small_tiles, table_bytes, tiles
from nki_kernels.common.router_choice import AT_ONCE, num_best, ranks_scores
from nki_kernels.route.config import RouterConfig, num_rows

PIECE = 1024  # columns that GpSimd normalises at once
_SMALL_TILES_BYTES = 1024  # sums, scales and single columns


class RouterTable(NamedTuple):
    """The buffers of one core; H / 128 rounded up is C."""

    hidden: Tiles  # [128 tokens, 128 C], one per tile in flight, two more to normalise
    normed: Tiles  # one per tile in flight; so is `transposed`
    squares: Tiles  # [128 tokens, H], one
    scaled: Tiles  # [128 tokens, columns that GpSimd normalises at once]
    transposed: Tiles  # [128 of H, C, 128 tokens]
    weight: Tiles  # [128 of H, C, E], transposed, and a gate's column
    norm_weight: Tiles  # [128, H], the same on all partitions; so are the next two
    bias: Tiles  # [128, E]
    selection_bias: Tiles
    scores: Tiles  # [128, E or more], temporaries of the choice, biases included
    affinities: Tiles  # [128, tiles * K]
    chosen: Tiles
    spoils: Tiles  # [128, tiles], of tokens that hold no numbers
    sums: Tiles  # [128, tiles], two
    best: Tiles  # [128, tiles, K filled up to eights], if that is more than K
    positions: Tiles  # likewise
    gates: Tiles  # [128, tiles]


def router_table(config: RouterConfig, num_tokens: int, in_flight: int) -> RouterTable:
    """Return the buffers.

    Args:
        config: what the kernel is compiled for.
        num_tokens: of this core.
        in_flight: tiles of hidden states at once.
    """
    formula, E, H = config.formula, config.num_experts, config.hidden_size
    hidden, operand = element_type(config.hidden_dtype), operand_type(config)
    chunks = (H + PARTITIONS - 1) // PARTITIONS
    columns = (num_tokens + PARTITIONS - 1) // PARTITIONS * formula.top_k
    norms = 1 if config.has_norm else 0
    biases = 1 if formula.has_bias else 0
    selection_biases = 1 if formula.has_selection_bias else 0
    scores = (7 if ranks_scores(formula) else 4) + biases + selection_biases
    best = (PARTITIONS, columns // formula.top_k, num_best(formula))
    apart = 1 if num_best(formula) > formula.top_k else 0
    return RouterTable(
        hidden=tiles(
            in_flight + (2 * norms if in_flight > 1 else 0),
            (PARTITIONS, chunks * PARTITIONS),
            hidden,
        ),
        normed=tiles(in_flight * norms, (PARTITIONS, chunks * PARTITIONS), hidden),
        squares=tiles(norms, (PARTITIONS, H), hidden),
        # Where tiles are worked on one after the other, nothing is gained by it.
        scaled=tiles(norms if in_flight > 1 else 0, (PARTITIONS, PIECE), nl.float32),
        transposed=tiles(in_flight, (PARTITIONS, chunks, PARTITIONS), operand),
        weight=tiles(1, (PARTITIONS, chunks, num_rows(config)), operand),
        # It has the type of its operand; float32 is the widest.
        norm_weight=tiles(norms, (PARTITIONS, H), nl.float32),
        bias=small_tiles(biases, (PARTITIONS, E), nl.float32),
        selection_bias=small_tiles(selection_biases, (PARTITIONS, E), nl.float32),
        scores=Tiles(0, (PARTITIONS, max(AT_ONCE, E)), nl.float32, scores),
        affinities=tiles(1, (PARTITIONS, columns), nl.float32),
        chosen=tiles(1, (PARTITIONS, columns), nl.int32),
        spoils=small_tiles(
            int(config.marks_broken), (PARTITIONS, columns // formula.top_k), nl.float32
        ),
        gates=small_tiles(int(config.has_gate), (PARTITIONS, columns // formula.top_k), nl.float32),
        sums=small_tiles(1, (PARTITIONS, columns // formula.top_k), nl.float32),
        best=tiles(apart, best, nl.float32),
        positions=tiles(apart, best, nl.uint32),
    )


def gpsimd_columns(table: RouterTable, hidden_size: int) -> int:
    """Return how many columns of a row GpSimd normalises: about five sixteenths, if any."""
    return hidden_size * 5 // 16 // 64 * 64 if table.scaled.number else 0


def sbuf_bytes(table: RouterTable) -> int:
    """Return the bytes per partition alive at once; kernels call it, and go through no record."""
    buffers = (
        table.hidden,
        table.normed,
        table.squares,
        table.scaled,
        table.transposed,
        table.weight,
        table.norm_weight,
        table.bias,
        table.selection_bias,
        table.scores,
        table.affinities,
        table.chosen,
        table.spoils,
        table.sums,
        table.best,
        table.positions,
        table.gates,
    )
    return table_bytes(buffers) + _SMALL_TILES_BYTES


def element_type(dtype: str) -> Any:
    """Return an element type by its name."""
    if dtype == "float32":
        return nl.float32
    return nl.bfloat16 if dtype == "bfloat16" else nl.float16


def operand_type(config: RouterConfig) -> Any:
    """Return the type of both operands on chip: float32 if either is, else that of the tokens."""
    if config.weight_dtype == "float32":
        return nl.float32
    return element_type(config.hidden_dtype)
