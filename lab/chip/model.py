"""What the simulator says the probes take, for any coefficients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.chip.coefficients import LAUNCH, chip_with
from nki_sim.hardware import SWITCHES, TRN2, Hardware
from nki_sim.time.prepare import Price, prices_of
from nki_sim.time.reorder import play
from nki_sim.time.timeline import Timeline


class ProbeModel:
    """Times of recorded kernels by coefficients.

    Args:
        timelines: of the kernels.

    `reads` holds, per kernel, the fields of the chip that its time can depend on.
    """

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self._timelines = list(timelines)
        self.reads = [_fields_read(timeline) for timeline in timelines]

    def __len__(self) -> int:
        return len(self._timelines)

    def ns(
        self,
        values: Mapping[str, float],
        switches: Mapping[str, int],
        which: Sequence[int] | None = None,
    ) -> NDArray[np.float64]:
        """Return the times of a launch of the kernels, or of some of them."""
        chip = chip_with(values, switches)
        chosen = range(len(self)) if which is None else which
        return np.array([_total_ns(self._timelines[k], chip) for k in chosen]) + values[LAUNCH]


def _total_ns(timeline: Timeline, chip: Hardware) -> float:
    """Return the time of a recorded kernel on another chip."""
    return play(timeline.prepared, chip, timeline.options).total_ns


class _Noting:
    """Stands for a chip and notes which of its fields are read."""

    def __init__(self, chip: Hardware) -> None:
        self._chip = chip
        self.fields: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.fields.add(name)
        return getattr(self._chip, name)


def _fields_read(timeline: Timeline) -> frozenset[str]:
    """Return the fields of a chip that a kernel's time is made of, whatever the switches.

    A field that prices are made from counts if one of them changes with it.
    """
    found = {LAUNCH}
    for on in (0, 1):
        switches: dict[str, Any] = dict.fromkeys(SWITCHES, on)
        chip = dataclasses.replace(TRN2, **switches)
        pricing: Any = _Noting(chip)
        prices = prices_of(timeline.prepared, pricing)
        playing: Any = _Noting(chip)
        _total_ns(timeline, playing)
        found |= playing.fields - pricing.fields
        found |= {name for name in pricing.fields if _moves(timeline, chip, prices, name)}
    return frozenset(found)


def _moves(timeline: Timeline, chip: Hardware, prices: list[Price], name: str) -> bool:
    """Tell whether a field changes the price of anything in a kernel."""
    for factor in (0.25, 4.0):
        change: dict[str, Any] = {name: getattr(chip, name) * factor}
        if prices_of(timeline.prepared, dataclasses.replace(chip, **change)) != prices:
            return True
    return False
