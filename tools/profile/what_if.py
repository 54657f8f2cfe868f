"""What a run would take with other coefficients of the chip."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, Final

from neuron_moe.tools.console import format_table
from nki_sim.hardware import SWITCHES, Hardware
from nki_sim.time.sensitivity import FIXED, varied_ns
from nki_sim.time.timeline import Timeline, schedule

MOST: Final = 8
_KINDS: Final = ("documented", "measured", "assumed")


def changed_chip(chip: Hardware, settings: Sequence[str]) -> Hardware:
    """Return a chip with some coefficients set, each as NAME=VALUE or NAME=xFACTOR.

    Raises:
        ValueError: an unknown name, a size in place of a coefficient, or no positive number.
    """
    changed: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        known = coefficients(chip)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"Close to it: {', '.join(near)}" if near else "--sensitivity lists some"
            raise ValueError(f"--set {setting}: no coefficient {name!r}. {hint}.")
        try:
            value = known[name] * float(text[1:]) if text[:1] == "x" else float(text)
        except ValueError:
            value = -1.0
        if value <= 0.0 and not (name in SWITCHES and value == 0.0):
            raise ValueError(
                f"--set {setting}: must be a positive number, or x and a factor. It is"
                f" {name}={known[name]:g} now."
            )
        is_whole = isinstance(getattr(chip, name), int)
        changed[name] = round(value) if is_whole else value
    return dataclasses.replace(chip, **changed)


def coefficients(chip: Hardware) -> dict[str, float]:
    """Return the numbers of a chip that say how long something takes."""
    values = {field.name: getattr(chip, field.name) for field in dataclasses.fields(chip)}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and name not in FIXED
    }


def what_if(run: Timeline, settings: Sequence[str]) -> Timeline:
    """Return a run timed on its chip with some coefficients set."""
    return schedule(run.trace, changed_chip(run.chip, settings), run.options)


def what_if_text(run: Timeline, other: Timeline) -> str:
    """Say what a change of coefficients does to a run."""
    rows = [["coefficient", "is", "set to", "source"]]
    for name, value in coefficients(run.chip).items():
        changed = getattr(other.chip, name)
        if changed != value:
            source = run.chip.provenance(name).kind
            rows.append([name, f"{value:g}", f"{changed:g}", source])
    ratio = other.total_ns / run.total_ns if run.total_ns else 1.0
    return (
        f"what if\n{format_table(rows)}\n"
        f"{other.total_us:,.2f} us instead of {run.total_us:,.2f} us, x{ratio:.2f}  [simulated]"
    )


def sensitivity(run: Timeline) -> list[dict[str, Any]]:
    """Return the coefficients that move a run most when halved or doubled, the largest first."""
    found = []
    times = varied_ns(run, kinds=_KINDS)
    for name in dict.fromkeys(name for name, _ in times):
        halved, doubled = (
            times.get((name, factor), times.get((name, 0.0), run.total_ns)) / run.total_ns
            for factor in (0.5, 2.0)
        )
        if max(abs(halved - 1.0), abs(doubled - 1.0)) >= 0.001:
            found.append(
                {
                    "coefficient": name,
                    "is": getattr(run.chip, name),
                    "halved": halved,
                    "doubled": doubled,
                    "source": run.chip.provenance(name).kind,
                }
            )
    return sorted(found, key=lambda one: -max(abs(one["halved"] - 1), abs(one["doubled"] - 1)))


def sensitivity_rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the largest of them, a heading first."""
    rows = [["coefficient", "is", "time if halved", "if doubled", "source"]]
    rows += [
        [
            one["coefficient"],
            f"{one['is']:g}",
            f"x{one['halved']:.2f}",
            f"x{one['doubled']:.2f}",
            one["source"],
        ]
        for one in found[:MOST]
    ]
    return rows
