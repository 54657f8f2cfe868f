"""A kernel that does nothing but read the weights of chosen experts once, as decode must."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # elements of a program


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    first_ptr,
    down_ptr,
    index_ptr,
    out_ptr,
    first_size,
    down_size,
    first_blocks,
    BLOCK: tl.constexpr,
):
    """Add up a block of an expert's matrix; store the sum where it is 2^100, which never comes."""
    expert, block = tl.load(index_ptr + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    total = 0.0
    if block < first_blocks:
        place = block * BLOCK + tl.arange(0, BLOCK)
        source = first_ptr + expert * first_size + place
        total += tl.sum(tl.load(source, mask=place < first_size, other=0.0).to(tl.float32), axis=0)
    else:
        place = (block - first_blocks) * BLOCK + tl.arange(0, BLOCK)
        source = down_ptr + expert * down_size + place
        total += tl.sum(tl.load(source, mask=place < down_size, other=0.0).to(tl.float32), axis=0)
    if total == 1.2676506002282294e30:
        tl.store(out_ptr, total)


def read_matrices(chosen_E: Tensor, first_EHI: Tensor, down_EIH: Tensor, out: Tensor) -> None:
    """Read both matrices of chosen experts in one launch: the fastest of five forms on an H200.

    Args:
        chosen_E: [chosen] int32, each once.
        first_EHI: of all experts, contiguous.
        down_EIH: of all experts, contiguous.
        out: [1] float32, left as it is.
    """
    sizes = first_EHI[0].numel(), down_EIH[0].numel()
    blocks = [triton.cdiv(size, _BLOCK) for size in sizes]
    grid = chosen_E.shape[0], sum(blocks)
    _read[grid](first_EHI, down_EIH, chosen_E, out, *sizes, blocks[0], BLOCK=_BLOCK)
