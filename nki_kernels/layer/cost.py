"""What a launch of `prefill_layer` moves and multiplies: its stages, less what stays on chip."""

from __future__ import annotations

import numpy as np

from nki_kernels.combine import cost_combine, cost_folds
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.token_tiles import split_tokens
from nki_kernels.common.work_tiles import Ints, WorkTileLists
from nki_kernels.index.cost import rank_columns, row_size, work_tile_list_bytes
from nki_kernels.index.slot_inverse import WEIGHT_TERMS
from nki_kernels.index.token_search import search_columns
from nki_kernels.index.work_tiles import spread_entries
from nki_kernels.layer.config import (
    PrefillLayerConfig,
    choices_of,
    folds_of,
    has_table,
    places_width,
    shared_work_tiles,
)
from nki_kernels.prefill import cost_blockwise_moe
from nki_kernels.prefill.config import num_partials
from nki_kernels.route import cost_router_topk

_WORD_BYTES, _BF16_BYTES = 4, 2


def cost_prefill_layer(
    config: PrefillLayerConfig,
    lists: WorkTileLists,
    slots: Ints,
    *,
    residual_bytes: int = 2,
    num_whole: int | None = None,
    num_passes: int = 1,
) -> KernelCost:
    """Count bytes and columns of a launch; equal to those of its trace.

    Args:
        config: what the kernel is compiled for.
        lists: the work tiles that its routing comes to.
        slots: [N*B] int32 token of each slot, -1 for padding.
        residual_bytes: of an element of the residual.
        num_whole: tokens that are numbers, which shared experts compute, the first ones; all by
            default.
        num_passes: over the pairs, to list the tokens of an expert that many choose.

    Raises:
        ValueError: as of `cost_blockwise_moe`.
    """
    experts = config.experts
    num_tokens, H, cores = experts.num_tokens, experts.H, experts.num_cores
    pairs_T, folds = np.bincount(slots[slots >= 0], minlength=num_tokens), folds_of(config)
    output = cost_combine(
        num_tokens,
        folds.columns,
        H,
        num_partials(experts),
        out_dtype=str(config.out.out_dtype),
        num_pairs=int(np.where(pairs_T > folds.columns, 1, pairs_T).sum()),
        num_cores=cores,
        dims=config.out,
    )
    output = output + cost_folds(pairs_T, H, folds, cores)
    beside = num_tokens * _WORD_BYTES * (1 + int(config.out.has_gate))
    if config.out.has_residual:
        beside += num_tokens * H * residual_bytes
    stages = (
        _front_cost(config, num_passes),
        cost_blockwise_moe(experts, lists, slots, has_ids=True),
        output,
        KernelCost(beside, 0, 0),
        _shared_cost(config, num_whole),
    )
    total = KernelCost(0, 0, 0)
    for stage in stages:
        total = total + stage
    return total


def _shared_cost(config: PrefillLayerConfig, num_whole: int | None) -> KernelCost:
    """Return the work of shared experts, of the list of their tokens, and of adding their rows."""
    shared = config.shared
    if shared is None:
        return KernelCost(0, 0, 0)
    num_tokens = shared.num_tokens if num_whole is None else num_whole
    slots = np.arange(shared.num_tiles * shared.tile_rows, dtype=np.int32)
    tokens = np.where(slots < num_tokens, slots, -1).astype(np.int32)
    added = KernelCost(shared.num_tokens * shared.H * _BF16_BYTES, len(slots) * _WORD_BYTES, 0)
    return cost_blockwise_moe(shared, shared_work_tiles(shared), tokens) + added


def _front_cost(config: PrefillLayerConfig, num_passes: int) -> KernelCost:
    """Return the work up to the experts; choices stay on chip unless they are returned."""
    top_k, cores = choices_of(config).top_k, config.experts.num_cores
    num_tokens, work_tiles = config.experts.num_tokens, config.work_tiles
    is_kept = config.returns_routing or config.router is None
    kept, columns = 0 if is_kept else top_k, folds_of(config).columns
    if has_table(config):
        columns *= 2  # rows and weights, and no affinities unless they are returned
        kept += 0 if config.returns_routing else top_k
    # What broken tokens add, and the rows of pairs.
    written = num_tokens * (1 + int(config.out.has_gate) + columns - kept) * _WORD_BYTES
    scales = config.experts.scaling == "pre"
    if scales:  # of slots, and ones
        num_slots = config.dims.num_blocks * config.dims.block_size
        ones = 0 if has_table(config) else num_tokens * top_k
        written += (num_slots + ones) * _WORD_BYTES
    read, width, columns = 0, places_width(config, cores), 0
    for core in range(cores):
        tokens = split_tokens(num_tokens, core, cores)
        read += PARTITIONS * _WORD_BYTES if tokens.count and config.router is not None else 0
        columns += search_columns(tokens, config.dims.num_experts, width, num_passes)
        columns += num_passes * cores * spread_entries(work_tiles)
        pairs = max(1, tokens.count) * top_k
        columns += pairs * WEIGHT_TERMS * row_size(config.dims) if scales else 0
        columns += rank_columns(tokens, config.dims)
    read += num_tokens * _WORD_BYTES if config.has_padding else 0
    index = KernelCost(read, written + work_tile_list_bytes(config.work_tiles), columns)
    if config.router is None:
        pairs_bytes = num_tokens * top_k * _WORD_BYTES  # affinities are stored, 0 of broken tokens
        return KernelCost(2 * pairs_bytes, pairs_bytes, 0) + index
    return cost_router_topk(config.router, num_tokens) + index
