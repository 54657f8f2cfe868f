"""neuron-moe bench sim: what the simulator costs per instruction on [128, 512] tiles.

    neuron-moe bench sim

Each kernel repeats one instruction on tiles that stay in place. The overhead in mode "full" is what
is left of the time per instruction when the NumPy work of its meaning is taken off, measured on
equal arrays; in mode "indices" there is no such work. Processor time is counted, the best of
several repeats, so that load from outside disturbs little. A timeline is measured in the order of
the source, and what it takes more where queues reorder (the window of a list schedule).

With --library, also the time and memory of a whole kernel: the vendor's blockwise MoE on the sizes
of GPT-OSS-120B at tensor parallelism 8, prefill of 1,024 tokens, in mode "indices", its timeline
included.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import nki_sim
from lab.check.vendor_cases.adapters import build_job
from lab.check.vendor_cases.case import Case, Limits
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.errors import check_positive_int
from neuron_moe.tools.console import format_table, tell_json
from neuron_moe.tools.parsers import Parser
from nki_sim.hardware import TRN2
from nki_sim.time.prepare import TimelineOptions
from nki_sim.time.schedule_model import ScheduleModel
from nki_sim.time.timeline import schedule
from nki_sim.trace import Trace

nki_sim.provide()

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

ROWS, COLUMNS = 128, 512
FULL_LIMIT_US, INDICES_LIMIT_US, REORDER_LIMIT_US = 25.0, 12.0, 5.0
PREFILL_LIMIT_S, PREFILL_LIMIT_GIB = 120.0, 6.0
_ONE_THREAD = "OPENBLAS_NUM_THREADS"
# GPT-OSS-120B on 8 ranks: hidden 2,880 padded to 3,072, intermediate 360 padded to 384.
_PREFILL = {
    "id": "gpt-oss-120b-tp8-prefill-1024",
    "kernel": "moe_cte",
    "variant": "shard_on_block",
    "params": {
        "tokens": 1024,
        "hidden": 3072,
        "intermediate": 384,
        "experts": 128,
        "top_k": 4,
        "block_size": 256,
        "dtype": "bfloat16",
        "skip_mode": 3,
        "bias": True,
        "act_fn": "Swish",
        "affinity_scaling_mode": "POST_SCALE",
        "gate_clamp_upper": 7,
        "gate_clamp_lower": None,
        "up_clamp_upper": 8,
        "up_clamp_lower": -9,
    },
}


class Instruction(NamedTuple):
    """An instruction, its kernel, and the NumPy work that its meaning takes."""

    name: str
    kernel: Any
    work: Callable[[], object]


def _tile(dtype: Any, buffer: Any = None) -> Any:
    """Allocate one tile inside a kernel."""
    return nl.ndarray((ROWS, COLUMNS), dtype=dtype, buffer=buffer or nl.sbuf)


def _tensor_tensor(count: int, dtype: Any) -> None:
    a, b, c = _tile(dtype), _tile(dtype), _tile(dtype)
    nisa.memset(dst=a, value=1.0)
    nisa.memset(dst=b, value=1.0)
    for _ in range(count):
        nisa.tensor_tensor(dst=c, data1=a, data2=b, op=nl.add)


def _tensor_scalar(count: int, dtype: Any) -> None:
    a, b = _tile(dtype), _tile(dtype)
    nisa.memset(dst=a, value=1.0)
    for _ in range(count):
        nisa.tensor_scalar(dst=b, data=a, op0=nl.multiply, operand0=2.0)


def _tensor_copy(count: int, dtype: Any) -> None:
    a, b = _tile(dtype), _tile(dtype)
    nisa.memset(dst=a, value=1.0)
    for _ in range(count):
        nisa.tensor_copy(dst=b, src=a)


def _activation(count: int, dtype: Any) -> None:
    a, b = _tile(dtype), _tile(dtype)
    nisa.memset(dst=a, value=1.0)
    for _ in range(count):
        nisa.activation(dst=b, op=nl.exp, data=a)


def _matmul(count: int, dtype: Any) -> None:
    stationary = nl.ndarray((ROWS, 128), dtype=dtype, buffer=nl.sbuf)
    moving, psum = _tile(dtype), _tile(nl.float32, nl.psum)
    nisa.memset(dst=stationary, value=1.0)
    nisa.memset(dst=moving, value=1.0)
    for _ in range(count):
        nisa.nc_matmul(dst=psum, stationary=stationary, moving=moving)


def _dma_copy(count: int, dtype: Any) -> None:
    source, a = _tile(dtype, nl.shared_hbm), _tile(dtype)
    nisa.memset(dst=a, value=1.0)
    nisa.dma_copy(dst=source, src=a)
    for _ in range(count):
        nisa.dma_copy(dst=a, src=source)


def cases() -> list[tuple[Instruction, Any]]:
    """Return the instructions with the dtype they run on."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) for _ in range(3))
    half_a, half_b, half_c = (array.astype(ml_dtypes.bfloat16) for array in (a, b, c))
    weights = half_a[:, :128]

    def matmul() -> None:
        np.add(weights.astype(np.float32).T @ half_a.astype(np.float32), c, out=c)

    def add_half() -> None:
        half_c[...] = half_a.astype(np.float32) + half_b.astype(np.float32)

    fp32, bf16 = np.float32, ml_dtypes.bfloat16
    return [
        (Instruction("tensor_tensor fp32", _tensor_tensor, lambda: np.add(a, b, out=c)), fp32),
        (Instruction("tensor_tensor bf16", _tensor_tensor, add_half), bf16),
        (Instruction("tensor_scalar fp32", _tensor_scalar, lambda: np.multiply(a, 2, out=c)), fp32),
        (Instruction("tensor_copy bf16", _tensor_copy, lambda: np.copyto(half_b, half_a)), bf16),
        (Instruction("activation fp32", _activation, lambda: np.exp(a, out=c)), fp32),
        (Instruction("nc_matmul bf16", _matmul, matmul), bf16),
        (Instruction("dma_copy bf16", _dma_copy, lambda: np.copyto(half_b, half_a)), bf16),
    ]


def _processor_time(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def best_us(work: Callable[[int], object], count: int, repeats: int) -> float:
    """Return the least time of `work(count)` per item in microseconds, without set-up."""
    work(1)
    empty = min(_processor_time(lambda: work(0)) for _ in range(repeats))
    full = min(_processor_time(lambda: work(count)) for _ in range(repeats))
    return max(0.0, full - empty) / count * 1e6


def measure(case: Instruction, dtype: Any, count: int, repeats: int) -> dict[str, Any]:
    """Return the times of one instruction in both modes and of its NumPy work."""

    def repeat_work(times: int) -> None:
        for _ in range(times):
            case.work()

    def run(mode: Any) -> Callable[[int], object]:
        options = nki_sim.SimOptions(mode=mode)
        return lambda times: nki_sim.run(case.kernel, times, dtype, options=options)

    numpy_us = best_us(repeat_work, count, repeats)
    full_us = best_us(run("full"), count, repeats)
    indices_us = best_us(run("indices"), count, repeats)
    trace = nki_sim.run(case.kernel, count, dtype, options=nki_sim.SimOptions(mode="indices")).trace
    timeline_us, reorder_us = timeline_times(trace, repeats)
    return {
        "instruction": case.name,
        "numpy_us": numpy_us,
        "full_us": full_us,
        "full_overhead_us": max(0.0, full_us - numpy_us),
        "indices_us": indices_us,
        "timeline_us": timeline_us,
        "reorder_us": reorder_us,
    }


def timeline_times(trace: Trace, repeats: int) -> tuple[float, float]:
    """Return microseconds per instruction of a timeline in order, and what reordering adds."""
    reordering = TimelineOptions(model=ScheduleModel(order="list"))
    in_order_us, reordered_us = (
        min(_processor_time(partial(schedule, trace, TRN2, options)) for _ in range(repeats))
        / len(trace)
        * 1e6
        for options in (TimelineOptions(), reordering)
    )
    return in_order_us, max(0.0, reordered_us - in_order_us)


def measure_prefill(library: Path, repeats: int) -> dict[str, Any]:
    """Return wall time, peak memory and simulated time of the prefill of a whole layer."""
    unlimited = Limits(macs=float("inf"), input_bytes=float("inf"))
    job = build_job(Case.from_json(_PREFILL), VendorLibrary(library), unlimited)
    begin = time.perf_counter()
    options = nki_sim.SimOptions(
        nki="0.6", mode="indices", uninitialized="off", mx_headroom=job.mx_headroom
    )
    run = nki_sim.run(job.kernel, lnc=job.cores, options=options, **job.inputs)
    simulated_us = run.timeline.total_us
    seconds = time.perf_counter() - begin
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    timeline_us, reorder_us = timeline_times(run.trace, repeats)
    return {
        "prefill_seconds": seconds,
        "prefill_limit_seconds": PREFILL_LIMIT_S,
        "prefill_peak_gib": peak_gib,
        "prefill_limit_gib": PREFILL_LIMIT_GIB,
        "prefill_instructions": len(run.trace),
        "prefill_simulated_us": simulated_us,
        "prefill_timeline_us": timeline_us,
        "prefill_reorder_us": reorder_us,
    }


def _in_one_thread(args: argparse.Namespace) -> int:
    """Run again in a process whose matrix products use one thread.

    The threads of the library wait for each other by spinning, which on a busy machine costs a
    hundred times the product; their number can only be chosen before NumPy is loaded.
    """
    command = [sys.executable, "-m", "neuron_moe.tools.cli", "bench", "sim"]
    command += ["--count", str(args.count), "--repeats", str(args.repeats)]
    if args.library is not None:
        command += ["--library", str(args.library)]
    if args.json is not None:
        command += ["--json", str(args.json)]
    environment = os.environ | {_ONE_THREAD: "1"}
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    return done.returncode


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; return 1 where a limit is missed."""
    parser = Parser("bench sim", __doc__)
    parser.add_json_option()
    parser.add_argument("--count", type=int, default=2000, help="instructions of each kernel")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each; the best counts")
    parser.add_argument("--library", type=Path, help="checkout of the vendor's kernel library")
    args = parser.parse_args(argv)
    for name in ("count", "repeats"):
        check_positive_int(f"--{name}", getattr(args, name))
    if os.environ.get(_ONE_THREAD) != "1":
        return _in_one_thread(args)
    rows = [measure(case, dtype, args.count, args.repeats) for case, dtype in cases()]
    prefill = {} if args.library is None else measure_prefill(args.library, args.repeats)
    verdict = judge(rows, prefill)
    print(_table(rows, verdict, prefill))
    tell_json(
        args.json,
        "bench sim",
        kind="measured",
        count=args.count,
        repeats=args.repeats,
        **verdict,
        rows=rows,
        **prefill,
    )
    return 0 if verdict["within_limits"] else 1


def judge(rows: list[dict[str, Any]], prefill: dict[str, Any]) -> dict[str, Any]:
    """Return the largest overheads, their limits, and whether everything measured is within.

    Args:
        rows: from `measure`.
        prefill: from `measure_prefill`, empty if it did not run.
    """
    worst_full = max(row["full_overhead_us"] for row in rows)
    worst_indices = max(row["indices_us"] for row in rows)
    worst_reorder = max([row["reorder_us"] for row in rows] + _reorder_of(prefill))
    within = worst_full < FULL_LIMIT_US and worst_indices < INDICES_LIMIT_US
    within = within and worst_reorder <= REORDER_LIMIT_US
    if prefill:
        within = within and prefill["prefill_seconds"] < PREFILL_LIMIT_S
        within = within and prefill["prefill_peak_gib"] < PREFILL_LIMIT_GIB
    return {
        "full_overhead_us": worst_full,
        "full_limit_us": FULL_LIMIT_US,
        "indices_us": worst_indices,
        "indices_limit_us": INDICES_LIMIT_US,
        "reorder_us": worst_reorder,
        "reorder_limit_us": REORDER_LIMIT_US,
        "within_limits": within,
    }


def _reorder_of(prefill: dict[str, Any]) -> list[float]:
    return [prefill["prefill_reorder_us"]] if prefill else []


def _table(rows: list[dict[str, Any]], verdict: dict[str, Any], prefill: dict[str, Any]) -> str:
    head = ["instruction", "NumPy", "full", "overhead", "indices", "timeline", "reordering"]
    body = [[row["instruction"], *(f"{row[key]:.1f}" for key in list(row)[1:])] for row in rows]
    lines = [
        "microseconds per instruction on [128, 512] tiles  [measured]\n",
        format_table([head, *body]),
        f"\nlargest overhead: full {verdict['full_overhead_us']:.1f} (limit {FULL_LIMIT_US:.0f}), "
        f"indices {verdict['indices_us']:.1f} (limit {INDICES_LIMIT_US:.0f}), "
        f"reordering {verdict['reorder_us']:.1f} (limit {REORDER_LIMIT_US:.0f})",
    ]
    if prefill:
        lines.append(
            f"GPT-OSS-120B TP8, prefill of 1,024 tokens: {prefill['prefill_seconds']:.1f} s (limit "
            f"{PREFILL_LIMIT_S:.0f}), {prefill['prefill_peak_gib']:.2f} GiB (limit "
            f"{PREFILL_LIMIT_GIB:.0f}); a timeline {prefill['prefill_timeline_us']:.1f} us an "
            f"instruction, {prefill['prefill_reorder_us']:.1f} more where queues reorder"
        )
    return "\n".join(lines)
