"""The price of one instruction, from its facts and the chip's record alone.

A price has two parts. The occupancy is how long the engine can take nothing else; the latency is
when others may use the result. Waiting, queueing and everything that depends on neighbours (the
clock ramp of the tensor engine, a stationary tile that is already loaded, a table that has to be
loaded, shared bandwidth) is the schedule's affair (timeline.py). Instructions of one kind and shape
cost the same, so prices are computed once per distinct fact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from nki_sim.hardware import Hardware
from nki_sim.trace import (
    GPSIMD,
    HBM,
    PSUM,
    SBUF,
    SCALAR,
    VECTOR,
    ComputeFacts,
    ControlFacts,
    DmaFacts,
    MatmulFacts,
    SyncFacts,
)


@dataclass(frozen=True, slots=True)
class ComputePrice:
    """Vector, Scalar, GpSimd or Sync work.

    `table` is the activation function whose table must be loaded; the empty string needs none.
    """

    occupancy_ns: float
    latency_ns: float
    table: str = ""


@dataclass(frozen=True, slots=True)
class MatmulPrice:
    """Tensor engine work at full clock: loading the stationary tile, streaming the moving one.

    `useful_ns` is the streaming time weighted with the share of the array in use. `cells` are the
    32 x 32 parts of the array it occupies, numbered 4 * row + column; empty for all of it. On a
    part, the next matmul may start `issue_ns` later on another one.
    """

    load_ns: float
    stream_ns: float
    drain_ns: float
    useful_ns: float
    flops: int
    cells: tuple[int, ...]
    issue_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class DmaPrice:
    """A data movement: its trigger, then `engines` DMA engines for `engine_ns` each.

    `single_queue_ns` replaces `engine_ns` where one queue feeds all transfers of a core. `dge` is
    none, hwdge or swdge; `generator_ns` is how long the descriptor generator is busy; `extra_ns`
    delays the first byte.
    """

    engines: int
    engine_ns: float
    single_queue_ns: float
    dge: str
    generator_ns: float
    extra_ns: float
    hbm_bytes: int


@dataclass(frozen=True, slots=True)
class MeetingPrice:
    """A barrier, an exchange or a collective: `duration_ns` after the last partner arrived.

    `transfer_ns` is how long the bytes of an exchange keep the way between two cores busy; None
    for other meetings, which nothing may overtake.
    """

    duration_ns: float
    transfer_ns: float | None = None


_HALF: Final = frozenset({"bfloat16", "float16"})
_HALF_OR_FP8: Final = _HALF | {"float8_e4m3", "float8_e4m3fn", "float8_e5m2"}
_WHOLE_ARRAY: Final[tuple[int, ...]] = ()
# Functions that every activation table holds, so that they never cause a switch.
_RESIDENT: Final = frozenset({"", "copy", "identity", "square", "relu", "abs", "sign"})
_COPIES: Final = frozenset({"tensor_copy", "tensor_scalar", "tensor_scalar_addr", "transpose"})
_SIMPLE_ALU: Final = frozenset({"add", "multiply", "subtract"})
_SCANS: Final = frozenset({"tensor_tensor_scan", "scalar_tensor_tensor"})


def itemsize(dtype: str) -> int:
    """Return the bytes of one stored element of a type, by its name."""
    if dtype.endswith("_x4"):
        return 2 if dtype.startswith("float4") else 4
    if dtype in ("bool", "bool_") or "8" in dtype.split("_")[0]:
        return 1
    if "64" in dtype:
        return 8
    return 2 if "16" in dtype else 4


def price_matmul(facts: MatmulFacts, chip: Hardware) -> MatmulPrice:
    """Price a matmul or a transpose on the tensor engine.

    max(N, 64) cycles per pass (ARCH1), a stationary load at a quarter of that per column.
    """
    passes = 1
    if "float32" in (facts.stationary_dtype, facts.moving_dtype):
        if facts.is_transpose:
            passes = chip.fp32_transpose_passes
        elif facts.onezero:
            passes = chip.fp32_onezero_passes
        else:
            passes = chip.fp32_passes
    cycle_ns = 1.0 / chip.tensor_clock_ghz
    stream = passes * max(facts.n, chip.matmul_floor_cycles) * cycle_ns
    if facts.accumulates:
        stream *= chip.psum_accumulate_factor
    columns = max(facts.m / chip.stationary_load_speedup, chip.stationary_load_floor_cycles)
    rows_used = min(facts.k, chip.array_rows) / chip.array_rows
    columns_used = min(facts.m, chip.array_columns) / chip.array_columns
    depth = 1
    if facts.perf_mode.startswith("double_row"):
        depth = 2
    elif facts.stationary_dtype.endswith("_x4"):
        depth = 4
    issue = chip.tile_issue_cycles * cycle_ns
    if facts.tile:
        # Moving rows enter at tile_streams times the height of the array each cycle.
        height = facts.tile[2] / chip.array_rows
        issue = max(issue, stream * height / chip.tile_streams)
    return MatmulPrice(
        load_ns=passes * columns * cycle_ns,
        stream_ns=stream * chip.matmul_calibration_factor,
        drain_ns=chip.matmul_drain_ns,
        useful_ns=passes * facts.n * cycle_ns * rows_used * columns_used,
        flops=0 if facts.is_transpose else 2 * facts.k * depth * facts.m * facts.n,
        cells=_cells(facts.tile),
        issue_ns=issue,
    )


def _cells(tile: tuple[int, ...]) -> tuple[int, ...]:
    """Return the 32 x 32 parts that a (row, column, rows, columns) tile covers."""
    if not tile:
        return _WHOLE_ARRAY
    row, column, rows, columns = (size // 32 for size in tile)
    cells = tuple(
        4 * r + c for r in range(row, row + rows) for c in range(column, column + columns)
    )
    return _WHOLE_ARRAY if len(cells) == 16 else cells


def price_compute(op: str, engine: int, facts: ComputeFacts, chip: Hardware) -> ComputePrice:
    """Price an instruction of the Vector, Scalar or GpSimd engine.

    Raises:
        ValueError: the engine computes nothing.
    """
    # An address from a register makes the fixed part of an instruction longer.
    slower = chip.register_offset_factor - 1.0 if facts.is_dynamic else 0.0
    if engine == VECTOR:
        cycles = facts.elements / vector_rate(op, facts, chip)
        if op == "bn_aggr":
            cycles = 13 * facts.elements / 3
        if facts.reads_accumulator and op != "range_select":  # N cycles (older ISA cost lines)
            cycles += chip.accumulator_read_cycles
        fixed = slower * chip.vector_overhead_cycles
        latency = cycles + fixed + chip.vector_overhead_cycles
        busy = max(cycles, chip.vector_floor_cycles) + fixed + chip.vector_issue_cycles
        return ComputePrice(busy / chip.vector_clock_ghz, latency / chip.vector_clock_ghz)
    if engine == SCALAR:
        rate = 1.0
        if op in _COPIES and _HALF.issuperset(facts.dtypes):
            rate = chip.scalar_copy_speedup
        cycles = facts.elements / rate + slower * chip.scalar_overhead_cycles
        if facts.reads_accumulator:
            cycles += chip.accumulator_read_cycles
        latency = (cycles + chip.scalar_overhead_cycles) / chip.scalar_clock_ghz
        busy = max(cycles, chip.vector_floor_cycles) + chip.scalar_issue_cycles
        table = facts.function if op.startswith("activat") else ""
        return ComputePrice(
            busy / chip.scalar_clock_ghz, latency, "" if table in _RESIDENT else table
        )
    if engine == GPSIMD:
        cycles = gpsimd_cycles(op, facts, chip) + slower * chip.gpsimd_simple_overhead_cycles
        time = cycles / chip.gpsimd_clock_ghz
        return ComputePrice(time, time)
    raise ValueError(f"engine={engine}: does not compute. Use the Vector, Scalar or GpSimd engine.")


def vector_rate(op: str, facts: ComputeFacts, chip: Hardware) -> float:
    """Return how many elements per cycle and partition the Vector engine takes.

    One by default; more in the performance modes of ARCH2 for 16-bit data, less for two tensor
    inputs.
    """
    half = _HALF.issuperset(facts.dtypes)
    psum_operands = sum(space == PSUM for space in facts.spaces)
    contiguous = all(facts.contiguous)
    rate = 1.0
    if op in _COPIES:
        if half and psum_operands == 0:
            rate = chip.fast_copy_contiguous_speedup if contiguous else chip.fast_copy_speedup
        elif half and psum_operands == 1 and contiguous:
            rate = chip.fast_copy_speedup
        elif psum_operands == 0 and contiguous and _HALF_OR_FP8.issuperset(facts.dtypes):
            rate = chip.fast_copy_fp8_speedup
    elif op == "tensor_tensor":
        inputs = facts.spaces[1:]
        if PSUM in inputs and SBUF in inputs:
            rate = 1.0
        elif half and psum_operands == 0 and contiguous and facts.function in _SIMPLE_ALU:
            rate = chip.two_input_16bit_share
        else:
            rate = chip.two_input_share
    elif op in _SCANS:
        exception = op == "scalar_tensor_tensor" and facts.function == "subtract,multiply"
        fast = exception and _HALF.issuperset(facts.dtypes[1:]) and facts.elements % 2 == 0
        split = op == "scalar_tensor_tensor" and {PSUM, SBUF} <= set(facts.spaces[1:])
        rate = 1.0 if fast or split else chip.scan_share
    elif op == "tensor_copy_predicated":
        inputs = facts.spaces[1:]
        rate = 1.0 if PSUM in inputs and SBUF in inputs else chip.two_input_share
    elif op == "tensor_reduce":
        fast = half and facts.function in ("add", "maximum", "max")
        rate = chip.fast_reduce_speedup if fast else 1.0
    elif op == "memset":
        rate = chip.fast_memset_speedup if half and facts.function == "zero" else 1.0
    elif op == "reciprocal":
        rate = chip.reciprocal_share
    elif op in ("exponential", "quantize_mx"):
        # ARCH3: four times the Scalar engine's exp; four elements per partition and cycle.
        rate = 4.0
    return rate * (chip.wide_stride_share if facts.wide_stride else 1.0)


def gpsimd_cycles(op: str, facts: ComputeFacts, chip: Hardware) -> float:
    """Return the GpSimd cycles of an instruction; most are assumptions (see hardware.py)."""
    n = facts.elements
    fixed: float = chip.gpsimd_overhead_cycles
    if op in ("iota", "affine_select"):
        return fixed + n
    if op in ("memset", "tensor_copy"):
        return chip.gpsimd_simple_overhead_cycles + n
    if op == "local_gather":
        each = max(1, facts.extent)
        width = itemsize(facts.dtypes[0]) if facts.dtypes else 4
        together = ((28 + 4 * each) / (4 * each)) / min(4 / width, each)
        return fixed + n / together
    if op == "topk":
        return fixed + 4 * n + facts.extent
    if op == "nc_n_gather":
        blocks = math.ceil(n / 512)
        return blocks * chip.gpsimd_gather_block_cycles + n * chip.gpsimd_gather_cycles_per_element
    per_element = chip.gpsimd_other_cycles_per_element
    if op == "nonzero_with_count":
        per_element = chip.gpsimd_nonzero_cycles_per_element
    elif op == "tensor_partition_reduce":
        per_element = chip.gpsimd_partition_reduce_cycles_per_element
    elif "power" in facts.function:
        per_element = chip.gpsimd_power_cycles_per_element
    elif op == "tensor_tensor":
        per_element = chip.gpsimd_two_input_cycles_per_element
    return fixed + n * per_element


def price_dma(facts: DmaFacts, chip: Hardware) -> DmaPrice:
    """Price a data movement: runs and bytes of the busiest engine.

    engine time = runs * dma_run_ns + bytes / dma_engine_bytes_per_ns, where neighbouring rows do
    not merge. On a single queue nothing hides the latency of a descriptor, and the published curve
    follows max(runs * dma_single_queue_run_ns, bytes / dma_single_queue_bytes_per_ns).
    """
    engines = math.ceil(facts.rows / chip.dma_rows_per_engine)
    if facts.src_space == HBM and facts.dst_space == HBM:
        # Between HBM tensors a long row is cut; 32 KiB per engine is the documented sensible piece.
        engines = max(engines, math.ceil(facts.moved_bytes / 32768))
    engines = max(1, min(chip.dma_engines, engines))
    # The transpose unit takes whole rows, whatever the element-wise walk looks like.
    pieces = max(facts.rows, facts.hbm_runs) if facts.transpose else facts.runs
    skipped = facts.skipped_rows * chip.dma_skipped_row_share / engines
    runs = math.ceil(pieces / engines) + skipped
    if facts.transpose == "2-byte":
        runs = 0  # its unit is fed by blocks, not row by row
    data = facts.moved_bytes / engines
    share = 1.0
    if facts.transpose == "4-byte":
        share = chip.dma_transpose_4byte_share
    elif facts.transpose:
        on_chip = facts.src_space != HBM
        share = chip.dma_transpose_sbuf_share if on_chip else chip.dma_transpose_hbm_share
    elif facts.sources > 1:
        share = chip.dma_compute_share
    engine_ns = (runs * chip.dma_run_ns + data / chip.dma_engine_bytes_per_ns) / share
    single_ns = max(runs * chip.dma_single_queue_run_ns, data / chip.dma_single_queue_bytes_per_ns)
    dge = facts.dge
    if facts.indirect_rows:
        dge = "swdge"
    elif dge == "unknown":
        dge = "auto" if chip.generation > 2 else "none"
    generator = {
        "none": chip.dma_static_issue_ns,
        "hwdge": chip.hwdge_ns,
        "auto": chip.dma_auto_issue_ns,
    }.get(dge, chip.swdge_ns)
    extra = facts.registers * chip.dma_register_ns
    if dge == "swdge":
        generator += facts.indirect_rows * chip.swdge_index_ns
        extra += facts.indirect_rows * chip.swdge_index_ns
    return DmaPrice(
        engines=engines,
        engine_ns=engine_ns,
        single_queue_ns=single_ns / share,
        dge=dge,
        generator_ns=generator,
        extra_ns=extra,
        hbm_bytes=facts.hbm_read_bytes + facts.hbm_write_bytes,
    )


def price_control(facts: ControlFacts, chip: Hardware) -> ComputePrice:
    """Price a register operation or the step of a dynamic loop."""
    if facts.kind == "register_load":
        time = chip.register_load_hbm_ns if facts.space == HBM else chip.register_load_sbuf_ns
    elif facts.kind == "register_store":
        time = chip.register_store_ns
    elif facts.kind == "register_move":
        time = chip.register_move_ns
    else:
        time = chip.loop_iteration_ns if facts.kind == "loop_iteration" else 0.0
    return ComputePrice(time, time)


def price_meeting(facts: SyncFacts, chip: Hardware) -> MeetingPrice:
    """Price a meeting of cores or ranks, counted from the arrival of the last.

    Collectives: a base, hops by the documented choice of algorithm (mesh, recursive halving, ring),
    and what crosses the link of one rank.
    """
    if facts.kind == "core_barrier":
        return MeetingPrice(chip.core_barrier_ns if facts.partners > 1 else 0.0)
    if facts.kind == "sendrecv":
        if facts.path == "gpsimd_dma":
            moving = facts.moved_bytes / chip.gpsimd_sendrecv_bytes_per_ns
            return MeetingPrice(chip.gpsimd_sendrecv_ns + moving, moving)
        engines = min(chip.dma_engines, math.ceil(facts.partitions / chip.dma_rows_per_engine))
        runs = math.ceil(facts.partitions / engines) * chip.dma_run_ns
        moving = facts.moved_bytes / engines / chip.dma_engine_bytes_per_ns
        return MeetingPrice(chip.sendrecv_ns + runs + moving, runs + moving)
    travelling = facts.moved_bytes * _link_share(facts.kind, facts.ranks)
    if travelling < chip.mesh_limit_bytes:
        hops = 2
    elif travelling < chip.rdh_limit_bytes:
        hops = 1 + math.ceil(math.log2(max(2, facts.ranks)))
    else:
        hops = max(1, facts.ranks - 1)
    moving = travelling / chip.collective_bytes_per_ns
    return MeetingPrice(chip.collective_base_ns + (hops - 1) * chip.collective_hop_ns + moving)


def _link_share(kind: str, ranks: int) -> float:
    """Return how often the source of one rank crosses that rank's link in the best algorithm."""
    others = max(0, ranks - 1)
    if kind.startswith("all_gather"):
        return float(others)
    if kind == "all_reduce":
        return 2.0 * others / ranks
    if kind.startswith(("reduce_scatter", "all_to_all")):
        return others / ranks
    return 1.0
