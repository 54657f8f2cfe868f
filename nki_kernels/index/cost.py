"""What a launch of `index_blocks` moves and multiplies."""

from __future__ import annotations

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.token_tiles import split_tokens
from nki_kernels.common.visits import VisitDims
from nki_kernels.index.config import NO_VISITS, BlockDims
from nki_kernels.index.slot_inverse import num_digits


def cost_index_blocks(
    num_tokens: int,
    top_k: int,
    dims: BlockDims,
    num_cores: int = 2,
    visits: VisitDims = NO_VISITS,
) -> KernelCost:
    """Predict the work of a launch.

    Args:
        num_tokens: T.
        top_k: K.
        dims: E, B and N.
        num_cores: physical cores of the launch.
        visits: the lists of visits that are asked for.
    """
    num_slots = dims.num_blocks * dims.block_size
    row_size = -(-num_slots // PARTITIONS)
    written = 4 * (2 * num_slots + dims.num_blocks + 1 + dims.num_experts + num_tokens * top_k)
    if visits.num_lanes:
        written += 4 * visits.num_lanes * visits.num_visits * (1 + visits.largest)
        written += 4 * (2 * visits.largest - 1)
    columns = 0
    for core in range(num_cores):
        tokens = split_tokens(num_tokens, core, num_cores)
        count = max(1, tokens.count)
        last_pair = (tokens.first + PARTITIONS * count) * top_k
        columns += count * 2 * dims.num_experts
        columns += count * top_k * num_digits(last_pair) * row_size
    return KernelCost(4 * num_tokens * top_k, written, columns)
