"""One small kernel for each open feature of NKI: does it compile, are its numbers right?"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from lab.chip.open_features.tiles import counted, kept, loaded


@nki.jit
def copy_by_register(x: nl.NkiTensor, place: nl.NkiTensor) -> nl.NkiTensor:
    """Return the column of x [128, 64] float32 that a loaded number names."""
    x_sb = loaded(x)
    place_sb = loaded(place)
    column = nisa.register_alloc()
    nisa.register_load(column, place_sb)
    found_sb = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    entry = x_sb.ap([[64, 128], [1, 1]], scalar_offset=column, indirect_dim=1)
    nisa.tensor_copy(dst=found_sb, src=entry, engine=nisa.engine.scalar)
    return kept(found_sb)


@nki.jit
def copy_by_number(x: nl.NkiTensor, place: nl.NkiTensor) -> nl.NkiTensor:
    """Return the column of x [128, 64] float32 that a number in SBUF names, no register loaded."""
    x_sb = loaded(x)
    place_sb = loaded(place)
    found_sb = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    entry = x_sb.ap([[64, 128], [1, 1]], scalar_offset=place_sb, indirect_dim=1)
    nisa.tensor_copy(dst=found_sb, src=entry, engine=nisa.engine.gpsimd)
    return kept(found_sb)


@nki.jit
def float8_beside_bfloat16(weight: nl.NkiTensor, x: nl.NkiTensor) -> nl.NkiTensor:
    """Return weight^T x of a float8 [128, 128] and a bfloat16 [128, 64] operand."""
    weight_sb = loaded(weight)
    x_sb = loaded(x)
    product_ps = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product_ps, stationary=weight_sb, moving=x_sb, accumulate=False)
    product_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=product_sb, src=product_ps)
    return kept(product_sb)


@nki.jit
def gathered_transpose(x: nl.NkiTensor, rows: nl.NkiTensor) -> nl.NkiTensor:
    """Return the rows of x [256, 128] bfloat16 that `rows` [128, 1] names, transposed on the way.

    An index is uint32, as documented; int32 is taken as it is, and a row out of range is left out.
    """
    rows_sb = loaded(rows)
    transposed_sb = nl.ndarray((128, 1, 1, 128), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=transposed_sb, value=0.0)
    nisa.dma_transpose(
        dst=transposed_sb,
        src=x.ap([[128, 128], [128, 1], [128, 1], [1, 128]], vector_offset=rows_sb),
        oob_mode=nisa.oob_mode.skip,
        dge_mode=nisa.dge_mode.swdge,
    )
    return kept(transposed_sb.reshape((128, 128)))


@nki.jit
def exchange_in_a_loop(x: nl.NkiTensor, iterations: nl.NkiTensor) -> nl.NkiTensor:
    """Swap x [2, 128, 64] float32 between the cores in every iteration of a loop; return both."""
    core = nl.program_id(0)
    mine_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    theirs_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=mine_sb, src=x[core])
    end = counted(iterations)

    def iteration(_number: nl.NkiTensor) -> None:
        nisa.sendrecv(
            src=mine_sb, dst=theirs_sb, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0
        )
        nisa.tensor_copy(dst=mine_sb, src=theirs_sb)

    nl.fori_loop(0, end, iteration)
    return kept(mine_sb)


@nki.jit
def skipped_rows(x: nl.NkiTensor, rows: nl.NkiTensor) -> nl.NkiTensor:
    """Gather rows of x [256, 64] float32 by `rows` [128, 1]; -1 leaves a row of zeros alone."""
    rows_sb = loaded(rows)
    found_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=found_sb, value=0.0)
    nisa.dma_copy(
        dst=found_sb,
        src=x.ap([[64, 128], [1, 64]], vector_offset=rows_sb),
        oob_mode=nisa.oob_mode.skip,
        dge_mode=nisa.dge_mode.swdge,
    )
    return kept(found_sb)


@nki.jit
def skipped_stores(x: nl.NkiTensor, rows: nl.NkiTensor) -> nl.NkiTensor:
    """Store rows of x [128, 64] float32 where `rows` [128, 1] says, of zeros; -1 stores nothing."""
    rows_sb = loaded(rows)
    x_sb = loaded(x)
    zeros_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros_sb, value=0.0)
    stored = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=stored, src=zeros_sb)
    nisa.dma_copy(
        dst=stored.ap([[64, 128], [1, 64]], vector_offset=rows_sb),
        src=x_sb,
        oob_mode=nisa.oob_mode.skip,
        dge_mode=nisa.dge_mode.swdge,
    )
    return kept(loaded(stored))


@nki.jit
def skipped_entries(x: nl.NkiTensor, entries: nl.NkiTensor) -> nl.NkiTensor:
    """Load two matrices of x [4, 128, 64] float32; of one that there is not, zeros stay."""
    numbers_sb = loaded(entries)
    found_sb = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=found_sb, value=0.0)
    for k in range(2):
        entry = numbers_sb[0:1, k : k + 1]
        nisa.dma_copy(
            dst=found_sb[:, k * 64 : (k + 1) * 64],
            src=x.ap([[64, 128], [1, 64]], scalar_offset=entry, indirect_dim=0),
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
        )
    return kept(found_sb)


@nki.jit
def plain_copy(x: nl.NkiTensor) -> nl.NkiTensor:
    """Return x [128, 64] float32 plus one: what every machine that works can do."""
    sum_sb = loaded(x)
    nisa.tensor_scalar(dst=sum_sb, data=sum_sb, op0=nl.add, operand0=1.0)
    return kept(sum_sb)


@nki.jit
def loads_for_the_next_iteration(x: nl.NkiTensor, iterations: nl.NkiTensor) -> nl.NkiTensor:
    """Add up the first matrices of x [5, 128, 64] float32, each loaded an iteration before."""
    end = counted(iterations)
    ahead_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=ahead_sb, value=1)
    next_sb = loaded(x[0])
    sum_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sum_sb, value=0.0)

    def iteration(_number: nl.NkiTensor) -> None:
        nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=next_sb, op=nl.add)
        nisa.dma_copy(
            dst=next_sb,
            src=x.ap([[64, 128], [1, 64]], scalar_offset=ahead_sb, indirect_dim=0),
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
        )
        nisa.tensor_scalar(dst=ahead_sb, data=ahead_sb, op0=nl.add, operand0=1)

    nl.fori_loop(0, end, iteration)
    return kept(sum_sb)


@nki.jit
def products_in_a_loop(
    x: nl.NkiTensor, weights: nl.NkiTensor, iterations: nl.NkiTensor
) -> nl.NkiTensor:
    """Add up weights[i]^T x over a loop of a loaded length, with all engines inside.

    x is [128, 64] and weights [4, 128, 128] bfloat16. Nothing stays in PSUM from iteration to
    iteration.
    """
    end = counted(iterations)
    x_sb = loaded(x)
    weight_sb = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.sbuf)
    product_ps = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)
    product_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    sum_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sum_sb, value=0.0)

    def iteration(number: nl.NkiTensor) -> None:
        nisa.dma_copy(
            dst=weight_sb,
            src=weights.ap([[128, 128], [1, 128]], scalar_offset=number, indirect_dim=0),
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
        )
        nisa.nc_matmul(dst=product_ps, stationary=weight_sb, moving=x_sb, accumulate=False)
        nisa.tensor_copy(dst=product_sb, src=product_ps, engine=nisa.engine.scalar)
        nisa.tensor_tensor(
            dst=sum_sb, data1=sum_sb, data2=product_sb, op=nl.add, engine=nisa.engine.gpsimd
        )

    nl.fori_loop(0, end, iteration)
    return kept(sum_sb)


@nki.jit
def loops_in_a_row(x: nl.NkiTensor, iterations: nl.NkiTensor) -> nl.NkiTensor:
    """Add 2 x^T x up over three loops, of x [128, 128] bfloat16; `iterations` is [1, 3].

    The two products of an iteration are added up in PSUM, which nothing outlasts.
    """
    x_sb, iterations_sb = loaded(x), loaded(iterations)
    product_ps = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    sum_sb = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sum_sb, value=0.0)

    def iteration(_number: nl.NkiTensor) -> None:
        nisa.nc_matmul(dst=product_ps, stationary=x_sb, moving=x_sb, accumulate=False)
        nisa.nc_matmul(dst=product_ps, stationary=x_sb, moving=x_sb, accumulate=True)
        nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=product_ps, op=nl.add)

    for k in range(3):
        end = nisa.register_alloc()
        nisa.register_load(end, iterations_sb[0:1, k : k + 1])
        nl.fori_loop(0, end, iteration)
    return kept(sum_sb)


@nki.jit
def bodies_that_differ(x: nl.NkiTensor, iterations: nl.NkiTensor) -> nl.NkiTensor:
    """Add x [128, 64] float32 up in a loop: core 0 once in each iteration, core 1 twice."""
    x_sb = loaded(x)
    sum_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sum_sb, value=0.0)
    end = counted(iterations)
    core = nl.program_id(0)

    def iteration(_number: nl.NkiTensor) -> None:
        for _turn in range(1 + core):
            nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=x_sb, op=nl.add)

    nl.fori_loop(0, end, iteration)
    return kept(sum_sb)


@nki.jit
def stores_to_a_loaded_place(x: nl.NkiTensor, entries: nl.NkiTensor) -> nl.NkiTensor:
    """Store x [128, 64] float32 to the matrices, of four of zeros, that `entries` [1, 2] names.

    One that there is not is left out. Returns the four beside each other.
    """
    x_sb, numbers_sb = loaded(x), loaded(entries)
    zeros_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros_sb, value=0.0)
    stored = nl.ndarray((4, 128, 64), dtype=nl.float32, buffer=nl.private_hbm)
    for k in range(4):
        nisa.dma_copy(dst=stored[k], src=zeros_sb)
    for k in range(2):
        nisa.dma_copy(
            dst=stored.ap(
                [[64, 128], [1, 64]], scalar_offset=numbers_sb[0:1, k : k + 1], indirect_dim=0
            ),
            src=x_sb,
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
        )
    found_sb = nl.ndarray((128, 256), dtype=nl.float32, buffer=nl.sbuf)
    for k in range(4):
        nisa.dma_copy(dst=found_sb[:, k * 64 : (k + 1) * 64], src=stored[k])
    return kept(found_sb)


@nki.jit
def patterns_of_four_levels(x: nl.NkiTensor, entry: nl.NkiTensor) -> nl.NkiTensor:
    """Load every other piece of 16 of a matrix that a number names; x is [3, 256, 128] bfloat16.

    A partition gets two rows, of each the even pieces: [128, 128].
    """
    entry_sb = loaded(entry)
    found_sb = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=found_sb,
        src=x.ap(
            [[128, 128], [128 * 128, 2], [32, 4], [1, 16]], scalar_offset=entry_sb, indirect_dim=0
        ),
        dge_mode=nisa.dge_mode.hwdge,
        engine=nisa.engine.sync,
    )
    return kept(found_sb)


@nki.jit
def largest_of_psum(x: nl.NkiTensor, one: nl.NkiTensor) -> nl.NkiTensor:
    """Return the places of the 8 largest numbers of each row of x, read from PSUM.

    x is [128, 64] and `one` the unit matrix [128, 128], both bfloat16.
    """
    x_sb, one_sb = loaded(x), loaded(one)
    x_ps = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=x_ps, stationary=one_sb, moving=x_sb, accumulate=False)
    best_sb = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
    nisa.max8(dst=best_sb, src=x_ps)
    places_sb = nl.ndarray((128, 8), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.nc_find_index8(dst=places_sb, data=x_ps, vals=best_sb)
    return kept(places_sb)


@nki.jit
def replaced_in_bfloat16(x: nl.NkiTensor) -> nl.NkiTensor:
    """Return x [128, 64] float32 as bfloat16, the 8 largest numbers of each row set to 0."""
    x_sb = loaded(x)
    best_sb = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
    nisa.max8(dst=best_sb, src=x_sb)
    rest_sb = nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.nc_match_replace8(dst=rest_sb, data=x_sb, vals=best_sb, imm=0.0)
    return kept(rest_sb)


@nki.jit
def integers_compared(x: nl.NkiTensor, y: nl.NkiTensor) -> nl.NkiTensor:
    """Return 10 (x == y) + (x >= y) of two [128, 64] int32 tensors."""
    x_sb, y_sb = loaded(x), loaded(y)
    equal_sb = nl.ndarray((128, 64), dtype=nl.int32, buffer=nl.sbuf)
    not_less_sb = nl.ndarray((128, 64), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=equal_sb, data1=x_sb, data2=y_sb, op=nl.equal)
    nisa.tensor_tensor(dst=not_less_sb, data1=x_sb, data2=y_sb, op=nl.greater_equal)
    nisa.tensor_scalar(dst=equal_sb, data=equal_sb, op0=nl.multiply, operand0=10)
    nisa.tensor_tensor(dst=equal_sb, data1=equal_sb, data2=not_less_sb, op=nl.add)
    return kept(equal_sb)


@nki.jit
def row_onto_partitions(x: nl.NkiTensor) -> nl.NkiTensor:
    """Load 128 numbers of a row, x [1, 512] int32, onto a partition each, from number 128 on."""
    column_sb = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=column_sb, src=x.ap([[1, 128], [1, 1]], offset=128))
    return kept(column_sb)


@nki.jit
def skipped_in_a_loop(
    x: nl.NkiTensor, entries: nl.NkiTensor, iterations: nl.NkiTensor
) -> nl.NkiTensor:
    """Add up the matrices of x [4, 128, 64] float32 that `entries` [1, 4] names, in a loop.

    One that there is not adds what was loaded before it.
    """
    end = counted(iterations)
    numbers_sb = loaded(entries)
    found_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    sum_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=found_sb, value=0.0)
    nisa.memset(dst=sum_sb, value=0.0)

    def iteration(number: nl.NkiTensor) -> None:
        entry_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(
            dst=entry_sb,
            src=numbers_sb.ap([[4, 1], [1, 1]], scalar_offset=number, indirect_dim=1),
            engine=nisa.engine.vector,
        )
        nisa.dma_copy(
            dst=found_sb,
            src=x.ap([[64, 128], [1, 64]], scalar_offset=entry_sb, indirect_dim=0),
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
        )
        nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=found_sb, op=nl.add)

    nl.fori_loop(0, end, iteration)
    return kept(sum_sb)


@nki.jit
def shared_matrices(
    x: nl.NkiTensor, weights: nl.NkiTensor, iterations: nl.NkiTensor
) -> nl.NkiTensor:
    """Add up weights[i]^T x over a loop, each core half of the sum, exchanged in every iteration.

    x is [256, 64] and weights [4, 256, 128] bfloat16; both cores return [128, 64] float32.
    """
    core = nl.program_id(0)
    end = counted(iterations)
    mine_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    theirs_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    sum_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    weight_sb = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.sbuf)
    half_ps = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.memset(dst=sum_sb, value=0.0)
    x_sb = loaded(x[core * 128 : (core + 1) * 128])

    def iteration(number: nl.NkiTensor) -> None:
        nisa.dma_copy(
            dst=weight_sb,
            src=weights.ap(
                [[128, 128], [1, 128]],
                offset=core * 128 * 128,
                scalar_offset=number,
                indirect_dim=0,
            ),
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
        )
        nisa.nc_matmul(dst=half_ps, stationary=weight_sb, moving=x_sb, accumulate=False)
        nisa.tensor_copy(dst=mine_sb, src=half_ps)
        nisa.sendrecv(
            src=mine_sb, dst=theirs_sb, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0
        )
        nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=mine_sb, op=nl.add)
        nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=theirs_sb, op=nl.add)

    nl.fori_loop(0, end, iteration)
    return kept(sum_sb)


@nki.jit
def meeting_cores(x: nl.NkiTensor) -> nl.NkiTensor:
    """Swap x [2, 128, 64] float32 between the cores by sendrecv, and add one behind a barrier."""
    core = nl.program_id(0)
    mine_sb = loaded(x[core])
    theirs_sb = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.sendrecv(
        src=mine_sb, dst=theirs_sb, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0
    )
    between = nl.ndarray((2, 128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=between[core], src=theirs_sb)
    nisa.core_barrier(between, (0, 1))
    sum_sb = loaded(between[core])
    nisa.tensor_scalar(dst=sum_sb, data=sum_sb, op0=nl.add, operand0=1.0)
    return kept(sum_sb)


@nki.jit
def full_sbuf(x: nl.NkiTensor, tiles: int) -> nl.NkiTensor:
    """Add up x [128, n] float32 in so many tiles that are all there at once; return column 0."""
    all_tiles = []
    for _tile in range(tiles):
        all_tiles.append(loaded(x))
    sum_sb = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sum_sb, value=0.0)
    for k in range(tiles):
        nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=all_tiles[k][:, 0:1], op=nl.add)
    return kept(sum_sb)
