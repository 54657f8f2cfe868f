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
    bias_1E           [1, E]  any float, if formula.has_bias
    selection_bias_1E [1, E]  float32, if formula.has_selection_bias
    norm_weight_1H    [1, H]  any float, if formula.has_norm
Outputs, in shared HBM, in this order:
    affinities_TK     [T, K]  float32
    index_TK          [T, K]  int32, best first
    logits_TE         [T, E]  float32, if formula.returns_logits
    normed_TH         [T, H]  the dtype of hidden, if formula.has_norm

On chip: tokens lie on the partitions (token_tiles.py), but for x^T and router_weight^T, which have
128 rows of H there. Both are transposed by the tensor engine, exactly. All of router_weight^T stays
in SBUF.

Limits (check_router_topk): K <= 16, E <= 512, H a multiple of 64, at most 16,384 tokens per core,
groups of equal size of at least 2; SBUF must hold router_weight^T.

Cost: hidden is read once, router_weight once per core; per tile of 128 tokens H/128 transposes of
the tile's rows and H/128 matmuls of E columns (four passes each if either operand is float32); two
to four passes of E columns on the Vector engine. Loads of the next tile overlap.

The choice itself is in router_choice.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import PARTITIONS, SBUF_BYTES
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.router_choice import (
    SLOTS,
    RouterFormula,
    check_router_formula,
    choose,
    finish_logits,
    ranks_scores,
)
from nki_kernels.common.token_tiles import (
    TokenTiles,
    split_tokens,
    store_per_token,
    tile_rows,
    token_rows,
    used_partitions,
)

MAX_TOKENS_PER_CORE = 16384
H_CHUNK = 512  # columns transposed into one PSUM bank


def check_router_topk(
    num_tokens: int,
    hidden_size: int,
    num_experts: int,
    formula: RouterFormula,
    hidden_dtype: str = "bfloat16",
    weight_dtype: str = "bfloat16",
    num_cores: int = 2,
) -> None:
    """Raise ValueError unless the kernel takes these sizes.

    Args:
        num_tokens: T.
        hidden_size: H.
        num_experts: E.
        formula: the router.
        hidden_dtype: element type of hidden_TH.
        weight_dtype: element type of router_weight_EH.
        num_cores: physical cores of the launch.
    """
    most = MAX_TOKENS_PER_CORE * num_cores
    if not 1 <= num_tokens <= most:
        raise ValueError(
            f"num_tokens={num_tokens}: must be 1 to {most} on {num_cores} core(s)."
            " Route longer inputs in parts."
        )
    if hidden_size < 64 or hidden_size % 64:
        raise ValueError(
            f"hidden_size={hidden_size}: must be a multiple of 64. Pad hidden and router_weight"
            " with zeros."
        )
    for name, dtype in (("hidden_dtype", hidden_dtype), ("weight_dtype", weight_dtype)):
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"{name}={dtype!r}: must be float32, bfloat16 or float16.")
    check_router_formula(formula, num_experts)
    needed = sbuf_bytes(
        (num_tokens + num_cores - 1) // num_cores,
        hidden_size,
        num_experts,
        formula,
        _itemsize(hidden_dtype),
        _itemsize(weight_dtype),
        1,
    )
    if needed > SBUF_BYTES:
        raise ValueError(
            f"hidden_size={hidden_size}, num_experts={num_experts} with {hidden_dtype} hidden and"
            f" {weight_dtype} weights: need {needed} bytes of SBUF per partition, must be at most"
            f" {SBUF_BYTES}. Keep hidden and router_weight in bfloat16, or split the experts."
        )


def sbuf_bytes(
    num_tokens: int,
    hidden_size: int,
    num_experts: int,
    formula: RouterFormula,
    hidden_bytes: int,
    weight_bytes: int,
    tiles: int,
) -> int:
    """Return bytes per partition alive at once with `tiles` tiles of hidden states in flight."""
    operand_bytes = max(hidden_bytes, weight_bytes)
    num_chunks = (hidden_size + PARTITIONS - 1) // PARTITIONS
    per_tile = hidden_size * hidden_bytes * (2 if formula.has_norm else 1)
    per_tile += num_chunks * PARTITIONS * operand_bytes
    norm = hidden_size * 4 if formula.has_norm else 0
    weight = num_chunks * num_experts * operand_bytes
    columns = (
        (7 if ranks_scores(formula) else 4)
        + int(formula.has_bias)
        + int(formula.has_selection_bias)
    )
    chosen = ((num_tokens + PARTITIONS - 1) // PARTITIONS) * formula.top_k * 8
    return tiles * per_tile + norm + weight + columns * max(SLOTS, num_experts) * 4 + chosen + 1024


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


@dataclass
class RouterConstants(nl.NKIObject):
    """What every tile uses: tiles in SBUF, each repeated on all partitions."""

    weight_sb: nl.ndarray  # [128 of H, H / 128, E], transposed
    bias_sb: nl.ndarray  # [128, E] float32
    selection_bias_sb: nl.ndarray  # [128, E] float32
    norm_weight_sb: nl.ndarray  # [128, H]


@nki.jit
def router_topk(
    hidden_TH: nl.ndarray,
    router_weight_EH: nl.ndarray,
    bias_1E: nl.ndarray,
    selection_bias_1E: nl.ndarray,
    norm_weight_1H: nl.ndarray,
    formula: RouterFormula,
) -> tuple[nl.ndarray, ...]:
    """Route T tokens; see the module's docstring. Operands the formula does not use may be None."""
    num_tokens, hidden_size = hidden_TH.shape
    num_experts = router_weight_EH.shape[0]
    top_k = formula.top_k
    affinities_TK = nl.ndarray((num_tokens, top_k), nl.float32, buffer=nl.shared_hbm)
    index_TK = nl.ndarray((num_tokens, top_k), nl.int32, buffer=nl.shared_hbm)
    outputs = [affinities_TK, index_TK]
    logits_TE = affinities_TK
    normed_TH = hidden_TH
    if formula.returns_logits:
        logits_TE = nl.ndarray((num_tokens, num_experts), nl.float32, buffer=nl.shared_hbm)
        outputs.append(logits_TE)
    if formula.has_norm:
        normed_TH = nl.ndarray((num_tokens, hidden_size), hidden_TH.dtype, buffer=nl.shared_hbm)
        outputs.append(normed_TH)

    tokens = split_tokens(num_tokens, nl.program_id(0), nl.num_programs(0))
    if tokens.count == 0:
        return tuple(outputs)
    constants = load_constants(
        hidden_TH, router_weight_EH, bias_1E, selection_bias_1E, norm_weight_1H, formula, tokens
    )
    affinities_sb = nl.ndarray((PARTITIONS, tokens.count * top_k), nl.float32, buffer=nl.sbuf)
    index_sb = nl.ndarray((PARTITIONS, tokens.count * top_k), nl.int32, buffer=nl.sbuf)
    weight_bytes = 4 if constants.weight_sb.dtype == nl.float32 else 2
    hidden_bytes = 4 if hidden_TH.dtype == nl.float32 else 2
    two_tiles = sbuf_bytes(
        tokens.rows, hidden_size, num_experts, formula, hidden_bytes, weight_bytes, 2
    )
    ahead = 1 if two_tiles <= SBUF_BYTES else 0
    turned = []
    for tile in range(min(ahead, tokens.count)):
        turned.append(turn_hidden(hidden_TH, normed_TH, constants, formula, tokens, tile))
    for tile in range(tokens.count):
        # The tensor engine works in order: it turns the next tile while this one is copied.
        if tile + ahead < tokens.count:
            turned.append(
                turn_hidden(hidden_TH, normed_TH, constants, formula, tokens, tile + ahead)
            )
        rows = tile_rows(tokens, tile)
        logits_sb = multiply(turned.pop(0), constants, hidden_size, formula)
        if formula.returns_logits:
            target = token_rows(logits_TE, tokens, tile, 0, num_experts)
            nisa.dma_copy(dst=target, src=logits_sb[:, 0:num_experts])
        first = tile * top_k
        weights = affinities_sb[0:rows, first : first + top_k]
        chosen = index_sb[0:rows, first : first + top_k]
        selection_bias_sb = constants.selection_bias_sb
        choose(weights, chosen, logits_sb, selection_bias_sb, num_experts, formula)
    store_per_token(affinities_TK, affinities_sb, tokens)
    store_per_token(index_TK, index_sb, tokens)
    return tuple(outputs)


def load_constants(
    hidden_TH: nl.ndarray,
    router_weight_EH: nl.ndarray,
    bias_1E: nl.ndarray,
    selection_bias_1E: nl.ndarray,
    norm_weight_1H: nl.ndarray,
    formula: RouterFormula,
    tokens: TokenTiles,
) -> RouterConstants:
    """Load and transpose the router's weight; repeat the row vectors on the partitions in use."""
    num_experts, hidden_size = router_weight_EH.shape
    is_wide = hidden_TH.dtype == nl.float32 or router_weight_EH.dtype == nl.float32
    operand_dtype = nl.float32 if is_wide else hidden_TH.dtype
    num_chunks = (hidden_size + PARTITIONS - 1) // PARTITIONS
    weight_sb = nl.ndarray((PARTITIONS, num_chunks, num_experts), operand_dtype, buffer=nl.sbuf)
    for expert in range(0, num_experts, PARTITIONS):
        rows = min(PARTITIONS, num_experts - expert)
        for start in range(0, hidden_size, H_CHUNK):
            width = min(H_CHUNK, hidden_size - start)
            part_sb = nl.ndarray((rows, width), router_weight_EH.dtype, buffer=nl.sbuf)
            source = router_weight_EH[expert : expert + rows, start : start + width]
            nisa.dma_copy(dst=part_sb, src=source)
            target = weight_sb[:, :, expert : expert + rows]
            transpose_columns(target, part_sb, start // PARTITIONS)
    used = used_partitions(tokens)
    constants = RouterConstants(weight_sb, weight_sb, weight_sb, weight_sb)
    if formula.has_bias:
        constants.bias_sb = repeat_row(bias_1E, used, nl.float32)
    if formula.has_selection_bias:
        constants.selection_bias_sb = repeat_row(selection_bias_1E, used, nl.float32)
    if formula.has_norm:
        constants.norm_weight_sb = repeat_row(norm_weight_1H, used, norm_weight_1H.dtype)
    return constants


def repeat_row(row_1X: nl.ndarray, partitions: int, dtype: nl.DType) -> nl.ndarray:
    """Load a row [1, X] into each of the first partitions."""
    width = row_1X.shape[1]
    repeated_sb = nl.ndarray((partitions, width), dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=repeated_sb, src=row_1X.ap([[0, partitions], [1, width]]))
    return repeated_sb


def transpose_columns(target_sb: nl.ndarray, source_sb: nl.ndarray, first_chunk: int) -> None:
    """Transpose up to 512 columns of source [rows, width] into chunks of target [128, C, rows].

    Column 128 * c + p of the source goes to partition p of chunk first_chunk + c.
    """
    rows, width = source_sb.shape
    full = width // PARTITIONS
    # Scalar and Vector engine take turns at the copies, which last longer than the transposes.
    turn = first_chunk * PARTITIONS // H_CHUNK
    engine = nisa.engine.vector if turn % 2 == 1 else nisa.engine.scalar
    if full > 0:
        turned_ps = nl.ndarray((PARTITIONS, full, rows), source_sb.dtype, buffer=nl.psum)
        for chunk in range(full):
            start = chunk * PARTITIONS
            nisa.nc_transpose(
                dst=turned_ps[:, chunk, :], data=source_sb[:, start : start + PARTITIONS]
            )
        target = target_sb[:, first_chunk : first_chunk + full, :]
        nisa.tensor_copy(dst=target, src=turned_ps, engine=engine)
    tail = width - full * PARTITIONS
    if tail > 0:
        tail_ps = nl.ndarray((tail, rows), source_sb.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=tail_ps, data=source_sb[:, full * PARTITIONS : width])
        target = target_sb[0:tail, first_chunk + full, :]
        nisa.tensor_copy(dst=target, src=tail_ps, engine=engine)


def turn_hidden(
    hidden_TH: nl.ndarray,
    normed_TH: nl.ndarray,
    constants: RouterConstants,
    formula: RouterFormula,
    tokens: TokenTiles,
    tile: int,
) -> nl.ndarray:
    """Return a tile's tokens, normalised if asked, as [128 of H, H / 128, rows]."""
    hidden_sb = load_hidden(hidden_TH, normed_TH, constants, formula, tokens, tile)
    rows, hidden_size = hidden_sb.shape
    weight_sb = constants.weight_sb
    turned_sb = nl.ndarray((PARTITIONS, weight_sb.shape[1], rows), weight_sb.dtype, buffer=nl.sbuf)
    for start in range(0, hidden_size, H_CHUNK):
        width = min(H_CHUNK, hidden_size - start)
        transpose_columns(turned_sb, hidden_sb[:, start : start + width], start // PARTITIONS)
    return turned_sb


def load_hidden(
    hidden_TH: nl.ndarray,
    normed_TH: nl.ndarray,
    constants: RouterConstants,
    formula: RouterFormula,
    tokens: TokenTiles,
    tile: int,
) -> nl.ndarray:
    """Load the rows of a tile, [rows, H]; with a norm, normalise them and store them too."""
    hidden_size = hidden_TH.shape[1]
    rows = tile_rows(tokens, tile)
    hidden_sb = nl.ndarray((rows, hidden_size), hidden_TH.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=hidden_sb, src=token_rows(hidden_TH, tokens, tile, 0, hidden_size))
    if not formula.has_norm:
        return hidden_sb
    normed_sb = nl.ndarray((rows, hidden_size), hidden_TH.dtype, buffer=nl.sbuf)
    scale_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    # The squares themselves are not needed: their place is overwritten below.
    nisa.activation_reduce(
        dst=normed_sb, op=nl.square, data=hidden_sb, reduce_op=nl.add, reduce_res=scale_sb
    )
    nisa.activation(
        dst=scale_sb, op=nl.rsqrt, data=scale_sb, scale=1.0 / hidden_size, bias=formula.norm_eps
    )
    nisa.scalar_tensor_tensor(
        dst=normed_sb,
        data=hidden_sb,
        op0=nl.multiply,
        operand0=scale_sb,
        op1=nl.multiply,
        operand1=constants.norm_weight_sb[0:rows, :],
    )
    nisa.dma_copy(dst=token_rows(normed_TH, tokens, tile, 0, hidden_size), src=normed_sb)
    return normed_sb


def multiply(
    turned_sb: nl.ndarray, constants: RouterConstants, hidden_size: int, formula: RouterFormula
) -> nl.ndarray:
    """Return the logits of a tile, [rows, max(E, 8)] float32; columns past E hold LOWEST."""
    rows = turned_sb.shape[2]
    num_chunks, num_experts = constants.weight_sb.shape[1:3]
    logits_ps = nl.ndarray((rows, num_experts), nl.float32, buffer=nl.psum)
    for chunk in range(num_chunks):
        depth = min(PARTITIONS, hidden_size - chunk * PARTITIONS)
        nisa.nc_matmul(
            dst=logits_ps,
            stationary=turned_sb[0:depth, chunk, :],
            moving=constants.weight_sb[0:depth, chunk, :],
            accumulate=chunk > 0,
        )
    return finish_logits(logits_ps, constants.bias_sb, formula)


def cost_router_topk(
    num_tokens: int,
    hidden_size: int,
    num_experts: int,
    formula: RouterFormula,
    hidden_dtype: str = "bfloat16",
    weight_dtype: str = "bfloat16",
    num_cores: int = 2,
) -> KernelCost:
    """Predict the work of a launch; biases are taken as float32, the norm weight as hidden_dtype.

    Args:
        num_tokens: T.
        hidden_size: H.
        num_experts: E.
        formula: the router.
        hidden_dtype: element type of hidden_TH.
        weight_dtype: element type of router_weight_EH.
        num_cores: physical cores of the launch.
    """
    hidden_bytes = _itemsize(hidden_dtype)
    num_chunks = -(-hidden_size // PARTITIONS)
    per_row = formula.top_k * 8 + (num_experts * 4 if formula.returns_logits else 0)
    repeated = num_experts * 4 * (int(formula.has_bias) + int(formula.has_selection_bias))
    if formula.has_norm:
        per_row += hidden_size * hidden_bytes
        repeated += hidden_size * hidden_bytes
    read = columns = 0
    for core in range(num_cores):
        tokens = split_tokens(num_tokens, core, num_cores)
        if tokens.count == 0:
            continue
        read += tokens.rows * hidden_size * hidden_bytes
        read += num_experts * hidden_size * _itemsize(weight_dtype)
        read += used_partitions(tokens) * repeated
        columns += num_chunks * (num_experts + tokens.rows + tokens.count * num_experts)
    return KernelCost(read, num_tokens * per_row, columns)
