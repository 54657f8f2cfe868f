"""The simulator without the rest of the project: ``nki-sim run | lint | profile | vendor-tests``,
or ``python -m nki_sim`` with the same words.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from nki_sim.lint import linter
from nki_sim.options import VERSIONS, SimOptions
from nki_sim.own_kernel import TIMES_ONLY, load_kernel, read_arguments, simulate
from nki_sim.precedent import TABLE, Table, recording

_ARGUMENTS: Final = """\
Arguments of the kernel, each VALUE or NAME=VALUE: a tensor as 128x4096:bfloat16, an array as
FILE.npy, a number, True, False, None, a tuple, or any other text. Tensors of floating point are
drawn, integer ones hold zeros."""


def main(argv: list[str] | None = None) -> int:
    """Run, lint or profile kernels of a file.

    Returns:
        0; 1 where a kernel breaks a rule or the linter has an error; 2 for a wrong command.
    """
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["lint"] and "--precedent" not in words:
        return linter.main(words[1:])
    if words[:1] == ["vendor-tests"]:
        return _vendor_tests(words[1:])
    try:
        if words[:1] == ["lint"]:
            return _precedent(_precedent_parser().parse_args(words[1:]))
        args = _parser().parse_args(words)
        return _run(args) if args.command == "run" else _profile(args)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _vendor_tests(words: list[str]) -> int:
    """Run the suite of the vendor's kernel library."""
    try:
        from nki_sim import vendor_tests  # here, as pytest need not be installed
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        sys.stderr.write("vendor-tests: pytest is missing. pip install pytest\n")
        return 2
    try:
        return vendor_tests.main(words)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nki-sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "Lint and run a kernel with every check; print its results and what was found."),
        ("profile", "Lint a kernel; print how long it takes on a chip, which lines hold it up."),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=_ARGUMENTS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("kernel", metavar="FILE.py:NAME", help="the function NAME of a file")
        _add_how(command)
        if name == "run":
            command.add_argument("--save", type=Path, metavar="FILE.npz", help="keep the results")
        else:
            command.add_argument("--picture", metavar="FILE.png", help="draw the engine lanes")
            command.add_argument("--perfetto", metavar="FILE.json", help="for ui.perfetto.dev")
    text = "Check kernels against the NKI language; with --precedent, against public kernels."
    commands.add_parser("lint", help=text)
    text = "Run the tests of the vendor's kernel library on the simulator."
    commands.add_parser("vendor-tests", help=text)
    return parser


def _add_how(parser: argparse.ArgumentParser) -> None:
    """Add what says how a kernel is run."""
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="see below")
    parser.add_argument("--lnc", type=int, choices=(1, 2), help="cores (default: 1)")
    parser.add_argument("--target", help="trn1, trn2 or trn3 (default: trn2)")
    parser.add_argument("--nki", choices=VERSIONS, help="version of the language (default: 0.7)")


def _precedent_parser() -> argparse.ArgumentParser:
    """Return the parser of the form of `lint` that runs a kernel."""
    text = (
        "Run a kernel; list the uses of instructions that no public kernel shows or page documents."
        " What is listed is not illegal: nobody showed that it compiles."
    )
    parser = argparse.ArgumentParser(
        prog="nki-sim lint",
        description=text,
        epilog=_ARGUMENTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--precedent", dest="kernel", metavar="FILE.py:NAME", help="the function NAME of a file"
    )
    _add_how(parser)
    parser.add_argument(
        "--table", type=Path, default=TABLE, metavar="FILE", help="of uses (default: shipped)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    return parser


def _precedent(args: argparse.Namespace) -> int:
    table = Table.read(args.table)
    with recording() as recorder:
        _simulate(args, TIMES_ONLY)
    sys.stdout.write("".join(f"{line}\n" for line in table.report(recorder)))
    if args.json is not None:
        args.json.write_text(json.dumps(table.counts(recorder), indent=1) + "\n")
    return 0


def _simulate(args: argparse.Namespace, options: SimOptions) -> Any:
    """Run the kernel that the command names; say before what the linter finds in it."""
    kernel, chosen = load_kernel(args.kernel), replace(options, target=args.target, nki=args.nki)
    for finding in linter.lint_kernel(kernel, dialect=args.nki or VERSIONS[0]):
        sys.stdout.write(f"{finding}\n")
    return simulate(kernel, read_arguments(args.arguments), args.lnc, chosen)


def _run(args: argparse.Namespace) -> int:
    run = _simulate(args, SimOptions())
    outputs = _arrays(run.outputs)
    if not outputs:
        sys.stdout.write("The kernel returned nothing. return TENSOR gives a result.\n")
    for name, value in outputs.items():
        shown = np.array2string(value, threshold=16, precision=5)
        sys.stdout.write(f"{name} {list(value.shape)} {value.dtype}\n{shown}\n")
    for finding in run.findings:
        has_place = not finding.location or finding.text.startswith(finding.location)
        place = "" if has_place else f"{finding.location}: "
        sys.stdout.write(f"{place}finding {finding.kind}: {finding.text}\n")
    if args.save is not None:
        np.savez(args.save, allow_pickle=False, **outputs)
    return 0


def _profile(args: argparse.Namespace) -> int:
    timeline = _simulate(args, TIMES_ONLY).timeline
    sys.stdout.write(f"{timeline.summary()}\n")
    if args.picture is not None:
        sys.stdout.write(f"{timeline.save_picture(args.picture)}\n")
    if args.perfetto is not None:
        timeline.save_perfetto(args.perfetto)
        sys.stdout.write(f"{args.perfetto}\n")
    return 0


def _arrays(outputs: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return what a kernel returned by name: output, or output_0 and so on."""
    if isinstance(outputs, (tuple, list)):
        return {f"output_{k}": np.asarray(value) for k, value in enumerate(outputs)}
    return {} if outputs is None else {"output": np.asarray(outputs)}


if __name__ == "__main__":
    sys.exit(main())
