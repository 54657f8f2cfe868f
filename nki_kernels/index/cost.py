"""What a launch of `index_blocks` moves and multiplies."""

from __future__ import annotations

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.token_tiles import TokenTiles, split_tokens
from nki_kernels.common.work_tiles import WorkTileDims, loops_of, sizes_of
from nki_kernels.index.config import NO_WORK_TILES, BlockDims
from nki_kernels.index.memory import COUNT_BANKS
from nki_kernels.index.slot_inverse import num_digits


def cost_index_blocks(
    num_tokens: int,
    top_k: int,
    dims: BlockDims,
    num_cores: int = 2,
    work_tiles: WorkTileDims = NO_WORK_TILES,
) -> KernelCost:
    """Predict the work of a launch.

    Args:
        num_tokens: T.
        top_k: K.
        dims: E, B and N.
        num_cores: physical cores of the launch.
        work_tiles: the lists of work tiles to make.
    """
    num_slots = dims.num_blocks * dims.block_size
    written = 4 * (2 * num_slots + dims.num_blocks + 1 + dims.num_experts + num_tokens * top_k)
    columns = 0
    for core in range(num_cores):
        tokens = split_tokens(num_tokens, core, num_cores)
        last_pair = (tokens.first + PARTITIONS * max(1, tokens.count)) * top_k
        columns += count_columns(tokens, dims)
        columns += max(1, tokens.count) * top_k * num_digits(last_pair) * row_size(dims)
    return KernelCost(4 * num_tokens * top_k, written + work_tile_list_bytes(work_tiles), columns)


def work_tile_list_bytes(work_tiles: WorkTileDims) -> int:
    """Return the bytes of the lists of work tiles."""
    if not work_tiles.num_lanes:
        return 0
    numbers = work_tiles.num_lanes * work_tiles.num_work_tiles * (1 + work_tiles.largest)
    return 4 * (numbers + len(loops_of(sizes_of(work_tiles.largest))))


def count_columns(tokens: TokenTiles, dims: BlockDims) -> int:
    """Return the columns that count the choices of a core, in all and before each tile."""
    before = sum(min(tile, COUNT_BANKS) for tile in range(tokens.count))
    return (max(1, tokens.count) * 2 + before) * dims.num_experts


def rank_columns(tokens: TokenTiles, dims: BlockDims) -> int:
    """Return the columns that count a core's choices, in all and before each token; for lists."""
    return (3 * max(1, tokens.count) + 1) * dims.num_experts


def row_size(dims: BlockDims) -> int:
    """Return the columns of the inverse."""
    return -(-dims.num_blocks * dims.block_size // PARTITIONS)
