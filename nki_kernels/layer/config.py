"""What a prefill of a whole layer is compiled for, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from nki.language import NKIObject

from nki_kernels.combine import CombineDims, check_combine
from nki_kernels.common.visits import VisitDims
from nki_kernels.index import BlockDims, check_index_blocks
from nki_kernels.prefill import PrefillConfig, output_tiles
from nki_kernels.prefill.config import num_partials
from nki_kernels.route import RouterConfig, check_router_topk


@dataclass(frozen=True)
class PrefillLayerConfig(NKIObject):
    """Compile-time constants of `prefill_layer`: those of its stages, which must agree.

    Attributes:
        router: norm and router, of all ranks' experts; marks broken tokens.
        dims: blocks of this rank's experts.
        visits: lists of visits, of `visit_dims(experts)`.
        experts: the routed experts of this rank.
        out: the sum over a token's experts; told of broken tokens, and of a residual if any.
        returns_routing: also return affinities and experts.
    """

    router: RouterConfig
    dims: BlockDims
    visits: VisitDims
    experts: PrefillConfig
    out: CombineDims
    returns_routing: bool = False


def check_prefill_layer(config: PrefillLayerConfig) -> None:
    """Raise ValueError unless the kernel takes this configuration."""
    router, experts, dims = config.router, config.experts, config.dims
    num_tokens, top_k = experts.num_tokens, router.formula.top_k
    check_router_topk(router, num_tokens)
    check_index_blocks(num_tokens, top_k, dims, experts.num_cores, config.visits)
    slots = output_tiles(experts) * experts.tile_rows
    check_combine(num_tokens, top_k, experts.H, slots, num_partials(experts))
    if router.returns_logits:
        raise ValueError("returns_logits=True: they stay on chip. Use router_topk.")
    if not (router.marks_broken and config.out.has_spoils):
        raise ValueError(
            "marks_broken=False: a token that holds no numbers would spread to others. Set it,"
            " and has_spoils of the sum."
        )
    if router.hidden_dtype != "bfloat16":
        raise ValueError(f"hidden_dtype={router.hidden_dtype!r}: experts take bfloat16.")
    if experts.stores == "tokens":
        raise ValueError("stores='tokens': broken tokens have no row there. Use 'rows' or 'tiles'.")
