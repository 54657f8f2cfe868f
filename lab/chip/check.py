"""neuron-moe chip check: does every kernel of ours compile, compute and keep its time on this chip?

    neuron-moe chip check --json report.json

In order of danger: the machine in words, a small kernel for each open feature of NKI, every kernel
on small shapes and on those of models, last what may leave the device without an answer. Every row
is a process of its own with a time limit; after each a kernel known to be good tells whether the
device still answers. Where it does not, the row is the culprit, and the device is reset (--reset).

A row works, fails, wedges (the device did not answer after it) or was not tried. Rows are kept in a
folder, with what the compiler said; the same command goes on where one was stopped, and does not
repeat what works or wedges. What became of the open features is written to a file of verdicts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import lab
from lab.check.chip_cases import CASES, FULL, SMALL
from lab.chip.bugs import FOLDER, wedged_file
from lab.chip.devices import WITH_BUGS, bugs_of, find_device
from lab.chip.duration import check_sum
from lab.chip.open_features.listing import ALIVE, OPEN_FEATURES
from lab.chip.planted import PLANTS
from lab.chip.worker import FEATURES, SIMULATOR
from neuron_moe.tools.chip.environment import (
    LNC,
    Fact,
    job_variables,
    read_environment,
    run_process,
    simulated_environment,
    versions,
)
from neuron_moe.tools.console import format_table, progress_bar, tell_json
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.timing.sources import digest
from neuron_moe.verdicts import Verdict, write_verdicts

LIMIT_S: Final = 300.0
ALIVE_S: Final = 90.0
"""For the kernel that is known to be good, so that a device without an answer costs no more."""
NO_DEVICE: Final = "no-device"
PROBES: Final = "probes"
_START: Final = (
    f"import sys; sys.path.append({str(Path(lab.__file__).parents[1])!r}); "
    "import nki_sim; nki_sim.provide(force={force}); "
    "from lab.chip.worker import main; raise SystemExit(main())"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a kernel.

    Attributes:
        name: an open feature, or which kernel on which shapes.
        outcome: works, fails, wedges or not tried.
        seconds: that its process took.
        compiled, right: whether it does, and is; None: not tried.
        us: measured time (or that of a stand-in), without the launch; None for open features.
        simulated_us: by the simulator's own coefficients.
        ratio: us over simulated_us.
        why: one sentence where something is wrong.
        made_of: fingerprint of what was run, device and versions.
    """

    name: str
    outcome: Verdict = "not tried"
    seconds: float = 0.0
    compiled: bool | None = None
    right: bool | None = None
    us: float | None = None
    simulated_us: float | None = None
    ratio: float | None = None
    why: str = ""
    made_of: str = ""


def main(argv: list[str] | None = None) -> int:
    """Check; return 0 if all is right but what is dangerous and was not requested, else 1."""
    options = _parse(argv)
    facts = _environment(options)
    for fact in facts:
        print(f"{'ok  ' if fact.is_right else 'FAIL'}  {fact.name}: {fact.text}")
    where = options.against or "neuron"
    can_run = all(fact.is_right for fact in facts)
    check = _Check(options, where, "" if can_run else "see FAIL above")
    names = _names(options)
    rows = []
    with progress_bar("checking") as tell:
        for number, name in enumerate(names):
            tell(number, len(names))
            rows.append(check.row(name))
    print(_table(rows, where))
    _write_verdicts(options, where, check, rows)
    content = {
        "device": where,
        "environment": [asdict(fact) for fact in facts],
        "rows": [asdict(row) for row in rows],
    }
    tell_json(options.json, "chip check", **content)
    is_left_out = {
        row.name
        for row in rows
        if row.outcome == "not tried" and danger(row.name) and not options.dangerous
    }
    is_right = all(row.outcome == "works" or row.name in is_left_out for row in rows)
    return 0 if can_run and is_right else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("chip check", __doc__, exits=f"On a chip: {check_sum()}.")
    parser.add_argument(
        "--against",
        metavar="sim:SEED",
        help=f"a simulated chip, or {WITH_BUGS}; default: the chip",
    )
    parser.add_argument(
        "--only", choices=(PROBES, "small", "full"), metavar="WHAT", help="probes, small or full"
    )
    parser.add_argument("--match", default="", help="only rows whose name contains this")
    parser.add_argument(
        "--dangerous", action="store_true", help="run also what may wedge the device, last"
    )
    parser.add_argument(
        "--reset", metavar="COMMAND", help="shell command that resets a device without an answer"
    )
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="seconds for a row, compiling included"
    )
    parser.add_argument(
        "--state", type=Path, default=Path("chip_check"), help="folder of rows and compiler logs"
    )
    parser.add_argument("--verdicts", type=Path, help="file of verdicts; default: in that folder")
    parser.add_argument("--again", action="store_true", help="run also what works or wedges")
    parser.add_json_option()
    parser.add_argument(
        "--plant",
        action="append",
        default=[],
        metavar="WHAT[:ROW]",
        help=f"rehearse a failure: {', '.join((NO_DEVICE, *(f'{p}:ROW' for p in PLANTS)))}",
    )
    options = parser.parse_args(argv)
    if options.limit_s <= 0:
        raise ValueError(f"--limit-s {options.limit_s:g}: must be positive.")
    if options.against is not None and not bugs_of(options.against):
        find_device(options.against)
    for plant in options.plant:
        what, _, row = plant.partition(":")
        if plant != NO_DEVICE and not (what in PLANTS and row in (*CASES, *FEATURES)):
            raise ValueError(
                f"--plant {plant}: must be one of {NO_DEVICE}, or one of {', '.join(PLANTS)} with a"
                f" row, as hang:{SMALL[0].id}."
            )
    return options


def _environment(options: argparse.Namespace) -> list[Fact]:
    """Return the machine in words, or what is planted."""
    is_planted = NO_DEVICE in options.plant
    with tempfile.TemporaryDirectory() as nowhere:
        found = read_environment(Path(nowhere) if is_planted else Path("/"))
    if options.against is None:
        return found
    planted = [fact for fact in found if is_planted and fact.name == "device"]
    return [*planted, *simulated_environment(options.against)]


def danger(name: str) -> str:
    """Return why a row runs last and only if requested, or ""."""
    return FEATURES[name].danger if name in FEATURES else ""


def in_order() -> list[str]:
    """Return the names of all rows: probes before kernels, what is dangerous last."""
    names = [
        *(feature.name for feature in OPEN_FEATURES),
        *(case.id for case in (*SMALL, *FULL)),
    ]
    return sorted(names, key=lambda name: bool(danger(name)))


def _names(options: argparse.Namespace) -> list[str]:
    """Return the names of the rows that are requested."""
    found = [name for name in in_order() if options.match in name]
    if options.only == PROBES:
        return [name for name in found if name in FEATURES]
    return [name for name in found if name.startswith(options.only or "")]


class _Check:
    """Runs rows one after the other, and watches over the device.

    Args:
        options: of the command.
        where: the device by its name.
        stopped: why nothing can run, or "".
    """

    def __init__(self, options: argparse.Namespace, where: str, stopped: str) -> None:
        self._options, self._where, self._stopped = options, where, stopped
        self._versions = [fact.text for fact in versions()]
        self._plants = dict(reversed(plant.split(":")) for plant in options.plant if ":" in plant)
        self._was_alive = False

    def row(self, name: str) -> Row:
        """Return what is known of a row, or find it out."""
        known = self.kept(name)
        if known is not None and known.outcome in ("works", "wedges") and not self._options.again:
            return known
        why = self._why_not(name)
        if why:
            return known or Row(name=name, why=f"not tried: {why}")
        simulated = None
        if name in CASES:
            simulated = _in_a_process(self._options, name, SIMULATOR, "")["us"]
        begin = time.monotonic()
        found = _in_a_process(self._options, name, self._where, self._plants.get(name, ""))
        seconds = time.monotonic() - begin
        outcome: Verdict = "works" if found["right"] else "fails"
        if found["right"] is None:
            outcome = "not tried"
        if not self._is_alive():
            outcome = "wedges"
            found["why"] = f"the device does not answer after it. {found['why']}".rstrip()
            self._revive(f"since {name}")
        row = Row(
            name=name,
            outcome=outcome,
            seconds=seconds,
            simulated_us=simulated,
            ratio=found["us"] / simulated if found["us"] and simulated else None,
            made_of=self._made_of(name),
            **found,
        )
        self._keep(row)
        return row

    def kept(self, name: str) -> Row | None:
        """Return the row that an earlier run with the same versions kept."""
        place = self._place(name)
        if not place.is_file():
            return None
        try:
            row = Row(**json.loads(place.read_text()))
        except (TypeError, ValueError):  # cut short, or another version's
            return None
        return row if row.made_of == self._made_of(name) else None

    def _why_not(self, name: str) -> str:
        """Return why a row is not tried, or ""."""
        if not self._stopped and danger(name) and not self._options.dangerous:
            return f"{danger(name)}. Run it with --dangerous."
        if not self._stopped and not self._was_alive:
            self._was_alive = self._is_alive()
            if not self._was_alive:
                self._revive("from the start")
        return self._stopped

    def _is_alive(self) -> bool:
        """Run the kernel that is known to be good."""
        plant = self._plants.get(ALIVE.name, "")
        found = _in_a_process(self._options, ALIVE.name, self._where, plant)
        return bool(found["right"])

    def _revive(self, since: str) -> None:
        """Reset the device, or run nothing more."""
        if self._options.against is not None:
            wedged_file(self._options.state).unlink(missing_ok=True)
        elif self._options.reset is not None:
            run_process(["sh", "-c", self._options.reset], self._options.limit_s, os.environ)
        can_reset = self._options.against is not None or self._options.reset is not None
        if not can_reset or not self._is_alive():
            self._stopped = (
                f"the device does not answer {since} (see {_file_name(ALIVE.name)}.log). Reset it;"
                " the same command goes on from here."
            )

    def _made_of(self, name: str) -> str:
        kernel = FEATURES[name].question if name in FEATURES else repr(CASES[name])
        return digest(kernel, self._where, self._plants.get(name, ""), *self._versions)

    def _place(self, name: str) -> Path:
        state: Path = self._options.state
        return state / f"{_file_name(name)}.json"

    def _keep(self, row: Row) -> None:
        try:
            self._place(row.name).write_text(json.dumps(asdict(row)))
        except OSError as error:
            print(
                f"{self._place(row.name)}: cannot be kept ({error}); the check goes on",
                file=sys.stderr,
            )


def _file_name(name: str) -> str:
    return name.replace("/", "-").replace(" ", "-")


def _write_verdicts(
    options: argparse.Namespace, where: str, check: _Check, rows: Sequence[Row]
) -> None:
    """Write what became of the open features; of those not requested, what is kept."""
    fresh = {row.name: row for row in rows}
    found = {
        feature.name: row.outcome if row is not None else "not tried"
        for feature in OPEN_FEATURES
        for row in [fresh.get(feature.name) or check.kept(feature.name)]
    }
    path = options.verdicts or options.state / "verdicts.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_verdicts(path, found, where, [fact.text for fact in versions()])
    except OSError as error:
        print(f"{path}: verdicts cannot be written ({error})", file=sys.stderr)
    else:
        print(f"verdicts: {path}")


def _in_a_process(options: argparse.Namespace, name: str, where: str, plant: str) -> dict[str, Any]:
    """Run a worker; return what it found, or what became of it."""
    nothing = {"compiled": False, "right": False, "us": None}
    with tempfile.TemporaryDirectory() as folder:
        row = Path(folder) / "row.json"
        start = _START.format(force=where != "neuron")
        command = [sys.executable, "-c", start, name, where, str(row)]
        variables = {**os.environ, **_variables(options, name)}
        plants = ["--plant", plant] if plant else []
        limit_s = min(options.limit_s, ALIVE_S) if name == ALIVE.name else options.limit_s
        status, output = run_process([*command, *plants], limit_s, variables)
        stage_file = row.with_suffix(".stage")
        stage = stage_file.read_text() if stage_file.is_file() else "starting"
        _keep_log(options.state, name, where, output)
        if row.is_file():
            found: dict[str, Any] = json.loads(row.read_text())
            return found
    is_compiled = not stage.startswith(("compiling", "starting"))
    if status is None:
        why = (
            f"hangs: no answer after {limit_s:g} s while {stage}; it was ended. Give more"
            " with --limit-s if that is too short."
        )
    else:
        last = (output.strip().splitlines() or ["no message"])[-1]
        how = f"signal {-status}" if status < 0 else f"status {status}"
        why = f"ended by {how} while {stage}: {last[:200]}"
    return nothing | {"compiled": is_compiled, "why": why}


def _variables(options: argparse.Namespace, name: str) -> dict[str, str]:
    """Return what a worker's environment has of its own."""
    cores = FEATURES[name].cores if name in FEATURES else int(LNC)
    return {**job_variables(cores), FOLDER: str(options.state)}


def _keep_log(state: Path, name: str, where: str, output: str) -> None:
    """Keep what a worker and its compiler said."""
    if where == SIMULATOR:
        return
    try:
        state.mkdir(parents=True, exist_ok=True)
        (state / f"{_file_name(name)}.log").write_text(output)
    except OSError as error:
        print(f"{state}: cannot be written ({error}); the check goes on", file=sys.stderr)


def _table(rows: Sequence[Row], where: str) -> str:
    lines = [["row", "outcome", "compiled", "right", "s", "us", "simulated us", "ratio", ""]]
    for row in rows:
        numbers = (row.us, row.simulated_us, row.ratio)
        lines.append(
            [
                row.name,
                row.outcome,
                *(
                    "-" if one is None else "yes" if one else "no"
                    for one in (row.compiled, row.right)
                ),
                f"{row.seconds:.1f}",
                *("-" if one is None else f"{one:.2f}" for one in numbers),
                row.why,
            ]
        )
    kind = "measured" if where == "neuron" else "simulated"
    return f"{where}: times {kind}, without the launch\n{format_table(lines)}"
