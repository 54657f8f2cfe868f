"""What a chip said about features that NKI leaves open: written by `neuron-moe chip check`, read by
whoever chooses between ways to compute.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, cast, get_args

from neuron_moe.errors import check_choice

# What plans may use if all of its probes worked (`Tuning.features`).
PROBES: Final = {
    "loads for the next iteration": ("loads for the next iteration",),
}
FEATURES: Final = frozenset(PROBES)

Verdict = Literal["works", "fails", "wedges", "not tried"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)


def write_verdicts(
    path: Path, found: Mapping[str, Verdict], device: str, versions: Sequence[str]
) -> None:
    """Write verdicts; a reader never sees half a file.

    Args:
        path: of the JSON file.
        found: verdict by the name of the feature.
        device: whose they are.
        versions: of what they depend on.
    """
    content = {"device": device, "versions": list(versions), "verdicts": dict(found)}
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def verdicts(path: Path) -> dict[str, Verdict]:
    """Read what a chip said: "works", "fails", "wedges" or "not tried" by the feature's name.

    Raises:
        OSError: there is no such file.
        ValueError: it is no file of verdicts, or names one that there is not.
    """
    try:
        found = dict(json.loads(path.read_text())["verdicts"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: is no file of verdicts ({type(error).__name__}: {error}). Write one with"
            " neuron-moe chip check."
        ) from None
    for name, verdict in found.items():
        check_choice(f"{path}: {name}", verdict, VERDICTS)
    return cast("dict[str, Verdict]", found)


def opened_by(path: Path) -> frozenset[str]:
    """Return the features that a chip has, for `Tuning.features`: those whose probes all worked.

    Raises:
        OSError, ValueError: as `verdicts`.
    """
    found = verdicts(path)
    return frozenset(
        name
        for name, probes in PROBES.items()
        if all(found.get(probe) == "works" for probe in probes)
    )
