"""index_blocks against neuron_moe.blocks, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch

import nki_sim
from neuron_moe.blocks import build_block_mapping, num_blocks
from nki_kernels.common.arithmetic import divide_down
from nki_kernels.common.token_tiles import load_per_token, split_tokens
from nki_kernels.index import (
    BlockDims,
    check_index_blocks,
    cost_index_blocks,
    index_blocks,
    index_blocks_ref,
)
from nki_kernels.index.check import MOST
from nki_kernels.index.memory import sbuf_bytes
from nki_kernels.index.slot_inverse import invert_weights, store_flat
from nki_kernels.index.token_search import Meanwhile
from nki_kernels.index.work_tiles import _store_lane
from nki_sim import SimOptions, TensorSpec, isa
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute
from tests.nki_kernels.traces import measured_cost

# name: (T, K, E, B, share of choices without an expert)
CASES: dict[str, tuple[int, int, int, int, float]] = {
    "one-pair": (1, 1, 1, 1, 0.0),
    "one-token": (1, 4, 32, 32, 0.0),
    "K1": (200, 1, 16, 128, 0.0),
    "gpt-oss": (260, 4, 32, 32, 0.0),
    "expert-parallel": (260, 4, 16, 32, 0.75),
    "odd-everything": (301, 3, 7, 48, 0.1),
    "K9": (131, 9, 12, 33, 0.1),
    "K16-of-512": (130, 16, 512, 32, 0.0),
    "K32-of-1024": (140, 32, 1024, 32, 0.0),
    "four-banks-of-slots": (300, 2, 500, 480, 0.0),
    "nobody": (40, 2, 8, 32, 1.0),
    "two-pieces": (300, 8, 64, 64, 0.0),
}
ROUTINGS = ["uniform", "one-expert", "zipf"]
OPTIONS = {
    "core-1-first": SimOptions(start_core=1),
    "preempted": SimOptions(preempt=0.2, seed=3),
    "zero-filled": SimOptions(fill=0),
}


def draw(T: int, K: int, E: int, none: float, routing: str = "uniform") -> np.ndarray:
    rng = np.random.default_rng(T * K + E)
    score = rng.random((T, E))
    if routing == "one-expert":
        score[:, E // 2] = -1.0
    elif routing == "zipf":
        score *= np.arange(1, E + 1)
    index = np.argsort(score, axis=1)[:, :K].astype(np.int32)
    index[rng.random((T, K)) < none] = -1
    return index


def assert_equal_to_torch(index: np.ndarray, dims: BlockDims, outputs: tuple) -> None:
    mapping = build_block_mapping(
        torch.from_numpy(index), dims.num_experts, dims.block_size, min_blocks=dims.num_blocks
    )
    token, pair, expert, valid, counts, slot = outputs
    np.testing.assert_array_equal(token, mapping.token_position_to_id.numpy())
    np.testing.assert_array_equal(pair, mapping.pair_of_slot.numpy())
    np.testing.assert_array_equal(expert, mapping.block_to_expert.numpy())
    np.testing.assert_array_equal(valid, [mapping.num_valid_blocks.item()])
    np.testing.assert_array_equal(counts, mapping.tokens_per_expert_E.numpy())
    flat = slot.reshape(-1)
    np.testing.assert_array_equal(flat < 0, index.reshape(-1) < 0)
    np.testing.assert_array_equal(pair[flat[flat >= 0]], np.flatnonzero(flat >= 0))
    assert {array.dtype for array in outputs} == {np.dtype(np.int32)}


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_mapping_equals_that_of_torch(case: str, num_cores: int) -> None:
    T, K, E, B, none = CASES[case]
    index, dims = draw(T, K, E, none), BlockDims(E, B, num_blocks(T, K, E, B))
    check_index_blocks(T, K, dims, num_cores)
    run = nki_sim.run(index_blocks, index, dims, lnc=num_cores)
    assert_equal_to_torch(index, dims, run.outputs)
    wanted = index_blocks_ref(index, E, B, dims.num_blocks)
    for got, want in zip(run.outputs, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not run.findings
    assert measured_cost(run.trace) == cost_index_blocks(T, K, dims, num_cores)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_skewed_routings_are_placed_as_by_torch(routing: str) -> None:
    index = draw(384, 4, 16, 0.0, routing)
    dims = BlockDims(16, 64, num_blocks(384, 4, 16, 64, pad_to_even=True) + 2)
    assert_equal_to_torch(index, dims, nki_sim.run(index_blocks, index, dims, lnc=2).outputs)


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("sizes", [(7, 48, 60), (7, 45, 62)])  # the last row ends in a group
def test_an_inverse_of_several_groups_of_columns(
    sizes: tuple[int, int, int], num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nki_kernels.index.slot_inverse.GROUP", 8)
    index, dims = draw(301, 3, 7, 0.1), BlockDims(*sizes)
    run = nki_sim.run(index_blocks, index, dims, lnc=num_cores)
    assert_equal_to_torch(index, dims, run.outputs)


@pytest.mark.parametrize(("tokens", "num_cores"), [(2049, 1), (4096, 1), (4097, 1), (4097, 2)])
def test_numbers_of_many_tokens_are_exact_in_16_bits(tokens: int, num_cores: int) -> None:
    index, dims = draw(tokens, 1, 3, 0.2), BlockDims(3, 128, num_blocks(tokens, 1, 3, 128))
    run = nki_sim.run(index_blocks, index, dims, lnc=num_cores)
    assert_equal_to_torch(index, dims, run.outputs)


def weights_of(slot_TK: Any, weight_TK: Any, num_slots: int) -> Any:
    """Invert slots that somebody gave to weights of pairs."""
    weight_of_slot = nl.ndarray((num_slots,), nl.float32, buffer=nl.shared_hbm)
    tokens = split_tokens(slot_TK.shape[0], nl.program_id(0), nl.num_programs(0))
    slot_sb = nl.ndarray((128, tokens.count * slot_TK.shape[1]), nl.float32, buffer=nl.sbuf)
    isa.memset(dst=slot_sb, value=-1.0)
    weight_sb = nl.ndarray(slot_sb.shape, nl.float32, buffer=nl.sbuf)
    isa.memset(dst=weight_sb, value=0.0)
    load_per_token(slot_sb, slot_TK, tokens)
    load_per_token(weight_sb, weight_TK, tokens)
    invert_weights(weight_of_slot, weight_sb, slot_sb, Meanwhile([], []))
    return weight_of_slot


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(("T", "K", "num_slots"), [(150, 3, 700), (40, 2, 128), (300, 9, 4100)])
def test_pairs_of_a_token_share_what_is_put_into_their_slots(
    T: int, K: int, num_slots: int, num_cores: int
) -> None:
    rng = np.random.default_rng(K)
    slot_TK = rng.permutation(num_slots)[: T * K].reshape(T, K).astype(np.int32)
    slot_TK[rng.random((T, K)) < 0.1] = -1
    weight_TK = (rng.normal(size=(T, K)) * 10.0 ** rng.integers(-4, 4)).astype(np.float32)
    weights = np.zeros(num_slots, np.float32)
    token, choice = np.nonzero(slot_TK >= 0)
    weights[slot_TK[token, choice]] = weight_TK[token, choice]
    run = nki_sim.run(weights_of, slot_TK.astype(np.float32), weight_TK, num_slots, lnc=num_cores)
    np.testing.assert_array_equal(run.outputs, weights)


@pytest.mark.parametrize("option", OPTIONS)
def test_neither_unset_memory_nor_the_order_of_the_cores_matters(option: str) -> None:
    index, dims = draw(301, 3, 7, 0.1), BlockDims(7, 48, 30)
    run = nki_sim.run(index_blocks, index, dims, lnc=2, options=OPTIONS[option])
    assert_equal_to_torch(index, dims, run.outputs)


def test_numbers_of_no_expert_are_no_choice() -> None:
    index = draw(200, 3, 9, 0.0)
    odd = index.copy()
    odd[5, 0], odd[6, 1], odd[199, 2] = np.iinfo(np.int32).max, np.iinfo(np.int32).min, 9
    none = np.where((odd >= 0) & (odd < 9), odd, -1).astype(np.int32)
    dims = BlockDims(9, 32, num_blocks(200, 3, 9, 32))
    runs = [nki_sim.run(index_blocks, which, dims, lnc=2) for which in (odd, none)]
    for got, want in zip(runs[0].outputs, runs[1].outputs, strict=True):
        np.testing.assert_array_equal(got, want)
    wanted = index_blocks_ref(odd, 9, 32, dims.num_blocks)
    np.testing.assert_array_equal(runs[0].outputs[0], wanted.token_position_to_id)


@pytest.mark.parametrize("divisor", [1, 3, 7, 16, 1000, 8191, 8192])
def test_division_is_exact_up_to_the_limit(divisor: int) -> None:
    edges = np.arange(0, MOST + 1, divisor)
    picked = edges[np.linspace(0, len(edges) - 1, 500).astype(int)]
    if divisor > 16:  # quotients of slots stay below 128
        picked = picked[picked < 128 * divisor]
    data = np.unique(np.concatenate((picked - 1, picked, [-1])))
    result = execute(
        lambda dst, data: divide_down(dst, data, divisor),
        dst=Tile(shape=(1, len(data)), dtype="int32"),
        data=Tile(data[None].astype(np.float32)),
    )
    np.testing.assert_array_equal(result["dst"][0], data // divisor)


@pytest.mark.parametrize(
    "length", [1, 3, 64 * 3 - 1, 64 * 3, 64 * 3 + 1, 65 * 3, 128 * 3 - 1, 128 * 3]
)
def test_both_halves_together_store_a_flat_tensor_once(length: int) -> None:
    values = np.arange(128 * 3, dtype=np.int32).reshape(128, 3)

    def store(values_hbm: nl.ndarray) -> nl.ndarray:
        flat = nl.ndarray((length,), nl.int32, buffer=nl.shared_hbm)
        values_sb = nl.ndarray((128, 3), nl.int32)
        isa.dma_copy(values_sb, values_hbm)
        first = 64 * nl.program_id(0)
        store_flat(flat, values_sb, 3, 0, 3, first, first + 64)
        return flat

    run = nki_sim.run(store, values, lnc=2)
    np.testing.assert_array_equal(run.outputs, values.reshape(-1)[:length])
    assert run.findings == []
    assert measured_cost(run.trace).written_bytes == 4 * length


@pytest.mark.parametrize(
    ("work_tiles", "size"), [(1, 1), (128, 1), (129, 1), (256, 1), (130, 3), (131, 3)]
)
def test_the_values_of_a_lane_are_stored_once(work_tiles: int, size: int) -> None:
    width = -(-work_tiles // 128) * size
    values = np.arange(128 * width, dtype=np.float32).reshape(128, width)

    def store(values_hbm: nl.ndarray) -> nl.ndarray:
        lists = nl.ndarray((2, work_tiles, size), nl.int32, buffer=nl.shared_hbm)
        values_sb = nl.ndarray((128, width), nl.float32)
        isa.dma_copy(values_sb, values_hbm)
        _store_lane(lists, values_sb, nl.program_id(0), work_tiles, size)
        return lists

    run = nki_sim.run(store, values, lnc=2)
    np.testing.assert_array_equal(
        run.outputs[1].reshape(-1), values.reshape(-1)[: work_tiles * size]
    )
    assert run.findings == []
    assert measured_cost(run.trace).written_bytes == 4 * 2 * work_tiles * size


# T, K, E, B and N of an index.
REFUSED: dict[str, tuple[int, int, int, int, int]] = {
    "num_tokens=0": (0, 1, 1, 1, 1),
    "top_k=0": (1, 0, 1, 1, 1),
    "top_k=33: must be 1 to 32": (1, 33, 1, 1, 1),
    "num_experts=0": (1, 1, 0, 1, 1),
    "num_experts=1025: must be 1 to 1024": (1, 1, 1025, 1, 1),
    "block_size=0": (1, 1, 1, 0, 1),
    "num_blocks=0": (1, 1, 1, 1, 0),
    r"T \* K at most": (1 << 19, 3, 8, 32, 8),
    r"block_size=1048577: N \* B must be at most": (1, 1, 1, (1 << 20) + 1, 1),
    r"num_blocks=1048577, .*: N \* B must be at most": (1, 1, 1, 1, (1 << 20) + 1),
    "bytes of SBUF per partition": (65536, 16, 512, 128, 8192),
}


@pytest.mark.parametrize("message", REFUSED)
def test_limits_are_refused_by_name(message: str) -> None:
    T, K, *dims = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        check_index_blocks(T, K, BlockDims(*dims))


def test_what_the_check_counts_covers_what_is_alive() -> None:
    T, K, E, B = 32768, 2, 512, 128
    dims = BlockDims(E, B, num_blocks(T, K, E, B))
    check_index_blocks(T, K, dims)
    options = SimOptions(mode="indices")
    run = nki_sim.run(index_blocks, TensorSpec((T, K), "int32"), dims, lnc=2, options=options)
    assert 64 * 1024 < run.sbuf_peak_bytes <= sbuf_bytes(T, K, dims, 2)


def test_the_longest_inputs_are_accepted() -> None:
    check_index_blocks(32768, 16, BlockDims(512, 1024, num_blocks(32768, 16, 512, 1024)))
    check_index_blocks(32768, 8, BlockDims(256, 128, num_blocks(32768, 8, 256, 128)), 1)


@pytest.mark.parametrize(
    "sizes",  # T, K, E, B and N
    [
        (1, 1, 1, 1, 1),
        (1, 16, 1, 1, 1),
        (1, 1, 1024, 1, 1),
        (1, 1, 1, 1 << 20, 1),
        (1, 1, 1, 1, 1 << 20),
    ],
)
def test_limits_are_reached(sizes: tuple[int, ...]) -> None:
    T, K, *dims = sizes
    check_index_blocks(T, K, BlockDims(*dims))
