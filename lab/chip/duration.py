"""How long a chip day takes: what its sum is made of, for `--help` and the documentation.

Counted: processes, compiled kernels and launches. Assumed, as no document says: the seconds of a
compilation, of starting Python with the SDK, and of a launch with its trace. What the kernels take
themselves is simulated and is nothing beside that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lab.check.chip_cases import CASES
from lab.chip.held_out import HELD_OUT
from lab.chip.open_features.listing import OPEN_FEATURES
from lab.chip.probes.listing import PROBES
from lab.chip.worker import REPEATS

COMPILE_S: Final = 3.0
START_S: Final = 5.0
LAUNCH_S: Final = 0.005
CHIP_ROUNDS: Final = 200
"""Launches of every micro-kernel; the device's clock has less noise and drift than the host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """What a command does on a chip.

    Attributes:
        processes: that start Python with the SDK.
        compiles: kernels that are compiled.
        launches: of compiled kernels.
    """

    processes: int
    compiles: int
    launches: int

    @property
    def minutes(self) -> float:
        """What that takes with the assumed seconds."""
        return (
            self.processes * START_S + self.compiles * COMPILE_S + self.launches * LAUNCH_S
        ) / 60

    def __str__(self) -> str:
        return (
            f"{self.minutes:.0f} minutes: {self.compiles} compilations of {COMPILE_S:g} s,"
            f" {self.processes} starts of Python of {START_S:g} s, {self.launches:,} launches of"
            f" {1000 * LAUNCH_S:g} ms (all three assumed)"
        )


def _kernels_of(case: str) -> int:
    """Return the launches of a case: a prefill is index_blocks, blockwise_moe and combine."""
    return 3 if CASES[case].kernel == "moe_cte" else 1


def check_sum() -> Sum:
    """Return what `chip check --dangerous` does.

    Cases also time an empty kernel; before the first row, and after each, runs one that is known to
    be good.
    """
    timed = sum(_kernels_of(case) + 1 for case in CASES)
    rows = len(CASES) + len(OPEN_FEATURES)
    return Sum(
        processes=2 * rows + 1,
        compiles=timed + len(OPEN_FEATURES) + rows + 1,
        launches=timed * REPEATS,
    )


def calibrate_sum() -> Sum:
    """Return what `chip calibrate` does; kernels not seen before compile to run and to be timed."""
    timed = len(PROBES) + sum(len(wanted) for _, wanted in HELD_OUT)
    compiles = timed + sum(_kernels_of(case) for case, _ in HELD_OUT)
    return Sum(processes=1, compiles=compiles, launches=timed * CHIP_ROUNDS)
