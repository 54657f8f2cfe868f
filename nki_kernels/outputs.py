"""What the kernels return: shapes and element types, known before they run.

A graph that is captured needs them; the kernels allocate their outputs by the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nki_kernels.combine import CombineDims
from nki_kernels.common.rank_sums import output_rows
from nki_kernels.common.work_tiles import WorkTileDims, loops_of, sizes_of
from nki_kernels.decode import DecodeConfig, LayerConfig
from nki_kernels.index import NO_WORK_TILES, BlockDims
from nki_kernels.layer import PrefillLayerConfig
from nki_kernels.layer.config import choices_of
from nki_kernels.prefill import PrefillConfig
from nki_kernels.prefill.config import num_partials, output_tiles
from nki_kernels.route import RouterConfig

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Output:
    """A tensor that a kernel returns.

    Attributes:
        shape: sizes of its axes.
        dtype: element type as kernels spell it.
    """

    shape: tuple[int, ...]
    dtype: str


def _router_topk(shapes: Shapes, config: RouterConfig) -> tuple[Output, ...]:
    num_tokens, hidden_size = shapes["hidden_TH"]
    chosen = (num_tokens, config.formula.top_k)
    found = [Output(chosen, "float32"), Output(chosen, "int32")]
    if config.returns_logits:
        found.append(Output((num_tokens, config.num_experts), "float32"))
    if config.has_norm:
        found.append(Output((num_tokens, hidden_size), config.hidden_dtype))
    return tuple(found)


def _index_blocks(
    shapes: Shapes, dims: BlockDims, work_tiles: WorkTileDims = NO_WORK_TILES
) -> tuple[Output, ...]:
    num_slots = dims.num_blocks * dims.block_size
    sizes: list[tuple[int, ...]] = [
        (num_slots,),
        (num_slots,),
        (dims.num_blocks,),
        (1,),
        (dims.num_experts,),
        shapes["index_TK"],
    ]
    if work_tiles.num_lanes > 0:
        lists = (work_tiles.num_lanes, work_tiles.num_work_tiles)
        loops = loops_of(sizes_of(work_tiles.largest))
        sizes += [lists, (*lists, work_tiles.largest), (1, len(loops))]
    return tuple(Output(size, "int32") for size in sizes)


def _blockwise_moe(_shapes: Shapes, config: PrefillConfig) -> Output:
    rows = output_tiles(config) * config.tile_rows
    return Output((num_partials(config), rows, config.H), "bfloat16")


def _combine(shapes: Shapes, dims: CombineDims) -> Output:
    return _summed((shapes["slot_of_pair_TK"][0], shapes["slots_PSH"][2]), dims)


def _summed(sums: tuple[int, ...], dims: CombineDims) -> Output:
    num_tokens, hidden_size = sums
    return Output((output_rows(dims.ranks, num_tokens), hidden_size), str(dims.out_dtype))


def _decode_moe(_shapes: Shapes, config: DecodeConfig) -> Output:
    return Output((config.T, config.H), config.output_dtype)


def _decode_layer(_shapes: Shapes, config: LayerConfig) -> Output | tuple[Output, ...]:
    moe = config.moe
    output = Output((output_rows(config.form.ranks, moe.T), moe.H), moe.output_dtype)
    if not config.form.returns_routing:
        return output
    return output, Output((moe.T, moe.K), "float32"), Output((moe.T, moe.K), "int32")


def _prefill_layer(shapes: Shapes, config: PrefillLayerConfig) -> Output | tuple[Output, ...]:
    output = _summed(shapes["hidden"], config.out)
    if not config.returns_routing:
        return output
    chosen = (shapes["hidden"][0], choices_of(config).top_k)
    return output, Output(chosen, "float32"), Output(chosen, "int32")


_FORMULAS: dict[str, Callable[..., Output | tuple[Output, ...]]] = {
    "router_topk": _router_topk,
    "index_blocks": _index_blocks,
    "blockwise_moe": _blockwise_moe,
    "combine": _combine,
    "decode_moe": _decode_moe,
    "decode_layer": _decode_layer,
    "prefill_layer": _prefill_layer,
}


def outputs_of(kernel: str, shapes: Shapes, records: Mapping[str, Any]) -> Any:
    """Return what a kernel returns: an `Output`, or a tuple of them where it returns a tuple.

    Args:
        kernel: its name.
        shapes: of its operands, by the names of its parameters.
        records: what it is compiled for, likewise.
    """
    return _FORMULAS[kernel](shapes, **records)
