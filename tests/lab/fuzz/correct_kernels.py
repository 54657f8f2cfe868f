"""Small correct kernels, in which `tests/lab/fuzz/kernels.py` plants faults.

Axes: T tokens, H hidden, N columns.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def project(x_HT: nl.ndarray, w_HN: nl.ndarray) -> nl.ndarray:
    """Multiply over H in tiles of 128 rows, the last one shorter; scale by a masked column."""
    H, T = x_HT.shape
    N = w_HN.shape[1]
    sum_ps = nl.ndarray((T, N), nl.float32, buffer=nl.psum)
    for tile in range((H + 127) // 128):
        rows = min(128, H - 128 * tile)
        x_sb = nl.ndarray((128, T), nl.float32)
        w_sb = nl.ndarray((128, N), nl.float32)
        nisa.dma_copy(x_sb[0:rows], x_HT[128 * tile : 128 * tile + rows])
        nisa.dma_copy(w_sb[0:rows], w_HN[128 * tile : 128 * tile + rows])
        nisa.nc_matmul(sum_ps, x_sb[0:rows], w_sb[0:rows], accumulate=tile > 0)
    mask_sb = nl.ndarray((T, N), nl.uint8)
    nisa.memset(mask_sb, 0)
    nisa.memset(mask_sb[:, 0:8], 1)
    kept_sb = nl.ndarray((T, N), nl.float32)
    nisa.memset(kept_sb, 0.0)
    nisa.tensor_copy_predicated(kept_sb, sum_ps, mask_sb)
    scaled_sb = nl.ndarray((T, N), nl.float32)
    nisa.tensor_tensor(scaled_sb, kept_sb, sum_ps, nl.add)
    nisa.tensor_copy(scaled_sb[:, 0:4], kept_sb[:, 4:8])
    out_TN = nl.ndarray((T, N), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out_TN, scaled_sb)
    return out_TN


def move_rows(x_TH: nl.ndarray, index_T1: nl.ndarray) -> nl.ndarray:
    """Gather rows by an index that may be -1, and scatter them back to other places."""
    T, H = x_TH.shape
    index_sb = nl.ndarray((T, 1), nl.int32)
    nisa.dma_copy(index_sb, index_T1)
    rows_sb = nl.ndarray((T, H), nl.float32)
    nisa.memset(rows_sb, 0.0)
    source = x_TH.ap([[H, T], [1, H]], vector_offset=index_sb)
    nisa.dma_copy(rows_sb, source, oob_mode=nisa.oob_mode.skip)
    nisa.activation(rows_sb, nl.exp, rows_sb, scale=-1.0)
    order_sb = nl.ndarray((T, 1), nl.int32)
    nisa.iota(order_sb, [[0, 1]], offset=T - 1, channel_multiplier=-1)
    out_TH = nl.ndarray((T, H), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out_TH.ap([[H, T], [1, H]], vector_offset=order_sb), rows_sb)
    first_sb = nl.ndarray((1, H), nl.float32)
    nisa.dma_copy(first_sb, out_TH[0:1])
    nisa.dma_copy(out_TH[0:1], first_sb)
    return out_TH


def share(x_2H: nl.ndarray) -> nl.ndarray:
    """Two cores: each brings a row, reads the other's, and sends its sum over."""
    H = x_2H.shape[1]
    core = nl.program_id(0)
    own_sb = nl.ndarray((1, H), nl.float32)
    other_sb = nl.ndarray((1, H), nl.float32)
    sent_sb = nl.ndarray((1, H), nl.float32)
    shared_2H = nl.ndarray((2, H), nl.float32, buffer=nl.shared_hbm)
    out_2H = nl.ndarray((2, H), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(own_sb, x_2H[core : core + 1])
    nisa.dma_copy(shared_2H[core : core + 1], own_sb)
    nisa.core_barrier(shared_2H, (0, 1))
    nisa.dma_copy(other_sb, shared_2H[1 - core : 2 - core])
    nisa.core_barrier(shared_2H, (0, 1))
    nisa.tensor_scalar(own_sb, own_sb, nl.multiply, 3.0)
    nisa.dma_copy(shared_2H[core : core + 1], own_sb)
    nisa.core_barrier(shared_2H, (0, 1))
    nisa.tensor_tensor(own_sb, own_sb, other_sb, nl.add)
    nisa.sendrecv(own_sb, sent_sb, 1 - core, 1 - core, 0)
    nisa.tensor_tensor(own_sb, own_sb, sent_sb, nl.subtract)
    nisa.dma_copy(out_2H[core : core + 1], own_sb)
    return out_2H


def repeat(x_TH: nl.ndarray, count_11: nl.ndarray) -> nl.ndarray:
    """Add rows of x in a loop whose iterations are known at run time only."""
    T, H = x_TH.shape
    count_sb = nl.ndarray((1, 1), nl.int32)
    nisa.dma_copy(count_sb, count_11)
    iterations = nisa.register_alloc(0)
    nisa.register_load(iterations, count_sb)
    sum_sb = nl.ndarray((1, H), nl.float32)
    other_sb = nl.ndarray((1, H), nl.float32)
    nisa.memset(sum_sb, 0.0)
    nisa.memset(other_sb, 0.0)
    ones_sb = nl.ndarray((T, 1), nl.float32)
    nisa.memset(ones_sb, 1.0)
    whole_sb = nl.ndarray((T, H), nl.float32)
    nisa.dma_copy(whole_sb, x_TH)
    column_ps = nl.ndarray((1, H), nl.float32, buffer=nl.psum)
    sums = [sum_sb, other_sb]
    turn = 0
    for iteration in nl.dynamic_range(0, iterations):
        row_sb = nl.ndarray((1, H), nl.float32)
        nisa.dma_copy(row_sb, x_TH.ap([[H, 1], [1, H]], scalar_offset=iteration, indirect_dim=0))
        nisa.tensor_tensor(sums[turn], sums[turn], row_sb, nl.add)
        nisa.nc_matmul(column_ps, ones_sb, whole_sb, accumulate=False)
        nisa.tensor_tensor(other_sb, other_sb, column_ps, nl.add)
    out_2H = nl.ndarray((2, H), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out_2H[0:1], sum_sb)
    nisa.dma_copy(out_2H[1:2], other_sb)
    return out_2H


def place(x_TH: nl.ndarray) -> nl.ndarray:
    """Two buffers at addresses take turns: one is loaded while the other is used."""
    T, H = x_TH.shape
    bytes_H = 4 * H
    sum_sb = nl.ndarray((T, H), nl.float32, address=(0, 4 * bytes_H))
    nisa.memset(sum_sb, 0.0)
    first_sb = nl.ndarray((T, H), nl.float32, address=(0, 0))
    second_sb = nl.ndarray((T, H), nl.float32, address=(0, bytes_H))
    buffers = [first_sb, second_sb]
    nisa.dma_copy(buffers[0], x_TH)
    for turn in range(4):
        if turn < 3:
            nisa.dma_copy(buffers[(turn + 1) % 2], x_TH)
        nisa.tensor_tensor(sum_sb, sum_sb, buffers[turn % 2], nl.add)
    bank_ps = nl.ndarray((T, H), nl.float32, buffer=nl.psum, address=(0, 2048))
    nisa.tensor_copy(bank_ps, sum_sb)
    last_sb = nl.ndarray((T, H), nl.float32)
    nisa.tensor_copy(last_sb, bank_ps)
    out_TH = nl.ndarray((T, H), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out_TH, last_sb)
    return out_TH
