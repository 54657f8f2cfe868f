"""What the index kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from nki.language import NKIObject

from nki_kernels.common.work_tiles import WorkTileDims


@dataclass(frozen=True)
class BlockDims(NKIObject):
    """Sizes of the mapping; compile-time integers only.

    Attributes:
        num_experts: E of this rank.
        block_size: B.
        num_blocks: N, from neuron_moe.blocks.num_blocks or larger.
    """

    num_experts: int
    block_size: int
    num_blocks: int


NO_WORK_TILES = WorkTileDims(0, 1, 0, 1, False, 0)
