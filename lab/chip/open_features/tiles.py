"""What the kernels of open features share: loads, loaded counts, and the store that ends them."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def loaded(x: nl.NkiTensor) -> nl.NkiTensor:
    """Return a tensor of HBM as a tile in SBUF."""
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    return tile


def counted(iterations: nl.NkiTensor) -> nl.NkiTensor:
    """Return a register with a number that is loaded, [1, 1] int32 in HBM: the end of a loop."""
    end = nisa.register_alloc()
    nisa.register_load(end, loaded(iterations))
    return end


def kept(tile: nl.NkiTensor) -> nl.NkiTensor:
    """Store a tile as the kernel's result, [cores, rows, columns]: every core its own.

    So both cores run the same instructions, and each shows what it computed.
    """
    result = nl.ndarray(
        (nl.num_programs(0), tile.shape[0], tile.shape[1]), dtype=tile.dtype, buffer=nl.shared_hbm
    )
    nisa.dma_copy(dst=result[nl.program_id(0)], src=tile)
    return result
