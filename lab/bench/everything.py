"""neuron-moe bench all: every benchmark that needs no accelerator, and what moved since.

    neuron-moe bench all --quick --report all.html

First the ceilings: how fast this machine reads and multiplies, and the peaks that simulated times
are held against. Then cpu, sim, host, prefill and decode. Simulated rows are compared with the
committed results, where any difference is a change of ours; measured ones with --against, an
earlier --json of the same processor, where a difference counts beyond the spread of both.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from neuron_moe.backends.form_times import processor
from neuron_moe.tools.console import format_table, print_json_line
from neuron_moe.tools.parsers import PRINTED, Parser
from neuron_moe.tools.timing.condensed import expand
from neuron_moe.tools.timing.layers import HBM_BYTES_PER_US, PE_CYCLES_PER_US
from neuron_moe.tools.timing.sources import write_result

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
COMMITTED = {"prefill": "prefill_trn2.json", "decode": "decode_trn2.json"}
_KEYS = ("kernel", "model", "T", "B", "routing", "format", "layout")
_STEPS: dict[str, tuple[str, list[str], list[str]]] = {
    "cpu": ("cpu", [], ["--models", "qwen3-30b-a3b", "--tokens", "1", "512", "--repeats", "5"]),
    "sim": ("sim", [], ["--count", "500", "--repeats", "3"]),
    "host": ("host", [], ["--repeats", "40"]),
    "prefill": ("prefill", [], ["--models", "gpt-oss-20b", "--tokens", "128"]),
    "decode": ("decode", [], ["--models", "gpt-oss-20b", "--batches", "1", "16"]),
}
_SIMULATED_CHANGE = 1e-3
_ELEMENTS = 1 << 25
_SIZE = 1536


def main(argv: list[str] | None = None) -> int:
    """Run all; return the worst status."""
    args = _parse(argv)
    before = {} if args.against is None else json.loads(args.against.read_text())
    found: dict[str, Any] = {"processor": processor(), "ceiling": ceiling()}
    _print_ceiling(found)
    status = 0
    try:
        for name in args.only or _STEPS:
            print(f"\n== {name}", flush=True)
            code, found[name] = run_step(name, args.quick, args.jobs)
            status = max(status, code)
    finally:  # Ctrl-C keeps what is done
        write_result(args.json, found)
    print("\n== what moved")
    same = before.get("processor") == found["processor"]
    rows = [["benchmark", "row", "before", "now", "ratio"]]
    rows += [row for name in COMMITTED for row in simulated_changes(name, found.get(name, {}))]
    if same:
        rows += list(measured_changes(before.get("cpu", {}), found.get("cpu", {})))
    print(format_table(rows) if len(rows) > 1 else "nothing beyond noise")
    if before and not same:
        print(f"--against is of {before.get('processor')}: its measured times were not compared")
    if args.json == PRINTED:
        print_json_line("bench all", **found)
    return status


def run_step(name: str, is_quick: bool, jobs: int) -> tuple[int, dict[str, Any]]:
    """Run one benchmark; return its status and the JSON that ends what it prints."""
    target, whole, quick = _STEPS[name]
    options = [*(quick if is_quick else whole)]
    if name in COMMITTED:
        options += ["--jobs", str(jobs)]
    module = importlib.import_module(f"lab.bench.{target}")
    kept = io.StringIO()
    with contextlib.redirect_stdout(kept):
        status = int(module.main([*options, "--json"]))
    *lines, last = kept.getvalue().strip().splitlines()
    print("\n".join(lines))
    result: dict[str, Any] = json.loads(last)
    return status, result


def ceiling() -> dict[str, float]:
    """Measure how fast this machine reads memory and multiplies, the best of five each."""
    source = torch.ones(_ELEMENTS)
    matrix = torch.randn(_SIZE, _SIZE)
    read_s = min(_seconds(source.sum) for _ in range(5))
    multiply_s = min(_seconds(lambda: matrix @ matrix) for _ in range(5))
    return {
        "read_gb_per_s": source.nbytes / read_s / 1e9,
        "float32_gflops": 2 * _SIZE**3 / multiply_s / 1e9,
        "threads": float(torch.get_num_threads()),
    }


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _print_ceiling(found: Mapping[str, Any]) -> None:
    reached = found["ceiling"]
    print(
        f"ceilings\n{found['processor']}, {reached['threads']:.0f} threads: reads"
        f" {reached['read_gb_per_s']:.1f} GB/s, multiplies {reached['float32_gflops']:.0f} GFLOP/s"
        " in float32  [measured]\n"
        f"Trn2, two cores: HBM {HBM_BYTES_PER_US / 1e3:.0f} GB/s, bfloat16"
        f" {2 * 2 * 128 * 128 * PE_CYCLES_PER_US / 1e6:.0f} TFLOP/s  [published]"
    )


def simulated_changes(name: str, result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the rows whose simulated time is another one than in the committed results."""
    path = RESULTS / COMMITTED[name]
    if not path.is_file() or "rows" not in result:
        return
    before = {_key(row): row for row in expand(json.loads(path.read_text()))["rows"]}
    for row in result["rows"]:
        was, now = (_likely_us(one) for one in (before.get(_key(row), {}), row))
        if was and now and abs(now / was - 1) > _SIMULATED_CHANGE:
            yield _change(name, " ".join(map(str, _key(row))), was, now)


def _likely_us(row: Mapping[str, Any]) -> float | None:
    time = row.get("ours")
    return None if time is None else float(time["us"])


def measured_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the rows of `bench cpu` that differ by more than the spread of both runs."""
    known = {(row["model"], row["dtype"], row["tokens"]): row for row in before.get("rows", ())}
    for row in now.get("rows", ()):
        key = row["model"], row["dtype"], row["tokens"]
        was = known.get(key)
        if was is None:
            continue
        noise = 2 * (was["ours_spread_ms"] + row["ours_spread_ms"])
        if abs(row["ours_ms"] - was["ours_ms"]) > noise:
            yield _change("cpu", " ".join(map(str, key)), was["ours_ms"], row["ours_ms"])


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEYS if name in row)


def _change(name: str, row: str, was: float, now: float) -> list[str]:
    return [name, row, f"{was:,.2f}", f"{now:,.2f}", f"{now / was:.3f}"]


def _parse(argv: Sequence[str] | None) -> Any:
    parser = Parser("bench all", __doc__)
    parser.add_argument("--quick", action="store_true", help="few cases of each; minutes")
    parser.add_argument("--only", nargs="+", choices=list(_STEPS), help="these, in this order")
    parser.add_argument("--jobs", type=int, default=2, help="processes of simulations (default: 2)")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier --json")
    parser.add_json_option()
    return parser.parse_args(sys.argv[1:] if argv is None else argv)
