"""Launches for few tokens: no sort, four kernels, and two for one token.

Axes: T tokens, K choices, P pairs, E experts, S parts of the depth, H hidden, I intermediate.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from neuron_moe.backends.cuda import decode_kernels
from neuron_moe.backends.cuda.records import Matrices, constants_of, form_of
from neuron_moe.backends.cuda.tiles import DecodeTile, decode_tile
from nki_kernels.common.formula import ExpertFormula, num_projections

_COLUMNS = 256
_ASKED_BYTES = 16  # that weights are asked for in
_MOST_ASKED_BYTES = 16 << 20  # of all: a third of the L2 cache


@dataclass(frozen=True)
class Ahead:
    """How the second product runs, for the first one, which asks for its weights.

    Attributes:
        blocks: of columns.
        block: columns of each.
        depth_part: lines of a program.
        lines: of an expert's matrix.
        width: of its lines.
        asked: first lines of each program that are asked for, a power of two, or 0.
        is_one_token: pairs share no expert, and `decode_kernels.finish_token` counts on counters.
    """

    blocks: int
    block: int
    depth_part: int
    lines: int
    width: int
    asked: int
    is_one_token: bool

    @property
    def counters(self) -> int:
        """Counters of blocks, and some more, to a power of two."""
        return 1 << (self.blocks - 1).bit_length()


def forward(
    hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor, weights: Matrices,
    formula: ExpertFormula, tiles: tuple[DecodeTile, DecodeTile] | None = None,
) -> Tensor:  # fmt: skip
    """Return the output [T, H].

    Args:
        hidden_TH: contiguous.
        affinities_TK: contiguous.
        index_TK: [T, K] int32, -1 for none.
        weights: of the experts.
        formula: of the experts.
        tiles: of both products; by default those of `tiles.decode_tile`.
    """
    num_tokens, top_k = index_TK.shape
    num_experts, _, first_width = weights.first_EHI.shape
    H, num_pairs = weights.down_EIH.shape[2], num_tokens * top_k
    I = first_width // num_projections(formula)  # noqa: E741  the axis
    experts = min(num_pairs, num_experts)
    one, two = tiles or (
        _tile(experts, weights.first_EHI),
        _tile(experts, weights.down_EIH),
    )
    index_P = index_TK.reshape(-1).contiguous()
    values, _ = form_of(weights.down_EIH)
    ahead = _ahead(values, two, experts, is_one_token=num_tokens == 1)
    arrived = index_P.new_empty(ahead.counters)
    first = weights.first_EHI, weights.first_scale
    first_SPI = _project(hidden_TH, index_P, *first, top_k, one, (values, arrived, ahead))
    if num_tokens == 1:
        return _finish_token(
            first_SPI, index_P, (hidden_TH, affinities_TK), weights, formula, two, arrived
        )
    bias_EI, bias_EH = weights.first_bias_EI, weights.down_bias_EH
    middle_PI = hidden_TH.new_empty((num_pairs, I))
    block = min(_COLUMNS, triton.next_power_of_2(I))
    decode_kernels.activate_pairs[(num_pairs, triton.cdiv(I, block))](
        first_SPI, bias_EI, index_P, middle_PI, num_pairs, I=I, PARTS=first_SPI.shape[0],
        HAS_BIAS=bias_EI is not None, **constants_of(formula), BLOCK=block, num_warps=2,
    )  # fmt: skip
    down_SPH = _project(middle_PI, index_P, weights.down_EIH, weights.down_scale, 1, two)
    output_TH = torch.empty_like(hidden_TH)
    block = min(_COLUMNS, triton.next_power_of_2(H))
    decode_kernels.combine_choices[(num_tokens, triton.cdiv(H, block))](
        down_SPH, index_P, affinities_TK, bias_EH, output_TH, num_pairs, H=H, TOP_K=top_k,
        PARTS=down_SPH.shape[0], HAS_BIAS=bias_EH is not None, BLOCK=block, num_warps=2,
    )  # fmt: skip
    return output_TH


def _finish_token(
    first_SKI: Tensor, index_K: Tensor, inputs: tuple[Tensor, Tensor], weights: Matrices,
    formula: ExpertFormula, tile: DecodeTile, arrived: Tensor,
) -> Tensor:  # fmt: skip
    """Return the output of one token: nothing waits for a third and a fourth launch."""
    hidden_1H, affinities_1K = inputs
    values, form = form_of(weights.down_EIH)
    bias_EI, bias_EH = weights.first_bias_EI, weights.down_bias_EH
    (parts, top_k, first_width), H = first_SKI.shape, values.shape[2]
    grid = top_k, triton.cdiv(H, tile.width), triton.cdiv(values.shape[1], tile.depth_part)
    output_1H = torch.empty_like(hidden_1H)
    decode_kernels.finish_token[grid](
        first_SKI, bias_EI, index_K, values, weights.down_scale, bias_EH, affinities_1K,
        first_SKI.new_empty((grid[2], top_k, H)), arrived, output_1H, top_k, *values.stride(),
        I=first_width // num_projections(formula), H=H, FIRST_PARTS=parts, PARTS=grid[2],
        HAS_FIRST_BIAS=bias_EI is not None, HAS_BIAS=bias_EH is not None, **constants_of(formula),
        TOP_K=top_k, ROWS=tile.rows, DEPTH_PART=tile.depth_part, BLOCK_WIDTH=tile.width,
        BLOCK_DEPTH=tile.depth, PRECISION=_precision(hidden_1H), FORMAT=form, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return output_1H


def _ahead(values: Tensor, tile: DecodeTile, experts: int, *, is_one_token: bool) -> Ahead:
    """Return how the product with `values`, of at most so many experts, runs.

    Nothing is asked for where lines are no whole number of 16 bytes.
    """
    _, lines, width = values.shape
    blocks, element_bytes = triton.cdiv(width, tile.width), values.element_size()
    programs = experts * blocks * triton.cdiv(lines, tile.depth_part)
    asked, limit = tile.depth, _MOST_ASKED_BYTES // (programs * tile.width * element_bytes)
    while asked > limit:
        asked //= 2
    if not values.is_contiguous() or (values.data_ptr() | width * element_bytes) % _ASKED_BYTES:
        asked = 0
    return Ahead(blocks, tile.width, tile.depth_part, lines, width, asked, is_one_token)


def _tile(experts: int, matrix: Tensor) -> DecodeTile:
    _, lines, width = matrix.shape
    return decode_tile(experts, lines, width, form_of(matrix).format)


def _project(
    rows: Tensor, index_P: Tensor, matrix: Tensor, scale: Tensor | None, pairs_of_row: int,
    tile: DecodeTile, ahead: tuple[Tensor | None, Tensor | None, Ahead | None] = (None, None, None),
) -> Tensor:  # fmt: skip
    """Return the products of pairs and their experts' matrices, [S, P, width] float32.

    Args:
        rows: one for `pairs_of_row` pairs.
        index_P: experts.
        matrix: of all experts.
        scale: of codes.
        pairs_of_row: see `rows`.
        tile: of the product.
        ahead: of one token, the next launch's weights and counters, and how it runs.
    """
    values, form = form_of(matrix)
    _, lines, width = values.shape
    num_pairs, parts = index_P.shape[0], triton.cdiv(lines, tile.depth_part)
    out_SPI = torch.empty((parts, num_pairs, width), dtype=torch.float32, device=rows.device)
    following, arrived, following_launch = ahead
    decode_kernels.project_pairs[(num_pairs, triton.cdiv(width, tile.width), parts)](
        rows, index_P, values, scale, out_SPI, following, arrived, num_pairs, *values.stride(),
        DEPTH=rows.shape[1],
        WIDTH=width, TOP_K=pairs_of_row, DEPTH_PART=tile.depth_part, ROWS=tile.rows,
        PAIRS=triton.next_power_of_2(num_pairs), BLOCK_WIDTH=tile.width, BLOCK_DEPTH=tile.depth,
        PRECISION=_precision(rows), NEXT=following_launch, num_warps=tile.warps,
        num_stages=tile.stages, FORMAT=form,
    )  # fmt: skip
    return out_SPI


def _precision(rows: Tensor) -> str:
    return "ieee" if rows.dtype == torch.float32 else "tf32"
