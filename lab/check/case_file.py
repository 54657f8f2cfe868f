"""Files of cases, and the options that say which of them a check runs."""

import argparse
import json
import math
from pathlib import Path

from lab.check.outcomes import OutcomeFile
from lab.check.vendor_cases.case import Case
from neuron_moe.tools.parsers import Parser


def add_case_options(
    parser: Parser, *, status: str, max_gmacs: float, is_file_required: bool = True
) -> None:
    """Add the options every check of a case file has, with the defaults of this one."""
    parser.add_argument(
        "--cases",
        type=Path,
        required=is_file_required,
        help="JSON file: an object with a list `cases`",
    )
    parser.more.add_argument(
        "--status", default=status, help=f"run cases of this status, or `any` (default: {status})"
    )
    parser.add_argument(
        "--match",
        default="",
        help="run only cases whose id, kernel/variant or platform contains this",
    )
    parser.more.add_argument(
        "--max-seconds", type=float, default=math.inf, help="start no case after this wall time"
    )
    parser.more.add_argument(
        "--max-gmacs",
        type=float,
        default=max_gmacs,
        help="reduce T above these billion MACs per case",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--json", type=Path, help="write the outcome of every case to this file")
    parser.more.add_argument(
        "--resume",
        action="store_true",
        help="run only cases that have not passed or failed in the file of --json",
    )


def outcome_file(options: argparse.Namespace) -> OutcomeFile:
    """Return the file of `--json`, with what it knows if `--resume` is given.

    Raises:
        ValueError: there is nothing to resume from, or it is of another kind.
    """
    return OutcomeFile.resumed(options.json) if options.resume else OutcomeFile(path=options.json)


def read_cases(path: Path, status: str = "active", match: str = "") -> list[Case]:
    """Read the cases of a file that have a status and contain a text.

    Raises:
        ValueError: the file is not JSON, or has no list of cases.
    """
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--cases {path}: not JSON ({error}). Give a case file.") from None
    entries = content.get("cases") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ValueError(
            f"--cases {path}: has no list `cases`. Give an object with `cases`, or a list."
        )
    wanted = [
        entry for entry in entries if status == "any" or entry.get("status", "active") == status
    ]
    cases = [Case.from_json(entry) for entry in wanted]
    return [
        case for case in cases if match in f"{case.id} {case.kernel}/{case.variant} {case.platform}"
    ]
