"""The numbers of the chips, one frozen record each, with the source of every number.

Nothing else in the simulator holds a number about a chip. `TRN2.provenance("dma_run_ns")` says
where one comes
from: documented (a public document states it), measured (read off or fitted to a published profile)
or assumed (nothing public was found; `assumed_fields()` lists these, and sensitivity.py varies
them).

Sources, by the names used below, all of the public aws-neuron repositories on GitHub: ARCH1..3 =
aws-neuron-sdk nki/guides/architecture (Trainium1..3), PERF = nki_perf_guide, DMABW =
nki-dma-bandwidth-guide, DMAOV = nki-dma-overview, DGE = nki-dge, ISA = the nki.isa reference, OPT =
the kernel-optimization tutorial with its profiles, RMSQ = its
design page of the quantising norm, with profiles, EXPL = the Neuron Explorer glossary, CHIP = the
chip pages, CC = the collective communication pages and nccom-test samples, BND, INV = the worked
profile examples of neuron-agentic-development, KLR = leanprover/KLR, LIB = nki-library.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

Kind = Literal["documented", "measured", "assumed"]


class Provenance(NamedTuple):
    """Where a number comes from.

    `quick` and `slow` are the ends of what it may be, by the time that they give; None where the
    source leaves no choice or the estimate of a time does not ask (nki_sim/time/estimate.py).
    """

    kind: Kind
    source: str
    quick: float | None = None
    slow: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One NeuronCore of one chip generation, and what it shares with its neighbours.

    Units are in the names; a byte per nanosecond is a gigabyte per second. `*_cycles` count cycles
    of the engine in question. `provenance(field)` names the source of each number.
    """

    name: str
    generation: int
    cores_per_chip: int

    # Memory
    partitions: int
    sbuf_bytes_per_partition: int
    sbuf_usable_bytes_per_partition: int
    psum_banks: int
    psum_bank_bytes: int
    hbm_bytes_per_core: int

    # Clocks
    tensor_clock_ghz: float
    vector_clock_ghz: float
    scalar_clock_ghz: float
    gpsimd_clock_ghz: float

    # Tensor engine
    array_rows: int
    array_columns: int
    matmul_floor_cycles: float
    matmul_calibration_factor: float
    psum_accumulate_factor: float
    matmul_drain_ns: float
    fp32_passes: int
    fp32_onezero_passes: int
    fp32_transpose_passes: int
    stationary_load_speedup: float
    stationary_load_floor_cycles: float
    stationary_reuse_skips_load: int
    tile_issue_cycles: float
    tile_streams: float
    ramp_start_share: float
    ramp_ns: float

    # Vector engine
    vector_overhead_cycles: float
    vector_floor_cycles: float
    vector_issue_cycles: float
    two_input_share: float
    two_input_16bit_share: float
    scan_share: float
    reciprocal_share: float
    wide_stride_share: float
    fast_copy_contiguous_speedup: float
    fast_copy_speedup: float
    fast_copy_fp8_speedup: float
    fast_reduce_speedup: float
    fast_memset_speedup: float
    accumulator_read_cycles: float

    # Scalar engine
    scalar_overhead_cycles: float
    scalar_issue_cycles: float
    scalar_copy_speedup: float
    table_load_ns: float

    # GpSimd
    gpsimd_overhead_cycles: float
    gpsimd_simple_overhead_cycles: float
    gpsimd_two_input_cycles_per_element: float
    gpsimd_power_cycles_per_element: float
    gpsimd_nonzero_cycles_per_element: float
    gpsimd_gather_block_cycles: float
    gpsimd_gather_cycles_per_element: float
    gpsimd_partition_reduce_cycles_per_element: float
    gpsimd_other_cycles_per_element: float
    swdge_ns: float
    swdge_index_ns: float

    # DMA
    dma_engines: int
    dma_rows_per_engine: int
    dma_rings: int
    dma_engine_bytes_per_ns: float
    dma_run_ns: float
    dma_single_queue_run_ns: float
    dma_single_queue_bytes_per_ns: float
    dma_first_byte_ns: float
    dma_done_ns: float
    dma_static_issue_ns: float
    hwdge_ns: float
    dma_auto_issue_ns: float
    dma_transpose_hbm_share: float
    dma_transpose_sbuf_share: float
    dma_transpose_4byte_share: float
    dma_compute_share: float
    dma_skipped_row_share: float
    dma_register_ns: float
    hbm_bytes_per_ns: float

    # Synchronisation, registers, loops
    launch_ns: float
    launch_pair_ns: float
    semaphore_ns: float
    loop_iteration_ns: float
    register_load_sbuf_ns: float
    register_load_hbm_ns: float
    register_store_ns: float
    register_move_ns: float
    register_offset_factor: float
    core_barrier_ns: float
    sendrecv_ns: float
    gpsimd_sendrecv_ns: float
    gpsimd_sendrecv_bytes_per_ns: float

    # Collectives
    collective_base_ns: float
    collective_hop_ns: float
    collective_bytes_per_ns: float
    mesh_limit_bytes: int
    rdh_limit_bytes: int

    def provenance(self, field: str) -> Provenance:
        """Return the kind of source of one number and what the source is.

        Raises:
            KeyError: there is no such field.
        """
        return _SOURCES[self.name][field]

    def at(self, end: Literal["quick", "slow"]) -> Hardware:
        """Return a copy with every number that has a range at one of its ends."""
        changes: dict[str, Any] = {}
        for name, source in _SOURCES[self.name].items():
            value = getattr(source, end)
            if value is not None:
                changes[name] = value
        return dataclasses.replace(self, **changes)

    def launch_cost_ns(self, cores: int) -> float:
        """Return what a program that is a kernel alone takes before and after the kernel."""
        return self.launch_ns + (self.launch_pair_ns if cores > 1 else 0.0)

    def fields_of_kind(self, kind: Kind) -> tuple[str, ...]:
        """Return the names of all numbers whose source is of this kind."""
        return tuple(name for name, source in _SOURCES[self.name].items() if source.kind == kind)

    def assumed_fields(self) -> tuple[str, ...]:
        """Return the names of the numbers for which nothing public was found."""
        return self.fields_of_kind("assumed")

    def varied(self, field: str, factor: float) -> Hardware:
        """Return a copy with one number multiplied; a whole number stays whole and at least 1.

        A 0/1 switch is flipped instead, whatever the factor.
        """
        return self.varied_together({field: factor})

    def varied_together(self, factors: Mapping[str, float]) -> Hardware:
        """Return a copy with several numbers multiplied, each as `varied` does.

        Args:
            factors: by field.
        """
        changes: dict[str, Any] = {}
        for field, factor in factors.items():
            value = getattr(self, field)
            if not isinstance(value, int | float):
                raise ValueError(f"field={field!r}: holds {value!r}. Vary a number.")
            changes[field] = value * factor
            if field in SWITCHES:
                changes[field] = 1 - int(value)
            elif isinstance(value, int):
                changes[field] = max(1, round(value * factor))
        return dataclasses.replace(self, **changes)

    @property
    def bf16_flops_per_ns(self) -> float:
        """Peak of one core for 16-bit operands: two operations per cell and cycle."""
        return 2.0 * self.array_rows * self.array_columns * self.tensor_clock_ghz

    @property
    def dma_bytes_per_ns(self) -> float:
        """Peak of all DMA engines of one core."""
        return self.dma_engines * self.dma_engine_bytes_per_ns


SWITCHES: Final = ("stationary_reuse_skips_load",)
"""Fields that are 0 or 1."""

NEUTRAL: Final = {
    "psum_accumulate_factor": 1.0,
    "wide_stride_share": 1.0,
    "register_offset_factor": 1.0,
}
"""Fields that change no time at this value: times of before they were there hold."""


_Sourced = tuple[float, Provenance | None]  # a number, and where it comes from


def _sourced(
    kind: Kind, value: float, source: str, quick: float | None = None, slow: float | None = None
) -> _Sourced:
    return value, Provenance(kind, source, quick, slow)


_d = functools.partial(_sourced, "documented")
_m = functools.partial(_sourced, "measured")
_a = functools.partial(_sourced, "assumed")
_SOURCES: Final[dict[str, dict[str, Provenance]]] = {}


def _chip(name: str, own: dict[str, _Sourced], base: Hardware | None = None) -> Hardware:
    """Return the record of a chip and keep its sources.

    What a document says of every generation stays documented in one made of another; the rest
    counts as assumed there.
    """
    values: dict[str, Any] = {}
    sources = _SOURCES[name] = {}
    if base is not None:
        values = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        shared = {"partitions", "psum_banks", "psum_bank_bytes", "array_rows", "array_columns"}
        general = ("ISA", "older ISA", "DGE", "PERF", "EXPL", "DMAOV", "CC")
        for field, source in _SOURCES[base.name].items():
            holds = source.kind == "documented" and source.source.startswith(general)
            if field not in shared and not holds:
                text = f"taken over from {base.name} to {name} ({source.source})"
                source = Provenance("assumed", text)
            sources[field] = source
    for field, (value, own_source) in own.items():
        values[field] = value
        if own_source is not None:
            sources[field] = own_source
    return Hardware(**values | {"name": name})


TRN2: Final = _chip(
    "trn2",
    {
        "generation": _d(3, "ARCH2"),
        "cores_per_chip": _d(8, "ARCH2"),
        "partitions": _d(128, "ARCH2"),
        "sbuf_bytes_per_partition": _d(224 * 1024, "ARCH2"),
        "sbuf_usable_bytes_per_partition": _d(
            212_984, "KLR Trace.lean: 16,392 bytes are held back"
        ),
        "psum_banks": _d(8, "ARCH2"),
        "psum_bank_bytes": _d(2048, "ARCH2"),
        "hbm_bytes_per_core": _d(12 * 1024**3, "CHIP: 96 GiB on 8 cores"),
        "tensor_clock_ghz": _d(2.4, "ARCH2"),
        "vector_clock_ghz": _d(0.96, "ARCH2"),
        "scalar_clock_ghz": _d(1.2, "ARCH2"),
        "gpsimd_clock_ghz": _d(1.2, "ARCH2"),
        "array_rows": _d(128, "ARCH2"),
        "array_columns": _d(128, "ARCH2"),
        "matmul_floor_cycles": _m(
            112, "PERF: the turnaround is 64 cycles on trn1; fit to QoR of LIB's mlp_tkg", 64, 128
        ),
        "matmul_calibration_factor": _m(1.019, "BND V2: 8,192 matmuls of N=512 in 1,781 us"),
        "psum_accumulate_factor": _m(
            1.0, "BND V2: matmuls that add up 32 deep run at 98 % of the peak"
        ),
        "matmul_drain_ns": _m(160.0, "OPT zoomed profile: 590 ns bars at 430 ns intervals"),
        "fp32_passes": _d(4, "ARCH1: four times the bf16 cost; OPT shows 4.03"),
        "fp32_onezero_passes": _d(2, "ISA: up to twice as fast with a one-zero operand"),
        "fp32_transpose_passes": _d(2, "ARCH2: twice as fast as without transpose mode"),
        "stationary_load_speedup": _d(
            4.0, "ARCH1, PERF: up to 4x faster than streaming the same columns"
        ),
        "stationary_load_floor_cycles": _a(16, "no figure; a quarter of the matmul floor"),
        "stationary_reuse_skips_load": _a(
            1, "the compiler is taken to keep an unchanged stationary tile"
        ),
        "tile_issue_cycles": _a(
            16, "ISA says that disjoint tiles run at once; the gap is not published"
        ),
        "tile_streams": _m(
            2.0,
            "ARCH2: 2 x 128 elements a cycle enter the array; fit to QoR of LIB's mlp_tkg",
            4.0,
            2.0,
        ),
        "ramp_start_share": _d(0.5, "EXPL: about 50 % of the peak at the start"),
        "ramp_ns": _d(3000.0, "EXPL: about 3 us; the linear shape is ours"),
        "vector_overhead_cycles": _m(
            144,
            "LIB topk tuner uses 144; BND copies take (512 + 145) cycles; PERF: about 100",
            100,
            144,
        ),
        "vector_floor_cycles": _d(64, "ARCH1: minimum initiation interval"),
        "vector_issue_cycles": _d(
            100,
            "PERF: about 100 cycles of static overhead limit the rate; ARCH1: engines hide part of"
            " the access to memory behind other instructions; OPT: 5,403 instructions take 553 ns"
            " each",
            20,
            144,
        ),
        "two_input_share": _d(
            0.5,
            "ARCH1: about 2N cycles for two tensor inputs; older ISA cost lines: N in cases",
            1.0,
            0.5,
        ),
        "two_input_16bit_share": _a(1.0, "ARCH2 promises twice v2, base not said", 2.0, 1.0),
        "scan_share": _d(0.5, "older ISA cost lines: 2N"),
        "reciprocal_share": _d(0.125, "ISA: max(64, 8N)"),
        "wide_stride_share": _a(
            1.0, "ARCH1 has half above 16 bytes for v2; ARCH2's modes name no such rule"
        ),
        "fast_copy_contiguous_speedup": _d(
            4.0, "ARCH2 performance modes: SBUF, 16 bit, contiguous"
        ),
        "fast_copy_speedup": _d(
            2.0, "ARCH2 performance modes: not contiguous, or one side in PSUM"
        ),
        "fast_copy_fp8_speedup": _m(2.0, "RMSQ: 16,384 elements from bf16 to fp8 in 8.7 us"),
        "fast_reduce_speedup": _d(2.0, "older ISA cost lines: bf16 add or max"),
        "fast_memset_speedup": _d(2.0, "older ISA cost lines: zero fill of a 16-bit type"),
        "accumulator_read_cycles": _d(64, "ARCH1"),
        "scalar_overhead_cycles": _m(
            353,
            "DMAOV figures: exp of 128 and 4,096 elements in 401 and 3,708 ns; PERF: 264 cycles on"
            " trn1",
            264,
            353,
        ),
        "scalar_issue_cycles": _d(100, "ARCH1, PERF: about 100 cycles of static overhead"),
        "scalar_copy_speedup": _d(1.0, "ARCH2: no performance mode"),
        "table_load_ns": _m(1283.0, "DMAOV figures 3 and 7"),
        "gpsimd_overhead_cycles": _d(
            150, "older ISA cost lines: iota, affine_select, local_gather"
        ),
        "gpsimd_simple_overhead_cycles": _a(100, "same order as the other engines"),
        "gpsimd_two_input_cycles_per_element": _a(2.0, "not published"),
        "gpsimd_power_cycles_per_element": _a(8.0, "not published"),
        "gpsimd_nonzero_cycles_per_element": _a(8.0, "not published"),
        "gpsimd_gather_block_cycles": _a(
            150, "ISA: one instruction per 512 elements; its cost is not given"
        ),
        "gpsimd_gather_cycles_per_element": _a(2.0, "not published"),
        "gpsimd_partition_reduce_cycles_per_element": _a(32.0, "not published"),
        "gpsimd_other_cycles_per_element": _a(2.0, "not published"),
        "swdge_ns": _a(1000.0, "DGE gives no figure; order of the hardware generator"),
        "swdge_index_ns": _a(8.0, "not published"),
        "dma_engines": _d(16, "ARCH2"),
        "dma_rows_per_engine": _d(8, "DMAOV: an engine serves 8 of 128 rows"),
        "dma_rings": _d(
            4, "DMAOV: 16 queues on each engine; 4 and 16 fit QoR of LIB's mlp_tkg alike"
        ),
        "dma_engine_bytes_per_ns": _d(27.2, "DMAOV; DMABW uses 23 for planning", 27.2, 23.0),
        "dma_run_ns": _m(
            32.0,
            "fit to the DMA-bound profiles: OPT naive kernel, INV mixed DGE, DMAOV [4, 4096]",
            16.0,
            48.0,
        ),
        "dma_single_queue_run_ns": _m(
            106.25, "DMAOV figure 1: 850 ns per transfer of 128 rows on one queue"
        ),
        "dma_single_queue_bytes_per_ns": _d(23.0, "DMABW, DMAOV"),
        "dma_first_byte_ns": _m(
            760.0,
            "DMAOV figures 3, 5 to 7: 739 to 1,000 ns; DMABW: about 1,300 from semaphore to start",
            739.0,
            1_300.0,
        ),
        "dma_done_ns": _m(300.0, "DMAOV figures: 273 to 335 ns", 273.0, 335.0),
        "dma_static_issue_ns": _a(50.0, "not published"),
        "hwdge_ns": _d(600.0, "DGE: about 600 ns per transfer"),
        "dma_auto_issue_ns": _m(
            640.0,
            "OPT naive kernel: a transfer every 608 ns; BND V0: every 686 to 747 ns; ARCH2: two"
            " generators, 600 ns each",
            300.0,
            747.0,
        ),
        "dma_transpose_hbm_share": _d(0.9, "ARCH2: up to 90 % of the copy rate"),
        "dma_transpose_sbuf_share": _d(0.5, "ARCH2: up to 50 %"),
        "dma_transpose_4byte_share": _a(0.25, "not published"),
        "dma_compute_share": _d(0.5, "ARCH3: 50 % before v4"),
        "dma_skipped_row_share": _a(0.5, "not published"),
        "dma_register_ns": _a(100.0, "not published"),
        "hbm_bytes_per_ns": _m(
            716.0,
            "OPT profiler: 273 GB/s shown as 38.06 %; CHIP says 2.9 TB/s for 4 stacks",
            750.0,
            674.0,
        ),
        "launch_ns": _m(11_000.0, "fit to QoR of LIB's mlp_tkg on one core", 8_000.0, 16_000.0),
        "launch_pair_ns": _m(
            8_500.0, "fit to QoR of LIB's mlp_tkg on two cores", 4_500.0, 12_500.0
        ),
        "semaphore_ns": _m(30.0, "DMAOV figures: 10 to 35 ns", 10.0, 35.0),
        "loop_iteration_ns": _a(300.0, "not published"),
        "register_load_sbuf_ns": _a(200.0, "not published"),
        "register_load_hbm_ns": _a(1500.0, "not published; about one small DMA"),
        "register_store_ns": _a(200.0, "not published"),
        "register_move_ns": _a(50.0, "not published"),
        "register_offset_factor": _a(
            1.0,
            "older ISA cost lines: at least 600 cycles for a copy on v2, four times its overhead",
        ),
        "core_barrier_ns": _a(1500.0, "not published; two halves of the DMA completion path"),
        "sendrecv_ns": _a(2000.0, "not published", 1_000.0, 4_000.0),
        "gpsimd_sendrecv_ns": _a(1000.0, "ISA calls it low latency without a figure"),
        "gpsimd_sendrecv_bytes_per_ns": _d(153.0, "ARCH2: 307 GB/s for both directions"),
        "collective_base_ns": _m(6000.0, "CC: nccom-test samples; platform not named there"),
        "collective_hop_ns": _d(1500.0, "CC: 1 to 2 us per hop inside a node"),
        "collective_bytes_per_ns": _a(128.0, "a tenth of the documented NeuronLink rate of a chip"),
        "mesh_limit_bytes": _d(1 << 20, "CC: mesh below 1 MB"),
        "rdh_limit_bytes": _d(56 << 20, "CC: recursive doubling and halving from 1 to 56 MB"),
    },
)
"""Trainium 2, one physical core (LNC2 pairs two of them)."""

TRN3: Final = _chip(
    "trn3",
    {
        "generation": _d(4, "ARCH3"),
        "cores_per_chip": _d(8, "ARCH3"),
        "sbuf_bytes_per_partition": _d(256 * 1024, "ARCH3"),
        "sbuf_usable_bytes_per_partition": _d(245_752, "KLR Trace.lean"),
        "hbm_bytes_per_core": _d(18 * 1024**3, "CHIP: 144 GiB on 8 cores"),
        "tensor_clock_ghz": _d(2.4, "ARCH3"),
        "vector_clock_ghz": _d(1.2, "ARCH3"),
        "scalar_clock_ghz": _d(1.2, "ARCH3"),
        "gpsimd_clock_ghz": _d(1.2, "ARCH3"),
        "fast_copy_fp8_speedup": _d(4.0, "ARCH3: fp8 is as wide as 16-bit types"),
        "scalar_copy_speedup": _d(2.0, "ARCH3: twice for bf16 and fp16"),
        "dma_engines": _d(16, "ARCH3"),
        "dma_engine_bytes_per_ns": _d(38.4, "DMAOV"),
        "dma_single_queue_bytes_per_ns": _d(33.0, "DMABW, DMAOV"),
        "dma_compute_share": _d(1.0, "ARCH3: full rate from v4 on"),
        "hbm_bytes_per_ns": _d(1225.0, "CHIP: 4.9 TB/s for 4 stacks; ARCH3 says 4.7"),
        "collective_bytes_per_ns": (256.0, None),
    },
    TRN2,
)
"""Trainium 3, one physical core."""

TRN1: Final = _chip(
    "trn1",
    {
        "generation": _d(2, "ARCH1"),
        "cores_per_chip": _d(2, "ARCH1"),
        "sbuf_bytes_per_partition": _d(192 * 1024, "ARCH1"),
        "sbuf_usable_bytes_per_partition": _d(180_224, "KLR Trace.lean"),
        "hbm_bytes_per_core": _d(16 * 1024**3, "CHIP: 32 GiB on 2 cores"),
        "tensor_clock_ghz": _d(2.8, "ARCH1"),
        "vector_clock_ghz": _d(1.12, "ARCH1"),
        "scalar_clock_ghz": _d(1.4, "ARCH1"),
        "gpsimd_clock_ghz": _d(1.4, "ARCH1"),
        "matmul_floor_cycles": _d(64, "ARCH1"),
        "fp32_passes": _d(4, "ARCH1"),
        "fp32_transpose_passes": _d(4, "ARCH2: the fast mode starts with v3"),
        "ramp_start_share": _d(1.0, "EXPL: the ramp is described for Trn2 and Trn3"),
        "two_input_16bit_share": _d(1.0, "older ISA cost lines: N for bf16 in SBUF"),
        "wide_stride_share": _d(0.5, "ARCH1: half bandwidth above 16 bytes"),
        "fast_copy_contiguous_speedup": _d(1.0, "ARCH2: performance modes start with v3"),
        "fast_copy_speedup": _d(1.0, "ARCH2: performance modes start with v3"),
        "fast_copy_fp8_speedup": _d(1.0, "ARCH2: performance modes start with v3"),
        "scalar_overhead_cycles": _m(263, "PERF: dependent operations on one element, 264 cycles"),
        "dma_engines": _d(16, "ARCH1"),
        "dma_engine_bytes_per_ns": _d(27.2, "DMAOV"),
        "dma_single_queue_bytes_per_ns": _d(17.0, "DMABW, DMAOV"),
        "hbm_bytes_per_ns": _d(410.0, "CHIP: 0.82 TB/s for 2 cores"),
    },
    TRN2,
)
"""Trainium 1, one core."""

CHIPS: Final[dict[str, Hardware]] = {"trn1": TRN1, "trn2": TRN2, "trn3": TRN3}
"""What `find` knows; `hardware_file.use_hardware` puts a measured chip in place of ours."""

_ALIASES: Final = {
    "gen2": "trn1",
    "inf2": "trn1",
    "gen3": "trn2",
    "gen4": "trn3",
}


def find(name: str) -> Hardware:
    """Return the record of a chip by its name or generation (trn2, gen3, ...).

    Raises:
        ValueError: the name is unknown.
    """
    found = CHIPS.get(_ALIASES.get(name, name))
    if found is None:
        known = ", ".join([*CHIPS, *_ALIASES])
        raise ValueError(f"chip={name!r}: unknown. Use one of {known}.")
    return found
