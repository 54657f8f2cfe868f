"""A whole MoE layer's prefill in one launch: RMSNorm, router, index, experts, weighted sum.

    x = rms_norm(hidden), rounded to bfloat16            (hidden itself without a norm)
    logits = x W^T (+ bias); index, a = the router's choice        (route/kernel.py),
        or what `index` and `affinities` say, if config.router is None
    slots, work tiles = places of this rank's choices, in any order
        inside an expert                       (index/token_lists.py, index/work_tiles.py)
    y = this rank's experts on the slots                           (prefill/kernel.py),
        whose inputs are scaled by a, and the sum weighs by 1, if config.experts.scaling is pre
    s = shared experts of x, if config.out.has_shared              (prefill/kernel.py)
    g = sigmoid(x . shared_gate) if config.out.has_gate, else 1    (route/kernel.py)
    output[t] = sum over k of a[t, k] * y[slot of (t, k)] (+ residual[t]) (+ g[t] * s[t])
                                                                   (combine/kernel.py)

Inputs and outputs, in HBM (T tokens, H hidden, N experts of all ranks):

    hidden           [T, H]    bfloat16
    router_weight    [N, H]    as router_topk takes it; it and first_expert if there is a router
    gate_up, down and what belongs to them as blockwise_moe takes them
    first_expert     [1, 1]    int32    number of this rank's first expert among N
    index            [T, K]    int32    this rank's number of each choice, any that is none for no
                               expert here, and
    affinities       [T, K]    float32, no number for a token to be taken out; if there is no router
    is_real          [T, 1]    int32    0 for padding, else 1, if config.has_padding
    norm_weight      [1, H]    any float, if config.router.has_norm
    router_bias      [1, N]    any float, if the router has a bias
    selection_bias   [1, N]    float32, if the router has one
    residual         [T, H]    bfloat16 or float32, if it is added; may be hidden
    shared_gate_up   [1, H, 2I'] and
    shared_down      [1, I', H] bfloat16 or 8 bits without scales, if there are shared experts, and
                               their work tiles, three tensors of `shared_work_tiles`
    shared_gate      [1, H]    the type of router_weight, if config.out.has_gate
    -> output        [T, H]    the type of config.out; [T/R, H] where config.out.ranks scatters
                               the sum of R ranks (rank_sums.py)
       affinities    [T, K]    float32 and
       index         [T, K]    int32, if config.returns_routing

The stages are those of the kernels named above. What a core's own tokens chose goes from the router
to the index on chip, and so do the tokens of each work tile from there to the experts, looked up in
the lists of both cores. What both cores need is in HBM: normalised tokens, work tiles, slots'
results; the cores meet after each of these is written. But for a table of ids, each stage gives its
SBUF back before the experts begin, so that their plan is that of blockwise_moe alone.

Tokens do not see each other: one with a logit that is no number, or a given affinity, chooses no
expert, and its row of the output is NaN. Padding chooses none; shared experts compute it. A token
whose expert overflows bfloat16 is not contained, see combine/kernel.py.

Limits: check_prefill_layer. Cost: cost_prefill_layer.

Steps:
    1. Normalise and route this core's tokens, store normalised ones; or load choices.
    2. Keep this rank's choices, drop those of others and of broken tokens.
    3. Mark and count the pairs; exchange counts; list work tiles, while tokens are looked for;
       exchange lists of tokens, look up those of each work tile.
    4. Compute the work tiles; then the shared experts, as one expert that all whole tokens choose.
    5. Sum each token's slots; add up the ranks' rows, if config.out.ranks says so, a portion
       of tiles while the next one is summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.combine.folds import Folds, add_folds, make_folds
from nki_kernels.combine.kernel import combine
from nki_kernels.common.arithmetic import apply_two, apply_with, divide_up
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.tiles import identity
from nki_kernels.common.token_tiles import (
    TokenTiles,
    load_per_token,
    split_tokens,
    store_per_token,
)
from nki_kernels.index.kernel import lay_out_blocks, list_work_tiles, store_slots
from nki_kernels.index.slot_inverse import exchange, invert_weights
from nki_kernels.index.token_lists import (
    NOBODY,
    TokenLists,
    count_choices,
    count_group,
    exchange_lists,
    finish_counts,
    look_up_tokens,
    mark_group,
    more_passes,
    number_pairs,
    slots_of,
    spread_columns,
    start_lists,
    start_marks,
    tiles_of,
)
from nki_kernels.index.token_search import (
    Meanwhile,
    finish_searches,
    go_on,
    look_up_rest,
)
from nki_kernels.index.work_tiles import KnownWorkTiles, ListedTokens
from nki_kernels.layer.config import (
    PrefillLayerConfig,
    choices_of,
    folds_of,
    has_norm,
    has_router,
    has_table,
    num_shared_slots,
    places_width,
    router_of,
    slot_rows,
)
from nki_kernels.layer.front_pairs import compact_front, store_table
from nki_kernels.prefill.buffers import (
    Lists,
    Operands,
    keep_ids,
    make_buffers,
    make_id_table,
)
from nki_kernels.prefill.kernel import (
    blockwise_moe,
    compute_work_tiles,
    lane_of,
    make_output,
)
from nki_kernels.route.kernel import RoutedTiles, RouterOperands, route_tiles, weigh_tiles

_BOTH = (0, 1)


@dataclass
class LayerIndex(nl.NKIObject):
    """What experts and sum need of the routing, in HBM."""

    work_tiles: tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]
    rows_TC: nl.NkiTensor  # int32, slots that the sum reads, -1 for none
    weights_TC: nl.NkiTensor  # float32, of the sum: affinities, or ones where inputs are scaled
    folds: Folds
    affinities_TK: nl.NkiTensor  # float32, 0 of broken tokens
    slot_scale: nl.NkiTensor  # [N * B] float32, where inputs are scaled
    spoils_T1: nl.NkiTensor  # float32, 0, or NaN of broken tokens
    gates_T1: nl.NkiTensor  # float32, NaN of broken tokens, where shared experts have a gate
    index_TK: nl.NkiTensor  # int32, of all ranks
    shared_tokens: nl.NkiTensor  # [S, 1] int32, -1 of broken tokens, where there are shared experts


@dataclass
class Choosing(nl.NKIObject):
    """What names the experts of tokens: operands of norm and router, or choices."""

    router: RouterOperands
    first_expert: Any
    index_TK: Any
    affinities_TK: Any
    is_real_T1: Any


@dataclass
class LocalPairs(nl.NKIObject):
    """What this core's tokens chose here."""

    # [128, max(1, tiles) * K] int32; any number that is no expert here is another rank's; no token
    # -1
    index_sb: nl.NkiTensor
    is_whole_sb: nl.NkiTensor  # [128, max(1, tiles)] uint32, 0 of broken tokens
    routed: Any  # RoutedTiles, None if there is no token


@nki.jit
def prefill_layer(
    hidden: nl.NkiTensor,
    router_weight: Any,
    gate_up: nl.NkiTensor,
    down: nl.NkiTensor,
    first_expert: Any,
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
    shared_work_expert: Any = None,
    shared_work_row_tiles: Any = None,
    shared_iterations: Any = None,
    shared_gate: Any = None,
    index: Any = None,
    affinities: Any = None,
    is_real: Any = None,
) -> Any:
    """Compute one MoE layer for T tokens; see the module."""
    # Normalised tokens go through HBM, since either core gathers any of them.
    x_TH = hidden
    if has_norm(config):
        x_TH = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm)
    operands = RouterOperands(
        hidden, router_weight, router_bias, selection_bias, norm_weight, x_TH, x_TH, shared_gate
    )
    chosen_by = Choosing(operands, first_expert, index, affinities, is_real)
    listed = _allocate_index(hidden.shape[0], choices_of(config).top_k, config)
    x = Operands(
        x_TH,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        gate_up_scale,
        down_scale,
        listed.slot_scale,
        make_output(config.experts, slot_rows(config)),
    )
    id_table = _index_tokens(chosen_by, listed, x, config)
    b = make_buffers(config.experts, x, [id_table])
    # Where inputs are scaled the cores meet behind the first rows, before they read scales.
    if config.out.has_shared and config.experts.scaling != "pre":
        nisa.core_barrier(listed.shared_tokens, _BOTH)
    slots_PSH = compute_work_tiles(b, _lists_of(listed, config))
    # A token's slots may be the other core's work.
    nisa.core_barrier(slots_PSH, _BOTH)
    shared_SH = slots_PSH
    if config.out.has_shared:
        shared = blockwise_moe(
            x_TH,
            shared_gate_up,
            shared_down,
            listed.shared_tokens.reshape((listed.shared_tokens.shape[0],)),
            shared_work_expert,
            shared_work_row_tiles,
            shared_iterations,
            config.shared,
        )
        nisa.core_barrier(shared, _BOTH)
        shared_SH = shared.reshape((shared.shape[1], shared.shape[2]))
    folds = folds_of(config)
    if folds.tiles:
        add_folds(slots_PSH.reshape(slots_PSH.shape[1:]), listed.folds, config.out, folds)
    output = combine(
        slots_PSH,
        listed.rows_TC,
        listed.weights_TC,
        config.out,
        listed.spoils_T1,
        residual,
        shared_SH,
        listed.gates_T1,
    )
    if not config.returns_routing:
        return output
    return output, listed.affinities_TK, listed.index_TK


def _lists_of(index: LayerIndex, config: PrefillLayerConfig) -> Lists:
    """Return what says which work tiles there are."""
    return Lists(
        None,
        index.slot_scale,
        index.work_tiles[0],
        index.work_tiles[1],
        index.work_tiles[2],
        lane_of(config.experts),
        config.experts.scaling == "pre",
    )


def _index_tokens(
    chosen_by: Choosing,
    index: LayerIndex,
    experts: Operands,
    config: PrefillLayerConfig,
) -> nl.NkiTensor:
    """Take what this core's tokens choose, place and list their pairs; return the table of the
    work tiles' token ids.
    """
    top_k, dims = choices_of(config).top_k, config.dims
    tokens = split_tokens(experts.hidden.shape[0], nl.program_id(0), nl.num_programs(0))
    id_table = make_id_table(config.experts)
    local = _choose(chosen_by, config, tokens)
    pairs = start_marks(local.index_sb, tokens, dims, top_k)
    groups = tiles_of(pairs)
    mark_group(pairs, groups[0])
    width = places_width(config, nl.num_programs(0))
    lists = start_lists(tokens, config.experts.tile_rows, width, dims.num_experts)
    # Engines work in order: a group is counted when the next one is marked.
    for number in range(1, len(groups)):
        mark_group(pairs, groups[number])
        count_group(lists, pairs, groups[number - 1])
    count_group(lists, pairs, groups[len(groups) - 1])
    own_sb = count_choices(lists)
    other_sb = exchange(own_sb)
    # The other core's counts are on their way.
    finish_counts(lists)
    meanwhile = Meanwhile(lists.searches, [])
    go_on(meanwhile)
    numbered = number_pairs(lists, pairs)
    meanwhile.look_ups = numbered.look_ups
    go_on(meanwhile)
    ends, known = _list_work_tiles(index, meanwhile, own_sb, other_sb, config)
    go_on(meanwhile)
    # The Vector engine waits for a long gather.
    affinities_sb = _weigh(local, index, config, tokens)
    passes_sb = more_passes(own_sb, other_sb, lists_room(lists, config))
    fronts = []
    if has_table(config):
        weight_sb = affinities_sb
        if config.experts.scaling == "pre":
            weight_sb = nl.ndarray(affinities_sb.shape, nl.float32, buffer=nl.sbuf)
            nisa.memset(dst=weight_sb, value=1.0)
        fronts.append(
            compact_front(
                local.index_sb, weight_sb, tokens, index.folds, folds_of(config), dims.num_experts
            )
        )
    look_up_rest(meanwhile)
    slot_sb = slots_of(numbered, ends[0], ends[1])
    if config.experts.scaling == "pre":
        invert_weights(index.slot_scale, affinities_sb, slot_sb, meanwhile)
    finish_searches(lists.searches)
    both = exchange_lists(lists)
    # The other core's lists are on their way.
    identity_sb = identity(nl.float16)
    wanted = _wanted_columns(lists, known, identity_sb, config)
    # Experts read lists that the other core stored, and gather tokens that it normalised.
    nisa.core_barrier(index.work_tiles[2], _BOTH)
    if has_norm(config):
        nisa.core_barrier(experts.hidden, _BOTH)
    found = look_up_tokens(both, wanted)
    _fill_ids(id_table, found, lists, known, identity_sb, passes_sb, config)
    if has_table(config):
        store_table(
            index.rows_TC,
            index.weights_TC,
            index.folds,
            slot_sb,
            fronts[0],
            tokens,
            folds_of(config),
        )
    else:
        store_slots(index.rows_TC, slot_sb, tokens)
    return id_table


def _list_work_tiles(
    index: LayerIndex,
    meanwhile: Meanwhile,
    own_sb: nl.NkiTensor,
    other_sb: nl.NkiTensor,
    config: PrefillLayerConfig,
) -> tuple[tuple[nl.NkiTensor, nl.NkiTensor], KnownWorkTiles]:
    """List the work tiles, now that both cores' choices are counted; return the first slot of each
    expert and the one behind its last row tile, and what is known of the work tiles.
    """
    dims, rows = config.dims, config.experts.tile_rows
    shape = other_sb.shape
    total_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=total_sb, data1=own_sb, data2=other_sb, op=nl.add)
    last_block_sb, start_sb = lay_out_blocks(total_sb, dims)
    index.work_tiles, known = list_work_tiles(
        total_sb,
        last_block_sb,
        config.work_tiles,
        dims,
        ListedTokens(nl.num_programs(0), meanwhile),
    )
    tiles_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    divide_up(tiles_sb, total_sb, rows)
    end_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    apply_with(end_sb, tiles_sb, nl.multiply, float(rows), nl.add, start_sb)
    return (start_sb, end_sb), known


def lists_room(lists: TokenLists, config: PrefillLayerConfig) -> int:
    """Return how many tokens of an expert a pass lists."""
    room: int = lists.width // config.dims.num_experts * config.experts.tile_rows
    return room


def _fill_ids(
    id_table: nl.NkiTensor,
    found: list[nl.NkiTensor],
    lists: TokenLists,
    known: KnownWorkTiles,
    identity_sb: nl.NkiTensor,
    passes_sb: nl.NkiTensor,
    config: PrefillLayerConfig,
) -> None:
    """Write the token ids of all work tiles: what the first pass over the pairs has found, and what
    others find.
    """
    rows, entries = found[0].shape
    # The same on both cores: the first one has most tokens.
    most = split_tokens(config.experts.num_tokens, 0, nl.num_programs(0)).rows
    # One pass is enough for most routings: further ones are iterations of a loop, often none.
    if lists_room(lists, config) < most:
        iterations = nisa.register_alloc()
        nisa.register_load(iterations, passes_sb)

        def next_pass(_iteration: int) -> None:
            _next_places(lists, known, config)
            finish_searches(lists.searches)
            wanted = _wanted_columns(lists, known, identity_sb, config)
            both = exchange_lists(lists)
            for more_sb in look_up_tokens(both, wanted):
                nisa.tensor_tensor(dst=found[0], data1=found[0], data2=more_sb, op=nl.add)

        nl.fori_loop(0, iterations, next_pass)
    flat_sb = id_table.reshape((rows, entries))
    # Those of the first two work tiles are waited for.
    soon = min(entries, 2 * config.work_tiles.largest)
    for some in (slice(0, soon), slice(soon, entries)):
        if some.start == some.stop:
            continue
        if len(found) > 1:
            apply_with(flat_sb[:, some], found[0][:, some], nl.add, -1.0, nl.add, found[1][:, some])
        else:
            nisa.tensor_scalar(
                dst=flat_sb[:, some], data=found[0][:, some], op0=nl.add, operand0=-1.0
            )
    keep_ids(config.experts, flat_sb)


def _wanted_columns(
    lists: TokenLists, known: KnownWorkTiles, identity_sb: nl.NkiTensor, config: PrefillLayerConfig
) -> list[nl.NkiTensor]:
    """Return the columns of this core's list for all entries of its work tiles, then of the other
    core's if there is one, [R, V * G] uint32 each.
    """
    shape = (config.experts.tile_rows, config.work_tiles.num_work_tiles * config.work_tiles.largest)
    first, wanted = nl.program_id(0), []
    for number in range(len(known.columns)):
        columns_sb = known.columns[first if number == 0 else 1 - first]
        wanted.append(spread_columns(columns_sb, identity_sb, shape, lists.width))
    return wanted


def _next_places(lists: TokenLists, known: KnownWorkTiles, config: PrefillLayerConfig) -> None:
    """Let lists and columns begin behind the places of a pass; those of earlier passes are beyond
    all columns.
    """
    room = float(lists_room(lists, config))
    for search in lists.searches:
        number_sb = search.number_sb
        nisa.tensor_scalar(dst=number_sb, data=number_sb, op0=nl.add, operand0=room)
        search.step = 0
    for column_sb in known.columns:
        nisa.tensor_scalar(dst=column_sb, data=column_sb, op0=nl.add, operand0=-float(lists.width))
        earlier_sb = nl.ndarray(column_sb.shape, nl.int32, buffer=nl.sbuf)
        apply_two(earlier_sb, column_sb, nl.less, 0.0, nl.multiply, 2.0 * NOBODY)
        nisa.tensor_tensor(dst=column_sb, data1=column_sb, data2=earlier_sb, op=nl.add)


def _allocate_index(num_tokens: int, top_k: int, config: PrefillLayerConfig) -> LayerIndex:
    """Allocate what does not depend on the lists of work tiles."""
    folds = folds_of(config)
    rows_TC = nl.ndarray((num_tokens, folds.columns), nl.int32, buffer=nl.shared_hbm)
    affinities_TK = nl.ndarray((num_tokens, top_k), nl.float32, buffer=nl.shared_hbm)
    spoils_T1 = nl.ndarray((num_tokens, 1), nl.float32, buffer=nl.shared_hbm)
    gates_T1 = spoils_T1
    if config.out.has_gate:
        gates_T1 = nl.ndarray((num_tokens, 1), nl.float32, buffer=nl.shared_hbm)
    index_TK = nl.ndarray((num_tokens, top_k), nl.int32, buffer=nl.shared_hbm)
    listed = (index_TK, index_TK, index_TK)  # until they are
    weights_TC, slot_scale = affinities_TK, affinities_TK
    if config.experts.scaling == "pre" or has_table(config):
        weights_TC = nl.ndarray((num_tokens, folds.columns), nl.float32, buffer=nl.shared_hbm)
    if config.experts.scaling == "pre":
        num_slots = config.dims.num_blocks * config.dims.block_size
        slot_scale = nl.ndarray((num_slots,), nl.float32, buffer=nl.shared_hbm)
    shared_tokens = index_TK
    if config.out.has_shared:
        shared_tokens = nl.ndarray((num_shared_slots(config), 1), nl.int32, buffer=nl.shared_hbm)
    return LayerIndex(
        listed,
        rows_TC,
        weights_TC,
        make_folds(folds, nl.num_programs(0)),
        affinities_TK,
        slot_scale,
        spoils_T1,
        gates_T1,
        index_TK,
        shared_tokens,
    )


def _choose(chosen_by: Choosing, config: PrefillLayerConfig, tokens: TokenTiles) -> LocalPairs:
    """Return the choices of this core's tokens in this rank's numbers."""
    shape = (PARTITIONS, max(1, tokens.count), choices_of(config).top_k)
    local_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=local_sb, value=-1)
    is_whole_sb = nl.ndarray(shape[0:2], nl.uint32, buffer=nl.sbuf)
    flat_sb = local_sb.reshape((PARTITIONS, shape[1] * shape[2]))
    if tokens.count == 0:
        return LocalPairs(flat_sb, is_whole_sb, None)
    if has_router(config):
        routed = route_tiles(chosen_by.router, router_of(config), tokens)
    else:
        routed = _load_choices(chosen_by, shape, tokens)
    nisa.tensor_scalar(dst=is_whole_sb, data=routed.spoils_sb, op0=nl.equal, operand0=0.0)
    numbers_sb, chooses_sb = routed.index_sb.reshape(shape), is_whole_sb
    if has_router(config):
        numbers_sb = _local_numbers(routed, chosen_by.first_expert, shape)
    if config.has_padding:
        chooses_sb = _real_ones(is_whole_sb, chosen_by.is_real_T1, tokens)
    nisa.tensor_copy_predicated(
        dst=local_sb,
        src=numbers_sb,
        predicate=chooses_sb.expand_dim(2).broadcast(2, shape[2]),
    )
    return LocalPairs(flat_sb, is_whole_sb, routed)


def _real_ones(
    is_whole_sb: nl.NkiTensor, is_real_T1: nl.NkiTensor, tokens: TokenTiles
) -> nl.NkiTensor:
    """Return which tokens are whole and no padding, [128, tiles] uint32."""
    is_real_sb = nl.ndarray(is_whole_sb.shape, nl.int32, buffer=nl.sbuf)
    if tokens.rows < tokens.count * PARTITIONS:
        nisa.memset(dst=is_real_sb, value=0)
    load_per_token(is_real_sb, is_real_T1, tokens)
    both_sb = nl.ndarray(is_whole_sb.shape, nl.uint32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=both_sb, data1=is_whole_sb, data2=is_real_sb, op=nl.multiply)
    return both_sb


def _load_choices(
    chosen_by: Choosing, shape: tuple[int, int, int], tokens: TokenTiles
) -> RoutedTiles:
    """Load the choices of this core's tokens; one with an affinity that is no number is broken."""
    flat = (shape[0], shape[1] * shape[2])
    index_sb = nl.ndarray(flat, nl.int32, buffer=nl.sbuf)
    affinities_sb = nl.ndarray(flat, nl.float32, buffer=nl.sbuf)
    if tokens.rows < tokens.count * PARTITIONS:
        nisa.memset(dst=index_sb, value=-1)
        nisa.memset(dst=affinities_sb, value=0.0)
    load_per_token(index_sb, chosen_by.index_TK, tokens)
    load_per_token(affinities_sb, chosen_by.affinities_TK, tokens)
    nothing_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=nothing_sb, data=affinities_sb.reshape(shape), op0=nl.multiply, operand0=0.0
    )
    spoils_sb = nl.ndarray(shape[0:2], nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=spoils_sb, data=nothing_sb, op=nl.add, axis=2)
    return RoutedTiles(
        affinities_sb,
        index_sb,
        spoils_sb,
        spoils_sb,
        spoils_sb,
        affinities_sb,
        index_sb,
        spoils_sb,
    )


def _weigh(
    local: LocalPairs, index: LayerIndex, config: PrefillLayerConfig, tokens: TokenTiles
) -> nl.NkiTensor:
    """Store what others need of each token; return affinities in the order of the pairs, 0 of
    broken tokens, [128, max(1, tiles) * K] float32.
    """
    top_k, count = choices_of(config).top_k, max(1, tokens.count)
    kept_sb = nl.ndarray((PARTITIONS, count, top_k), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=kept_sb, value=0.0)
    flat_sb = kept_sb.reshape((PARTITIONS, count * top_k))
    if tokens.count == 0:
        return flat_sb
    routed = local.routed
    if has_router(config):
        weigh_tiles(routed, router_of(config), tokens)
    if config.returns_routing:
        store_per_token(index.index_TK, routed.index_sb, tokens)
    store_per_token(index.spoils_T1, routed.spoils_sb, tokens)
    if config.out.has_gate:
        store_per_token(index.gates_T1, routed.gates_sb, tokens)
    if config.out.has_shared:
        _list_whole(index.shared_tokens, local.is_whole_sb, tokens, index.index_TK.shape[0])
    nisa.tensor_copy_predicated(
        dst=kept_sb,
        src=routed.affinities_sb.reshape(kept_sb.shape),
        predicate=local.is_whole_sb.expand_dim(2).broadcast(2, top_k),
    )
    if config.returns_routing or not has_table(config):
        store_per_token(index.affinities_TK, flat_sb, tokens)
    if config.experts.scaling == "pre" and not has_table(config):
        ones_sb = nl.ndarray(flat_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=ones_sb, value=1.0)
        store_per_token(index.weights_TC, ones_sb, tokens)
    return flat_sb


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
