"""neuron-moe chip compile: does every kernel of a plan compile? Needs AWS's wheels, no device.

    neuron-moe chip compile --model qwen3_30b_a3b --tp 8 --tokens 1024 --out out

Each kernel of each step is compiled in a process of its own, with a time limit; programs, the
compiler's words and its dump stay below --out. From the dump comes the time of the kernel in the
compiler's order, at its addresses, with our prices, beside what the simulator expects, a range.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from neuron_moe.errors import check_positive_int
from neuron_moe.spec import DEFAULT_LNC_SIZE
from neuron_moe.tools.chip.dump import read_dump
from neuron_moe.tools.chip.environment import job_variables, run_process, versions
from neuron_moe.tools.chip.host import plan_of, start
from neuron_moe.tools.console import format_table, tell_json
from neuron_moe.tools.models import MODEL_HELP
from neuron_moe.tools.parsers import Parser
from nki_sim.time.timeline import schedule

LIMIT_S: Final = 600.0
TARGETS: Final = ("trn2", "trn3")
_NOT_THERE: Final = ("NKI_SIMULATOR", "NKI_PRECISE_FP", "NEURON_RT_VISIBLE_CORES")
_NOT_BY_PREFIX: Final = ("VLLM_NEURON_CPU_", "NEURON_LIBTORCH_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a kernel.

    Attributes:
        step: of which it is.
        kernel: its name.
        compiled: whether it does.
        seconds: that its process took.
        why: what the compiler said, or why its dump cannot be read.
        folder: of its program, the compiler's words and dump.
        us: in the compiler's order with our prices; None without a dump.
        estimate: what the simulator expects: low_us, us, high_us.
        dump: what it says of queues, semaphores and addresses.
    """

    step: str
    kernel: str
    compiled: bool
    seconds: float
    why: str
    folder: str
    us: float | None
    estimate: Mapping[str, float]
    dump: Mapping[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Compile; return 0 if every kernel does, else 1."""
    args = _parser().parse_args(argv)
    steps = [("prefill", tokens) for tokens in args.tokens]
    steps += [("decode", tokens) for tokens in args.decode]
    if not steps:
        raise ValueError("--tokens, --decode: give at least one step.")
    for _phase, tokens in steps:
        check_positive_int("--tokens", tokens)
    rows = [row for phase, tokens in steps for row in _step(args, phase, tokens)]
    print(_table(rows))
    content = {
        "versions": [fact.text for fact in versions()],
        "rows": [asdict(row) for row in rows],
    }
    tell_json(args.json, "chip compile", **content)
    return 0 if all(row.compiled for row in rows) else 1


def _step(args: argparse.Namespace, phase: str, tokens: int) -> Iterator[Row]:
    """Compile the kernels of a step."""
    asked = {name: getattr(args, name) for name in ("model", "tp", "ep", "lnc", "block_size")}
    request = {**asked, "features": args.features, "phase": phase, "tokens": tokens}
    step = f"{phase} {tokens}"
    place = args.out / step.replace(" ", "-")
    simulated = _work(args, {**request, "launch": None}, place / "simulated")
    for number, launch in enumerate(plan_of(request).launches()):
        folder = place / f"{number}-{launch.name}"
        begun = time.monotonic()
        found = _work(args, {**request, "launch": number}, folder)
        timed = _timed(folder) if found["compiled"] else {}
        yield Row(
            step=step,
            kernel=launch.name,
            compiled=found["compiled"],
            seconds=time.monotonic() - begun,
            why=found["why"] or timed.pop("why", ""),
            folder=str(folder),
            us=timed.pop("us", None),
            estimate=simulated["estimates"].get(launch.name, {}),
            dump=timed,
        )


def _work(args: argparse.Namespace, request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Let a process of its own work on a request; return what it found."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "request.json"
    result = path.with_suffix(".found.json")
    result.unlink(missing_ok=True)
    path.write_text(json.dumps(request))
    command = [*start(simulates=request["launch"] is None), str(path)]
    status, output = run_process(command, args.limit_s, _variables(args, folder))
    (folder / "compiler.log").write_text(output)
    if result.is_file():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    last = (output.strip().splitlines() or ["no message"])[-1][:200]
    ended = f"no end after {args.limit_s:g} s" if status is None else f"ended by status {status}"
    return {"compiled": False, "estimates": {}, "why": f"{ended}: {last}"}


def _variables(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the environment of a compiler that must not look for a device."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_THERE and not name.startswith(_NOT_BY_PREFIX)
    }
    return kept | {
        **job_variables(args.lnc),
        "NEURON_PLATFORM_TARGET_OVERRIDE": args.target,
        "NKI_COMPILE_CACHE_URL": str(folder / "cache"),
        "NKI_ARTIFACTS_DIR": str(folder),
    }


def _timed(folder: Path) -> dict[str, Any]:
    """Return the time and facts of a dump, or why there is none."""
    try:
        dump = read_dump(folder)
        timeline = schedule(dump.trace)
    except (OSError, ValueError) as error:
        return {"why": str(error)}
    timeline.save_perfetto(folder / "timeline.json")
    return {
        "us": timeline.total_us,
        "instructions": len(dump.trace),
        "queues": dict(dump.queues),
        "semaphores": dump.semaphores,
        "waits": dump.waits,
        "sbuf_bytes": dump.sbuf_bytes,
        "unknown": dict(dump.unknown),
    }


def _table(rows: Sequence[Row]) -> str:
    lines = [["step", "kernel", "compiled", "s", "us", "low us", "likely us", "high us", ""]]
    for row in rows:
        times = [row.us, *(row.estimate.get(name) for name in ("low_us", "us", "high_us"))]
        why = " ".join(row.why.split())[:160]
        if row.dump.get("unknown"):
            why = f"{why} not known in the dump: {', '.join(row.dump['unknown'])}".strip()
        lines.append(
            [
                row.step,
                row.kernel,
                "yes" if row.compiled else "no",
                f"{row.seconds:.1f}",
                *("-" if one is None else f"{one:.1f}" for one in times),
                why,
            ]
        )
    return (
        "us: the compiler's order and addresses, our prices [computed]; low to high [simulated]\n"
        f"{format_table(lines)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser("chip compile", __doc__)
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--tp", type=int, default=1, help="ranks that split an expert")
    parser.add_argument("--ep", type=int, default=1, help="ranks that split the experts")
    text = "of steps of prefill"
    parser.add_argument("--tokens", type=int, nargs="*", default=[], metavar="T", help=text)
    text = "of steps of decode"
    parser.add_argument("--decode", type=int, nargs="*", default=[], metavar="T", help=text)
    parser.add_argument("--block-size", type=int, help="slots of a block; default: the backend's")
    parser.add_argument("--out", type=Path, required=True, help="folder of programs and dumps")
    parser.add_argument("--target", choices=TARGETS, default="trn2", help="default: trn2")
    parser.add_argument("--lnc", type=int, default=DEFAULT_LNC_SIZE, help="cores a rank, 1 or 2")
    text = "seconds for a kernel"
    parser.more.add_argument("--limit-s", type=float, default=LIMIT_S, help=text)
    parser.add_features_option()
    parser.add_json_option()
    return parser
