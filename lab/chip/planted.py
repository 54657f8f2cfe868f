"""Failures on purpose: what a chip, its compiler or its disk may do to a kernel."""

from __future__ import annotations

import os
import time
from typing import Any, Final, Literal

import numpy as np

from lab.chip.device import Device, Job, Loaded

PLANTS: Final = ("compile", "crash", "hang", "wrong", "full-disk")
"""A kernel that does not compile, kills its compiler, hangs, is wrong, finds the disk full."""


class Planted:
    """A device on which every kernel fails in one way.

    Args:
        device: the device behind it.
        plant: one of PLANTS.
    """

    def __init__(self, device: Device, plant: str) -> None:
        self._device, self._plant = device, plant
        self.name = device.name
        self.kind: Literal["measured", "simulated"] = device.kind

    def load(self, job: Job) -> Loaded:
        """Compile a kernel, or not."""
        if self._plant == "compile":
            raise RuntimeError("planted: the compiler does not know this instruction")
        if self._plant == "crash":
            os.abort()
        if self._plant == "full-disk":
            with open("/dev/full", "wb", buffering=0) as disk:
                disk.write(bytes(4096))
        return _Planted(self._device.load(job), self._plant)


class _Planted:
    def __init__(self, loaded: Loaded, plant: str) -> None:
        self._loaded, self._plant = loaded, plant

    def run(self) -> Any:
        if self._plant == "hang":
            time.sleep(24 * 3600)
        found = self._loaded.run()
        outputs = found if isinstance(found, tuple | list) else (found,)
        return (
            type(found)([_spoilt(one) for one in outputs]) if outputs is found else _spoilt(found)
        )

    def time_ns(self) -> float:
        return self._loaded.time_ns()


def _spoilt(array: np.ndarray) -> np.ndarray:
    """Return an array with some elements changed, as far as it holds numbers."""
    spoilt = np.array(array)
    spoilt.reshape(-1)[::7] = np.asarray(1, spoilt.dtype)
    return spoilt
