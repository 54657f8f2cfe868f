"""A process that measures layer calls on one checkout of the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import neuron_moe

ROOT = Path(neuron_moe.__file__).parents[1]
PROBE = Path(__file__).with_name("probe.py")


class Worker:
    """Runs `probe.py` with the packages of a checkout, until the context ends.

    Args:
        checkout: folder that holds neuron_moe, nki_kernels and nki_sim.

    Raises:
        ValueError: it is no such folder, or its packages are not the ones that get imported.
    """

    def __init__(self, checkout: Path) -> None:
        package = checkout.resolve() / "neuron_moe"
        if not (package / "__init__.py").is_file():
            raise ValueError(
                f"--before {checkout}: no neuron_moe/__init__.py in it. Give the root of a checkout"
                " of this repository, e.g. one that `git worktree add` made."
            )
        paths = [str(checkout.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROBE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
        )
        imported = Path(self._read()["package"]).resolve()
        if imported != package:
            self.close()
            raise ValueError(
                f"--before {checkout}: its processes import {imported} instead. Uninstall"
                " neuron-moe from this environment, or install it in editable mode."
            )

    def measure(self, case: str, repeats: int) -> dict[str, Any]:
        """Return times_ms and stub_ms of each of some calls, and the launches of one."""
        found: dict[str, Any] = self._ask({"case": case, "repeats": repeats})
        return found

    def walk(self, case: str) -> list[list[str]]:
        """Return the switches of file of one call: from, to, and the function entered."""
        found: list[list[str]] = self._ask({"case": case})
        return found

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(
                f"the measuring process ended with status {self._process.wait()}; its message is"
                " above."
            )
        return json.loads(line)
