"""One small kernel for each open feature of NKI: does it compile, are its numbers right?"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def sums_over_trips(x: nl.NkiTensor, trips: nl.NkiTensor) -> nl.NkiTensor:
    """Add x^T x up in PSUM over the trips of a loop whose length is loaded; x [128, 128] bf16."""
    x_sb = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.sbuf)
    count_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=x)
    nisa.dma_copy(dst=count_sb, src=trips)
    sum_ps = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sum_ps, stationary=x_sb, moving=x_sb, accumulate=False)
    end = nisa.register_alloc()
    nisa.register_load(end, count_sb)

    def trip(_number: nl.NkiTensor) -> None:
        nisa.nc_matmul(dst=sum_ps, stationary=x_sb, moving=x_sb, accumulate=True)

    nl.fori_loop(0, end, trip)
    sum_sb = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=sum_sb, src=sum_ps)
    result = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=sum_sb)
    return result


@nki.jit
def copy_by_register(x: nl.NkiTensor, place: nl.NkiTensor) -> nl.NkiTensor:
    """Return the column of x [128, 64] float32 that a loaded number names."""
    x_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    place_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=x)
    nisa.dma_copy(dst=place_sb, src=place)
    column = nisa.register_alloc()
    nisa.register_load(column, place_sb)
    found_sb = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    entry = x_sb.ap([[64, 128], [1, 1]], scalar_offset=column, indirect_dim=1)
    nisa.tensor_copy(dst=found_sb, src=entry, engine=nisa.engine.scalar)
    result = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=found_sb)
    return result


@nki.jit
def copy_by_number(x: nl.NkiTensor, place: nl.NkiTensor) -> nl.NkiTensor:
    """Return the column of x [128, 64] float32 that a number in SBUF names, no register loaded."""
    x_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    place_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=x)
    nisa.dma_copy(dst=place_sb, src=place)
    found_sb = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    entry = x_sb.ap([[64, 128], [1, 1]], scalar_offset=place_sb, indirect_dim=1)
    nisa.tensor_copy(dst=found_sb, src=entry, engine=nisa.engine.gpsimd)
    result = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=found_sb)
    return result


@nki.jit
def float8_beside_bfloat16(weight: nl.NkiTensor, x: nl.NkiTensor) -> nl.NkiTensor:
    """Return weight^T x of a float8 [128, 128] and a bfloat16 [128, 64] operand."""
    weight_sb = nl.ndarray((128, 128), dtype=weight.dtype, buffer=nl.sbuf)
    x_sb = nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=weight_sb, src=weight)
    nisa.dma_copy(dst=x_sb, src=x)
    product_ps = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product_ps, stationary=weight_sb, moving=x_sb, accumulate=False)
    product_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=product_sb, src=product_ps)
    result = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=product_sb)
    return result


@nki.jit
def gathered_transpose(x: nl.NkiTensor, rows: nl.NkiTensor) -> nl.NkiTensor:
    """Return the rows of x [256, 128] bfloat16 that `rows` [128, 1] names, turned on the way."""
    rows_sb = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows_sb, src=rows)
    turned_sb = nl.ndarray((128, 1, 1, 128), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_transpose(
        dst=turned_sb,
        src=x.ap([[128, 128], [128, 1], [128, 1], [1, 128]], vector_offset=rows_sb.view(nl.uint32)),
        oob_mode=nisa.oob_mode.skip,
        dge_mode=nisa.dge_mode.swdge,
    )
    result = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=turned_sb.reshape((128, 128)))
    return result


@nki.jit
def exchange_in_a_loop(x: nl.NkiTensor, trips: nl.NkiTensor) -> nl.NkiTensor:
    """Swap x [2, 128, 64] float32 between the cores in every trip of a loop; return both."""
    core = nl.program_id(0)
    count_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=count_sb, src=trips)
    mine_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    theirs_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=mine_sb, src=x[core])
    end = nisa.register_alloc()
    nisa.register_load(end, count_sb)

    def trip(_number: nl.NkiTensor) -> None:
        nisa.sendrecv(
            src=mine_sb, dst=theirs_sb, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0
        )
        nisa.tensor_copy(dst=mine_sb, src=theirs_sb)

    nl.fori_loop(0, end, trip)
    result = nl.ndarray((2, 128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result[core], src=mine_sb)
    return result


@nki.jit
def skipped_rows(x: nl.NkiTensor, rows: nl.NkiTensor) -> nl.NkiTensor:
    """Gather rows of x [256, 64] float32 by `rows` [128, 1]; -1 leaves a row of zeros alone."""
    rows_sb = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows_sb, src=rows)
    found_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=found_sb, value=0.0)
    nisa.dma_copy(
        dst=found_sb,
        src=x.ap([[64, 128], [1, 64]], vector_offset=rows_sb),
        oob_mode=nisa.oob_mode.skip,
        dge_mode=nisa.dge_mode.swdge,
    )
    result = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=found_sb)
    return result


@nki.jit
def skipped_stores(x: nl.NkiTensor, rows: nl.NkiTensor) -> nl.NkiTensor:
    """Store rows of x [128, 64] float32 where `rows` [128, 1] says, of zeros; -1 stores nothing."""
    rows_sb = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    x_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    zeros_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows_sb, src=rows)
    nisa.dma_copy(dst=x_sb, src=x)
    nisa.memset(dst=zeros_sb, value=0.0)
    result = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=zeros_sb)
    nisa.dma_copy(
        dst=result.ap([[64, 128], [1, 64]], vector_offset=rows_sb),
        src=x_sb,
        oob_mode=nisa.oob_mode.skip,
        dge_mode=nisa.dge_mode.swdge,
    )
    return result


@nki.jit
def skipped_entries(x: nl.NkiTensor, entries: nl.NkiTensor) -> nl.NkiTensor:
    """Load two matrices of x [4, 128, 64] float32; of one that there is not, zeros stay."""
    numbers_sb = nl.ndarray((1, 2), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=numbers_sb, src=entries)
    result = nl.ndarray((2, 128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    for k in range(2):
        found_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=found_sb, value=0.0)
        entry = numbers_sb[0:1, k : k + 1]
        nisa.dma_copy(
            dst=found_sb,
            src=x.ap([[64, 128], [1, 64]], scalar_offset=entry, indirect_dim=0),
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
        )
        nisa.dma_copy(dst=result[k], src=found_sb)
    return result
