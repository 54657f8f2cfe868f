"""What a prefill of a whole layer is compiled for, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from nki.language import NKIObject

from nki_kernels.combine import (
    CombineDims,
    FoldDims,
    check_combine,
    check_combined_ranks,
    fold_dims,
    fold_rows,
)
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.token_tiles import split_tokens
from nki_kernels.common.work_tiles import WorkTileDims, WorkTileLists
from nki_kernels.index import BlockDims, check_index_blocks
from nki_kernels.index.token_lists import list_width
from nki_kernels.prefill import (
    Expected,
    ExpertSizes,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    Search,
    best_candidate,
    best_parts,
    make_config,
    output_tiles,
    work_tiles_of,
)
from nki_kernels.prefill.config import no_piece, num_partials, stored_rows
from nki_kernels.route import RouterConfig, check_router_topk

_ANY = PlanRequest()
_WHOLE_SUMS = Search(shard_plans=("balanced", "hidden"))  # the sum adds one row to a token


@dataclass(frozen=True)
class GivenChoices(NKIObject):
    """Choices of experts that were made before the launch.

    Attributes:
        top_k: K.
        num_experts: of all ranks, which tokens choose among.
    """

    top_k: int
    num_experts: int


@dataclass(frozen=True)
class PrefillLayerConfig(NKIObject):
    """Compile-time constants of `prefill_layer`: those of its stages, which must agree.

    Attributes:
        router: norm and router, of all ranks' experts; marks broken tokens. None: of another
            launch.
        dims: blocks of this rank's experts.
        work_tiles: lists of work tiles, of `work_tile_dims(experts)`.
        experts: the routed experts of this rank.
        out: the sum over a token's experts, and over ranks; knows broken tokens, and a
            residual and shared experts if any.
        returns_routing: also return affinities and experts.
        shared: shared experts of this rank as one expert that all tokens choose; of
            `make_shared_config`.
        given: the choices, where the router is another launch's.
        has_padding: some tokens are padding, which chooses no routed expert.
        columns: of a token's row in the table of the last sum: its pairs here, or one row for all
            where it has more; 0: one for each choice.
    """

    router: RouterConfig | None
    dims: BlockDims
    work_tiles: WorkTileDims
    experts: PrefillConfig
    out: CombineDims
    returns_routing: bool = False
    shared: PrefillConfig | None = None
    given: GivenChoices | None = None
    has_padding: bool = False
    columns: int = 0


def has_table(config: PrefillLayerConfig) -> bool:
    """Whether the last sum reads a table of its own, not a column for each choice."""
    return config.columns > 0


def folds_of(config: PrefillLayerConfig) -> FoldDims:
    """Return columns and folds of the last sum."""
    experts, top_k = config.experts, choices_of(config).top_k
    if not config.columns:
        return FoldDims(top_k, top_k)
    most, rows = min(top_k, experts.E), output_tiles(experts) * experts.tile_rows
    return fold_dims(experts.num_tokens, config.columns, most, rows, experts.num_cores)


def slot_rows(config: PrefillLayerConfig) -> int:
    """Return the rows of slots, and of folds behind them."""
    experts, folds = config.experts, folds_of(config)
    rows = output_tiles(experts) * experts.tile_rows
    return max(rows, fold_rows(folds, experts.num_cores, experts.loop.missing == "spare"))


def choices_of(config: PrefillLayerConfig) -> GivenChoices:
    """Return how many experts a token chooses, and among how many."""
    if config.router is None:
        assert config.given is not None
        return config.given
    return GivenChoices(config.router.formula.top_k, config.router.num_experts)


def has_router(config: PrefillLayerConfig) -> bool:
    """Whether the launch routes its tokens."""
    return config.router is not None


def router_of(config: PrefillLayerConfig) -> RouterConfig:
    """Return the router of a launch that has one."""
    assert config.router is not None
    return config.router


def has_norm(config: PrefillLayerConfig) -> bool:
    """Whether the launch normalises its tokens."""
    return config.router is not None and config.router.has_norm


def check_prefill_layer(config: PrefillLayerConfig) -> None:
    """Raise ValueError unless the kernel takes this configuration."""
    experts, dims = config.experts, config.dims
    _check_choices(config)
    num_tokens, top_k = experts.num_tokens, choices_of(config).top_k
    check_index_blocks(num_tokens, top_k, dims, experts.num_cores, config.work_tiles)
    if not 0 <= config.columns <= min(top_k, experts.E):
        raise ValueError(
            f"columns={config.columns}: must be up to {min(top_k, experts.E)}, the pairs that a"
            " token may have here, or 0 for a column for each choice."
        )
    folds, partials = folds_of(config), num_partials(experts)
    if folds.tiles and partials > 1:
        raise ValueError(
            f"columns={config.columns}, {partials} partial sums: a fold adds up one. Use"
            f" columns={folds.most}, or a plan that does not split the intermediate axis."
        )
    assert slot_rows(config) <= no_piece(experts) * stored_rows(experts)
    check_combine(num_tokens, folds.columns, experts.H, slot_rows(config), partials)
    check_combined_ranks(config.out, num_tokens, experts.num_cores)
    _check_shared(config)


def _check_choices(config: PrefillLayerConfig) -> None:
    """Raise ValueError unless experts are chosen, or given."""
    router = config.router
    if (router is None) != (config.given is not None):
        raise ValueError(
            f"given={config.given}: the launch has a router, or choices of another one. Give one of"
            " both."
        )
    if router is None:
        if config.returns_routing:
            raise ValueError("returns_routing=True: choices were given. Keep them.")
        if config.has_padding:
            raise ValueError("has_padding=True: choices are given. Give padding none.")
    else:
        check_router_topk(router, config.experts.num_tokens)
        if router.returns_logits:
            raise ValueError("returns_logits=True: they stay on chip. Use router_topk.")
        if router.hidden_dtype != "bfloat16":
            raise ValueError(f"hidden_dtype={router.hidden_dtype!r}: experts take bfloat16.")
    marks_broken = router is None or router.marks_broken
    if not (marks_broken and config.out.has_spoils):
        raise ValueError(
            "marks_broken=False: a token that holds no numbers would spread to others. Set it,"
            " and has_spoils of the sum."
        )


def places_width(config: PrefillLayerConfig, num_cores: int) -> int:
    """Return the columns of the lists of tokens of a core; see `list_width`."""
    choices = choices_of(config)
    tokens = split_tokens(config.experts.num_tokens, 0, num_cores)
    share = 1.0 / choices.num_experts
    return list_width(tokens, choices.top_k, config.dims, share, config.experts.tile_rows)


def _check_shared(config: PrefillLayerConfig) -> None:
    """Raise ValueError unless shared experts fit the layer."""
    shared, experts = config.shared, config.experts
    if config.out.has_shared != (shared is not None):
        raise ValueError(
            f"has_shared={config.out.has_shared}: the sum adds shared experts where there are some."
            " Give both or none."
        )
    has_gate = config.router is not None and config.router.has_gate
    if has_gate != config.out.has_gate or (config.out.has_gate and shared is None):
        raise ValueError(
            f"has_gate={config.out.has_gate}: the router's stage computes the gate that the sum"
            " multiplies shared experts with. Give both, and shared experts, or none."
        )
    if shared is None:
        return
    same = ("H", "num_tokens", "num_cores", "chip")
    unlike = [name for name in same if getattr(shared, name) != getattr(experts, name)]
    if shared.has_scales:
        raise ValueError(
            f"shared: {shared.weight_format} with scales: the launch takes none beside them. Leave"
            " shared experts in bfloat16, or in codes without scales."
        )
    if unlike or num_partials(shared) > 1:
        raise ValueError(
            f"shared: {', '.join(unlike) or 'partial sums'} unlike the routed experts'. Use"
            " make_shared_config() with the sizes of the layer."
        )


def make_shared_config(
    formula: ExpertFormula,
    sizes: ExpertSizes,
    num_tokens: int,
    base: PrefillConfig,
    request: PlanRequest = _ANY,
) -> PrefillConfig:
    """Return what shared experts are compiled for: one expert that all tokens choose.

    Their matrices are stored as `stored_parts` says: `split_parts` makes them so.

    Args:
        formula: of the shared experts.
        sizes: of one expert, as wide as this rank's share of all shared experts; without scales.
        num_tokens: T.
        base: the routed experts of the layer.
        request: loops and turns, as far as they are not open; what is missing is the base's.

    Raises:
        ValueError: sizes or a formula that the kernel does not take.
    """
    request = _shared_request(formula, sizes, base, request)
    expected = Expected(
        num_tokens=num_tokens, top_k=1, routing=(1.0,), num_cores=base.num_cores, stores="tiles"
    )
    best = best_candidate(formula, sizes, expected, request, _WHOLE_SUMS)
    num_slots = -(-num_tokens // best.block_size) * best.block_size
    work = PrefillWork(best.block_size, num_slots, num_tokens, base.num_cores, stores="tiles")
    return make_config(formula, sizes, work, best.request)


def _shared_request(
    formula: ExpertFormula, sizes: ExpertSizes, base: PrefillConfig, asked: PlanRequest
) -> PlanRequest:
    """Return how matrices of shared experts are stored, whatever the tokens: whole where the cores
    hold a half each, twice; else by parts, whose rows are one run.
    """
    plain = replace(asked, missing=base.loop.missing)
    work = PrefillWork(PARTITIONS, PARTITIONS, PARTITIONS, base.num_cores, stores="tiles")
    try:
        halves = make_config(formula, sizes, work, replace(plain, shard_plan="hidden")).loop
    except ValueError:  # not even once
        is_small = False
    else:
        is_small = (halves.in_parts, halves.out_parts, halves.weight_buffers) == (1, 1, 2)
    parts = (1, 1) if is_small else best_parts(make_config(formula, sizes, work, plain))
    return plain if parts == (1, 1) else replace(plain, weight_parts=parts)


def num_shared_slots(config: PrefillLayerConfig) -> int:
    """Return S, the slots of the shared experts; 0 if there are none."""
    return config.shared.num_tiles * config.shared.tile_rows if config.shared else 0


def shared_work_tiles(config: PrefillConfig) -> WorkTileLists:
    """Return the work tiles of shared experts: every row tile that has a token."""
    num_slots = config.num_tiles * config.tile_rows
    slots = np.arange(num_slots, dtype=np.int32)
    tokens = np.where(slots < config.num_tokens, slots, -1).astype(np.int32)
    return work_tiles_of(config, tokens, np.zeros(config.num_tiles, np.int32))
