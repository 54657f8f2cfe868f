"""Decode MoE: a few tokens through the experts they chose, each expert read once.

    y[t] = sum over k with an expert of this rank of a[t, k] * MLP_e(t, k)(x[t])
    MLP_e(x) = (act(clamp(x Wg + bg)) * (clamp(x Wu + bu) + up_offset)) Wd + bd

with the affinity on the expert's output (post), on its input (pre), or nowhere (none). Choices of
other ranks' experts add nothing; a rank without a hit writes zeros.

Inputs and output, in HBM (T tokens, H hidden, I intermediate of this rank, E experts of it):

    hidden             [T, H]      bfloat16
    gate_up            [E, H, 2I]  weights   gate columns first (or packed, see layout.py)
    down               [E, I, H]   weights
    expert_index       [T, K]      int32     global experts, different ones for a token; -1: none
    expert_affinities  [T, K]      float32
    first_expert       [1, 1]      int32     global number of local expert 0
    gate_up_bias       [E, 2I]     float32   optional
    down_bias          [E, H]      bfloat16  optional; none if it is in packed weights
    gate_up_scale      [E, 2I]     float32   optional, of output channels
    down_scale         [E, H] float32 of output channels, or [E, 1] of the expert; optional
    -> output          [T, H]      float32 or bfloat16

The steps:

1. Load the index, and allocate what outlasts an iteration of the loop (buffers.py): until the
   index is there nothing else can be loaded.
2. List the touched experts, and weigh what each token takes of them (list.py).
3. Load the tokens and transpose them: x^T [h, H/h, T] stays on chip (ends.py).
4. Go through the list in iterations, in the order that the host settled (schedule.py,
   iterations.py): weights of an item (a chunk of an expert) [h, H/h, 2, i] and [i, I/i, H] are in
   one of the weight buffers, a partition owning consecutive rows of HBM; y is added up over all
   experts in float32 SBUF, as y^T [h, H/h, T] or, of 65 to 128 tokens, in rows [T, H]
   (stages.py, out.py).
5. Epilogue: exchange and add the cores' sums, round once, store (ends.py, row_ends.py).

A token that holds NaN stays alone; in mode "all" the weights of every expert must be finite. Down
biases are not scaled.

Limits: `make_decode_config`. Bytes: the touched experts once (all of them in mode "all"), x and y.
Matmul columns: max(T, 64) per 128 x 128 weights.

Sources: NKI 0.6 ISA; Trainium 2 architecture guide.
"""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.decode.buffers import (
    DecodeBuffers,
    DecodeOperands,
    SumBuffers,
    make_buffers,
    make_sums,
    routing_bank,
)
from nki_kernels.decode.config import (
    DecodeConfig,
    is_direct,
    is_mx,
    output_dtype,
)
from nki_kernels.decode.ends import finish, load_tokens, transpose_tokens
from nki_kernels.decode.iterations import known_entries, look_up, run_iteration
from nki_kernels.decode.list import Listed, list_experts, weigh
from nki_kernels.decode.mx_stages import quantize_tokens
from nki_kernels.decode.row_ends import Epilogue
from nki_kernels.decode.steps import Loop


@nki.jit
def decode_moe(
    hidden: nl.NkiTensor,
    gate_up: nl.NkiTensor,
    down: nl.NkiTensor,
    expert_index: nl.NkiTensor,
    expert_affinities: nl.NkiTensor,
    first_expert: nl.NkiTensor,
    config: DecodeConfig,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    gate_up_scale: Any = None,
    down_scale: Any = None,
) -> nl.NkiTensor:
    """Compute the tokens' sums over the experts of this rank; see the module."""
    core = nl.program_id(0)
    output = nl.ndarray((config.T, config.H), dtype=output_dtype(config), buffer=nl.shared_hbm)
    x = DecodeOperands(gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale)
    index_tiles = _load_per_token(config, expert_index)
    first_sb = 0 if is_direct(config) else load_first_expert(config, first_expert)
    sums = make_sums(config, core)
    # Behind the index: the list of experts does not need them.
    affinity_tiles = _load_per_token(config, expert_affinities)
    _add_experts(config, sums, x, hidden, index_tiles, affinity_tiles, first_sb)
    finish(sums, Epilogue(output, []))
    return output


def _add_experts(
    config: DecodeConfig,
    sums: SumBuffers,
    x: DecodeOperands,
    hidden: nl.NkiTensor,
    index_tiles: list[nl.NkiTensor],
    affinity_tiles: list[nl.NkiTensor],
    first_sb: Any,
) -> None:
    """Make y of this core; all that takes place on chip but for `sums` is free again then."""
    b = make_buffers(config, x, sums)
    routing = _route_tokens(b, index_tiles, affinity_tiles, first_sb)
    transposed_sb = transpose_tokens(sums, load_tokens(config, hidden))
    start_sums(sums)
    run_experts(b, transposed_sb, routing)


def _load_per_token(config: DecodeConfig, values: nl.NkiTensor) -> list[nl.NkiTensor]:
    """Load [T, K] values, at most 128 tokens a tile."""
    tiles = []
    for first in range(0, config.T, PARTITIONS):
        size = min(PARTITIONS, config.T - first)
        tile_sb = nl.ndarray((size, config.K), dtype=values.dtype, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=tile_sb,
            src=values[first : first + size, 0 : config.K],
            # Everything waits for it: with addresses known beforehand no engine makes descriptors.
            dge_mode=nisa.dge_mode.none,
        )
        tiles.append(tile_sb)
    return tiles


def load_first_expert(config: DecodeConfig, first_expert: nl.NkiTensor) -> nl.NkiTensor:
    """Load the number of local expert 0 onto the partitions of the tokens."""
    rows = min(PARTITIONS, config.T)
    first_sb = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    source = first_expert.ap([[0, rows], [1, 1]])
    nisa.dma_copy(dst=first_sb, src=source, dge_mode=nisa.dge_mode.none)
    return first_sb


def start_sums(sums: SumBuffers) -> None:
    """Set y to zero."""
    # GpSimd has time: Vector and Scalar copy tokens or choose experts.
    nisa.memset(dst=sums.total_sb, value=0.0, engine=nisa.engine.gpsimd)


def _route_tokens(
    b: DecodeBuffers,
    index_tiles: list[nl.NkiTensor],
    affinity_tiles: list[nl.NkiTensor],
    first_sb: Any,
) -> Listed:
    """Work out which experts are touched, and by how much each token; see list.py."""
    # The list first, as loads of weights wait for it; factors are used after the first products.
    bank_ps = routing_bank(b.sums)
    routing = list_experts(b.config, index_tiles, first_sb, bank_ps, b.ones, b.sums.core)
    weigh(b.config, routing, affinity_tiles, bank_ps, b.ones)
    return routing


def run_experts(b: DecodeBuffers, transposed_sb: nl.NkiTensor, routing: Listed) -> None:
    """Add what this core computes of this rank's experts to y.

    Args:
        b: buffers; y is in `b.sums`.
        transposed_sb: x^T, [h, H/h, T] view.
        routing: touched experts and weights of the tokens.
    """
    config = b.config
    if is_mx(config):
        quantize_tokens(b, transposed_sb)
    begin: Any = 0
    for number in range(len(config.loops)):
        loop = config.loops[number]
        if loop.end < 0:  # it waits for the register; each is loaded where it is needed
            end = _load_end(routing, number)
            _loop_over(b, transposed_sb, routing, loop, begin, end)
            begin = end
        elif loop.step > 0:
            _loop_over(b, transposed_sb, routing, loop, loop.begin, loop.end)
        else:
            iteration = loop.iterations[routing.core]
            entries = known_entries(config, routing, iteration, loop.begin)
            run_iteration(b, transposed_sb, iteration, entries)


def _load_end(routing: Listed, number: int) -> Any:
    """Return a register with one of the ends of loops."""
    end = nisa.register_alloc()
    nisa.register_load(end, routing.ends[number])
    return end


def _loop_over(
    b: DecodeBuffers, transposed_sb: nl.NkiTensor, routing: Listed, loop: Loop, begin: Any, end: Any
) -> None:
    """Run the iterations of a loop from list position `begin` to `end`."""
    iteration = loop.iterations[routing.core]

    def one_iteration(position: Any) -> None:
        entries = look_up(b, routing, iteration, position)
        run_iteration(b, transposed_sb, iteration, entries)

    nl.fori_loop(begin, end, one_iteration, step=loop.step)
