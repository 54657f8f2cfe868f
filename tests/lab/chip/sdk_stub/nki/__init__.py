"""Stands for the NKI of the Neuron SDK: notes what it is called with and answers by the simulator.

A call with arrays compiles and runs, as in the SDK, and leaves `kernel.neff` in NKI_ARTIFACTS_DIR
as it was when this was imported. SDK_STUB_LOG names the file of notes, SDK_STUB_FAILS the step that
is to fail.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import nki_sim
from nki_sim.machine import running
from nki_sim.provide import _modules

_COMPILER = Path(__file__).parent / "compiler"
_LIKE_A_CHIP = nki_sim.SimOptions(
    uninitialized="off", races="off", capacity="reorder", accumulate="off"
)
_ARTIFACTS = os.environ.get("NKI_ARTIFACTS_DIR", "")

for _name, _module in _modules().items():
    _module.__dict__.pop("__nki_sim__", None)
    if _name.startswith("nki."):
        sys.modules[_name] = _module
        if _name.count(".") == 1:
            globals()[_name.removeprefix("nki.")] = _module
if "nki.compiler" in sys.modules:
    sys.modules["nki.compiler"].__path__ = [str(_COMPILER)]


def note(step: str, **facts: Any) -> None:
    """Write down a call; fail if this is the step that is to fail."""
    with Path(os.environ["SDK_STUB_LOG"]).open("a") as log:
        log.write(json.dumps({"step": step, **facts}) + "\n")
    if os.environ.get("SDK_STUB_FAILS") == step:
        raise RuntimeError(f"NCC_STUB001: planted while {step}")


class StubKernel:
    """A kernel that compiles anew with every call."""

    def __init__(self, func: Callable[..., Any], lnc: int = 1) -> None:
        self.func, self._lnc = func, lnc
        self.__name__ = func.__name__

    def __getitem__(self, lnc: int) -> StubKernel:
        return StubKernel(self.func, lnc)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if running() is not None:
            return self.func(*arguments, **options)
        variable = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
        note("compile", kernel=self.__name__, lnc=self._lnc, variable=variable)
        run = nki_sim.run(
            nki_sim.jit(self.func), *arguments, lnc=self._lnc, options=_LIKE_A_CHIP, **options
        )
        bound = inspect.signature(self.func).bind(*arguments, **options).arguments
        shapes = {k: v.shape for k, v in bound.items() if isinstance(v, np.ndarray)}
        if _ARTIFACTS and os.environ.get("SDK_STUB_FAILS") != "keep":
            Path(_ARTIFACTS).mkdir(parents=True, exist_ok=True)
            neff = {"kernel": self.__name__, "inputs": shapes, "ns": run.timeline.total_ns}
            Path(_ARTIFACTS, "kernel.neff").write_text(json.dumps(neff))
        note("execute", kernel=self.__name__)
        return run.outputs


def jit(func: Callable[..., Any]) -> StubKernel:
    """Return a kernel."""
    return StubKernel(func)
