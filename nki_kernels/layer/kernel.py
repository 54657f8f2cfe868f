"""A whole MoE layer's prefill in one launch: RMSNorm, router, index, experts, weighted sum.

    x = rms_norm(hidden), rounded to bfloat16            (hidden itself without a norm)
    logits = x W^T (+ bias); index, a = the router's choice        (route/kernel.py)
    slots, visits = places of this rank's choices                  (index/kernel.py)
    y = this rank's experts on the slots                           (prefill/kernel.py),
        whose inputs are scaled by a, and the sum weighs by 1, if config.experts.scaling is pre
    s = shared experts of x, if config.out.has_shared              (prefill/kernel.py)
    g = sigmoid(x . shared_gate) if config.out.has_gate, else 1    (route/kernel.py)
    output[t] = sum over k of a[t, k] * y[slot of (t, k)] (+ residual[t]) (+ g[t] * s[t])
                                                                   (combine/kernel.py)

Inputs and outputs, in HBM (T tokens, H hidden, N experts of all ranks):

    hidden           [T, H]    bfloat16
    router_weight    [N, H]    as router_topk takes it
    gate_up, down and what lies beside them as blockwise_moe takes them
    first_expert     [1, 1]    int32    number of this rank's first expert among N
    norm_weight      [1, H]    any float, if config.router.has_norm
    router_bias      [1, N]    any float, if the router has a bias
    selection_bias   [1, N]    float32, if the router has one
    residual         [T, H]    bfloat16 or float32, if it is added; may be hidden
    shared_gate_up   [1, H, 2I'] and
    shared_down      [1, I', H] bfloat16 or 8 bits without scales, if there are shared experts, and
                               their visits, three tensors of `shared_visits`
    shared_gate      [1, H]    the type of router_weight, if config.out.has_gate
    -> output        [T, H]    the type of config.out
       affinities    [T, K]    float32 and
       index         [T, K]    int32, if config.returns_routing

The stages are those of the kernels named above. What a core's own tokens chose goes from the router
to the index on chip; what both cores need lies in HBM: normalised tokens, the token of each slot,
trips, slots' results. The cores meet after each of these is written. Each stage gives its SBUF back
before the experts begin, so that their plan is that of blockwise_moe alone.

Tokens do not see each other: one with a logit that is no number chooses no expert, and its row of
the output is NaN. A token whose expert overflows bfloat16 is not contained, see combine/kernel.py.

Limits: check_prefill_layer. Cost: cost_prefill_layer.

Steps:
    1. Normalise and route this core's tokens; store normalised ones.
    2. Tell this rank's choices from others', drop those of broken tokens.
    3. Place the pairs; list visits, invert the slots.
    4. Compute the visits; then the shared experts, as one expert that all whole tokens choose.
    5. Sum each token's slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.combine.kernel import combine
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.token_tiles import TokenTiles, split_tokens, store_per_token
from nki_kernels.index.kernel import list_visits, place_pairs, store_slots
from nki_kernels.index.slot_inverse import invert_tokens, invert_weights
from nki_kernels.layer.config import PrefillLayerConfig, num_shared_slots
from nki_kernels.prefill.kernel import blockwise_moe
from nki_kernels.route.kernel import RoutedTiles, RouterOperands, route_tiles

_BOTH = (0, 1)


@dataclass
class LayerIndex(nl.NKIObject):
    """What experts and sum need of the routing, in HBM."""

    token_of_slot: nl.NkiTensor  # [N * B] int32
    visits: tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]
    slot_of_pair_TK: nl.NkiTensor  # int32, -1 for no expert here
    affinities_TK: nl.NkiTensor  # float32, 0 of broken tokens
    weights_TK: nl.NkiTensor  # float32, of the sum: affinities, or ones where inputs are scaled
    slot_scale: nl.NkiTensor  # [N * B] float32, where inputs are scaled
    spoils_T1: nl.NkiTensor  # float32, 0, or NaN of broken tokens
    gates_T1: nl.NkiTensor  # float32, NaN of broken tokens, where shared experts have a gate
    index_TK: nl.NkiTensor  # int32, of all ranks
    shared_tokens: nl.NkiTensor  # [S, 1] int32, -1 of broken tokens, where there are shared experts


@dataclass
class LocalPairs(nl.NKIObject):
    """What this core's tokens chose here, [128, max(1, tiles) * K]."""

    index_sb: (
        nl.NkiTensor
    )  # int32; any number that is no expert here is another rank's; no token -1
    affinities_sb: nl.NkiTensor  # float32, 0 of broken tokens


@nki.jit
def prefill_layer(
    hidden: nl.NkiTensor,
    router_weight: nl.NkiTensor,
    gate_up: nl.NkiTensor,
    down: nl.NkiTensor,
    first_expert: nl.NkiTensor,
    config: PrefillLayerConfig,
    norm_weight: Any = None,
    router_bias: Any = None,
    selection_bias: Any = None,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    gate_up_scale: Any = None,
    down_scale: Any = None,
    residual: Any = None,
    shared_gate_up: Any = None,
    shared_down: Any = None,
    shared_visit_expert: Any = None,
    shared_visit_tile: Any = None,
    shared_trips: Any = None,
    shared_gate: Any = None,
) -> Any:
    """Compute one MoE layer for T tokens; see the module."""
    x_TH = hidden
    if config.router.has_norm:
        x_TH = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm)
    operands = RouterOperands(
        hidden, router_weight, router_bias, selection_bias, norm_weight, x_TH, x_TH, shared_gate
    )
    index = _index_tokens(operands, first_expert, config)
    slots_PSH = blockwise_moe(
        x_TH,
        gate_up,
        down,
        index.token_of_slot,
        index.visits[0],
        index.visits[1],
        index.visits[2],
        config.experts,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
        slot_scale=index.slot_scale,
    )
    nisa.core_barrier(slots_PSH, _BOTH)
    shared_SH = slots_PSH
    if config.out.has_shared:
        shared = blockwise_moe(
            x_TH,
            shared_gate_up,
            shared_down,
            index.shared_tokens.reshape((index.shared_tokens.shape[0],)),
            shared_visit_expert,
            shared_visit_tile,
            shared_trips,
            config.shared,
        )
        nisa.core_barrier(shared, _BOTH)
        shared_SH = shared.reshape((shared.shape[1], shared.shape[2]))
    output = combine(
        slots_PSH,
        index.slot_of_pair_TK,
        index.weights_TK,
        config.out,
        index.spoils_T1,
        residual,
        shared_SH,
        index.gates_T1,
    )
    if not config.returns_routing:
        return output
    return output, index.affinities_TK, index.index_TK


def _index_tokens(
    x: RouterOperands, first_expert: nl.NkiTensor, config: PrefillLayerConfig
) -> LayerIndex:
    """Route this core's tokens and place their pairs; both cores have met when it returns."""
    num_tokens, top_k = x.hidden_TH.shape[0], config.router.formula.top_k
    tokens = split_tokens(num_tokens, nl.program_id(0), nl.num_programs(0))
    index = _allocate_index(num_tokens, top_k, config)
    local = _route(x, first_expert, index, config, tokens)
    if config.router.has_norm:
        nisa.core_barrier(x.normed_TH, _BOTH)
    placed = place_pairs(local.index_sb, tokens, config.dims, top_k)
    store_slots(index.slot_of_pair_TK, placed.slot_sb, tokens)
    index.visits = list_visits(placed, config.visits, config.dims)
    invert_tokens(index.token_of_slot, placed.slot_sb, tokens)
    if config.experts.scaling == "pre":
        invert_weights(index.slot_scale, local.affinities_sb, placed.slot_sb)
        nisa.core_barrier(index.slot_scale, _BOTH)
    nisa.core_barrier(index.visits[2], _BOTH)
    nisa.core_barrier(index.token_of_slot, _BOTH)
    if config.out.has_shared:
        nisa.core_barrier(index.shared_tokens, _BOTH)
    return index


def _allocate_index(num_tokens: int, top_k: int, config: PrefillLayerConfig) -> LayerIndex:
    """Allocate what does not depend on the lists of visits."""
    num_slots = config.dims.num_blocks * config.dims.block_size
    token_of_slot = nl.ndarray((num_slots,), nl.int32, buffer=nl.shared_hbm)
    slot_of_pair_TK = nl.ndarray((num_tokens, top_k), nl.int32, buffer=nl.shared_hbm)
    affinities_TK = nl.ndarray((num_tokens, top_k), nl.float32, buffer=nl.shared_hbm)
    spoils_T1 = nl.ndarray((num_tokens, 1), nl.float32, buffer=nl.shared_hbm)
    gates_T1 = spoils_T1
    if config.out.has_gate:
        gates_T1 = nl.ndarray((num_tokens, 1), nl.float32, buffer=nl.shared_hbm)
    index_TK = nl.ndarray((num_tokens, top_k), nl.int32, buffer=nl.shared_hbm)
    visits = (token_of_slot, token_of_slot, token_of_slot)  # until they are listed
    weights_TK, slot_scale = affinities_TK, token_of_slot
    if config.experts.scaling == "pre":
        weights_TK = nl.ndarray((num_tokens, top_k), nl.float32, buffer=nl.shared_hbm)
        slot_scale = nl.ndarray((num_slots,), nl.float32, buffer=nl.shared_hbm)
    shared_tokens = token_of_slot
    if config.out.has_shared:
        shared_tokens = nl.ndarray((num_shared_slots(config), 1), nl.int32, buffer=nl.shared_hbm)
    return LayerIndex(
        token_of_slot, visits, slot_of_pair_TK, affinities_TK, weights_TK, slot_scale, spoils_T1,
        gates_T1, index_TK, shared_tokens,
    )  # fmt: skip


def _route(
    x: RouterOperands,
    first_expert: nl.NkiTensor,
    index: LayerIndex,
    config: PrefillLayerConfig,
    tokens: TokenTiles,
) -> LocalPairs:
    """Return the choices of this core's tokens in this rank's numbers; store what others need."""
    top_k = config.router.formula.top_k
    shape = (PARTITIONS, max(1, tokens.count), top_k)
    local_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=local_sb, value=-1)
    kept_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=kept_sb, value=0.0)
    flat = (PARTITIONS, shape[1] * top_k)
    local = LocalPairs(local_sb.reshape(flat), kept_sb.reshape(flat))
    if tokens.count == 0:
        return local
    routed = route_tiles(x, config.router, tokens)
    if config.returns_routing:
        store_per_token(index.index_TK, routed.index_sb, tokens)
    store_per_token(index.spoils_T1, routed.spoils_sb, tokens)
    if config.out.has_gate:
        store_per_token(index.gates_T1, routed.gates_sb, tokens)
    is_whole_sb = nl.ndarray(routed.spoils_sb.shape, nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=is_whole_sb, data=routed.spoils_sb, op0=nl.equal, operand0=0.0)
    if config.out.has_shared:
        _list_whole(index.shared_tokens, is_whole_sb, tokens, x.hidden_TH.shape[0])
    is_whole = is_whole_sb.expand_dim(2).broadcast(2, top_k)
    nisa.tensor_copy_predicated(
        dst=kept_sb, src=routed.affinities_sb.reshape(shape), predicate=is_whole
    )
    store_per_token(index.affinities_TK, local.affinities_sb, tokens)
    if config.experts.scaling == "pre":
        ones_sb = nl.ndarray(flat, nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=ones_sb, value=1.0)
        store_per_token(index.weights_TK, ones_sb, tokens)
    nisa.tensor_copy_predicated(
        dst=local_sb, src=_local_numbers(routed, first_expert, shape), predicate=is_whole
    )
    return local


def _list_whole(
    numbers_S1: nl.NkiTensor, is_whole_sb: nl.NkiTensor, tokens: TokenTiles, num_tokens: int
) -> None:
    """Store the number of each whole token of this core, -1 of others and behind the last."""
    number_sb = nl.ndarray(is_whole_sb.shape, nl.int32, buffer=nl.sbuf)
    nisa.iota(
        dst=number_sb,
        pattern=[[1, tokens.count]],
        offset=tokens.first,
        channel_multiplier=tokens.count,
    )
    listed_sb = nl.ndarray(is_whole_sb.shape, nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=listed_sb, value=-1)
    nisa.tensor_copy_predicated(dst=listed_sb, src=number_sb, predicate=is_whole_sb)
    store_per_token(numbers_S1, listed_sb, tokens)
    spare = numbers_S1.shape[0] - num_tokens
    if spare > 0 and tokens.first + tokens.rows == num_tokens:
        none_sb = nl.ndarray((1, spare), nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=none_sb, value=-1)
        nisa.dma_copy(dst=numbers_S1.ap([[1, 1], [1, spare]], offset=num_tokens), src=none_sb)


def _local_numbers(
    routed: RoutedTiles, first_expert: nl.NkiTensor, shape: tuple[int, int, int]
) -> nl.NkiTensor:
    """Return experts counted from this rank's first, int32."""
    first_sb = nl.ndarray((PARTITIONS, 1), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=first_sb, src=first_expert.ap([[0, PARTITIONS], [1, 1]]))
    wide_sb = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide_sb, src=first_sb)
    numbers_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=numbers_sb, data=routed.index_sb.reshape(shape), op0=nl.subtract, operand0=wide_sb
    )
    return numbers_sb
