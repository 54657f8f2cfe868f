"""A kernel that does nothing but read the weights of chosen experts once, as decode must."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # elements of a program


@triton.jit  # type: ignore[untyped-decorator]
def _read(matrix_ptr, index_ptr, out_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up a block of an expert's matrix; store the sum where it is 2^100, which never comes."""
    expert = tl.load(index_ptr + tl.program_id(0)).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(matrix_ptr + expert * size + place, mask=place < size, other=0.0)
    total = tl.sum(values.to(tl.float32), axis=0)
    if total == 1.2676506002282294e30:
        tl.store(out_ptr, total)


def read_matrices(chosen_E: Tensor, matrices: list[Tensor], out: Tensor) -> None:
    """Read matrices [., depth, width] of chosen experts, one launch after another.

    Args:
        chosen_E: [chosen] int32, each once.
        matrices: of all experts, contiguous.
        out: [1] float32, left as it is.
    """
    for matrix in matrices:
        size = matrix[0].numel()
        grid = chosen_E.shape[0], triton.cdiv(size, _BLOCK)
        _read[grid](matrix, chosen_E, out, size, BLOCK=_BLOCK)
