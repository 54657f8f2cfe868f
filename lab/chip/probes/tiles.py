"""What the micro-kernels share: filled tiles, and the store that ends each of them."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl


def filled(columns: int, dtype: Any, value: float = 1.0, rows: int = 128) -> nl.NkiTensor:
    """Return a tile in SBUF, every element set."""
    tile = nl.ndarray((rows, columns), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def stored(tile: nl.NkiTensor) -> nl.NkiTensor:
    """Store the first column of a tile as the kernel's result, [cores, rows, 1]."""
    rows = tile.shape[0]
    result = nl.ndarray((nl.num_programs(0), rows, 1), dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result[nl.program_id(0)], src=tile[0:rows, 0:1], dge_mode=nisa.dge_mode.none)
    return result
