"""Launches for one token.

Axes: K choices, S parts of the depth, H hidden, I intermediate.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from neuron_moe.backends.cuda import one_token_kernels
from neuron_moe.backends.cuda.records import Matrices, constants_of, form_of
from nki_kernels.common.formula import ExpertFormula, num_projections

_PHASES = 4
_ALL = -1
_ROWS = 128  # parts that are added at once


@dataclass(frozen=True, slots=True)
class TokenTile:
    """How the experts of one token are computed.

    Attributes:
        depth: lines of a piece of a matrix.
        width: its columns.
        stages: pieces loaded ahead.
        programs: on a multiprocessor, that share the pieces; 0: a program for each piece, and a
            launch for each phase.
        ahead: pieces of a program that are asked for before its inputs are there.
        early: whether a launch begins beside the one before.
        columns: of sums over parts.
        warps: of a program.
    """

    depth: int = 32
    width: int = 128
    stages: int = 3
    programs: int = 0
    ahead: int = 2
    early: bool = False
    columns: int = 32
    warps: int = 4


_TILE = TokenTile()


def forward(
    hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor, weights: Matrices,
    formula: ExpertFormula, tile: TokenTile = _TILE,
) -> Tensor:  # fmt: skip
    """Return the output [1, H]; arguments as of `decode.forward`."""
    top_k = index_TK.shape[1]
    first, down = form_of(weights.first_EHI), form_of(weights.down_EIH)
    (_, lines, width), (_, down_lines, H) = first.values.shape, down.values.shape
    I = width // num_projections(formula)  # noqa: E741  the axis
    parts, down_parts = triton.cdiv(lines, tile.depth), triton.cdiv(down_lines, tile.depth)
    output_TH = torch.empty_like(hidden_TH)
    device = hidden_TH.device
    is_one = tile.programs > 0 and device.type == "cuda"
    arrived = torch.zeros(_PHASES - 1, dtype=torch.int32, device=device) if is_one else None
    operands = (
        hidden_TH, index_TK.contiguous(), affinities_TK,
        first.values, weights.first_scale, weights.first_bias_EI, *first.values.stride(),
        down.values, weights.down_scale, weights.down_bias_EH, *down.values.stride(),
        torch.empty((parts, top_k, width), dtype=torch.float32, device=device),
        hidden_TH.new_empty((top_k, I)),
        torch.empty((down_parts, top_k, H), dtype=torch.float32, device=device),
        output_TH, arrived,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "H": H, "I": I, "TOP_K": top_k, "CHOICES": triton.next_power_of_2(top_k), "ROWS": _ROWS,
        "FIRST_FORMAT": first.format, "DOWN_FORMAT": down.format, "FIRST_PARTS": parts,
        "DOWN_PARTS": down_parts, "HAS_FIRST_BIAS": weights.first_bias_EI is not None,
        "HAS_DOWN_BIAS": weights.down_bias_EH is not None, **constants_of(formula),
        "BLOCK_DEPTH": tile.depth, "BLOCK_WIDTH": tile.width, "COLUMNS": tile.columns,
        "num_warps": tile.warps,
    }  # fmt: skip
    if is_one:
        count = torch.cuda.get_device_properties(device).multi_processor_count * tile.programs
        one_token_kernels.compute_token[(count,)](
            *operands, **constants, STAGES=tile.stages, AHEAD=tile.ahead, PROGRAMS=count,
            PHASE=_ALL, EARLY=False, launch_cooperative_grid=True,
        )  # fmt: skip
        return output_TH
    early = tile.early and device.type == "cuda"
    counts = (
        top_k * parts * triton.cdiv(width, tile.width), top_k * triton.cdiv(I, tile.columns),
        top_k * down_parts * triton.cdiv(H, tile.width), triton.cdiv(H, tile.columns),
    )  # fmt: skip
    for phase, count in enumerate(counts):
        one_token_kernels.compute_token[(count,)](
            *operands, **constants, STAGES=1, AHEAD=int(early), PROGRAMS=count, PHASE=phase,
            EARLY=early, **({"launch_pdl": True} if early and phase else {}),
        )  # fmt: skip
    return output_TH
