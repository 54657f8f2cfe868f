"""Tokens of a decode step on chip: loaded, normalised and transposed.

    x[t] = hidden[t] * rsqrt(mean(hidden[t]^2) + eps) * norm_weight, rounded to the type of hidden

The result is x^T [h, H/h, T], a partition owning consecutive rows of H where `tile_axis` finds
equal tiles: what the router and the experts multiply with. Few tokens are loaded that way round; of
more the rows are loaded and transposed by the tensor engine, exactly.

A normalisation by tokens is one of columns there. Their sums of squares are the diagonal of
x x^T, whose products of bfloat16 are exact in float32; a product with ones adds them over the
partitions and leaves each sum on all of them. What is used twice is in PSUM, as the Vector engine
reads one operand from SBUF and one from PSUM at full rate, and two of SBUF at half of it.

The functions here take and give tiles; memory they allocate is counted by `norm_bytes`.

Sources: NKI 0.6 ISA; Trainium 2 architecture guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import apply_with
from nki_kernels.common.axes import AxisTiles
from nki_kernels.common.chip import BANK_BYTES, PARTITIONS
from nki_kernels.common.memory import Tiles, allocate, tiles, tiles_bytes
from nki_kernels.common.tiles import rows_of, transpose_rows

_DIRECT_TOKENS = 4  # a short run of HBM per token and partition: beyond, transposing rows is faster
WARM_UPS = 4  # matmuls while the tokens travel: the tensor engine's clock climbs with its work
_ENGINES, _ROWS_PER_ENGINE = 16, 8  # of the DMA: a transfer of few rows keeps few engines busy
_SHARED_TOKENS = 32  # from here on the Vector engine shares its passes over x^T
_STEP_COLUMNS = 1024  # of the last pass over x^T, so that the router follows closely


@dataclass
class TokenTile(nl.NKIObject):
    """Up to 128 tokens as they were loaded: transposed if they are few, else as rows."""

    rows_sb: nl.ndarray  # [R, H], or the same tile as transposed_sb
    transposed_sb: nl.ndarray  # [h, H/h, R], filled from the rows by `transpose`
    is_transposed: bool


@dataclass
class NormTiles(nl.NKIObject):
    """What normalising needs besides the tokens."""

    weight_sb: nl.ndarray  # [h, H/h], the weight as in HBM
    wide_sb: nl.ndarray  # [h, H/h] float32, the same
    ones_sb: nl.ndarray  # [128, 128] float32
    diagonal_sb: nl.ndarray  # [128, 128] uint32, the identity
    small_ps: nl.ndarray  # [128, 4, 128] float32: x x^T, sums, scales, weight


def is_direct(num_tokens: int, h_axis: AxisTiles) -> bool:
    """Whether tokens are loaded transposed."""
    return num_tokens <= _DIRECT_TOKENS and h_axis.is_strided


class NormTable(NamedTuple):
    """Buffers of a tile of tokens on the way, and what normalising needs besides."""

    rows: Tiles
    transposed: Tiles
    weighted: Tiles
    square: Tiles  # ones, the identity, squares, scales
    column: Tiles  # the weight as in HBM and in float32, squares of a token


def _norm_table(h_axis: AxisTiles, rows: int) -> NormTable:
    """Return the buffers of a tile of so many tokens."""
    shape = (h_axis.rows, h_axis.count, rows)
    return NormTable(
        rows=tiles(1, (rows, h_axis.size), nl.bfloat16),
        transposed=tiles(1, shape, nl.bfloat16),
        weighted=tiles(1, shape, nl.float32),
        square=tiles(4, (PARTITIONS, PARTITIONS), nl.float32),
        column=tiles(3, (h_axis.rows, h_axis.count), nl.float32),
    )


def norm_bytes(num_tokens: int, h_axis: AxisTiles, has_norm: bool) -> int:
    """Return the bytes of SBUF per partition alive while T tokens are loaded and normalised.

    The result is not among them. A tile of 128 tokens is transposed when the one before is done.
    """
    table = _norm_table(h_axis, min(PARTITIONS, num_tokens))
    size = tiles_bytes(table.transposed)
    if not is_direct(num_tokens, h_axis):
        size += tiles_bytes(table.rows) * -(-num_tokens // PARTITIONS)
    if has_norm:
        size += tiles_bytes(table.weighted) + tiles_bytes(table.square) + tiles_bytes(table.column)
    return size


def load_tokens(hidden_TH: nl.ndarray, h_axis: AxisTiles) -> list[TokenTile]:
    """Load all tokens, 128 a tile; nothing here waits for them.

    Args:
        hidden_TH: [T, H] bfloat16 in HBM.
        h_axis: how H is spread over partitions.
    """
    num_tokens = hidden_TH.shape[0]
    loaded = []
    for first in range(0, num_tokens, PARTITIONS):
        rows = min(PARTITIONS, num_tokens - first)
        if is_direct(num_tokens, h_axis):
            shape = (h_axis.rows, rows, h_axis.count)  # that of a transposed tile, read along rows
            flat_sb = nl.ndarray(shape, hidden_TH.dtype, buffer=nl.sbuf)
            _spread(flat_sb, hidden_TH, h_axis)
            transposed_sb = flat_sb.permute((0, 2, 1))
            loaded.append(TokenTile(transposed_sb, transposed_sb, True))
        else:
            table = _norm_table(h_axis, rows)
            rows_sb = allocate(table.rows)[0]
            _load_rows(rows_sb, hidden_TH, first)
            loaded.append(TokenTile(rows_sb, allocate(table.transposed)[0], False))
    return loaded


def _load_rows(rows_sb: nl.ndarray, hidden_TH: nl.ndarray, first: int) -> None:
    """Load rows in pieces of their columns, so that few rows keep all DMA engines busy too."""
    rows, hidden_size = rows_sb.shape
    pieces = max(1, _ENGINES // (-(-rows // _ROWS_PER_ENGINE)))
    width = -(-hidden_size // pieces)
    for start in range(0, hidden_size, width):
        columns = slice(start, min(start + width, hidden_size))
        source = hidden_TH[first : first + rows, columns]
        nisa.dma_copy(dst=rows_sb[:, columns], src=source, dge_mode=nisa.dge_mode.none)


def _spread(flat_sb: nl.ndarray, rows_RH: nl.ndarray, h_axis: AxisTiles) -> None:
    """Load rows of a strided axis as [h, R, H/h], a run of each on every partition.

    What the last partition lacks becomes zero.
    """
    count, rows = h_axis.count, flat_sb.shape[1]
    full, rest = h_axis.size // count, h_axis.size % count
    if rest > 0:
        nisa.memset(dst=flat_sb, value=0.0, engine=nisa.engine.gpsimd)
        source = rows_RH.ap([[count, 1], [h_axis.size, rows], [1, rest]], offset=full * count)
        target = flat_sb[full : full + 1, :, 0:rest]
        nisa.dma_copy(dst=target, src=source, dge_mode=nisa.dge_mode.none)
    source = rows_RH.ap([[count, full], [h_axis.size, rows], [1, count]])
    nisa.dma_copy(dst=flat_sb[0:full], src=source, dge_mode=nisa.dge_mode.none)


def transpose(tile: TokenTile, h_axis: AxisTiles, banks_ps: list[nl.ndarray]) -> None:
    """Transpose the rows of a tile if they came as rows.

    Args:
        tile: the tokens.
        h_axis: how H is spread over partitions.
        banks_ps: PSUM banks [128, 1024] bfloat16, used in turn.
    """
    if tile.is_transposed:
        return
    if h_axis.rows * h_axis.count != h_axis.size:
        # Places past the end of H: nobody multiplies with them, but they are scaled.
        nisa.memset(dst=tile.transposed_sb, value=0.0)
    transpose_rows(tile.transposed_sb, tile.rows_sb, h_axis, banks_ps, tile.rows_sb.shape[0])


def transposed_banks(h_axis: AxisTiles, num_tokens: int) -> list[nl.ndarray]:
    """Allocate the PSUM banks for `transpose`; none if the tokens come transposed."""
    banks = []
    if not is_direct(num_tokens, h_axis):
        for _bank in range(2):
            banks.append(nl.ndarray((PARTITIONS, BANK_BYTES // 2), nl.bfloat16, buffer=nl.psum))
    return banks


def load_norm(norm_weight_1H: nl.ndarray, h_axis: AxisTiles) -> NormTiles:
    """Load the weight of the norm and make its constants."""
    table = _norm_table(h_axis, PARTITIONS)
    weight_sb = nl.ndarray(table.column.shape, norm_weight_1H.dtype, buffer=nl.sbuf)
    _load_weight(weight_sb, norm_weight_1H, h_axis)
    ones_sb = nl.ndarray(table.square.shape, nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=ones_sb, pattern=[[0, PARTITIONS]], offset=1, channel_multiplier=0)
    diagonal_sb = nl.ndarray(table.square.shape, nl.uint32, buffer=nl.sbuf)
    nisa.affine_select(
        dst=diagonal_sb,
        pattern=[[1, PARTITIONS]],
        offset=0,
        channel_multiplier=-1,
        on_true_tile=ones_sb,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    small_ps = nl.ndarray((PARTITIONS, 4, PARTITIONS), nl.float32, buffer=nl.psum)
    # Loads the Scalar engine's table while the tokens travel; the number itself is not used.
    first_sb = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=first_sb, op=nl.rsqrt, data=ones_sb[:, 0:1])
    for _turn in range(WARM_UPS):
        nisa.nc_matmul(dst=small_ps[:, 0, :], stationary=ones_sb, moving=ones_sb, accumulate=False)
    wide_sb = nl.ndarray(table.column.shape, nl.float32, buffer=nl.sbuf)
    return NormTiles(weight_sb, wide_sb, ones_sb, diagonal_sb, small_ps)


def _load_weight(weight_sb: nl.ndarray, norm_weight_1H: nl.ndarray, h_axis: AxisTiles) -> None:
    """Load [1, H] onto the partitions of x^T, zeros past the end of H."""
    if h_axis.is_strided:
        _spread(weight_sb.expand_dim(1), norm_weight_1H, h_axis)
        return
    nisa.memset(dst=weight_sb, value=0.0)
    group = h_axis.group
    for tile in range(0, h_axis.count, group):
        rows = rows_of(h_axis, tile)
        source = norm_weight_1H.ap([[group, rows], [1, group]], offset=tile * h_axis.rows)
        target = weight_sb[0:rows, tile : tile + group]
        nisa.dma_copy(dst=target, src=source, dge_mode=nisa.dge_mode.none)


def normalize(
    normed_sb: nl.ndarray, tile: TokenTile, norm: NormTiles, h_axis: AxisTiles, eps: float
) -> None:
    """Write the normalised tokens of a tile, [h, H/h, R] of the type of hidden."""
    transposed_sb = tile.transposed_sb
    rows = transposed_sb.shape[2]
    if rows == 1:
        _normalize_one(normed_sb, transposed_sb, norm, h_axis, eps)
        return
    weighted_sb = allocate(_norm_table(h_axis, rows).weighted)[0]
    sums_ps = norm.small_ps[0 : h_axis.rows, 1, 0:rows]
    scale_ps = norm.small_ps[0 : h_axis.rows, 2, 0:rows]
    # Engines take their work in order: of few tokens the weight is applied while the products are
    # made, of many it would keep the sums waiting.
    weighs_first = not tile.is_transposed and rows < _SHARED_TOKENS
    if tile.is_transposed:
        _sum_squares(transposed_sb, norm, h_axis)
    _spread_weight(norm, h_axis)
    if weighs_first:
        _apply_weight(weighted_sb, transposed_sb, norm)
    if not tile.is_transposed:
        _sum_squares_by_products(transposed_sb, norm, h_axis)
    nisa.activation(dst=scale_ps, op=nl.rsqrt, data=sums_ps, scale=1.0 / h_axis.size, bias=eps)
    if not weighs_first:
        _apply_weight(weighted_sb, transposed_sb, norm)
    _apply_scale(normed_sb, weighted_sb, scale_ps)


def _normalize_one(
    normed_sb: nl.ndarray, transposed_sb: nl.ndarray, norm: NormTiles, h_axis: AxisTiles, eps: float
) -> None:
    """Normalise a single token, whose scale is one number for every partition."""
    _sum_squares(transposed_sb, norm, h_axis)
    sums_ps = norm.small_ps[0 : h_axis.rows, 1, 0:1]
    scale_sb = nl.ndarray((h_axis.rows, 1), nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=scale_sb, op=nl.rsqrt, data=sums_ps, scale=1.0 / h_axis.size, bias=eps)
    first = transposed_sb[:, :, 0]
    apply_with(normed_sb[:, :, 0], first, nl.multiply, scale_sb, nl.multiply, norm.weight_sb)


def _vector_share(count: int, rows: int) -> int:
    """Return how many tiles of H the Vector engine takes; another one has the rest of many."""
    return count if rows < _SHARED_TOKENS else count - count // 3


def _spread_weight(norm: NormTiles, h_axis: AxisTiles) -> None:
    """Put the norm's weight where it is read: in PSUM for the Vector engine, float32 for Scalar."""
    weight_ps = norm.small_ps[0 : h_axis.rows, 3, 0 : h_axis.count]
    nisa.tensor_copy(dst=weight_ps, src=norm.weight_sb, engine=nisa.engine.scalar)
    nisa.tensor_copy(dst=norm.wide_sb, src=norm.weight_sb, engine=nisa.engine.gpsimd)


def _apply_weight(weighted_sb: nl.ndarray, transposed_sb: nl.ndarray, norm: NormTiles) -> None:
    """Write the product of tokens and the norm's weight, [h, H/h, R] float32."""
    h, count, rows = transposed_sb.shape
    own = _vector_share(count, rows)
    weight = norm.small_ps[0:h, 3, 0:own].expand_dim(2).broadcast(2, rows)
    nisa.tensor_tensor(
        dst=weighted_sb[:, 0:own, :], data1=transposed_sb[:, 0:own, :], data2=weight, op=nl.multiply
    )
    for tile in range(own, count):
        nisa.activation(
            dst=weighted_sb[:, tile, :],
            op=nl.copy,
            data=transposed_sb[:, tile, :],
            scale=norm.wide_sb[:, tile : tile + 1],
        )


def _apply_scale(normed_sb: nl.ndarray, weighted_sb: nl.ndarray, scale_ps: nl.ndarray) -> None:
    """Multiply every token with its scale and round, [h, H/h, R]."""
    h, count, rows = weighted_sb.shape
    own = _vector_share(count, rows)
    if own < count:
        scale_sb = nl.ndarray((h, rows), nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=scale_sb, src=scale_ps, engine=nisa.engine.scalar)
        nisa.tensor_tensor(
            dst=normed_sb[:, own:count, :],
            data1=weighted_sb[:, own:count, :],
            data2=scale_sb.expand_dim(1).broadcast(1, count - own),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )
    step = max(1, _STEP_COLUMNS // rows)
    for first in range(0, own, step):
        chunks = slice(first, min(first + step, own))
        part_sb = weighted_sb[:, chunks, :]
        scale = scale_ps.expand_dim(1).broadcast(1, part_sb.shape[1])
        nisa.tensor_tensor(dst=normed_sb[:, chunks, :], data1=part_sb, data2=scale, op=nl.multiply)


def _sum_squares(transposed_sb: nl.ndarray, norm: NormTiles, h_axis: AxisTiles) -> None:
    """Leave the sums of squares of a few tokens on every partition of PSUM."""
    rows = transposed_sb.shape[2]
    partial_sb = nl.ndarray((h_axis.rows, rows), nl.float32, buffer=nl.sbuf)
    for token in range(rows):
        squares_sb = nl.ndarray((h_axis.rows, h_axis.count), nl.float32, buffer=nl.sbuf)
        nisa.activation_reduce(
            dst=squares_sb,
            op=nl.square,
            data=transposed_sb[:, :, token],
            reduce_op=nl.add,
            reduce_res=partial_sb[:, token : token + 1],
        )
    nisa.nc_matmul(
        dst=norm.small_ps[0 : h_axis.rows, 1, 0:rows],
        stationary=norm.ones_sb[0 : h_axis.rows, 0 : h_axis.rows],
        moving=partial_sb,
        accumulate=False,
    )


def _sum_squares_by_products(transposed_sb: nl.ndarray, norm: NormTiles, h_axis: AxisTiles) -> None:
    """Leave the sums of squares of up to 128 tokens on every partition of PSUM.

    The products of different tokens are dropped, not multiplied by zero: a token that holds NaN
    must not reach the others.
    """
    rows = transposed_sb.shape[2]
    products_ps = norm.small_ps[0:rows, 0, 0:rows]
    for tile in range(h_axis.count):
        depth = rows_of(h_axis, tile)
        nisa.nc_matmul(
            dst=products_ps,
            stationary=transposed_sb[0:depth, tile, :],
            moving=transposed_sb[0:depth, tile, :],
            accumulate=tile > 0,
        )
    squares_sb = nl.ndarray((rows, rows), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=squares_sb, value=0.0)
    nisa.tensor_copy_predicated(
        dst=squares_sb, src=products_ps, predicate=norm.diagonal_sb[0:rows, 0:rows]
    )
    nisa.nc_matmul(
        dst=norm.small_ps[0 : h_axis.rows, 1, 0:rows],
        stationary=norm.ones_sb[0:rows, 0 : h_axis.rows],
        moving=squares_sb,
        accumulate=False,
    )
