"""Options that the benchmarks beside the vendor's kernels share."""

import argparse
import os
from pathlib import Path

from lab.check.vendor_cases.library import LIBRARY_VARIABLE
from neuron_moe.tools.parsers import PRINTED, Parser
from nki_sim.hardware_file import use_hardware

LAYOUTS = ("plain", "packed")


def add_comparison_options(parser: Parser) -> None:
    """Add what says which sides run and how, and what an earlier result spares."""
    parser.more.add_argument(
        "--layout",
        nargs="+",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        help="how our weights are stored in HBM (default: both)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="simulate in so many processes"
    )
    parser.more.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="stop after so many minutes; --resume goes on with what is left",
    )
    add_library_option(parser)
    parser.more.add_argument(
        "--deployed",
        action="store_true",
        help="also time what NxD runs by default",
    )
    parser.more.add_argument(
        "--hardware", type=Path, metavar="FILE", help="time by what `chip calibrate` measured"
    )
    parser.more.add_argument("--only", choices=("ours", "vendor"), help="run only this side")
    parser.add_json_option(", after every row")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what the --json file of an earlier run has and still holds",
    )
    parser.more.add_argument(
        "--vendor-from",
        type=Path,
        metavar="FILE",
        help="take the vendor's times from an earlier result, for matching rows",
    )


def add_library_option(parser: Parser) -> None:
    """Add where the vendor's library is."""
    default = os.environ.get(LIBRARY_VARIABLE)
    parser.add_argument(
        "--library",
        type=Path,
        default=default and Path(default),
        help=f"checkout of the vendor's library ({LIBRARY_VARIABLE}); without it only ours runs",
    )


def check_comparison_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that contradict each other; take measured coefficients."""
    if options.hardware is not None:
        use_hardware(options.hardware)
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: must be positive.")
    if options.minutes is not None and options.minutes <= 0:
        raise ValueError(f"--minutes {options.minutes:g}: must be positive.")
    if options.only == "vendor" and not options.library:
        raise ValueError(
            f"--only vendor: needs a checkout of the vendor's library. Give --library, or set"
            f" {LIBRARY_VARIABLE}."
        )
    if options.resume and options.json in (None, PRINTED):
        raise ValueError("--resume: continues a result file. Name it with --json.")
    if options.resume and options.vendor_from:
        raise ValueError("--resume: contradicts --vendor-from. Give one of them.")
