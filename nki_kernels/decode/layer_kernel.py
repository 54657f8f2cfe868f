"""The fused decode layer: RMSNorm, router, routed and shared experts, residual, in one kernel.

    x = rms_norm(hidden), rounded to bfloat16            (hidden itself without a norm)
    logits = x W^T (+ bias); index, a = the router's choice        (router_choice.py)
    y = sum over k of a[t, k] * MLP_index(t, k)(x[t])    (kernel.py: this rank's experts)
      + gate[t] * MLP_shared(x[t]) + residual[t]         gate = sigmoid(x . w) or 1

Inputs and outputs, in HBM (T tokens, H hidden in tiles [h, H/h], N experts of all ranks):

    hidden           [T, H]             bfloat16
    router_weight    [P, h, H/h, N/P]   bfloat16 or float32, of pack_router_weight()
    gate_up, down, first_expert and the experts' biases and scales as in kernel.py
    norm_weight      [1, H]             any float, if there is a norm
    router_bias      [1, N]             float32, if the router has a bias
    selection_bias   [1, N]             float32, if the router has one
    shared_gate_up, shared_down         bfloat16, of pack_shared_experts(), if there are any
    shared_gate      [1, h, H/h, 1]     bfloat16, of pack_router_weight(), if they have a gate
    residual         [T, H]             bfloat16 or float32, if it is added; may be hidden
    is_real          [T, 1]             int32, 0 for padding, else 1, if there may be some
    -> output        [T, H]             float32 or bfloat16; [T/R, H] where config.form.ranks
                                        scatters the sum of R ranks (rank_sums.py)
       affinities    [T, K]             float32 and
       index         [T, K]             int32, if config.form.returns_routing

Between the tokens coming in and the result going out nothing passes through HBM. The order of the
source is that of need:

1. Load tokens, norm and router, then for the shared experts: none depends on the routing.
2. Normalise all tokens on both cores, transpose them (norm.py), make logits (router.py): of a large
   router each core computes half of them.
3. Pick the experts and list them (list.py), so that their loads are issued before the
   affinities are computed; then weigh.
4. Add the shared experts to y (shared.py): they are on chip by now, the routed ones on their way.
5. Go through the routed experts as decode_moe does (kernel.py), exchange, add the residual or the
   ranks' rows (config.form.ranks), store; ranks that share the rows add them up in HBM.

Tokens do not see each other: one that holds NaN spoils its own row alone, and its index stays in
range. Padding is computed by the shared experts alone.

Cost: cost_decode_layer. hidden, norm and router are read by every core (a large router once), the
shared experts once, the routed ones as by decode_moe.

Limits: make_layer_config. Sources: those of the stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.rank_sums import end_portion, make_rows, rest_in_hbm
from nki_kernels.decode.buffers import (
    DecodeBuffers,
    DecodeOperands,
    SumBuffers,
    make_buffers,
    make_sums,
    routing_bank,
)
from nki_kernels.decode.config import is_direct, output_dtype
from nki_kernels.decode.ends import finish
from nki_kernels.decode.kernel import load_first_expert, run_experts, start_sums
from nki_kernels.decode.layer_config import LayerConfig
from nki_kernels.decode.list import Listed, list_experts, weigh
from nki_kernels.decode.norm import (
    NormTiles,
    TokenTile,
    load_norm,
    load_tokens,
    normalize,
    transpose,
    transposed_banks,
)
from nki_kernels.decode.router import (
    RouterTiles,
    gate_tokens,
    load_gate,
    load_router,
    make_logits,
    pick_experts,
    weigh_experts,
)
from nki_kernels.decode.row_ends import Epilogue
from nki_kernels.decode.shared import load_shared, run_shared


@dataclass
class Front(NKIObject):
    """What norm and router need; lists hold one thing or none."""

    tiles: list[TokenTile]
    norms: list[NormTiles]
    router: RouterTiles
    gates: list[nl.NkiTensor]  # weight of the shared experts' gate
    real: list[nl.NkiTensor]  # of each tile [tokens, 1] uint32, 0 for padding; none: all are real


@dataclass
class RoutedTokens(NKIObject):
    """What the experts need of the tokens; tiles are of 128 tokens."""

    x_sb: nl.NkiTensor  # x^T, [h, H/h, T] view
    routing: Listed
    index_tiles: list[nl.NkiTensor]  # [tokens, K] int32
    affinity_tiles: list[nl.NkiTensor]  # [tokens, K] float32
    gate_rows: list[nl.NkiTensor]  # [128, T] float32, one or none


@nki.jit
def decode_layer(
    hidden: nl.NkiTensor,
    router_weight: nl.NkiTensor,
    gate_up: nl.NkiTensor,
    down: nl.NkiTensor,
    first_expert: nl.NkiTensor,
    config: LayerConfig,
    norm_weight: Any = None,
    router_bias: Any = None,
    selection_bias: Any = None,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    gate_up_scale: Any = None,
    down_scale: Any = None,
    shared_gate_up: Any = None,
    shared_down: Any = None,
    shared_gate: Any = None,
    residual: Any = None,
    is_real: Any = None,
) -> Any:
    """Compute one MoE layer for T tokens; see the module."""
    core = nl.program_id(0)
    moe = config.moe
    apart = rest_in_hbm(config.form.ranks)
    rows = make_rows(apart, (moe.T, moe.H), output_dtype(moe))
    x = DecodeOperands(gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale)
    front = _load_front(
        config, hidden, norm_weight, router_weight, router_bias, selection_bias, shared_gate
    )
    if config.form.has_padding:
        front.real = _load_real(is_real)
    first_sb = 0 if is_direct(moe) else load_first_expert(moe, first_expert)
    sums = make_sums(moe, core)
    shared = [shared_gate_up, shared_down]
    routed = _add_experts(config, front, sums, x, shared, first_sb)
    residuals = []
    if config.form.has_residual:
        residuals.append(residual)
    finish(sums, Epilogue(rows.parts[0], residuals, config.form.ranks))
    end_portion(apart, rows, 0)
    if not config.form.returns_routing:
        return rows.output
    affinities = _store_routing(config, routed.affinity_tiles, nl.float32, core)
    index = _store_routing(config, routed.index_tiles, nl.int32, core)
    return rows.output, affinities, index


def _add_experts(
    config: LayerConfig,
    front: Front,
    sums: SumBuffers,
    x: DecodeOperands,
    shared: list[Any],
    first_sb: Any,
) -> RoutedTokens:
    """Route the tokens and make y of this core; the experts' place is free again then."""
    moe = config.moe
    b = make_buffers(moe, x, sums)
    # Before the routing: weights that wait for it would stand in front of these in the queue.
    shared_tiles = []
    if config.form.shared_width > 0:
        shared_tiles.append(load_shared(config.shared, sums, shared[0], shared[1]))
    routed = _route(config, front, b, first_sb)
    start_sums(sums)
    for part_tiles in shared_tiles:
        run_shared(part_tiles, routed.x_sb, routed.gate_rows)
    run_experts(b, routed.x_sb, routed.routing)
    return routed


def _load_front(
    config: LayerConfig,
    hidden: nl.NkiTensor,
    norm_weight: Any,
    router_weight: nl.NkiTensor,
    router_bias: Any,
    selection_bias: Any,
    shared_gate: Any,
) -> Front:
    """Load what norm and router need; the tokens come first."""
    h_axis = config.moe.h_axis
    tiles = load_tokens(hidden, h_axis)
    norms = []
    if config.form.has_norm:
        norms.append(load_norm(norm_weight, h_axis))
    router = load_router(router_weight, router_bias, selection_bias, config.router, config.moe.T)
    gates = []
    if config.form.has_shared_gate:
        gates.append(load_gate(shared_gate))
    return Front(tiles, norms, router, gates, [])


def _load_real(is_real_T1: nl.NkiTensor) -> list[nl.NkiTensor]:
    """Load which tokens are no padding."""
    num_tokens, tiles = is_real_T1.shape[0], []
    for first in range(0, num_tokens, PARTITIONS):
        stop = min(first + PARTITIONS, num_tokens)
        real_sb = nl.ndarray((stop - first, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=real_sb, src=is_real_T1[first:stop, 0:1])
        tiles.append(real_sb.view(nl.uint32))
    return tiles


def _drop_padding(index_tiles: list[nl.NkiTensor], real: list[nl.NkiTensor]) -> list[nl.NkiTensor]:
    """Return the choices, -1 of padding."""
    found = []
    for number in range(len(index_tiles)):
        index_sb, real_sb = index_tiles[number], real[number]
        chosen_sb = nl.ndarray(index_sb.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=chosen_sb, value=-1)
        nisa.tensor_copy_predicated(
            dst=chosen_sb, src=index_sb, predicate=real_sb.broadcast(1, index_sb.shape[1])
        )
        found.append(chosen_sb)
    return found


def _route(config: LayerConfig, front: Front, b: DecodeBuffers, first_sb: Any) -> RoutedTokens:
    """Normalise and route all tokens.

    Args:
        config: what the kernel is compiled for.
        front: operands of norm and router.
        b: buffers of the routed experts.
        first_sb: number of local expert 0, as in kernel.py.
    """
    moe, formula = config.moe, config.router
    x_sb = _prepare_tokens(config, front.tiles, front.norms)
    logits = []
    for first in range(0, moe.T, PARTITIONS):
        rows = min(PARTITIONS, moe.T - first)
        tile = make_logits(x_sb, first, rows, front.router, moe.h_axis, moe.num_experts, b.ones)
        logits.append(tile)
    index_tiles, picked = pick_experts(logits, front.router, moe.num_experts, formula)
    bank_ps = routing_bank(b.sums)
    chosen_tiles = index_tiles
    if config.form.has_padding:
        chosen_tiles = _drop_padding(index_tiles, front.real)
    # The list first, as loads of weights wait for it; affinities are used after the first products.
    routing = list_experts(moe, chosen_tiles, first_sb, bank_ps, b.ones, b.sums.core)
    affinity_tiles = weigh_experts(logits, picked, moe.num_experts, formula)
    weigh(moe, routing, affinity_tiles, bank_ps, b.ones)
    gate_rows = []
    for gate_sb in front.gates:
        gate_rows.append(gate_tokens(x_sb, gate_sb, moe.h_axis))
    return RoutedTokens(x_sb, routing, index_tiles, affinity_tiles, gate_rows)


def _prepare_tokens(
    config: LayerConfig, tiles: list[TokenTile], norms: list[NormTiles]
) -> nl.NkiTensor:
    """Return x^T [h, H/h, T] of all tokens, normalised if there is a norm."""
    h_axis, T = config.moe.h_axis, config.moe.T
    banks_ps = transposed_banks(h_axis, T)
    x_sb = tiles[0].transposed_sb
    is_whole = len(tiles) == 1 and not config.form.has_norm
    # One tile without a norm is x^T as it is; others are copied or normalised into their columns.
    if not is_whole:
        x_sb = nl.ndarray((h_axis.rows, h_axis.count, T), nl.bfloat16, buffer=nl.sbuf)
    for number in range(len(tiles)):
        tile = tiles[number]
        transpose(tile, h_axis, banks_ps)
        first = number * PARTITIONS
        part = x_sb[:, :, first : first + tile.transposed_sb.shape[2]]
        if config.form.has_norm:
            normalize(part, tile, norms[0], h_axis, config.form.norm_eps)
        elif not is_whole:
            nisa.tensor_copy(dst=part, src=tile.transposed_sb)
    return x_sb


def _store_routing(
    config: LayerConfig, tiles: list[nl.NkiTensor], dtype: Any, core: int
) -> nl.NkiTensor:
    """Store what the router decided, [T, K]; one core does."""
    moe = config.moe
    stored = nl.ndarray((moe.T, moe.K), dtype=dtype, buffer=nl.shared_hbm)
    if core == 0:
        for number in range(len(tiles)):
            first = number * PARTITIONS
            stop = min(first + PARTITIONS, moe.T)
            nisa.dma_copy(dst=stored[first:stop, 0 : moe.K], src=tiles[number])
    return stored
