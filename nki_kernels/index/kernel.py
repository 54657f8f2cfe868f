"""Block index: which slot of which expert's block each (token, choice) pair takes.

Formula: a stable counting sort of the T * K pairs by expert, every expert starting at a new block:
    tokens_per_expert[e] = pairs that chose e;  blocks[e] = ceil(tokens_per_expert[e] / B)
    slot(pair) = B * (blocks of lower experts) + pairs before it that chose the same expert
    pair_of_slot = inverse of slot, -1 where there is none; token_position_to_id = pair_of_slot // K
    block_to_expert[n] = experts but the last whose blocks end at or before block n

Input, in HBM:
    index_TK              [T, K]   int32  expert of each choice; any number that is none, as -1, is
                                          no choice; no expert twice a token
Outputs, in shared HBM:
    token_position_to_id  [N * B]  int32  token in each slot, -1 for padding
    pair_of_slot          [N * B]  int32  pair (token * K + choice) in each slot, -1 for padding
    block_to_expert       [N]      int32  blocks past num_valid_blocks name the last expert
    num_valid_blocks      [1]      int32  blocks that hold a token
    tokens_per_expert     [E]      int32
    slot_of_pair_TK       [T, K]   int32  slot of each pair, -1 for no expert
and, where asked, the lists of work tiles for `blockwise_moe` (see work_tiles.py):
    work_expert_CV        [C, V]   int32  work tiles.WorkTileLists, to which all three are equal
    work_row_tiles_CVG    [C, V, G]  int32  bit by bit
    class_iterations_1L   [1, L]   int32

On chip: tokens are on the partitions as in token_tiles.py, experts along the free axis; whether a
token chose an expert is one element of a 0-1 tile [128, E]. Ranks are sums of such tiles: over
lower partitions by a matmul with a triangle of ones, over lower tiles by one with the identity. The
inverse is a matmul too: slot s goes to row s // F, column s % F of a [128, F] tile, and the sum
over pairs of (pair + 1) * onehot(row) x onehot(column) holds pair + 1 where there is a pair and 0
elsewhere. All numbers stay below 2^24, so float32 sums of them are exact; pair + 1 enters as
bfloat16 digits of 8 bits.

Limits (`check_index_blocks`): E <= 1,024, K <= 32, T * K <= 2^20, N * B <= 2^20; SBUF must hold the
0-1 tiles of a core's tokens (one byte per token and expert) and the slots of its pairs.

Cost: the index is read once, every output written once; per tile of 128 tokens six matmuls of E
columns, and per choice up to three of N * B / 128 columns. The Vector engine bounds it: per tile
one pass of E, per choice one of 128 and one of N * B / 128 in 16 bits; the Scalar engine marks
choices and copies counts, GpSimd looks them up, a pass of E each. The two cores take half of the
tokens each and exchange counts and their parts of the inverse.

Steps:
    1. Load the experts of this core's pairs; mark who chose whom, tile by tile.
    2. Count choices per expert, on lower partitions and in all; exchange the counts.
    3. Lay out blocks; core 0 stores what is known per block and per expert.
    4. Rank the pairs: a tile's first slot of each expert, plus the choices in tiles before it.
    5. List the work tiles (work_tiles.py), if asked.
    6. Invert the slots (slot_inverse.py).

Source: neuron_moe.blocks.build_block_mapping, to which the outputs are equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import add_up, apply_two, count_up, divide_up
from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.memory import allocate
from nki_kernels.common.tiles import compare_columns, identity, multiply_banks, ones
from nki_kernels.common.token_tiles import (
    TokenTiles,
    load_per_token,
    split_tokens,
    store_per_token,
)
from nki_kernels.common.work_tiles import WorkTileDims, loops_of, sizes_of
from nki_kernels.index.config import NO_WORK_TILES, BlockDims
from nki_kernels.index.memory import AT_ONCE, COUNT_BANKS, IndexTable, index_table, ranked_tiles
from nki_kernels.index.slot_inverse import exchange, invert, store_flat
from nki_kernels.index.token_search import Meanwhile
from nki_kernels.index.work_tiles import KnownWorkTiles, ListedTokens, store_work_tiles


@dataclass
class PlacedPairs(nl.NKIObject):
    """Where the pairs of a core go; numbers in float32."""

    slot_sb: nl.ndarray  # [128, max(1, tiles) * K], -1 for no expert
    total_sb: nl.ndarray  # [128, E], tokens of each expert, on all partitions alike
    last_block_sb: nl.ndarray  # [128, E], end of each expert's blocks, likewise


@dataclass
class _Counts(nl.NKIObject):
    """What running counts are made of."""

    identity_sb: nl.ndarray  # [128, 128] bfloat16
    chosen_sb: nl.ndarray  # [128, tiles, E], 1 where a token chose an expert
    banks: list[nl.ndarray]  # [128, E] float32 in PSUM


@nki.jit
def index_blocks(
    index_TK: nl.ndarray, dims: BlockDims, work_tiles: WorkTileDims = NO_WORK_TILES
) -> tuple[nl.ndarray, ...]:
    """Place every pair in a slot, and list the work tiles if asked; see the module's docstring."""
    num_tokens, top_k = index_TK.shape
    num_slots = dims.num_blocks * dims.block_size
    token_of_slot = nl.ndarray((num_slots,), nl.int32, buffer=nl.shared_hbm)
    pair_of_slot = nl.ndarray((num_slots,), nl.int32, buffer=nl.shared_hbm)
    block_to_expert = nl.ndarray((dims.num_blocks,), nl.int32, buffer=nl.shared_hbm)
    num_valid_blocks = nl.ndarray((1,), nl.int32, buffer=nl.shared_hbm)
    tokens_per_expert = nl.ndarray((dims.num_experts,), nl.int32, buffer=nl.shared_hbm)
    slot_of_pair_TK = nl.ndarray((num_tokens, top_k), nl.int32, buffer=nl.shared_hbm)

    tokens = split_tokens(num_tokens, nl.program_id(0), nl.num_programs(0))
    index_sb = _load_index(index_TK, tokens, index_table(tokens, top_k, dims))
    placed = place_pairs(index_sb, tokens, dims, top_k)
    if nl.program_id(0) == 0:
        _store_blocks(block_to_expert, num_valid_blocks, tokens_per_expert, placed)
    store_slots(slot_of_pair_TK, placed.slot_sb, tokens)
    outputs: tuple[nl.ndarray, ...] = (
        token_of_slot,
        pair_of_slot,
        block_to_expert,
        num_valid_blocks,
        tokens_per_expert,
        slot_of_pair_TK,
    )
    if work_tiles.num_lanes > 0:
        nothing = ListedTokens(0, Meanwhile([], []))
        lists, _ = list_work_tiles(placed.total_sb, placed.last_block_sb, work_tiles, dims, nothing)
        outputs = outputs + lists
    # Last, as the lists wait for counts only, and the tensor engine for nothing else.
    invert(token_of_slot, pair_of_slot, placed.slot_sb, tokens, top_k)
    return outputs


def list_work_tiles(
    total_sb: nl.ndarray,
    last_block_sb: nl.ndarray,
    work_tiles: WorkTileDims,
    dims: BlockDims,
    listed: ListedTokens,
) -> tuple[tuple[nl.ndarray, nl.ndarray, nl.ndarray], KnownWorkTiles]:
    """Allocate and store the lists of work tiles; see `store_work_tiles`."""
    lanes, length, largest = work_tiles.num_lanes, work_tiles.num_work_tiles, work_tiles.largest
    work_expert_CV = nl.ndarray((lanes, length), nl.int32, buffer=nl.shared_hbm)
    work_row_tiles_CVG = nl.ndarray((lanes, length, largest), nl.int32, buffer=nl.shared_hbm)
    num_loops = len(loops_of(sizes_of(largest)))
    class_iterations_1L = nl.ndarray((1, num_loops), nl.int32, buffer=nl.shared_hbm)
    lists = (work_expert_CV, work_row_tiles_CVG, class_iterations_1L)
    num_tiles = dims.num_blocks * dims.block_size // work_tiles.tile_rows
    known = store_work_tiles(
        lists, total_sb, last_block_sb, work_tiles, dims.block_size, num_tiles, listed
    )
    return lists, known


def place_pairs(
    index_sb: nl.ndarray, tokens: TokenTiles, dims: BlockDims, top_k: int
) -> PlacedPairs:
    """Return the slot of each pair of this core, and what both cores know of each expert.

    Args:
        index_sb: [128, max(1, tiles) * K] int32 experts; overwritten. Numbers that are no expert,
            and partitions without a token, which hold -1, choose none.
        tokens: of this core.
        dims: E, B and N.
        top_k: K.
    """
    table = index_table(tokens, top_k, dims)
    keep_near(index_sb, dims.num_experts)
    chosen_sb = _mark_choices(index_sb, table, top_k, dims.num_experts)
    lower_sb, own_sb = _count_choices(chosen_sb, tokens, dims.num_experts)
    other_sb = exchange(own_sb)
    total_sb = nl.ndarray((PARTITIONS, dims.num_experts), nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=total_sb, data1=own_sb, data2=other_sb, op=nl.add)
    last_block_sb, start_sb = lay_out_blocks(total_sb, dims)
    if nl.program_id(0) > 0:
        # The tokens of core 0 come first.
        nisa.tensor_tensor(dst=start_sb, data1=start_sb, data2=other_sb, op=nl.add)
    # A pair without an expert looks up column E, which holds -1.
    first_sb = nl.ndarray((PARTITIONS, dims.num_experts + 1), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=first_sb, value=-1.0)
    first = first_sb[:, 0 : dims.num_experts]
    nisa.tensor_tensor(dst=first, data1=lower_sb, data2=start_sb, op=nl.add)
    slot_sb = _rank_pairs(index_sb, chosen_sb, first_sb, table, tokens, top_k)
    return PlacedPairs(slot_sb, total_sb, last_block_sb)


def keep_near(index_sb: nl.ndarray, num_experts: int) -> None:
    """Keep numbers far outside from being looked up, or coming near one that is."""
    apply_two(index_sb, index_sb, nl.maximum, -1.0, nl.minimum, float(num_experts))


def _load_index(index_TK: nl.ndarray, tokens: TokenTiles, table: IndexTable) -> nl.ndarray:
    """Return the experts of this core's pairs, [128, max(1, tiles) * K] int32; no token: -1."""
    index_sb = allocate(table.experts)[0]
    if tokens.full < PARTITIONS or tokens.count == 0:
        nisa.memset(dst=index_sb, value=-1)
    load_per_token(index_sb, index_TK, tokens)
    return index_sb


def _mark_choices(
    index_sb: nl.ndarray, table: IndexTable, top_k: int, num_experts: int
) -> nl.ndarray:
    """Return [128, max(1, tiles), E] float8: 1 where the token chose the expert, else 0."""
    wanted_sb, chosen_sb = list_wanted(index_sb, table, top_k), allocate(table.chosen)[0]
    expert_sb = count_up(num_experts, nl.float32)
    mark_tiles(chosen_sb, wanted_sb, expert_sb, slice(0, chosen_sb.shape[1]))
    return chosen_sb


def list_wanted(index_sb: nl.ndarray, table: IndexTable, top_k: int) -> nl.ndarray:
    """Return experts of each token, [128, max(1, tiles), K filled up] float32."""
    wanted_sb = allocate(table.wanted)[0]
    count, filled = wanted_sb.shape[1:3]
    if top_k < filled:
        nisa.memset(dst=wanted_sb, value=-2.0)  # matches nothing
    nisa.tensor_copy(dst=wanted_sb[:, :, 0:top_k], src=index_sb.reshape_dim(1, (count, top_k)))
    return wanted_sb


def mark_tiles(
    chosen_sb: nl.ndarray, wanted_sb: nl.ndarray, expert_sb: nl.ndarray, tiles: slice
) -> None:
    """Write 1 where a token of some tiles chose an expert, else 0; experts count up from 0."""
    num_experts = expert_sb.shape[1]
    at_once = max(1, BANK_FLOATS // num_experts)
    for first in range(tiles.start, tiles.stop, at_once):
        stop = min(first + at_once, tiles.stop)
        marked_sb = nl.ndarray((PARTITIONS, stop - first, num_experts), nl.float32, buffer=nl.sbuf)
        for tile in range(first, stop):
            source, marked = expert_sb, marked_sb[:, tile - first, :]
            for choice in range(0, wanted_sb.shape[2], AT_ONCE):
                wanted = wanted_sb[:, tile, choice : choice + AT_ONCE]
                nisa.nc_match_replace8(dst=marked, data=source, vals=wanted, imm=-1.0)
                source = marked
        # -1 becomes 1, numbers of experts become 0; the Vector engine has more to do.
        nisa.activation(dst=chosen_sb[:, first:stop, :], op=nl.relu, data=marked_sb, scale=-1.0)


def _count_choices(
    chosen_sb: nl.ndarray, tokens: TokenTiles, num_experts: int
) -> tuple[nl.ndarray, nl.ndarray]:
    """Return choices of each expert on lower partitions, and on all; [128, E] float32 each."""
    ones_sb = ones(nl.bfloat16)
    # The row of the matmul comes before its column.
    triangle_sb = compare_columns(ones_sb, nl.greater)
    lower_ps = nl.ndarray((PARTITIONS, num_experts), nl.float32, buffer=nl.psum)
    all_ps = nl.ndarray((PARTITIONS, num_experts), nl.float32, buffer=nl.psum)
    for tile in range(max(1, tokens.count)):
        moving = chosen_sb[:, tile, :]
        multiply_banks(lower_ps, triangle_sb, moving, tile > 0)
        multiply_banks(all_ps, ones_sb, moving, tile > 0)
    lower_sb = nl.ndarray((PARTITIONS, num_experts), nl.float32, buffer=nl.sbuf)
    all_sb = nl.ndarray((PARTITIONS, num_experts), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=lower_sb, src=lower_ps)
    nisa.tensor_copy(dst=all_sb, src=all_ps)
    return lower_sb, all_sb


def lay_out_blocks(total_sb: nl.ndarray, dims: BlockDims) -> tuple[nl.ndarray, nl.ndarray]:
    """Return the end of each expert's blocks and its first slot, [128, E] float32 each."""
    shape = total_sb.shape
    blocks_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    divide_up(blocks_sb, total_sb, dims.block_size)
    zeros_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros_sb, value=0.0)
    last_block_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    add_up(last_block_sb, blocks_sb, zeros_sb)
    start_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=start_sb, data1=last_block_sb, data2=blocks_sb, op=nl.subtract)
    nisa.tensor_scalar(
        dst=start_sb, data=start_sb, op0=nl.multiply, operand0=float(dims.block_size)
    )
    return last_block_sb, start_sb


def _store_blocks(
    block_to_expert: nl.ndarray,
    num_valid_blocks: nl.ndarray,
    tokens_per_expert: nl.ndarray,
    placed: PlacedPairs,
) -> None:
    """Store what is known per block and per expert."""
    last_block_sb, total_sb = placed.last_block_sb, placed.total_sb
    num_blocks = block_to_expert.shape[0]
    num_experts = total_sb.shape[1]
    counts_sb = nl.ndarray((1, num_experts), nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=counts_sb, src=total_sb[0:1, :])
    nisa.dma_copy(dst=tokens_per_expert, src=counts_sb)
    valid_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=valid_sb, src=last_block_sb[0:1, num_experts - 1 : num_experts])
    nisa.dma_copy(dst=num_valid_blocks, src=valid_sb)
    # Partition p takes blocks p * columns and on; those past the end are not stored.
    columns = (num_blocks + PARTITIONS - 1) // PARTITIONS
    block_sb = nl.ndarray((PARTITIONS, columns), nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=block_sb, pattern=[[1, columns]], offset=0, channel_multiplier=columns)
    expert_sb = nl.ndarray((PARTITIONS, columns), nl.float32, buffer=nl.sbuf)
    if num_experts == 1:
        nisa.memset(dst=expert_sb, value=0.0)
    else:
        ended_sb = nl.ndarray((PARTITIONS, num_experts - 1), nl.float32, buffer=nl.sbuf)
        for column in range(columns):
            nisa.tensor_scalar_reduce(
                dst=ended_sb,
                data=last_block_sb[:, 0 : num_experts - 1],
                op0=nl.less_equal,
                operand0=block_sb[:, column : column + 1],
                reduce_op=nl.add,
                reduce_res=expert_sb[:, column : column + 1],
            )
    integer_sb = nl.ndarray((PARTITIONS, columns), nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=integer_sb, src=expert_sb)
    store_flat(block_to_expert, integer_sb, columns, 0, columns, 0, PARTITIONS)


def _rank_pairs(
    index_sb: nl.ndarray,
    chosen_sb: nl.ndarray,
    first_sb: nl.ndarray,
    table: IndexTable,
    tokens: TokenTiles,
    top_k: int,
) -> nl.ndarray:
    """Return the slot of each pair, [128, max(1, tiles) * K] float32; -1 for no expert.

    `first_sb` [128, E + 1] holds the slot a choice of each expert in tile 0 would take, then -1.
    """
    num_experts = first_sb.shape[1] - 1
    column_sb = look_up_columns(index_sb, num_experts)
    slot_sb = allocate(table.slots)[0]
    if tokens.count == 0:
        nisa.memset(dst=slot_sb, value=-1.0)
        return slot_sb
    # On other engines, while the Vector engine lists the work tiles.
    nisa.nc_n_gather(dst=slot_sb, data=first_sb, indices=column_sb)
    ranked = ranked_tiles(num_experts)
    count_up_tiles(column_sb, column_sb, tokens.count, num_experts + 1, ranked)
    counts = _Counts(identity(nl.bfloat16), chosen_sb, [])
    for _bank in range(min(COUNT_BANKS, tokens.count)):
        counts.banks.append(nl.ndarray((PARTITIONS, num_experts), nl.float32, buffer=nl.psum))
    for start in range(0, tokens.count, ranked):
        count = min(ranked, tokens.count - start)
        next_sb = nl.ndarray((PARTITIONS, count, num_experts + 1), nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=next_sb[:, :, num_experts], value=0.0, engine=nisa.engine.gpsimd)
        for tile in range(start, start + count):
            _count_before(next_sb[:, tile - start, 0:num_experts], counts, tile)
        pairs = slice(start * top_k, (start + count) * top_k)
        flat_sb = next_sb.reshape((PARTITIONS, count * (num_experts + 1)))
        before_sb = nl.ndarray((PARTITIONS, count * top_k), nl.float32, buffer=nl.sbuf)
        nisa.nc_n_gather(dst=before_sb, data=flat_sb, indices=column_sb[:, pairs])
        slots = slot_sb[:, pairs]
        nisa.tensor_tensor(
            dst=slots, data1=slots, data2=before_sb, op=nl.add, engine=nisa.engine.gpsimd
        )
    return slot_sb


def _count_before(before: nl.ndarray, counts: _Counts, tile: int) -> None:
    """Write how many tiles before this one chose each expert on the same partition, [128, E].

    Sums of the tensor engine; of some banks in turn, so that none waits for the copy of another.
    """
    if tile == 0:
        nisa.memset(dst=before, value=0.0, engine=nisa.engine.gpsimd)
        return
    bank_ps, first = counts.banks[tile % len(counts.banks)], max(0, tile - COUNT_BANKS)
    for earlier in range(first, tile):
        multiply_banks(bank_ps, counts.identity_sb, counts.chosen_sb[:, earlier, :], earlier > 0)
    nisa.tensor_copy(dst=before, src=bank_ps, engine=nisa.engine.scalar)


def look_up_columns(index_sb: nl.ndarray, num_experts: int) -> nl.ndarray:
    """Return the expert of each pair as a column of a table, uint32; E for none."""
    none_sb = nl.ndarray(index_sb.shape, nl.int32, buffer=nl.sbuf)
    apply_two(none_sb, index_sb, nl.less, 0.0, nl.multiply, num_experts + 1.0)
    column_sb = nl.ndarray(index_sb.shape, nl.uint32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=column_sb, data1=index_sb, data2=none_sb, op=nl.add)
    return column_sb


def count_up_tiles(
    dst: nl.ndarray, column_sb: nl.ndarray, count: int, row_size: int, ranked: int
) -> None:
    """Write columns of a tile as columns of `ranked` tiles side by side."""
    first_sb = nl.ndarray((PARTITIONS, count), nl.int32, buffer=nl.sbuf)
    for start in range(0, count, ranked):
        tiles = min(ranked, count - start)
        nisa.iota(
            dst=first_sb[:, start : start + tiles],
            pattern=[[row_size, tiles]],
            offset=0,
            channel_multiplier=0,
        )
    shape = (count, column_sb.shape[1] // count)
    first = first_sb.expand_dim(2).broadcast(2, shape[1])
    nisa.tensor_tensor(
        dst=dst.reshape_dim(1, shape), data1=column_sb.reshape_dim(1, shape), data2=first, op=nl.add
    )


def store_slots(slot_of_pair_TK: nl.ndarray, slot_sb: nl.ndarray, tokens: TokenTiles) -> None:
    """Store the slot of each pair as int32."""
    integer_sb = nl.ndarray(slot_sb.shape, nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=integer_sb, src=slot_sb, engine=nisa.engine.scalar)
    store_per_token(slot_of_pair_TK, integer_sb, tokens)
