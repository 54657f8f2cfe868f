"""`nki.isa`: the instructions, one file per engine."""

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
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from nki_sim.errors import NkiValidationError
from nki_sim.isa.vector import tensor_tensor
from nki_sim.machine import NkiInstruction
from nki_sim.registers import VirtualRegister

__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "dge_mode",
    "dma_engine",
    "engine",
    "gpsimd_engine",
    "matmul_perf_mode",
    "nc_version",
    "oob_mode",
    "reduce_cmd",
    "scalar_engine",
    "tensor_engine",
    "tensor_tensor",
    "unknown_engine",
    "vector_engine",
]
