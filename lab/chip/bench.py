"""neuron-moe chip bench prefill|decode: the benchmarks' tables with times of the chip.

    neuron-moe chip bench decode --models qwen3_30b_a3b --json measured.json

The same cases, plans and result file as `neuron-moe bench`, ours and, with --library, the vendor's
kernels: launched on the chip (or, with `--against sim:SEED`, on one that is simulated) instead of
simulated by the coefficients we know. Times are medians without what a program takes beside its
kernel, and have no range. Whatever else is given goes to the benchmark.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Final

import numpy as np

from lab.bench.decode import main as bench_decode
from lab.bench.prefill import main as bench_prefill
from lab.chip.device import Device, Job
from lab.chip.devices import find_device
from lab.chip.probes.dma import nothing
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.timing.runs import MeasuredRun, running_with
from neuron_moe.tools.timing.sources import write_result
from nki_sim import TensorSpec
from nki_sim.dtypes import as_dtype

BENCHES: Final = {"prefill": bench_prefill, "decode": bench_decode}
REPEATS: Final = 21


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark on the chip; return its status."""
    parser = Parser(
        "chip bench",
        __doc__,
        "Further options (--models, --library) are those of neuron-moe bench.",
    )
    parser.add_argument("bench", choices=list(BENCHES))
    parser.add_argument("--against", metavar="sim:SEED", help="a simulated chip; default: the chip")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options, rest = parser.parse_known_args(argv)
    if "--hardware" in rest:
        raise ValueError(
            "--hardware: is of simulated times. Leave it out, or use neuron-moe bench."
        )
    if "--jobs" in rest:
        raise ValueError("--jobs: one process has the device. Leave it out.")
    device = find_device(options.against)
    if options.json is not None:
        rest += ["--json", str(options.json)]
    with running_with(DeviceRuns(device)):
        status = int(BENCHES[options.bench](rest))
    if options.json is not None:
        content = json.loads(options.json.read_text())
        write_result(options.json, {**content, "device": device.name})
    return status


class DeviceRuns:
    """Runs the kernels of a benchmark on a device.

    Args:
        device: where.
    """

    def __init__(self, device: Device) -> None:
        self.kind = device.kind
        self._device = device
        empty = Job(name="nothing", kernel=nothing, arguments=(1,), options={}, cores=2)
        self._launch_ns = self._median_ns(empty)

    def __call__(self, kernel: Any, *arguments: Any, lnc: int, **options: Any) -> MeasuredRun:
        """Launch a kernel often enough for a median."""
        simulation = options.pop("options", None)
        if self._device.kind == "measured":
            arguments = tuple(filled(value) for value in arguments)
            options = {name: filled(value) for name, value in options.items()}
        job = Job(
            name=getattr(kernel, "__name__", str(kernel)),
            kernel=kernel,
            arguments=arguments,
            options=options,
            cores=lnc,
            simulation=simulation,
        )
        return MeasuredRun((self._median_ns(job) - self._launch_ns) / 1e3)

    def _median_ns(self, job: Job) -> float:
        loaded = self._device.load(job)
        return statistics.median(loaded.time_ns() for _repeat in range(REPEATS))


def filled(value: Any) -> Any:
    """Return an argument with arrays of small numbers in place of those without values."""
    if isinstance(value, TensorSpec):
        numbers = np.random.default_rng(0).uniform(-0.05, 0.05, 4096).astype(np.float32)
        return np.resize(numbers, value.shape).astype(as_dtype(value.dtype).numpy)
    if isinstance(value, dict):
        return {name: filled(one) for name, one in value.items()}
    return value
