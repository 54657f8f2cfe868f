"""Finding the device of a command: the chip of this machine, or a stand-in by its name."""

from __future__ import annotations

from typing import Final

from lab.chip.bugs import BUGS, Buggy
from lab.chip.device import Device
from lab.chip.stand_in import PREFIX, StandIn

WITH_BUGS: Final = f"{PREFIX}bugs"
_SEED: Final = 1


def find_device(against: str | None) -> Device:
    """Return the device that `--against` names; None is the chip.

    Raises:
        ValueError: the name is none.
    """
    if against is None:
        from lab.chip.neuron import NeuronDevice

        return NeuronDevice()
    bugs = bugs_of(against)
    seed = str(_SEED) if bugs else against.removeprefix(PREFIX)
    if not against.startswith(PREFIX) or not seed.isdigit():
        raise ValueError(f"--against {against!r}: must be {PREFIX} and a number. Use {PREFIX}1.")
    stand_in = StandIn(int(seed))
    return Buggy(stand_in, bugs) if bugs else stand_in


def bugs_of(against: str) -> tuple[str, ...]:
    """Return the bugs of a stand-in: all of sim:bugs, of sim:bugs:NAME,NAME those; of others none.

    Raises:
        ValueError: a bug that there is not.
    """
    head, _, names = against.partition(f"{WITH_BUGS}:")
    if against == WITH_BUGS:
        return tuple(BUGS)
    if head or not names:
        return ()
    found = tuple(names.split(","))
    for name in found:
        if name not in BUGS:
            raise ValueError(f"--against {against}: {name!r} must be one of {', '.join(BUGS)}.")
    return found
