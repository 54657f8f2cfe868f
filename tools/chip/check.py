"""neuron-moe chip check: does every kernel of ours compile, compute and keep its time on this chip?

    neuron-moe chip check --json report.json

First the machine in words, then every kernel on small shapes, then on those of models: compiled,
right (against the formula in float64), measured time without the launch, simulated time, and their
ratio. Every step is a process of its own with a time limit: a hang or a crash costs one row. Rows
are kept in a folder, with what the compiler said; the same command goes on where one was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from neuron_moe.tools.chip.cases import CASES, FULL, SMALL
from neuron_moe.tools.chip.devices import find_device
from neuron_moe.tools.chip.duration import check_sum
from neuron_moe.tools.chip.environment import (
    LNC_VARIABLES,
    Fact,
    read_environment,
    simulated_environment,
    versions,
)
from neuron_moe.tools.chip.planted import PLANTS
from neuron_moe.tools.chip.worker import SIMULATOR
from neuron_moe.tools.console import format_table, progress_bar, tell_json
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.timing.sources import digest

LIMIT_S: Final = 300.0
ON_MACHINE: Final = ("no-device", "wrong-lnc")
_START: Final = "import nki_sim; nki_sim.provide(force={force}); " + (
    "from neuron_moe.tools.chip.worker import main; raise SystemExit(main())"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a kernel.

    Attributes:
        case: which kernel on which shapes.
        compiled, right: whether it does, and is; None: not tried.
        us: measured time (or that of a stand-in), without the launch.
        simulated_us: by the simulator's own coefficients.
        ratio: us over simulated_us.
        why: one sentence where something is wrong.
        made_of: fingerprint of case, device and versions.
    """

    case: str
    compiled: bool | None = None
    right: bool | None = None
    us: float | None = None
    simulated_us: float | None = None
    ratio: float | None = None
    why: str = ""
    made_of: str = ""


def main(argv: list[str] | None = None) -> int:
    """Check; return 0 if all is right, else 1."""
    options = _parse(argv)
    facts = _environment(options)
    for fact in facts:
        print(f"{'ok  ' if fact.is_right else 'FAIL'}  {fact.name}: {fact.text}")
    where = options.against or "neuron"
    can_run = all(fact.is_right for fact in facts)
    rows = list(_rows(options, where, can_run))
    print(_table(rows, where))
    content = {
        "device": where,
        "environment": [asdict(fact) for fact in facts],
        "rows": [asdict(row) for row in rows],
    }
    tell_json(options.json, "chip check", **content)
    return 0 if can_run and all(row.right for row in rows) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("chip check", __doc__, exits=f"On a chip: {check_sum()}.")
    parser.add_argument("--against", metavar="sim:SEED", help="a simulated chip; default: the chip")
    parser.add_argument("--only", choices=("small", "full"), help="only these shapes")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="seconds for a case, compiling included"
    )
    parser.add_argument(
        "--state", type=Path, default=Path("chip_check"), help="folder of rows and compiler logs"
    )
    parser.add_argument("--again", action="store_true", help="run also what is known to be right")
    parser.add_json_option()
    parser.add_argument(
        "--plant",
        action="append",
        default=[],
        metavar="WHAT[:CASE]",
        help=f"rehearse a failure: {', '.join((*ON_MACHINE, *(f'{p}:CASE' for p in PLANTS)))}",
    )
    options = parser.parse_args(argv)
    if options.limit_s <= 0:
        raise ValueError(f"--limit-s {options.limit_s:g}: must be positive.")
    if options.against is not None:
        find_device(options.against)
    for plant in options.plant:
        what, _, case = plant.partition(":")
        if not (what in ON_MACHINE and not case) and not (what in PLANTS and case in CASES):
            raise ValueError(
                f"--plant {plant}: must be one of {', '.join(ON_MACHINE)}, or one of"
                f" {', '.join(PLANTS)} with a case, as hang:{SMALL[0].id}."
            )
    return options


def _environment(options: argparse.Namespace) -> list[Fact]:
    """Return the machine in words, or what is planted."""
    variables = dict(os.environ)
    if "wrong-lnc" in options.plant:
        variables[LNC_VARIABLES[0]] = "1"
    planted = {"no-device": "device", "wrong-lnc": "LNC"}
    with tempfile.TemporaryDirectory() as nowhere:
        found = read_environment(
            Path(nowhere) if "no-device" in options.plant else Path("/"), variables
        )
    if options.against is None:
        return found
    wanted = {planted[plant] for plant in options.plant if plant in planted}
    return [
        *(fact for fact in found if fact.name in wanted),
        *simulated_environment(options.against),
    ]


def _rows(options: argparse.Namespace, where: str, can_run: bool) -> Iterator[Row]:
    """Yield the row of every case asked for."""
    cases = [case for case in (*SMALL, *FULL) if options.match in case.id]
    if options.only is not None:
        cases = [case for case in cases if case.id.startswith(options.only)]
    plants = dict(reversed(plant.split(":")) for plant in options.plant if ":" in plant)
    with progress_bar("checking") as tell:
        for number, case in enumerate(cases):
            tell(number, len(cases))
            yield _row(options, case.id, where, can_run, plants.get(case.id, ""))


def _row(options: argparse.Namespace, case: str, where: str, can_run: bool, plant: str) -> Row:
    """Return what is known of a case, or find it out."""
    made_of = digest(repr(CASES[case]), where, plant, *(fact.text for fact in versions()))
    place = options.state / f"{case.replace('/', '-')}.json"
    if place.is_file() and not options.again:
        known = Row(**json.loads(place.read_text()))
        if known.made_of == made_of and known.right:
            return known
    if not can_run:
        simulated = _simulated_us(options, case)
        return Row(case=case, simulated_us=simulated, why="not tried: see FAIL above")
    found = _in_a_process(options, case, where, plant)
    simulated = _simulated_us(options, case)
    ratio = found["us"] / simulated if found["us"] and simulated else None
    row = Row(case=case, simulated_us=simulated, ratio=ratio, made_of=made_of, **found)
    try:
        place.write_text(json.dumps(asdict(row)))
    except OSError as error:
        print(f"{place}: cannot be kept ({error}); the check goes on", file=sys.stderr)
    return row


def _simulated_us(options: argparse.Namespace, case: str) -> float | None:
    found: float | None = _in_a_process(options, case, SIMULATOR, "")["us"]
    return found


def _in_a_process(options: argparse.Namespace, case: str, where: str, plant: str) -> dict[str, Any]:
    """Run a worker; return what it found, or what became of it."""
    nothing = {"compiled": False, "right": False, "us": None}
    with tempfile.TemporaryDirectory() as folder:
        row = Path(folder) / "row.json"
        start = _START.format(force=where != "neuron")
        command = [sys.executable, "-c", start, case, where, str(row)]
        status, output = _run(command + (["--plant", plant] if plant else []), options.limit_s)
        stage_file = row.with_suffix(".stage")
        stage = stage_file.read_text() if stage_file.is_file() else "starting"
        _keep_log(options.state, case, where, output)
        if row.is_file():
            found: dict[str, Any] = json.loads(row.read_text())
            return found
    is_compiled = not stage.startswith(("compiling", "starting"))
    if status is None:
        why = (
            f"hangs: no answer after {options.limit_s:g} s while {stage}; it was ended. Give more"
            " with --limit-s if that is too short."
        )
    else:
        last = (output.strip().splitlines() or ["no message"])[-1]
        how = f"signal {-status}" if status < 0 else f"status {status}"
        why = f"ended by {how} while {stage}: {last[:200]}"
    return nothing | {"compiled": is_compiled, "why": why}


def _run(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run a command in a group of its own; return status (None: ended after the limit), output."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output


def _keep_log(state: Path, case: str, where: str, output: str) -> None:
    """Keep what a worker and its compiler said."""
    if where == SIMULATOR:
        return
    try:
        state.mkdir(parents=True, exist_ok=True)
        (state / f"{case.replace('/', '-')}.log").write_text(output)
    except OSError as error:
        print(f"{state}: cannot be written ({error}); the check goes on", file=sys.stderr)


def _table(rows: Sequence[Row], where: str) -> str:
    lines = [["case", "compiled", "right", "us", "simulated us", "ratio", ""]]
    for row in rows:
        numbers = (row.us, row.simulated_us, row.ratio)
        lines.append(
            [
                row.case,
                *(
                    "-" if one is None else "yes" if one else "no"
                    for one in (row.compiled, row.right)
                ),
                *("-" if one is None else f"{one:.2f}" for one in numbers),
                row.why,
            ]
        )
    kind = "measured" if where == "neuron" else "simulated"
    return f"{where}: times {kind}, without the launch\n{format_table(lines)}"
