"""Micro-kernels of registers, dynamic loops, and the meetings of two cores."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from lab.chip.probes.tiles import filled, stored


@nki.jit
def iterations(repeats: int, columns: int) -> nl.NkiTensor:
    """Copy a tile in a loop whose length is only known at run time."""
    one, other = filled(columns, nl.float32), filled(columns, nl.float32)
    count = filled(1, nl.int32, repeats, rows=1)
    end = nisa.register_alloc()
    nisa.register_load(end, count)

    def iteration(_position: nl.NkiTensor) -> None:
        nisa.tensor_copy(dst=other, src=one, engine=nisa.engine.vector)
        nisa.tensor_copy(dst=one, src=other, engine=nisa.engine.vector)

    nl.fori_loop(0, end, iteration)
    return stored(one)


@nki.jit
def register_loads(repeats: int) -> nl.NkiTensor:
    """Load numbers from SBUF into a register."""
    number = filled(1, nl.int32, 3, rows=1)
    register = nisa.register_alloc()
    for _turn in range(repeats):
        nisa.register_load(register, number)
    nisa.register_store(number, register)
    return stored(number)


@nki.jit
def register_loads_from_hbm(source: nl.NkiTensor, repeats: int) -> nl.NkiTensor:
    """Load numbers from HBM into a register; `source` is [1, 1] int32."""
    number = filled(1, nl.int32, 3, rows=1)
    register = nisa.register_alloc()
    for _turn in range(repeats):
        nisa.register_load(register, source)
    nisa.register_store(number, register)
    return stored(number)


@nki.jit
def register_stores(repeats: int) -> nl.NkiTensor:
    """Store a register again and again."""
    number = filled(1, nl.int32, 3, rows=1)
    register = nisa.register_alloc(7)
    for _turn in range(repeats):
        nisa.register_store(number, register)
    return stored(number)


@nki.jit
def register_moves(repeats: int) -> nl.NkiTensor:
    """Set a register again and again."""
    number = filled(1, nl.int32, 3, rows=1)
    register = nisa.register_alloc(7)
    for turn in range(repeats):
        nisa.register_move(register, turn)
    nisa.register_store(number, register)
    return stored(number)


@nki.jit
def copies_from_a_register(repeats: int, columns: int) -> nl.NkiTensor:
    """Copy the columns that a register names."""
    one, other = filled(2 * columns, nl.float32), filled(columns, nl.float32)
    zero = filled(1, nl.int32, 0, rows=1)
    start = nisa.register_alloc()
    nisa.register_load(start, zero)
    for _turn in range(repeats):
        nisa.tensor_copy(
            dst=other,
            src=one.ap([[2 * columns, 128], [1, columns]], scalar_offset=start, indirect_dim=1),
            engine=nisa.engine.vector,
        )
        nisa.tensor_copy(dst=one[:, 0:columns], src=other, engine=nisa.engine.vector)
    return stored(other)


@nki.jit
def barriers(repeats: int) -> nl.NkiTensor:
    """Meet the other core."""
    result = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = filled(1, nl.float32)
    for _turn in range(repeats):
        nisa.core_barrier(result, (0, 1))
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=result, src=tile, dge_mode=nisa.dge_mode.none)
    return result


@nki.jit
def exchanges(repeats: int, columns: int, by_gpsimd: bool) -> nl.NkiTensor:
    """Swap tiles with the other core."""
    core = nl.program_id(0)
    mine, theirs = filled(columns, nl.float32), filled(columns, nl.float32)
    for turn in range(repeats):
        nisa.sendrecv(
            src=mine if turn % 2 == 0 else theirs,
            dst=theirs if turn % 2 == 0 else mine,
            send_to_rank=1 - core,
            recv_from_rank=1 - core,
            pipe_id=0,
            dma_engine=nisa.dma_engine.gpsimd_dma if by_gpsimd else nisa.dma_engine.dma,
        )
    result = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    if core == 0:
        nisa.dma_copy(dst=result, src=mine[:, 0:1], dge_mode=nisa.dge_mode.none)
    return result


@nki.jit
def streams_of_two_cores(source: nl.NkiTensor, repeats: int) -> nl.NkiTensor:
    """Load long rows on both cores at once; `source` is [128, n] float32 in HBM."""
    columns = source.shape[1]
    tiles = []
    for _tile in range(4):
        tiles.append(nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf))
    for turn in range(repeats):
        nisa.dma_copy(dst=tiles[turn % 4], src=source, dge_mode=nisa.dge_mode.none)
    result = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=result, src=tiles[0][:, 0:1], dge_mode=nisa.dge_mode.none)
    return result
