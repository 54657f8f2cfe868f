"""The lists of tokens that a layer makes on chip, and the numbers of its pairs, against NumPy."""

from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_kernels.common.token_tiles import TokenTiles, load_per_token, split_tokens, store_per_token
from nki_kernels.index import BlockDims
from nki_kernels.index.cost import rank_columns
from nki_kernels.index.token_lists import (
    count_choices,
    count_group,
    exchange_lists,
    finish_counts,
    mark_group,
    number_pairs,
    spread_columns,
    start_lists,
    start_marks,
    tiles_of,
)
from nki_kernels.index.token_search import Meanwhile, finish_searches, go_on, look_up_rest
from nki_kernels.index.token_search import search_columns as columns_of_searches
from nki_sim import isa
from nki_sim.language import api as nl
from tests.nki_kernels.index.test_kernel import OPTIONS, draw
from tests.nki_kernels.traces import measured_cost

nki_sim.provide()

# name: (T, K, E, share of choices without an expert, R, W // E)
CASES: dict[str, tuple[int, int, int, float, int, int]] = {
    "one-token": (1, 1, 1, 0.0, 32, 1),
    "one-tile": (90, 3, 7, 0.1, 32, 3),
    "odd-tiles": (1400, 3, 7, 0.1, 128, 3),  # filled up; the last one is not full
    "expert-parallel": (600, 4, 16, 0.75, 32, 5),
    "copies-that-do-not-divide": (900, 1, 40, 0.0, 32, 5),
    "two-searches": (1300, 4, 128, 0.0, 128, 5),
    "two-parts-of-experts": (300, 8, 130, 0.0, 32, 2),
    "nobody": (200, 2, 8, 1.0, 32, 2),
    "many-tokens": (8500, 1, 3, 0.2, 128, 8),
}


def lists_of(index_TK: Any, dims: BlockDims, rows: int, places: int) -> Any:
    """List tokens by their experts [C, R, W], and number the pairs [T, K]."""
    (num_tokens, top_k), core, cores = index_TK.shape, nl.program_id(0), nl.num_programs(0)
    tokens = split_tokens(num_tokens, core, cores)
    width = places * dims.num_experts
    listed = nl.ndarray((cores, rows, width), nl.uint16, buffer=nl.shared_hbm)
    counted = nl.ndarray((cores, dims.num_experts), nl.float32, buffer=nl.shared_hbm)
    number_TK = nl.ndarray((num_tokens, top_k), nl.float32, buffer=nl.shared_hbm)
    index_sb = nl.ndarray((128, max(1, tokens.count) * top_k), nl.int32, buffer=nl.sbuf)
    isa.memset(dst=index_sb, value=-1)
    load_per_token(index_sb, index_TK, tokens)
    pairs = start_marks(index_sb, tokens, dims, top_k)
    lists = start_lists(tokens, rows, width, dims.num_experts)
    for tiles in tiles_of(pairs):
        mark_group(pairs, tiles)
        count_group(lists, pairs, tiles)
    isa.dma_copy(dst=counted[core : core + 1, :], src=count_choices(lists)[0:1, :])
    finish_counts(lists)
    numbered = number_pairs(lists, pairs)
    meanwhile = Meanwhile(lists.searches, numbered.look_ups)
    go_on(meanwhile)
    look_up_rest(meanwhile)
    finish_searches(lists.searches)
    both = exchange_lists(lists)
    isa.dma_copy(dst=listed[core], src=both[0][:, 0:width])
    store_per_token(number_TK, numbered.number_sb, tokens)
    return listed, counted, number_TK


def in_order(tokens: TokenTiles) -> Any:
    """Return a core's tokens by tiles, then partitions."""
    token = np.arange(tokens.rows)
    return tokens.first + token[np.lexsort((token // tokens.count, token % tokens.count))]


@pytest.mark.parametrize("routing", ["uniform", "one-expert"])
@pytest.mark.parametrize("name", CASES)
def test_lists_hold_the_tokens_of_each_expert(name: str, routing: str) -> None:
    T, K, E, none, rows, places = CASES[name]
    index, dims = draw(T, K, E, none, routing), BlockDims(E, rows, 1)
    run = nki_sim.run(lists_of, index, dims, rows, places, lnc=2)
    listed, counted, number = run.outputs
    columns = 0
    for core in range(2):
        tokens, wanted = split_tokens(T, core, 2), np.zeros((rows, places * E), np.float32)
        columns += rank_columns(tokens, dims) + columns_of_searches(tokens, E, places * E, 1)
        for expert in range(E):
            chose = [t for t in in_order(tokens) if expert in index[t]] if tokens.rows else []
            assert counted[core, expert] == len(chose)
            for n, token in enumerate(chose):
                assert number[token, list(index[token]).index(expert)] == n
                row = n % rows if core == 0 else rows - 1 - n % rows
                if n // rows < places:
                    wanted[row, n // rows * E + expert] = token + 1
        np.testing.assert_array_equal(listed[core], wanted)
    assert measured_cost(run.trace).matmul_columns == columns


@pytest.mark.parametrize("option", OPTIONS)
def test_neither_unset_memory_nor_the_order_of_the_cores_matters(option: str) -> None:
    index, dims = draw(700, 3, 7, 0.1), BlockDims(7, 32, 1)
    first, other = (
        nki_sim.run(lists_of, index, dims, 32, 4, lnc=2, options=options).outputs
        for options in (None, OPTIONS[option])
    )
    for one, another in zip(first, other, strict=True):
        np.testing.assert_array_equal(one, another)


def spread(columns: Any, rows: int, entries: int, width: int) -> Any:
    """Spread columns [128, J] over rows."""
    columns_sb = nl.ndarray(columns.shape, nl.float32, buffer=nl.sbuf)
    isa.dma_copy(dst=columns_sb, src=columns)
    identity_sb = nl.ndarray((128, 128), nl.float16, buffer=nl.sbuf)
    isa.memset(dst=identity_sb, value=1.0)
    isa.affine_select(
        dst=identity_sb,
        pattern=[[1, 128]],
        offset=0,
        channel_multiplier=-1,
        on_true_tile=identity_sb,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    spread_RN = nl.ndarray((rows, entries), nl.uint32, buffer=nl.shared_hbm)
    isa.dma_copy(dst=spread_RN, src=spread_columns(columns_sb, identity_sb, (rows, entries), width))
    return spread_RN


@pytest.mark.parametrize(
    ("J", "rows", "entries"), [(3, 32, 100), (5, 128, 640), (10, 128, 1271), (600, 16, 1300)]
)
def test_columns_are_spread_over_rows(J: int, rows: int, entries: int) -> None:
    columns = np.random.default_rng(J).integers(0, 5000, (128, J)).astype(np.float32)
    run = nki_sim.run(spread, columns, rows, entries, 2048, lnc=1)
    wanted = np.minimum(columns.reshape(-1)[:entries], 2048)
    np.testing.assert_array_equal(run.outputs, np.broadcast_to(wanted, (rows, entries)))
