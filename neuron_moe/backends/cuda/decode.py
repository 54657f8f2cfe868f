"""Launches for few tokens: no sort, three kernels.

Axes: T tokens, K choices, P pairs, E experts, S parts of the depth, H hidden, I intermediate.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from neuron_moe.backends.cuda import decode_kernels
from neuron_moe.backends.cuda.records import Matrices, constants_of
from neuron_moe.backends.cuda.tiles import DecodeTile, first_decode_tile, second_decode_tile
from nki_kernels.common.formula import ExpertFormula

_COLUMNS = 256
_LINE_BYTES = 128  # of the cache


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
        tiles: of both products; by default those of `tiles`.
    """
    num_tokens, top_k = index_TK.shape
    num_experts, H, width = weights.first_EHI.shape
    I, num_pairs = weights.down_EIH.shape[1], num_tokens * top_k  # noqa: E741
    experts = min(num_pairs, num_experts)
    one, two = tiles or (first_decode_tile(experts, width), second_decode_tile(experts, I, H))
    index_P = index_TK.reshape(-1).contiguous()
    bias_EI, bias_EH = weights.first_bias_EI, weights.down_bias_EH
    overlaps = _overlaps(hidden_TH.device)
    early = {"OVERLAPS": overlaps, **({"launch_pdl": True} if overlaps else {})}
    pairs = triton.next_power_of_2(num_pairs)
    precision = "ieee" if hidden_TH.dtype == torch.float32 else "tf32"
    middle_PI = hidden_TH.new_empty((num_pairs, I))
    decode_kernels.activate_pairs[(num_pairs, triton.cdiv(width, one.width))](
        hidden_TH, index_P, weights.first_EHI, bias_EI, middle_PI, num_pairs,
        *weights.first_EHI.stride(), H=H, I=I, TOP_K=top_k, HAS_BIAS=bias_EI is not None,
        **constants_of(formula), ROWS=one.rows, PAIRS=pairs, BLOCK_WIDTH=one.width,
        BLOCK_DEPTH=one.depth, PRECISION=precision, OVERLAPS=overlaps, num_warps=one.warps,
        num_stages=one.stages,
    )  # fmt: skip
    parts = triton.cdiv(I, two.depth_part)
    down_SPH = torch.empty((parts, num_pairs, H), dtype=torch.float32, device=hidden_TH.device)
    decode_kernels.project_pairs[(num_pairs, triton.cdiv(H, two.width), parts)](
        middle_PI, index_P, weights.down_EIH, down_SPH, num_pairs, *weights.down_EIH.stride(),
        DEPTH=I, WIDTH=H, DEPTH_PART=two.depth_part, ROWS=two.rows, PAIRS=pairs,
        BLOCK_WIDTH=two.width, BLOCK_DEPTH=two.depth, PRECISION=precision,
        LINE=_LINE_BYTES // hidden_TH.element_size(), num_warps=two.warps, num_stages=two.stages,
        **early,
    )  # fmt: skip
    output_TH = torch.empty_like(hidden_TH)
    block = min(_COLUMNS, triton.next_power_of_2(H))
    decode_kernels.combine_choices[(num_tokens, triton.cdiv(H, block))](
        down_SPH, index_P, affinities_TK, bias_EH, output_TH, num_pairs, H=H, TOP_K=top_k,
        PARTS=parts, HAS_BIAS=bias_EH is not None, BLOCK=block, num_warps=2, **early,
    )  # fmt: skip
    return output_TH


@cache
def _overlaps(device: torch.device) -> bool:
    """Tell whether a kernel may start before the one before it ends, on request."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
