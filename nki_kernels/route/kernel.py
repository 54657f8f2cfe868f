"""Router: logits, the top-k choice and expert affinities of every token.

Formula, float32 throughout:
    x = hidden, or RMSNorm(hidden) = hidden * rsqrt(mean(hidden^2) + eps) * norm_weight, rounded to
        the dtype of hidden
    logits = x @ router_weight^T (+ bias)
    scores = act(logits); ranked = scores + selection_bias, groups outside the chosen ones filled
    index = the K largest of ranked, or of the logits where nothing changes the ranks; the lower
        expert wins a tie
    affinities = act(chosen logits) or scores[index]; / (sum + renormalize_eps); * scaling

Inputs, all in HBM:
    hidden_TH         [T, H]  float32, bfloat16 or float16
    router_weight_EH  [E, H]  float32, bfloat16 or float16, as in the checkpoint
    bias_1E           [1, E]  any float, if config.formula.has_bias
    selection_bias_1E [1, E]  float32, if config.formula.has_selection_bias
    norm_weight_1H    [1, H]  any float, if config.has_norm
Outputs, in shared HBM, in this order:
    affinities_TK     [T, K]  float32; NaN of tokens with a logit that is none, if
                              config.marks_broken
    index_TK          [T, K]  int32, best first
    logits_TE         [T, E]  float32, if config.returns_logits
    normed_TH         [T, H]  the dtype of hidden, if config.has_norm

On chip: tokens are on the partitions (token_tiles.py), but for x^T and router_weight^T, which have
128 rows of H there. Both are transposed by the tensor engine, exactly, and filled up to whole 128
rows with zeros. All of router_weight^T stays in SBUF.

Limits (check_router_topk): K <= 32, E <= 1,024, H a multiple of 64, at most 16,384 tokens per core,
groups of equal size of at least 2; SBUF must hold router_weight^T.

Cost: hidden is read once, router_weight once per core; per tile of 128 tokens H/128 transposes of
the tile's rows and H/128 matmuls of E columns (four passes each if either operand is float32); two
to four passes of E columns on the Vector engine, and a copy of a bank of transposed rows at a time.
Loads of the next tile overlap.

Steps:
    1. Split the tokens over the cores; allocate the outputs in HBM (the same on both cores).
    2. Per tile of 128 tokens: load, add up squares, normalise, transpose; later tiles' before this
       one's choice. The norm's weight, on all partitions, comes behind the first tile.
    3. Load the router's weight, transposed, and its biases, before the first product.
    4. Multiply, add the bias; choose experts, and add up what weighing them needs of all experts.
    5. Number and weigh the experts of all tiles (router_choice.py); store them, at once too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import apply_with
from nki_kernels.common.chip import BANK_BYTES, BANK_FLOATS, PARTITIONS, SBUF_BYTES
from nki_kernels.common.memory import allocate, allocate_rows
from nki_kernels.common.router_choice import (
    begin_weights,
    finish_logits,
    finish_weights,
    pick_into,
    sums_all,
    write_index,
)
from nki_kernels.common.tiles import multiply_banks
from nki_kernels.common.token_tiles import (
    TokenTiles,
    split_tokens,
    store_per_token,
    tile_rows,
    token_rows,
    used_partitions,
)
from nki_kernels.route.config import RouterConfig, num_rows
from nki_kernels.route.memory import (
    PIECE,
    RouterTable,
    element_type,
    gpsimd_columns,
    router_table,
    sbuf_bytes,
)

_TURNS = 3  # of so many copies the Scalar engine takes one
_CHUNKS_LOADED = 4  # of the weight of a router, at once
_NORM_PSUM_BYTES = 8192  # per partition, half of PSUM


@dataclass
class _RouterConstants(nl.NKIObject):
    """What every tile uses: operands, sizes, and tiles in SBUF, each repeated on all partitions."""

    x: Any  # RouterOperands
    config: RouterConfig
    table: RouterTable
    tokens: TokenTiles
    weight_sb: nl.ndarray  # [128 of H, H / 128, E], transposed
    bias_sb: nl.ndarray  # [128, E] float32
    selection_bias_sb: nl.ndarray  # [128, E] float32
    norm_weight_sb: nl.ndarray  # [128, H]
    norm_weight_ps: nl.ndarray  # the first columns of it in PSUM
    scaled_sb: nl.ndarray  # [128, PIECE] float32, scratch of GpSimd


@dataclass
class _LoadedTile(nl.NKIObject):
    """Rows of tokens, and what the norm multiplies them with."""

    hidden_sb: nl.ndarray  # [rows, H]
    scale_sb: nl.ndarray  # [rows, 1] float32, or any tile without a norm


@dataclass
class RouterOperands(nl.NKIObject):
    """Tensors in HBM; those the configuration does not use may be None or any other."""

    hidden_TH: nl.ndarray
    router_weight_EH: nl.ndarray
    bias_1E: Any
    selection_bias_1E: Any
    norm_weight_1H: Any
    normed_TH: nl.ndarray  # written, if there is a norm
    logits_TE: nl.ndarray  # written, if they are returned
    gate_1H: Any = None  # weight of a gate, of the type of the router's


@dataclass
class RoutedTiles(nl.NKIObject):
    """What the tokens of a core chose, on the partitions of token_tiles.py.

    Where broken tokens are marked, partitions without a token hold an index of -1, affinities that
    are numbers, and spoils of 0.
    """

    affinities_sb: nl.ndarray  # [128, tiles * K] float32
    index_sb: nl.ndarray  # [128, tiles * K] int32
    spoils_sb: nl.ndarray  # [128, tiles] float32, 0, or NaN for a token with a logit that is none
    sums_sb: nl.ndarray  # [128, tiles] float32, scratch; so are the next three
    shifts_sb: nl.ndarray  # likewise
    best_sb: nl.ndarray  # [128, tiles, K filled up to eights] float32, what experts were chosen by
    positions_sb: nl.ndarray  # likewise uint32, the experts, or more where a token has NaNs
    gates_sb: nl.ndarray  # [128, tiles] float32, spoils and sigmoid of a gate, if there is one


@nki.jit
def router_topk(
    hidden_TH: nl.ndarray,
    router_weight_EH: nl.ndarray,
    bias_1E: Any,
    selection_bias_1E: Any,
    norm_weight_1H: Any,
    config: RouterConfig,
) -> tuple[nl.ndarray, ...]:
    """Route T tokens; see the module's docstring. Operands the formula does not use may be None."""
    assert hidden_TH.dtype == element_type(config.hidden_dtype), "hidden_TH: not as configured"
    assert router_weight_EH.dtype == element_type(config.weight_dtype), "router_weight_EH: too"
    num_tokens, top_k = hidden_TH.shape[0], config.formula.top_k
    affinities_TK = nl.ndarray((num_tokens, top_k), nl.float32, buffer=nl.shared_hbm)
    index_TK = nl.ndarray((num_tokens, top_k), nl.int32, buffer=nl.shared_hbm)
    outputs = [affinities_TK, index_TK]
    logits_TE, normed_TH = affinities_TK, hidden_TH
    if config.returns_logits:
        logits_TE = nl.ndarray((num_tokens, config.num_experts), nl.float32, buffer=nl.shared_hbm)
        outputs.append(logits_TE)
    if config.has_norm:
        normed_TH = nl.ndarray(hidden_TH.shape, hidden_TH.dtype, buffer=nl.shared_hbm)
        outputs.append(normed_TH)
    tokens = split_tokens(num_tokens, nl.program_id(0), nl.num_programs(0))
    if tokens.count == 0:
        return tuple(outputs)
    operands = RouterOperands(
        hidden_TH,
        router_weight_EH,
        bias_1E,
        selection_bias_1E,
        norm_weight_1H,
        normed_TH,
        logits_TE,
    )
    routed = route_tiles(operands, config, tokens)
    weigh_tiles(routed, config, tokens)
    if config.marks_broken:
        _spoil_affinities(routed, top_k)
    store_per_token(affinities_TK, routed.affinities_sb, tokens)
    store_per_token(index_TK, routed.index_sb, tokens)
    return tuple(outputs)


def _spoil_affinities(routed: RoutedTiles, top_k: int) -> None:
    """Make affinities of broken tokens NaN, which sigmoids of infinite logits are not."""
    affinities = routed.affinities_sb.reshape_dim(1, (routed.spoils_sb.shape[1], top_k))
    nisa.tensor_tensor(
        dst=affinities,
        data1=affinities,
        data2=routed.spoils_sb.expand_dim(2).broadcast(2, top_k),
        op=nl.add,
    )


def route_tiles(x: RouterOperands, config: RouterConfig, tokens: TokenTiles) -> RoutedTiles:
    """Route the tokens of this core, at least one; logits and normalised tokens go to HBM.

    Who waits for experts goes on with them: affinities and gates are made by `weigh_tiles`.
    """
    table, ahead = router_table(config, tokens.rows, 2), 1
    if sbuf_bytes(table) > SBUF_BYTES:
        table, ahead = router_table(config, tokens.rows, 1), 0
    routed = _allocate_routed(config, table, tokens)
    # Engines work in order: a tile is chosen for while the next one is multiplied, the one after
    # that transposed, one more normalised, and the squares of two more added up.
    squared = 2 * ahead
    early = squared + ahead if config.has_norm else 0
    loaded, normed, transposed, logits = [], [], [], []
    # What is constant is loaded where it is first used: no tile waits for more than it needs.
    squares_sb = allocate(table.squares)[0] if config.has_norm else None
    loaded.append(_load_hidden(x, squares_sb, config, table, tokens, 0))
    constants = _load_norm(x, config, table, tokens)
    for step in range(tokens.count + early + 2 * ahead):
        if 0 < step < tokens.count:
            loaded.append(_load_hidden(x, squares_sb, config, table, tokens, step))
        if config.has_norm and 0 <= step - squared and step - squared < tokens.count:
            first = loaded.pop(0)
            normed.append(_normalize(first, constants, step - squared))
        if 0 <= step - early and step - early < tokens.count:
            rows_sb = normed.pop(0) if config.has_norm else loaded.pop(0).hidden_sb
            transposed.append(_transpose_hidden(rows_sb, constants, step - early))
        if step == early + ahead:
            _load_router(constants)
        if 0 <= step - early - ahead and step - early - ahead < tokens.count:
            logits.append(_multiply(transposed.pop(0), constants))
        if 0 <= step - early - 2 * ahead:
            _choose_tile(constants, routed, step - early - 2 * ahead, logits.pop(0))
    _number_choices(routed, config, tokens)
    return routed


def _allocate_routed(config: RouterConfig, table: RouterTable, tokens: TokenTiles) -> RoutedTiles:
    """Allocate what is known per token; partitions without a token get numbers."""
    affinities_sb, index_sb = allocate(table.affinities)[0], allocate(table.chosen)[0]
    sums_sb, shifts_sb = allocate(table.sums)[0], allocate(table.sums)[0]
    shape = (tokens.count, config.formula.top_k)
    # Where as many are found as are wanted, they are in the tiles of affinities and indices.
    best_sb = affinities_sb.reshape_dim(1, shape)
    positions_sb = index_sb.view(nl.uint32).reshape_dim(1, shape)
    if table.best.number > 0:
        best_sb, positions_sb = allocate(table.best)[0], allocate(table.positions)[0]
    routed = RoutedTiles(
        affinities_sb, index_sb, affinities_sb, sums_sb, shifts_sb, best_sb, positions_sb, sums_sb
    )
    if config.has_gate:
        routed.gates_sb = allocate(table.gates)[0]
    if config.marks_broken:
        routed.spoils_sb = allocate(table.spoils)[0]
    if tokens.rows < tokens.count * PARTITIONS:
        for ones_sb in (affinities_sb, best_sb, sums_sb):
            nisa.memset(dst=ones_sb, value=1.0)
        nisa.memset(dst=shifts_sb, value=0.0)
        nisa.memset(dst=routed.index_sb, value=-1)
        if config.marks_broken:
            nisa.memset(dst=routed.spoils_sb, value=0.0)
        if config.has_gate:
            nisa.memset(dst=routed.gates_sb, value=0.0)
    return routed


def _number_choices(routed: RoutedTiles, config: RouterConfig, tokens: TokenTiles) -> None:
    """Make indices and marks of all tiles at once."""
    # All tiles before `rest` have a row more than those from it on.
    _write_indices(routed, config, slice(0, tokens.rest), tokens.full + 1)
    _write_indices(routed, config, slice(tokens.rest, tokens.count), tokens.full)
    if config.marks_broken and sums_all(config.formula):
        # The sum of exponents is a number if all logits are.
        nisa.tensor_scalar(dst=routed.spoils_sb, data=routed.sums_sb, op0=nl.multiply, operand0=0.0)


def weigh_tiles(routed: RoutedTiles, config: RouterConfig, tokens: TokenTiles) -> None:
    """Make affinities and gates of all tiles at once, after `route_tiles`."""
    formula, count = config.formula, tokens.count
    finish_weights(
        routed.affinities_sb.reshape_dim(1, (count, formula.top_k)),
        routed.best_sb[:, :, 0 : formula.top_k],
        routed.sums_sb,
        routed.shifts_sb,
        formula,
    )
    if config.has_gate:
        gates_sb = routed.gates_sb
        nisa.activation(dst=gates_sb, op=nl.sigmoid, data=gates_sb)
        nisa.tensor_tensor(dst=gates_sb, data1=gates_sb, data2=routed.spoils_sb, op=nl.add)


def _write_indices(routed: RoutedTiles, config: RouterConfig, tiles: slice, rows: int) -> None:
    """Write the experts of some tiles, of which as many partitions hold a token."""
    if tiles.start == tiles.stop or rows == 0:
        return
    top_k = config.formula.top_k
    index = routed.index_sb.reshape_dim(1, (routed.sums_sb.shape[1], top_k))
    positions = routed.positions_sb[0:rows, tiles, 0:top_k]
    write_index(index[0:rows, tiles, :], positions, config.num_experts)


def _choose_tile(
    constants: _RouterConstants, routed: RoutedTiles, tile: int, logits_ps: nl.ndarray
) -> None:
    """Choose the experts of a tile's tokens and score them; store their logits if asked."""
    config = constants.config
    tokens, top_k, num_experts = constants.tokens, config.formula.top_k, config.num_experts
    rows = tile_rows(tokens, tile)
    column = slice(tile, tile + 1)
    if config.has_gate:
        gate_ps = logits_ps[:, num_experts : num_rows(config)]
        nisa.tensor_copy(dst=routed.gates_sb[0:rows, column], src=gate_ps)
        logits_ps = logits_ps[:, 0:num_experts]
    logits = finish_logits(logits_ps, constants.bias_sb, config.formula)
    if config.returns_logits:
        target = token_rows(constants.x.logits_TE, tokens, tile, 0, num_experts)
        nisa.dma_copy(dst=target, src=logits[:, 0:num_experts])
    picked = pick_into(
        routed.best_sb[0:rows, tile, :],
        routed.positions_sb[0:rows, tile, :],
        logits,
        constants.selection_bias_sb,
        num_experts,
        config.formula,
    )
    begin_weights(
        routed.affinities_sb[0:rows, tile * top_k : (tile + 1) * top_k],
        routed.sums_sb[0:rows, column],
        routed.shifts_sb[0:rows, column],
        picked,
        logits,
        num_experts,
        config.formula,
    )
    if config.marks_broken and not sums_all(config.formula):
        _mark_broken(routed.spoils_sb[0:rows, column], logits, num_experts)


def _mark_broken(spoils: nl.ndarray, logits: nl.ndarray, num_experts: int) -> None:
    """Write 0 for a token whose logits are numbers, else NaN: 0 times what is none is none."""
    nothing_sb = nl.ndarray((logits.shape[0], num_experts), nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(
        dst=nothing_sb,
        op=nl.copy,
        data=logits[:, 0:num_experts],
        scale=0.0,
        reduce_op=nl.add,
        reduce_res=spoils,
    )


def _load_norm(
    x: RouterOperands, config: RouterConfig, table: RouterTable, tokens: TokenTiles
) -> _RouterConstants:
    """Repeat the norm's weight on the partitions in use; `_load_router` does what is left."""
    weight_sb, hidden_size = allocate(table.weight)[0], x.hidden_TH.shape[1]
    used = used_partitions(tokens)
    constants = _RouterConstants(
        x, config, table, tokens, weight_sb, weight_sb, weight_sb, weight_sb, weight_sb, weight_sb
    )
    if config.has_norm:
        norm_sb = nl.ndarray((used, hidden_size), x.norm_weight_1H.dtype, buffer=nl.sbuf)
        constants.norm_weight_sb = _repeat_row(x.norm_weight_1H, norm_sb)
        if table.scaled.number > 0:
            constants.scaled_sb = allocate(table.scaled)[0]
        columns = _norm_columns(norm_sb, table)
        constants.norm_weight_ps = nl.ndarray((used, columns), norm_sb.dtype, buffer=nl.psum)
        for start in range(0, columns, BANK_FLOATS):
            part = slice(start, min(start + BANK_FLOATS, columns))
            nisa.tensor_copy(dst=constants.norm_weight_ps[:, part], src=norm_sb[:, part])
    return constants


def _load_router(constants: _RouterConstants) -> None:
    """Load and transpose the router's weight; repeat its biases on the partitions in use."""
    config = constants.config
    router_weight_EH, weight_sb = constants.x.router_weight_EH, constants.weight_sb
    num_experts, used = router_weight_EH.shape[0], used_partitions(constants.tokens)
    for expert in range(0, num_experts, PARTITIONS):
        rows = min(PARTITIONS, num_experts - expert)
        source = router_weight_EH[expert : expert + rows, :]
        _load_transposed(weight_sb[:, :, expert : expert + rows], source)
    if config.has_gate:
        _load_transposed(weight_sb[:, :, num_experts : num_rows(config)], constants.x.gate_1H)
    if config.formula.has_bias:
        bias_sb = allocate_rows(constants.table.bias, used)
        constants.bias_sb = _repeat_row(constants.x.bias_1E, bias_sb)
    if config.formula.has_selection_bias:
        selection_bias_sb = allocate_rows(constants.table.selection_bias, used)
        constants.selection_bias_sb = _repeat_row(constants.x.selection_bias_1E, selection_bias_sb)


def _norm_columns(norm_sb: nl.ndarray, table: RouterTable) -> int:
    """Return how many columns the Vector engine finds in half of PSUM."""
    columns: int = norm_sb.shape[1]
    columns -= gpsimd_columns(table, columns)
    return min(columns, _NORM_PSUM_BYTES // (4 if norm_sb.dtype == nl.float32 else 2))


def _repeat_row(row_1X: nl.ndarray, repeated_sb: nl.ndarray) -> nl.ndarray:
    """Load a row [1, X] into each partition of a tile; return the tile."""
    partitions, width = repeated_sb.shape
    nisa.dma_copy(dst=repeated_sb, src=row_1X.ap([[0, partitions], [1, width]]))
    return repeated_sb


def _load_transposed(target_sb: nl.ndarray, source_RH: nl.ndarray) -> None:
    """Load rows of H and transpose them into [128 of H, C, rows]."""
    rows, hidden_size = source_RH.shape
    chunks = target_sb.shape[1]
    for first in range(0, chunks, _CHUNKS_LOADED):
        count = min(_CHUNKS_LOADED, chunks - first)
        start = first * PARTITIONS
        width = min(count * PARTITIONS, hidden_size - start)
        part_sb = nl.ndarray((rows, count * PARTITIONS), source_RH.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=part_sb[:, 0:width], src=source_RH[:, start : start + width])
        _clear_tail(part_sb, width)
        _turn(target_sb[:, first : first + count, :], part_sb, first // _CHUNKS_LOADED)


def _clear_tail(rows_sb: nl.ndarray, hidden_size: int) -> None:
    """Write zeros behind rows of H, which are transposed, too."""
    width = rows_sb.shape[1]
    if hidden_size < width:
        nisa.memset(dst=rows_sb[:, hidden_size:width], value=0.0, engine=nisa.engine.gpsimd)


def _turn(target_sb: nl.ndarray, source_sb: nl.ndarray, tile: int) -> None:
    """Transpose source [rows, 128 * C] into target [128, C, rows].

    Column 128 * c + p of the source goes to partition p of chunk c. The Scalar engine, slower at
    copies, which last longer than the transposes, takes every third one of all tiles.
    """
    rows, chunks = source_sb.shape[0], target_sb.shape[1]
    at_once = BANK_BYTES // (4 if source_sb.dtype == nl.float32 else 2) // PARTITIONS
    number = tile * ((chunks + at_once - 1) // at_once)
    for first in range(0, chunks, at_once):
        count = min(at_once, chunks - first)
        transposed_ps = nl.ndarray((PARTITIONS, count, rows), source_sb.dtype, buffer=nl.psum)
        for chunk in range(count):
            start = (first + chunk) * PARTITIONS
            nisa.nc_transpose(
                dst=transposed_ps[:, chunk, :], data=source_sb[:, start : start + PARTITIONS]
            )
        engine = nisa.engine.scalar if number % _TURNS == 1 else nisa.engine.vector
        nisa.tensor_copy(
            dst=target_sb[:, first : first + count, :], src=transposed_ps, engine=engine
        )
        number += 1


def _transpose_hidden(hidden_sb: nl.ndarray, constants: _RouterConstants, tile: int) -> nl.ndarray:
    """Return rows of tokens as [128 of H, H / 128, rows]."""
    chunks = constants.weight_sb.shape[1]
    shape = (PARTITIONS, chunks, hidden_sb.shape[0])
    transposed_sb = nl.ndarray(shape, constants.table.transposed.dtype, buffer=nl.sbuf)
    _turn(transposed_sb, hidden_sb, tile)
    return transposed_sb


def _load_hidden(
    x: RouterOperands,
    squares_sb: Any,
    config: RouterConfig,
    table: RouterTable,
    tokens: TokenTiles,
    tile: int,
) -> _LoadedTile:
    """Load the rows of a tile, [rows, H]; with a norm, find what it divides them by."""
    hidden_size = x.hidden_TH.shape[1]
    rows = tile_rows(tokens, tile)
    hidden_sb = allocate_rows(table.hidden, rows)
    real = hidden_sb[:, 0:hidden_size]
    nisa.dma_copy(dst=real, src=token_rows(x.hidden_TH, tokens, tile, 0, hidden_size))
    if not config.has_norm:
        _clear_tail(hidden_sb, hidden_size)
        return _LoadedTile(hidden_sb, hidden_sb)
    scale_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    # The squares themselves are not needed.
    nisa.activation_reduce(
        dst=squares_sb[0:rows, :],
        op=nl.square,
        data=real,
        scale=hidden_size**-0.5,
        reduce_op=nl.add,
        reduce_res=scale_sb,
    )
    return _LoadedTile(hidden_sb, scale_sb)


def _normalize(loaded: _LoadedTile, constants: _RouterConstants, tile: int) -> nl.ndarray:
    """Return RMSNorm of the rows [rows, H], and store it."""
    hidden_sb, hidden_size = loaded.hidden_sb, constants.x.hidden_TH.shape[1]
    rows = hidden_sb.shape[0]
    normed_sb = allocate_rows(constants.table.normed, rows)
    _clear_tail(normed_sb, hidden_size)
    # A root of the Scalar engine would change its table twice a tile. GpSimd takes it a step after
    # the squares, for which it would wait otherwise.
    nisa.tensor_scalar(
        dst=loaded.scale_sb,
        data=loaded.scale_sb,
        op0=nl.add,
        operand0=constants.config.norm_eps,
        op1=nl.power,
        operand1=-0.5,
        engine=nisa.engine.gpsimd,
    )
    # The Vector engine reads one operand from SBUF and one from PSUM at full rate, two of SBUF at
    # half of it. GpSimd, which does little else, takes a share of the columns.
    first = hidden_size - gpsimd_columns(constants.table, hidden_size)
    fast = min(first, constants.norm_weight_ps.shape[1])
    weight_ps, scale_sb = constants.norm_weight_ps, loaded.scale_sb
    _apply_norm(normed_sb[:, 0:fast], hidden_sb[:, 0:fast], scale_sb, weight_ps[:, 0:fast])
    if fast < first:
        rest = slice(fast, first)
        weight_sb = constants.norm_weight_sb[:, rest]
        _apply_norm(normed_sb[:, rest], hidden_sb[:, rest], scale_sb, weight_sb)
    for start in range(first, hidden_size, PIECE):
        piece = slice(start, min(start + PIECE, hidden_size))
        _normalize_piece(normed_sb[:, piece], hidden_sb[:, piece], piece, loaded, constants)
    target = token_rows(constants.x.normed_TH, constants.tokens, tile, 0, hidden_size)
    nisa.dma_copy(dst=target, src=normed_sb[:, 0:hidden_size])
    return normed_sb


def _normalize_piece(
    normed: nl.ndarray,
    hidden: nl.ndarray,
    piece: slice,
    loaded: _LoadedTile,
    constants: _RouterConstants,
) -> None:
    """Write what `_apply_norm` does to a piece of the columns, on GpSimd."""
    rows, width = hidden.shape
    scaled = constants.scaled_sb[0:rows, 0:width]
    gpsimd, scale = nisa.engine.gpsimd, loaded.scale_sb.broadcast(1, width)
    nisa.tensor_tensor(dst=scaled, data1=hidden, data2=scale, op=nl.multiply, engine=gpsimd)
    weight = constants.norm_weight_sb[0:rows, piece]
    nisa.tensor_tensor(dst=normed, data1=scaled, data2=weight, op=nl.multiply, engine=gpsimd)


def _apply_norm(
    normed: nl.ndarray, hidden: nl.ndarray, scale_sb: nl.ndarray, weight: nl.ndarray
) -> None:
    """Write hidden * scale * weight, views [rows, columns]."""
    apply_with(normed, hidden, nl.multiply, scale_sb, nl.multiply, weight[0 : hidden.shape[0], :])


def _multiply(transposed_sb: nl.ndarray, constants: _RouterConstants) -> nl.ndarray:
    """Return the products of a tile, [rows, E] float32 in PSUM."""
    rows = transposed_sb.shape[2]
    num_chunks, num_experts = constants.weight_sb.shape[1:3]
    logits_ps = nl.ndarray((rows, num_experts), nl.float32, buffer=nl.psum)
    for chunk in range(num_chunks):
        depth = min(PARTITIONS, constants.config.hidden_size - chunk * PARTITIONS)
        weight_sb = constants.weight_sb[0:depth, chunk, :]
        multiply_banks(logits_ps, transposed_sb[0:depth, chunk, :], weight_sb, chunk > 0)
    return logits_ps
