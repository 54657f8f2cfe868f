"""Chips whose coefficients were measured, as `neuron-moe chip calibrate` writes them.

A file is an object with the name of the chip and `coefficients`, by name an object with `estimate`.
Names that are no field of `Hardware`, such as the time of a launch, are left to others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nki_sim import hardware
from nki_sim.hardware import Hardware


def read_hardware(path: str | Path) -> Hardware:
    """Return the chip of a file: ours, with what was measured in place of what was not.

    Raises:
        ValueError: the file is none, or an estimate is no positive number (0 for a switch).
    """
    try:
        content: dict[str, Any] = json.loads(Path(path).read_text())
        chip = hardware.find(content["chip"])
        estimates = {name: one["estimate"] for name, one in content["coefficients"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--hardware {path}: not measured coefficients ({type(error).__name__}: {error}). Give "
            "a file that `neuron-moe chip calibrate` wrote."
        ) from None
    fields = {field.name for field in dataclasses.fields(Hardware)}
    changed: dict[str, Any] = {}
    for name, value in estimates.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value < 0 or (value == 0 and name not in hardware.SWITCHES):
            raise ValueError(
                f"--hardware {path}: {name}={value!r} must be a positive number. Calibrate again."
            )
        if name in fields:
            changed[name] = value
    return dataclasses.replace(chip, **changed)


@contextmanager
def using(chip: Hardware) -> Iterator[None]:
    """Let a chip be the one of its name while the context lasts, for timelines and choices."""
    before = hardware.CHIPS[chip.name]
    hardware.CHIPS[chip.name] = chip
    try:
        yield
    finally:
        hardware.CHIPS[chip.name] = before


def use_hardware(path: str | Path) -> Hardware:
    """Let every timeline and every choice of this process be for the chip of a file; return it."""
    chip = read_hardware(path)
    hardware.CHIPS[chip.name] = chip
    return chip
