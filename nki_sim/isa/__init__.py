"""`nki.isa`: the instructions, one file per engine.

Behind them: `_instruction` (the decorator), `_checks` (operands and cost facts), `_arithmetic`,
`_dma_operand` and `_dma_transfer`; `functions`, `search` and `mx_formats` (formulas in NumPy);
`operators` (codes like nl.add); `exchange` (for nki_sim.collectives). For nki_sim.language and the
files above it; kernels reach it as `nki.isa`. It knows the machine, and nothing of the language.
"""

from nki_sim.constants import (
    dge_mode,
    dma_engine,
    engine,
    gpsimd_engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    unknown_engine,
    vector_engine,
)
from nki_sim.dialects import old_names
from nki_sim.errors import NkiValidationError
from nki_sim.isa.dma import dma_compute, dma_copy, dma_transpose
from nki_sim.isa.gpsimd import (
    affine_select,
    iota,
    local_gather,
    nc_n_gather,
    nonzero_with_count,
    sequence_bounds,
    tensor_partition_reduce,
    topk,
)
from nki_sim.isa.mx import nc_matmul_mx, quantize_mx
from nki_sim.isa.query import get_nc_sub_version, get_nc_version
from nki_sim.isa.randoms import dropout, rand2, rand_get_state, rand_set_state, rng, set_rng_seed
from nki_sim.isa.registers import (
    register_alloc,
    register_load,
    register_move,
    register_store,
    scalar_load,
    scalar_store,
)
from nki_sim.isa.scalar import (
    activate2,
    activation,
    activation_reduce,
)
from nki_sim.isa.sync import core_barrier, sendrecv
from nki_sim.isa.tensor_engine import nc_matmul, nc_transpose
from nki_sim.isa.vector import (
    reciprocal,
    scalar_tensor_tensor,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
    tensor_tensor_scan,
)
from nki_sim.isa.vector_copy import memset, tensor_copy, tensor_copy_predicated
from nki_sim.isa.vector_search import (
    bn_aggr,
    bn_stats,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_stream_shuffle,
)
from nki_sim.isa.vector_select import (
    exponential,
    range_select,
    select_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
)
from nki_sim.machine import NkiInstruction, NkiScalar, VirtualRegister

tensor_engine = engine.tensor  # not the file of that name
globals().update(old_names("nisa"))

__all__ = [
    "NkiInstruction",
    "NkiScalar",
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "dropout",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "rng",
    "scalar_engine",
    "scalar_load",
    "scalar_store",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
    "unknown_engine",
    "vector_engine",
]
