"""The patterns that MoE kernels are made of, each as a small kernel against NumPy.

They are the regression list of the simulator: expert weights by run-time index, gathers with
padding, address arithmetic, accumulation over tiles and blocks, exchange between two cores, dynamic
loops, routing, and quantised weights.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_sim import SimOptions, isa
from nki_sim.language import api as nl

RANDOM = np.random.default_rng(3)
SKIP = isa.oob_mode.skip
BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3
BOTH_ORDERS = [SimOptions(start_core=0), SimOptions(start_core=1), SimOptions(preempt=0.3, seed=5)]
ORDER_IDS = ["core-0-first", "core-1-first", "preempted"]


def output(shape: tuple[int, ...], dtype: Any = nl.float32) -> Any:
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm)


def tile(shape: tuple[int, ...], dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> Any:
    return nl.ndarray(shape, dtype, buffer=buffer)


def filled(shape: tuple[int, ...], dtype: Any, value: float) -> Any:
    made = tile(shape, dtype)
    isa.memset(made, value)
    return made


@pytest.mark.parametrize("dge", ["hwdge", "swdge", "unknown"])
def test_1_expert_weights_are_fetched_by_an_index_in_memory(dge: str) -> None:
    E, H, I, N = 5, 128, 48, 7  # noqa: E741
    weights = RANDOM.normal(size=(E, H, 2, I)).astype(BF16)
    block_to_expert = RANDOM.integers(0, E, (N, 1)).astype(np.int32)

    def kernel(w: Any, blocks: Any) -> Any:
        out = output((N, H, I), nl.bfloat16)
        for n in range(N):
            block = filled((1, 1), nl.int32, n)
            expert = tile((1, 1), nl.int32)
            isa.dma_copy(expert, blocks.ap([[1, 1], [1, 1]], scalar_offset=block))
            up = tile((H, I), nl.bfloat16)
            source = w.ap([[2 * I, H], [1, I]], offset=I, scalar_offset=expert, indirect_dim=0)
            isa.dma_copy(up, source, dge_mode=isa.dge_mode[dge])
            isa.dma_copy(out[n], up)
        return out

    result = nki_sim.run(kernel, weights, block_to_expert).outputs
    assert np.array_equal(result, weights[block_to_expert[:, 0], :, 1])


def test_2_tokens_are_gathered_by_a_column_of_an_index_tile() -> None:
    T, H, NT = 60, 96, 3
    hidden = RANDOM.normal(size=(T, H)).astype(BF16)
    ids = RANDOM.integers(0, T, (128, NT)).astype(np.int32)
    ids[RANDOM.random((128, NT)) < 0.3] = -1

    def kernel(x: Any, i: Any) -> Any:
        index = tile((128, NT), nl.int32)
        isa.dma_copy(index, i)
        out = output((NT, 128, H), nl.bfloat16)
        for k in range(NT):
            rows = filled((128, H), nl.bfloat16, 0)
            column = index.ap([[NT, 128], [1, 1]], offset=k)
            isa.dma_copy(rows, x.ap([[H, 128], [1, H]], vector_offset=column), oob_mode=SKIP)
            isa.dma_copy(out[k], rows)
        return out

    result = nki_sim.run(kernel, hidden, ids)
    expected = np.where(ids.T[:, :, None] >= 0, hidden[np.maximum(ids.T, 0)], BF16(0))
    assert np.array_equal(result.outputs, expected)
    assert result.findings == []


def test_3_token_ids_are_loaded_by_transpose_cast_and_scalar_offset() -> None:
    """Three ways to bring [NT, 128] ids in HBM to one id per partition; all are exact."""
    NT = 4
    ids = RANDOM.integers(0, 1 << 20, (NT, 128)).astype(np.int32)

    def kernel(i: Any) -> Any:
        out = output((3, 128, NT), nl.int32)
        by_dma = tile((128, 1, 1, NT), nl.int32)
        isa.dma_transpose(by_dma, i.reshape((NT, 1, 1, 128)))
        isa.dma_copy(out[0], by_dma)

        as_float = tile((NT, 128))
        isa.dma_copy(as_float, i)
        turned = tile((128, NT), buffer=nl.psum)
        isa.nc_transpose(turned, as_float)
        by_array = tile((128, NT), nl.int32)
        isa.tensor_copy(by_array, turned)
        isa.dma_copy(out[1], by_array)

        by_column = tile((128, NT), nl.int32)
        for k in range(NT):
            where = filled((1, 1), nl.int32, k)
            source = i.ap([[1, 128], [1, 1]], scalar_offset=where, indirect_dim=0)
            isa.dma_copy(by_column[:, k : k + 1], source, oob_mode=SKIP)
        isa.dma_copy(out[2], by_column)
        return out

    result = nki_sim.run(kernel, ids)
    for k in range(3):
        assert np.array_equal(result.outputs[k], ids.T)
    exact = nki_sim.run(kernel, ids, options=SimOptions(mode="indices"))
    assert np.array_equal(exact.outputs, result.outputs)
    assert list(exact.trace) == list(result.trace)


def test_4_affinities_are_fetched_at_token_times_experts_plus_expert() -> None:
    T, E = 50, 6
    affinities = RANDOM.normal(size=(T * E, 1)).astype(np.float32)
    ids = RANDOM.integers(-1, T, (128, 1)).astype(np.int32)

    def kernel(a: Any, i: Any) -> Any:
        token = tile((128, 1), nl.int32)
        isa.dma_copy(token, i)
        address = tile((128, 1), nl.int32)
        isa.tensor_scalar(address, token, nl.multiply, E)
        expert = filled((128, 1), nl.int32, 4)
        isa.tensor_tensor(address, address, expert, nl.add)
        isa.tensor_scalar(address, address, nl.maximum, -1)
        found = filled((128, 1), nl.float32, 0)
        isa.dma_copy(found, a.ap([[1, 128], [1, 1]], vector_offset=address), oob_mode=SKIP)
        out = output((128, 1))
        isa.dma_copy(out, found)
        return out

    # An id of -1 gives address -2, clamped to -1: out of range.
    result = nki_sim.run(kernel, affinities, ids).outputs
    expected = np.where(ids >= 0, affinities[np.maximum(ids[:, 0], 0) * E + 4], 0)
    assert np.array_equal(result, expected)


def _silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def test_5_gate_and_up_accumulate_over_h_and_are_clamped_and_multiplied() -> None:
    H, B, I = 384, 256, 96  # noqa: E741
    hidden = (RANDOM.normal(size=(B, H)) / 8).astype(BF16)
    weights = (RANDOM.normal(size=(H, 2, I)) / 4).astype(BF16)
    bias = RANDOM.normal(size=(I, 2)).astype(np.float32)

    def kernel(x: Any, w: Any, b: Any) -> Any:
        identity = nl.shared_identity_matrix(128, dtype=nl.bfloat16)
        turned = [tile((128, B), nl.bfloat16) for _ in range(H // 128)]
        for row in range(B // 128):
            rows = tile((128, H), nl.bfloat16)
            isa.dma_copy(rows, x[row * 128 : row * 128 + 128])
            bank = tile((128, H), nl.bfloat16, nl.psum)
            for k in range(H // 128):
                part = slice(128 * k, 128 * k + 128)
                isa.nc_matmul(bank[:, part], rows[:, part], identity, is_transpose=True)
            for k in range(H // 128):
                isa.tensor_copy(
                    turned[k][:, row * 128 : row * 128 + 128], bank[:, nl.ds(128 * k, 128)]
                )
        biases = tile((I, 2))
        isa.dma_copy(biases, b)
        parts = []
        for half in range(2):
            bank = tile((I, B), nl.float32, nl.psum)
            for k in range(H // 128):
                weight = tile((128, I), nl.bfloat16)
                isa.dma_copy(weight, w[k * 128 : k * 128 + 128, half, :])
                isa.nc_matmul(bank, weight, turned[k])
            part = tile((I, B))
            op = nl.silu if half == 0 else nl.copy
            isa.activation(part, op, bank, bias=biases[:, half : half + 1])
            isa.tensor_scalar(part, part, nl.minimum, 0.7, op1=nl.maximum, operand1=-0.6)
            parts.append(part)
        product = tile((I, B), nl.bfloat16)
        isa.tensor_tensor(product, parts[0], parts[1], nl.multiply)
        out = output((I, B), nl.bfloat16)
        isa.dma_copy(out, product)
        return out

    result = nki_sim.run(kernel, hidden, weights, bias).outputs.astype(np.float32)
    x, w = hidden.astype(np.float64), weights.astype(np.float64)
    gate = np.clip(_silu(x @ w[:, 0] + bias[:, 0]), -0.6, 0.7)
    up = np.clip(x @ w[:, 1] + bias[:, 1], -0.6, 0.7)
    np.testing.assert_allclose(result, (gate * up).T, rtol=0.005, atol=1e-3)


def test_6_down_projection_is_scaled_by_an_affinity_per_token() -> None:
    I, H, B = 96, 512, 64  # noqa: E741
    inner = RANDOM.normal(size=(I, B)).astype(BF16)
    weights = RANDOM.normal(size=(I, H)).astype(BF16)
    affinity = RANDOM.random((B, 1)).astype(BF16)
    old = RANDOM.normal(size=(B, H)).astype(np.float32)

    def kernel(x: Any, w: Any, a: Any, before: Any) -> Any:
        x_sb, w_sb, a_sb = (
            tile((I, B), nl.bfloat16),
            tile((I, H), nl.bfloat16),
            tile((B, 1), a.dtype),
        )
        isa.dma_copy(x_sb, x)
        isa.dma_copy(w_sb, w)
        isa.dma_copy(a_sb, a)
        total = tile((B, H))
        isa.dma_copy(total, before)
        bank = tile((B, H), nl.float32, nl.psum)
        isa.nc_matmul(bank, x_sb, w_sb)
        isa.scalar_tensor_tensor(total, bank, nl.multiply, a_sb, nl.add, total)
        out = output((B, H))
        isa.dma_copy(out, total)
        return out

    result = nki_sim.run(kernel, inner, weights, affinity, old).outputs
    expected = inner.astype(np.float64).T @ weights.astype(np.float64) * affinity.astype(np.float64)
    np.testing.assert_allclose(result, expected + old, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("options", BOTH_ORDERS, ids=ORDER_IDS)
@pytest.mark.parametrize("by_dma", [False, True], ids=["gather-add-scatter", "dma-compute"])
def test_7_blocks_are_added_to_the_rows_of_shared_memory(options: Any, by_dma: bool) -> None:
    """Core c owns half of H; both write the same rows, with a barrier between blocks."""
    T, H, N = 40, 128, 4
    blocks = RANDOM.normal(size=(N, 32, H)).astype(np.float32)
    ids = np.stack([RANDOM.permutation(T)[:32] for _ in range(N)]).astype(np.int32)
    ids[:, 20:24] = -1

    def kernel(x: Any, i: Any) -> Any:
        out = output((T, H))
        core, half = nl.program_id(0), H // 2
        zeros = filled((T, H), nl.float32, 0)
        isa.dma_copy(out, zeros)
        isa.core_barrier(out, (0, 1))
        for n in range(N):
            rows, values = tile((32, 1), nl.int32), tile((32, half))
            isa.dma_copy(rows, i[n].reshape((32, 1)))
            isa.dma_copy(values, x[n, :, core * half : core * half + half])
            where = out.ap([[H, 32], [1, half]], offset=core * half, vector_offset=rows)
            if by_dma:
                isa.dma_compute(where, [where, values], nl.add, oob_mode=SKIP)
            else:
                old = filled((32, half), nl.float32, 0)
                isa.dma_copy(old, where, oob_mode=SKIP)
                isa.tensor_tensor(old, old, values, nl.add)
                isa.dma_copy(where, old, oob_mode=SKIP)
            isa.core_barrier(out, (0, 1))
        return out

    result = nki_sim.run(kernel, blocks, ids, lnc=2, options=options).outputs
    expected = np.zeros((T, H), np.float32)
    for n in range(N):
        good = ids[n] >= 0
        expected[ids[n][good]] += blocks[n][good]
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", BOTH_ORDERS, ids=ORDER_IDS)
def test_8_cores_exchange_partial_sums_by_sendrecv(options: Any) -> None:
    I, H, B = 256, 192, 128  # noqa: E741
    inner = RANDOM.normal(size=(I, B)).astype(BF16)
    weights = RANDOM.normal(size=(I, H)).astype(BF16)

    def kernel(x: Any, w: Any) -> Any:
        core = nl.program_id(0)
        mine = slice(core * 128, core * 128 + 128)
        x_sb, w_sb = tile((128, B), nl.bfloat16), tile((128, H), nl.bfloat16)
        isa.dma_copy(x_sb, x[mine])
        isa.dma_copy(w_sb, w[mine])
        bank = tile((B, H), nl.float32, nl.psum)
        isa.nc_matmul(bank, x_sb, w_sb)
        partial, other = tile((B, H)), tile((B, H))
        isa.tensor_copy(partial, bank)
        isa.sendrecv(
            src=partial, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0
        )
        isa.tensor_tensor(partial, partial, other, nl.add)
        out = output((B, H))
        half = slice(core * 96, core * 96 + 96)
        isa.dma_copy(out[:, half], partial[:, half])
        return out

    result = nki_sim.run(kernel, inner, weights, lnc=2, options=options).outputs
    expected = inner.astype(np.float64).T @ weights.astype(np.float64)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


LOOPS = ["dynamic_range", "fori_loop", "while", "while_loop"]


@pytest.mark.parametrize("mode", ["full", "indices"])
@pytest.mark.parametrize("form", LOOPS)
def test_9_a_tail_of_blocks_runs_under_a_register(form: str, mode: Any) -> None:
    """The number of trips is a sum of conditions; the block counter lives in SBUF."""
    N = 8
    values = RANDOM.normal(size=(N, 16)).astype(np.float32)
    marks = np.arange(N, dtype=np.int32).reshape(N, 1) * 10
    conditions = np.array([1] * 5 + [0] * 3, np.int32)

    def kernel(x: Any, m: Any, c: Any) -> Any:
        out, seen = output((N, 16)), output((N, 1), nl.int32)
        isa.dma_copy(out, filled((N, 16), nl.float32, 0))
        isa.dma_copy(seen, filled((N, 1), nl.int32, -1))
        flags, count = tile((1, N), nl.int32), tile((1, 1), nl.int32)
        isa.dma_copy(flags, c.reshape((1, N)))
        isa.tensor_reduce(count, nl.add, flags, axis=1)
        block = filled((1, 1), nl.int32, 2)
        register = isa.register_alloc(count)

        def body(_: Any) -> None:
            row, mark = tile((1, 16)), tile((1, 1), nl.int32)
            isa.dma_copy(row, x.ap([[16, 1], [1, 16]], scalar_offset=block))
            isa.dma_copy(out.ap([[16, 1], [1, 16]], scalar_offset=block), row)
            isa.dma_copy(mark, m.ap([[1, 1], [1, 1]], scalar_offset=block))
            isa.dma_copy(seen.ap([[1, 1], [1, 1]], scalar_offset=block), mark)
            isa.tensor_scalar(block, block, nl.add, 1)

        if form == "dynamic_range":
            for i in nl.dynamic_range(2, register):
                body(i)
        elif form == "fori_loop":
            nl.fori_loop(2, register, body)
        else:
            left = tile((1, 1), nl.int32)
            isa.tensor_scalar(left, count, nl.subtract, 2)
            isa.register_load(register, left)

            def step(_: Any) -> Any:
                body(None)
                isa.tensor_scalar(left, left, nl.subtract, 1)
                isa.register_load(register, left)
                return register

            if form == "while":
                while register:
                    step(register)
            else:
                nl.while_loop(register, step)
        return out, seen

    version: Any = "0.6" if form in ("dynamic_range", "while") else "0.7"
    options = SimOptions(mode=mode, nki=version)
    run = nki_sim.run(kernel, values, marks, conditions, options=options)
    rows, seen = run.outputs
    expected = np.full((N, 1), -1, np.int32)
    expected[2:5] = marks[2:5]
    assert np.array_equal(seen, expected)
    if mode == "full":
        assert np.array_equal(rows, np.where(expected >= 0, values, 0))
    assert [record.op for record in run.trace].count("loop_trip") == 3


def test_10_decode_finds_its_tokens_and_gathers_their_affinities() -> None:
    """Nonzero positions on every 16th partition, and a gather inside groups of 16."""
    T, E = 64, 8
    affinities = np.where(RANDOM.random((E, T)) < 0.3, RANDOM.random((E, T)), 0).astype(np.float32)

    def kernel(a: Any) -> Any:
        rows = filled((128, T), nl.float32, 0)
        for e in range(E):
            isa.dma_copy(rows[16 * e : 16 * e + 1], a[e : e + 1])
        found = filled((128, T + 1), nl.int32, 0)
        isa.nonzero_with_count(found, rows, index_offset=0, padding_val=-1)
        out = output((E, T + 1), nl.int32)
        for e in range(E):
            isa.dma_copy(out[e : e + 1], found[16 * e : 16 * e + 1])
        return out

    result = nki_sim.run(kernel, affinities).outputs
    for e in range(E):
        positions = np.flatnonzero(affinities[e])
        assert np.array_equal(result[e, : len(positions)], positions)
        assert (result[e, len(positions) : -1] == -1).all()
        assert result[e, -1] == len(positions)


def test_10_column_tiles_hold_partial_sums_that_are_added_later() -> None:
    H, T, I = 512, 16, 200  # noqa: E741
    hidden = RANDOM.normal(size=(H, T)).astype(BF16)
    weights = RANDOM.normal(size=(H, I)).astype(BF16)

    def kernel(x: Any, w: Any) -> Any:
        bank = tile((128, I), nl.float32, nl.psum)
        for k in range(H // 128):
            x_sb, w_sb = tile((128, T), nl.bfloat16), tile((128, I), nl.bfloat16)
            isa.dma_copy(x_sb, x[k * 128 : k * 128 + 128])
            isa.dma_copy(w_sb, w[k * 128 : k * 128 + 128])
            column = 32 * (k % 4)
            isa.nc_matmul(
                bank[column : column + T],
                x_sb,
                w_sb,
                tile_position=(0, column),
                tile_size=(128, 32),
            )
        total = tile((T, I))
        isa.tensor_copy(total, bank[0:T])
        for k in range(1, 4):
            isa.tensor_tensor(total, total, bank[32 * k : 32 * k + T], nl.add)
        out = output((T, I))
        isa.dma_copy(out, total)
        return out

    result = nki_sim.run(kernel, hidden, weights).outputs
    expected = hidden.astype(np.float64).T @ weights.astype(np.float64)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


def test_10_one_partition_is_broadcast_by_a_shuffle() -> None:
    values = RANDOM.normal(size=(1, 40)).astype(np.float32)

    def kernel(x: Any) -> Any:
        one, wide = tile((1, 40)), tile((128, 40))
        isa.dma_copy(one, x)
        for quadrant in range(4):
            rows = slice(32 * quadrant, 32 * quadrant + 32)
            isa.nc_stream_shuffle(wide[rows], one, [0] * 32)
        out = output((128, 40))
        isa.dma_copy(out, wide)
        return out

    assert np.array_equal(nki_sim.run(kernel, values).outputs, np.repeat(values, 128, axis=0))


@pytest.mark.parametrize("top_k", [4, 8, 12])
def test_11_the_router_takes_the_largest_logits(top_k: int) -> None:
    T, E = 64, 40
    logits = RANDOM.permutation(T * E).reshape(T, E).astype(np.float32) / 100

    def kernel(x: Any) -> Any:
        scores = tile((T, E))
        isa.dma_copy(scores, x)
        indices = tile((T, 16), nl.uint32)
        for turn in range(-(-top_k // 8)):
            best = tile((T, 8))
            isa.max8(best, scores)
            isa.nc_find_index8(indices[:, 8 * turn : 8 * turn + 8], scores, best)
            isa.nc_match_replace8(scores, scores, best, -1e30)
        position = tile((T, E))
        isa.iota(position, [[1, E]], offset=0, channel_multiplier=0)
        chosen = filled((T, E), nl.float32, 0)
        for k in range(top_k):
            hot, which = tile((T, E)), tile((T, 1))
            isa.tensor_copy(which, indices[:, k : k + 1])
            isa.tensor_scalar(hot, position, nl.equal, which)
            isa.tensor_tensor(chosen, chosen, hot, nl.add)
        out, ids = output((T, E)), output((T, top_k), nl.uint32)
        isa.dma_copy(out, chosen)
        isa.dma_copy(ids, indices[:, 0:top_k])
        return out, ids

    mask, ids = nki_sim.run(kernel, logits).outputs
    expected = np.argsort(-logits, axis=1)[:, :top_k]
    assert np.array_equal(ids, expected)
    one_hot = np.zeros((T, E))
    np.put_along_axis(one_hot, expected, 1, axis=1)
    assert np.array_equal(mask, one_hot)


def test_12_fp8_weights_are_scaled_after_the_product() -> None:
    H, I, T = 128, 64, 32  # noqa: E741
    weights = RANDOM.normal(size=(H, I)).astype(np.float32)
    scale = (np.abs(weights).max(axis=0) / 240).reshape(I, 1).astype(np.float32)
    quantised = (weights / scale.T).astype(FP8)
    hidden = RANDOM.normal(size=(H, T)).astype(BF16)

    def kernel(x: Any, w: Any, s: Any) -> Any:
        x_sb, w_sb, s_sb = tile((H, T), nl.bfloat16), tile((H, I), w.dtype), tile((I, 1))
        isa.dma_copy(x_sb, x)
        isa.dma_copy(w_sb, w)
        isa.dma_copy(s_sb, s)
        bank = tile((I, T), nl.float32, nl.psum)
        isa.nc_matmul(bank, w_sb, x_sb)
        scaled = tile((I, T))
        isa.tensor_scalar(scaled, bank, nl.multiply, s_sb)
        out = output((I, T))
        isa.dma_copy(out, scaled)
        return out

    result = nki_sim.run(kernel, hidden, quantised, scale).outputs
    exact = (quantised.astype(np.float64) * scale.T).T @ hidden.astype(np.float64)
    np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-4)


def test_12_rows_are_quantised_to_fp8_with_their_largest_value() -> None:
    values = RANDOM.normal(size=(64, 96)).astype(np.float32)

    def kernel(x: Any) -> Any:
        rows, scaled, largest = tile((64, 96)), tile((64, 96)), tile((64, 1))
        isa.dma_copy(rows, x)
        isa.tensor_scalar_reduce(
            scaled, rows, nl.abs, 0.0, reduce_op=nl.maximum, reduce_res=largest
        )
        scale, inverse = tile((64, 1)), tile((64, 1))
        isa.tensor_scalar(scale, largest, nl.multiply, 1 / 240)
        isa.reciprocal(inverse, scale)
        narrow = tile((64, 96), nl.float8_e4m3)
        isa.tensor_scalar(narrow, rows, nl.multiply, inverse)
        out, scales = output((64, 96), nl.float8_e4m3), output((64, 1))
        isa.dma_copy(out, narrow)
        isa.dma_copy(scales, scale)
        return out, scales

    quantised, scales = nki_sim.run(kernel, values).outputs
    np.testing.assert_allclose(scales[:, 0], np.abs(values).max(axis=1) / 240, rtol=1e-6)
    restored = quantised.astype(np.float32) * scales
    assert np.abs(restored - values).max() <= (np.abs(values).max(axis=1) * 2**-4).max()
