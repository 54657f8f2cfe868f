"""Questions about the hardware that a kernel may ask while it is specialised."""

from __future__ import annotations

from typing import Any

from nki_sim.constants import nc_version
from nki_sim.machine import running
from nki_sim.targets import Target, find_target


def running_target() -> Target:
    """Return the limits of the generation that the running kernel is for, else of the default."""
    core = running()
    return core.target if core is not None else find_target(None)


def get_nc_version() -> nc_version:
    """Return the generation of the NeuronCore."""
    return running_target().version


def get_nc_sub_version() -> Any:
    """Return the revision within the generation; only revision 0 is simulated."""
    return 0
