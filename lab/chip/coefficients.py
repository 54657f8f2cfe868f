"""Which numbers of the chip the probes can show, and a chip with some of them changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lab.chip.probes.listing import PROBES
from nki_sim.hardware import SWITCHES, TRN2, Hardware

LAUNCH: Final = "launch_ns"
"""What a launch takes beside the kernel; the timeline of the simulator begins after it."""

LAUNCH_START_NS: Final = 15_000.0  # where the search begins; nothing rests on it

COEFFICIENTS: Final = tuple(
    dict.fromkeys(name for probe in PROBES for name in probe.shows if name not in SWITCHES)
)
"""All that is fitted, launch included."""

NOT_MEASURED: Final = {
    "launch_pair_ns": "no probe launches two cores",
    "tile_streams": "no probe runs more than two tiles at once",
    "collective_base_ns": "needs several ranks",
    "collective_hop_ns": "needs several chips",
    "collective_bytes_per_ns": "needs several chips",
}


def start_values() -> dict[str, float]:
    """Return the coefficients as the simulator has them before anything was measured."""
    values = {name: float(getattr(TRN2, name)) for name in COEFFICIENTS if name != LAUNCH}
    return {LAUNCH: LAUNCH_START_NS, **values}


def chip_with(values: Mapping[str, float], switches: Mapping[str, int]) -> Hardware:
    """Return a Trn2 with some coefficients; the share of the clock at the start is at most 1."""
    changed: dict[str, Any] = {k: v for k, v in values.items() if k != LAUNCH}
    if "ramp_start_share" in changed:
        changed["ramp_start_share"] = min(1.0, changed["ramp_start_share"])
    return dataclasses.replace(TRN2, **changed | dict(switches))
