"""Index: the slot of each (token, choice) pair in its expert's blocks, and the lists of work
tiles.
"""

import nki_kernels.provided  # noqa: F401  answers to `import nki`
from nki_kernels.index.check import check_index_blocks
from nki_kernels.index.config import NO_WORK_TILES, BlockDims
from nki_kernels.index.cost import cost_index_blocks
from nki_kernels.index.kernel import index_blocks
from nki_kernels.index.reference import Mapping, index_blocks_ref

__all__ = [
    "NO_WORK_TILES",
    "BlockDims",
    "Mapping",
    "check_index_blocks",
    "cost_index_blocks",
    "index_blocks",
    "index_blocks_ref",
]
