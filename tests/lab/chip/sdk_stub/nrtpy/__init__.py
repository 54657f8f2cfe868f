"""Stands for the Neuron SDK's runtime: what a kernel took is in its NEFF, see the stub of nki."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from nki import note

LAUNCH_NS = 9000.0


@dataclass
class TensorMetadata:
    """Shape of an input."""

    shape: list[int]
    size: int = 0


@dataclass
class BenchmarkResult:
    """Times of launches."""

    durations_ms: list[float]


class NrtpyTensor:
    """A tensor on the device."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @classmethod
    def from_numpy(cls, array: np.ndarray, name: str | None = None) -> NrtpyTensor:
        note("copy", name=name)
        return cls(array.copy())


class NrtpyModel:
    """A compiled kernel."""

    def __init__(self, neff: dict[str, Any]) -> None:
        self._ns, self._kernel = neff["ns"], neff["kernel"]
        self._random = np.random.default_rng(0)
        self.input_tensors_info = {k: TensorMetadata(v) for k, v in neff["inputs"].items()}

    @classmethod
    def load_from_neff(cls, neff_path: Path | str, name: str | None = None) -> NrtpyModel:
        neff = json.loads(Path(neff_path).read_text())
        note("load", kernel=neff["kernel"])
        return cls(neff)

    def benchmark(
        self,
        inputs: Any,
        outputs: Any = None,
        warmup_iter: int = 5,
        benchmark_iter: int = 5,
        mode: str = "device",
    ) -> BenchmarkResult:
        note("benchmark", kernel=self._kernel, mode=mode)
        if set(inputs) != set(self.input_tensors_info):
            raise ValueError(f"inputs {sorted(inputs)}")
        factors = 1.0 + 0.003 * self._random.standard_normal(benchmark_iter)
        return BenchmarkResult([(self._ns + LAUNCH_NS) * float(one) / 1e6 for one in factors])
