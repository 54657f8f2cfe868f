"""What the index kernel refuses."""

from __future__ import annotations

from nki_kernels.common.chip import BANK_FLOATS, MOST_SBUF_BYTES
from nki_kernels.common.work_tiles import WorkTileDims
from nki_kernels.index.config import NO_WORK_TILES, BlockDims
from nki_kernels.index.memory import sbuf_bytes

MOST = 1 << 20  # pairs or slots for which `divide_down` is exact
_MAX_EXPERTS = 2 * BANK_FLOATS  # counts of all experts take two banks
_MAX_TOP_K = 32


def check_index_blocks(
    num_tokens: int,
    top_k: int,
    dims: BlockDims,
    num_cores: int = 2,
    work_tiles: WorkTileDims = NO_WORK_TILES,
) -> None:
    """Raise ValueError unless the kernel takes these sizes.

    Args:
        num_tokens: T.
        top_k: K.
        dims: E, B and N.
        num_cores: physical cores of the launch.
        work_tiles: how row tiles become work tiles; prefill.work_tile_dims makes it.
    """
    if not 1 <= dims.num_experts <= _MAX_EXPERTS:
        raise ValueError(f"num_experts={dims.num_experts}: must be 1 to {_MAX_EXPERTS}.")
    if not 1 <= top_k <= _MAX_TOP_K:
        raise ValueError(f"top_k={top_k}: must be 1 to {_MAX_TOP_K}.")
    if num_tokens < 1 or num_tokens * top_k > MOST:
        raise ValueError(
            f"num_tokens={num_tokens}: must be at least 1, and T * K at most {MOST}."
            " Index longer inputs in parts."
        )
    for name in ("block_size", "num_blocks"):
        if getattr(dims, name) < 1:
            raise ValueError(f"{name}={getattr(dims, name)}: must be at least 1.")
    if dims.num_blocks * dims.block_size > MOST:
        raise ValueError(
            f"num_blocks={dims.num_blocks}, block_size={dims.block_size}: N * B must be at most"
            f" {MOST}. Index longer inputs in parts."
        )
    if work_tiles.tile_rows < 1 or dims.block_size % work_tiles.tile_rows:
        raise ValueError(
            f"tile_rows={work_tiles.tile_rows}: must divide block_size={dims.block_size}."
            " Use work_tile_dims() of the configuration."
        )
    needed = sbuf_bytes(num_tokens, top_k, dims, num_cores, work_tiles)
    if needed > MOST_SBUF_BYTES:
        raise ValueError(
            f"num_tokens={num_tokens}, num_experts={dims.num_experts},"
            f" num_blocks={dims.num_blocks}, block_size={dims.block_size}: need {needed} bytes of"
            f" SBUF per partition, must be at most {MOST_SBUF_BYTES}. Index the tokens in parts."
        )
