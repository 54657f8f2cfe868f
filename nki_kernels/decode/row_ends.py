"""The epilogue of a decode kernel whose sums are rows: exchange columns, add up, store.

Each core finishes half of the columns of all tokens.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.memory import allocate
from nki_kernels.common.rank_sums import ALONE, RankSum, sum_on_chip
from nki_kernels.common.tiles import copy_alternating
from nki_kernels.decode.buffers import SumBuffers
from nki_kernels.decode.config import accumulator_banks, bank_span
from nki_kernels.decode.memory import ends_table

_PIECES = 3  # most of a core's columns, each exchanged, added and stored
_PIECE_UNIT = 16  # columns


@dataclass
class Epilogue(NKIObject):
    """What becomes of y.

    Attributes:
        output: [T, H] in HBM.
        residuals: [T, H] tensors in HBM to add, none or one.
        ranks: what becomes of rounded sums of several ranks.
    """

    output: nl.NkiTensor
    residuals: list[nl.NkiTensor]
    ranks: RankSum = ALONE


def finish_rows(sums: SumBuffers, epilogue: Epilogue) -> None:
    """Add the cores' rows and the residual, round once, add up the ranks' on chip, store.

    Columns go in pieces, so that one is added and stored while the next is on its way.

    Args:
        sums: this core's rows.
        epilogue: what is added, and where it is stored.
    """
    config = sums.config
    T, share = config.T, config.H // config.num_cores
    first, theirs = sums.core * share, (1 - sums.core) * share
    rows_sb = allocate(ends_table(config).stored)[0]
    residual_tiles = []
    for residual in epilogue.residuals:
        residual_sb = nl.ndarray((T, share), dtype=residual.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=residual_sb, src=residual[0:T, first : first + share])
        residual_tiles.append(residual_sb)
    size = -(-share // (_PIECES * _PIECE_UNIT)) * _PIECE_UNIT
    pieces = []
    for begin in range(0, share, size):
        pieces.append(slice(begin, min(share, begin + size)))
    received = []
    if config.num_cores > 1:
        # All exchanges are issued before any sum: later pieces travel while earlier ones are added.
        received = allocate(ends_table(config).received)
        for piece in pieces:
            sent = slice(theirs + piece.start, theirs + piece.stop)
            nisa.sendrecv(
                src=sums.total_sb[0:T, sent],
                dst=received[0][0:T, piece],
                send_to_rank=1 - sums.core,
                recv_from_rank=1 - sums.core,
                pipe_id=0,
                dma_engine=nisa.dma_engine.dma,
            )
    for piece in pieces:
        _add_columns(sums, rows_sb, received + residual_tiles, first, piece)
    rows_sb = sum_on_chip(epilogue.ranks, rows_sb)
    for piece in pieces:
        nisa.dma_copy(
            dst=epilogue.output[0:T, first + piece.start : first + piece.stop],
            src=rows_sb[0:T, piece],
            dge_mode=nisa.dge_mode.none,
        )


def _add_columns(
    sums: SumBuffers, rows_sb: nl.NkiTensor, others: list[nl.NkiTensor], first: int, piece: slice
) -> None:
    """Round a piece of this core's columns, the same columns of others added before.

    Vector and GpSimd add as fast in SBUF: they take turns at runs of columns as wide as a bank.

    Args:
        sums: this core's rows.
        rows_sb: [T, columns of this core] for the result.
        others: of the same shape; all but the last are overwritten.
        first: first column of this core.
        piece: which columns of this core's.
    """
    config = sums.config
    for bank in range(accumulator_banks(config)):
        begin, stop = bank_span(config, bank)
        low, high = max(begin, first + piece.start), min(stop, first + piece.stop)
        if low >= high:
            continue
        columns = slice(low - first, high - first)
        engine = nisa.engine.vector if bank % 2 == 0 else nisa.engine.gpsimd
        source = sums.total_sb[0 : config.T, low:high]
        for k in range(len(others)):
            other_sb = others[k][0 : config.T, columns]
            sum_sb = rows_sb[0 : config.T, columns] if k == len(others) - 1 else other_sb
            nisa.tensor_tensor(dst=sum_sb, data1=source, data2=other_sb, op=nl.add, engine=engine)
            source = sum_sb
        if len(others) == 0:
            copy_alternating(rows_sb[0 : config.T, columns], source, bank)
