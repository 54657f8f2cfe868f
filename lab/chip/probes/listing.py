"""All probes: which kernel, with what, and which coefficients its time shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from lab.chip.probes import control, dma, gpsimd, scalar, tensor, vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A micro-kernel with its arguments.

    Attributes:
        name: what it is called in results.
        kernel: of this folder.
        arguments: after its tensors.
        tensors: makes the arrays in HBM.
        cores: physical cores of the launch.
        shows: the coefficients it is there for; its time depends on others, too.
    """

    name: str
    kernel: Any
    arguments: tuple[Any, ...]
    shows: tuple[str, ...]
    cores: int = 1
    tensors: Callable[[], tuple[np.ndarray, ...]] = tuple


def _hbm(rows: int, columns: int, dtype: Any = np.float32) -> Callable[[], tuple[np.ndarray, ...]]:
    return lambda: (np.ones((rows, columns), dtype),)


def _numbers() -> tuple[np.ndarray, ...]:
    return (np.arange(128, dtype=np.int32)[:, None],)


def _probe(name: str, kernel: Any, arguments: tuple[Any, ...], shows: str, **others: Any) -> Probe:
    return Probe(
        name=name, kernel=kernel, arguments=arguments, shows=tuple(shows.split()), **others
    )


_VECTOR: Final = (
    _probe("vector copies in a chain", vector.copies, (400, 64, True), "vector_overhead_cycles"),
    _probe("vector copies apart", vector.copies, (400, 64, False), "vector_issue_cycles"),
    _probe("vector copies apart, short", vector.copies, (400, 8, False), "vector_floor_cycles"),
    _probe("16-bit copies", vector.copies_of_16_bits, (8, 16384), "fast_copy_contiguous_speedup"),
    _probe("16-bit copies, strided", vector.copies_of_every_second, (8, 8192), "fast_copy_speedup"),
    _probe("conversions to float8", vector.copies_to_8_bits, (8, 8192), "fast_copy_fp8_speedup"),
    _probe("copies of every eighth", vector.copies_of_every_eighth, (8, 2048), "wide_stride_share"),
    _probe("float32 sums", vector.sums_of_two, (16, 2048, False), "two_input_share"),
    _probe("bfloat16 sums", vector.sums_of_two, (16, 4096, True), "two_input_16bit_share"),
    _probe("scans", vector.scans, (16, 2048), "scan_share"),
    _probe("reciprocals", vector.reciprocals, (16, 512), "reciprocal_share"),
    _probe("largest of rows", vector.reductions, (16, 8192), "fast_reduce_speedup"),
    _probe("16-bit fills", vector.fills, (16, 8192), "fast_memset_speedup"),
    _probe("reduced results", vector.reduced_results, (400, 8), "accumulator_read_cycles"),
)

_SCALAR: Final = (
    _probe(
        "activations in a chain", scalar.activations_in_a_chain, (300, 64), "scalar_overhead_cycles"
    ),
    _probe("activations apart, short", scalar.activations_apart, (800, 1), "vector_floor_cycles"),
    _probe("activations apart, long", scalar.activations_apart, (400, 256), "scalar_issue_cycles"),
    _probe("scalar copies", scalar.copies_on_scalar, (8, 8192), "scalar_copy_speedup"),
    _probe("table switches", scalar.other_functions, (24, 8), "table_load_ns"),
    _probe("signals", scalar.signals, (300, 1), "semaphore_ns"),
)

_GPSIMD: Final = (
    _probe("counts", gpsimd.counts, (600, 8), "gpsimd_overhead_cycles"),
    _probe("GpSimd fills", gpsimd.fills_on_gpsimd, (800, 8), "gpsimd_simple_overhead_cycles"),
    _probe("GpSimd sums", gpsimd.sums_on_gpsimd, (60, 1024), "gpsimd_two_input_cycles_per_element"),
    _probe("powers", gpsimd.powers, (60, 256), "gpsimd_power_cycles_per_element"),
    _probe(
        "bounds of segments",
        gpsimd.bounds_of_segments,
        (60, 1024),
        "gpsimd_other_cycles_per_element",
    ),
    _probe("nonzeros", gpsimd.nonzeros, (60, 256), "gpsimd_nonzero_cycles_per_element"),
    _probe("lookups, short", gpsimd.lookups, (400, 8), "gpsimd_gather_block_cycles"),
    _probe("lookups, long", gpsimd.lookups, (100, 512), "gpsimd_gather_cycles_per_element"),
    _probe(
        "sums over partitions",
        gpsimd.sums_over_partitions,
        (60, 64),
        "gpsimd_partition_reduce_cycles_per_element",
    ),
)

_TENSOR: Final = (
    _probe("matmul train", tensor.matmul_train, (500, 512, False), "matmul_calibration_factor"),
    _probe(
        "matmul train that adds", tensor.matmul_train, (500, 512, True), "psum_accumulate_factor"
    ),
    _probe("short matmuls", tensor.short_matmuls, (1500, 8), "matmul_floor_cycles"),
    _probe(
        "chain of wide tiles",
        tensor.matmul_chain,
        (150, 1, 128, 128, 2, False),
        "stationary_load_speedup",
    ),
    _probe(
        "chain of wide tiles, few loads",
        tensor.matmul_chain,
        (150, 4, 128, 128, 2, True),
        "stationary_load_speedup",
    ),
    _probe("chain", tensor.matmul_chain, (150, 1, 128, 8, 1, False), "matmul_drain_ns"),
    _probe(
        "chain, two stationary tiles",
        tensor.matmul_chain,
        (150, 1, 128, 8, 2, False),
        "stationary_reuse_skips_load",
    ),
    _probe("narrow chain", tensor.matmul_chain, (200, 1, 8, 8, 1, True), "matmul_drain_ns"),
    _probe(
        "chain of narrow tiles",
        tensor.matmul_chain,
        (150, 1, 8, 64, 2, False),
        "stationary_load_floor_cycles",
    ),
    _probe(
        "chain of narrow tiles, few loads",
        tensor.matmul_chain,
        (150, 4, 8, 64, 2, True),
        "matmul_drain_ns",
    ),
    _probe("tiles at once", tensor.tiles_at_once, (64,), "tile_issue_cycles"),
    _probe("pulses, short", tensor.pulses, (40, 4, 3072), "ramp_start_share"),
    _probe("pulses, long", tensor.pulses, (32, 24, 4096), "ramp_ns"),
    _probe("pulses, single", tensor.pulses, (96, 1, 1024), "ramp_start_share"),
    _probe("pulses, until warm", tensor.pulses, (12, 48, 8192), "ramp_ns"),
    _probe("pulses, little rest", tensor.pulses, (32, 12, 1024), "ramp_ns"),
)

_DMA: Final = (
    _probe("nothing", dma.nothing, (1,), "launch_ns"),
    _probe("nothing, longer", dma.nothing, (800,), "launch_ns"),
    _probe(
        "issue, static",
        dma.transfers,
        (1000, 1, 1, 4, "none"),
        "dma_static_issue_ns",
        tensors=_hbm(128, 8192),
    ),
    _probe(
        "issue, compiler's choice",
        dma.transfers,
        (200, 1, 1, 4, "auto"),
        "dma_auto_issue_ns",
        tensors=_hbm(128, 8192),
    ),
    _probe(
        "issue, software",
        dma.transfers,
        (96, 1, 1, 4, "swdge"),
        "swdge_ns",
        tensors=_hbm(128, 8192),
    ),
    _probe(
        "issue, two queues",
        dma.transfers,
        (400, 1, 1, 4, "two queues"),
        "hwdge_ns",
        tensors=_hbm(128, 8192),
    ),
    _probe("runs", dma.transfers, (24, 128, 32, 4, "none"), "dma_run_ns", tensors=_hbm(128, 8192)),
    _probe(
        "bytes",
        dma.transfers,
        (24, 128, 1, 4096, "none"),
        "dma_engine_bytes_per_ns",
        tensors=_hbm(128, 8192),
    ),
    _probe(
        "runs on one queue",
        dma.transfers,
        (16, 128, 32, 4, "one queue"),
        "dma_single_queue_run_ns",
        tensors=_hbm(128, 8192),
    ),
    _probe(
        "bytes on one queue",
        dma.transfers,
        (16, 128, 1, 4096, "one queue"),
        "dma_single_queue_bytes_per_ns",
        tensors=_hbm(128, 8192),
    ),
    _probe(
        "there and back",
        dma.there_and_back,
        (100, False),
        "dma_first_byte_ns dma_done_ns",
        tensors=_hbm(128, 16),
    ),
    _probe(
        "there and back by register",
        dma.there_and_back,
        (100, True),
        "dma_register_ns",
        tensors=_hbm(128, 16),
    ),
    _probe("gathers", dma.gathers, (64, 128), "swdge_index_ns", tensors=_numbers),
    _probe(
        "loads of nothing",
        dma.loads_of_nothing,
        (96, 32),
        "dma_skipped_row_share",
        tensors=_hbm(1, 128 * 32 * 8),
    ),
    _probe(
        "transposes from HBM",
        dma.transposes,
        (300, False),
        "dma_transpose_hbm_share",
        tensors=_hbm(128, 128, ml_dtypes.bfloat16),
    ),
    _probe(
        "transposes in SBUF",
        dma.transposes,
        (200, True),
        "dma_transpose_sbuf_share",
        tensors=_hbm(128, 128, ml_dtypes.bfloat16),
    ),
    _probe(
        "transposes of 4 bytes",
        dma.transposes,
        (64, False),
        "dma_transpose_4byte_share",
        tensors=_hbm(128, 128),
    ),
    _probe(
        "sums in flight", dma.sums_in_flight, (24,), "dma_compute_share", tensors=_hbm(128, 4096)
    ),
)

_CONTROL: Final = (
    _probe("iterations", control.iterations, (200, 8), "loop_iteration_ns"),
    _probe("register loads", control.register_loads, (500,), "register_load_sbuf_ns"),
    _probe(
        "register loads from HBM",
        control.register_loads_from_hbm,
        (48,),
        "register_load_hbm_ns",
        tensors=_hbm(1, 1, np.int32),
    ),
    _probe("register stores", control.register_stores, (500,), "register_store_ns"),
    _probe("register moves", control.register_moves, (1000,), "register_move_ns"),
    _probe(
        "copies from a register", control.copies_from_a_register, (150, 8), "register_offset_factor"
    ),
    _probe("barriers", control.barriers, (48,), "core_barrier_ns", cores=2),
    _probe("exchanges", control.exchanges, (48, 1, False), "sendrecv_ns", cores=2),
    _probe("exchanges by GpSimd", control.exchanges, (48, 1, True), "gpsimd_sendrecv_ns", cores=2),
    _probe(
        "exchanges by GpSimd, long",
        control.exchanges,
        (48, 256, True),
        "gpsimd_sendrecv_bytes_per_ns",
        cores=2,
    ),
    _probe(
        "streams of two cores",
        control.streams_of_two_cores,
        (24,),
        "hbm_bytes_per_ns",
        cores=2,
        tensors=_hbm(128, 8192),
    ),
)

SWITCH_PROBES: Final = {
    "stationary_reuse_skips_load": (
        "chain",
        "chain, two stationary tiles",
    ),
}
"""Two probes of the same work, whose times differ only where a switch is on."""

PROBES: Final = _DMA + _VECTOR + _SCALAR + _GPSIMD + _TENSOR + _CONTROL
