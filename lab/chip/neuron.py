"""Kernels on the chip of this machine, through the NKI and the runtime of the Neuron SDK.

A kernel that is called with NumPy arrays is compiled and launched once, and compiled anew by every
further call, so its times are not taken around such calls. What the compiler made, a NEFF, is kept,
loaded by the runtime and launched from there, with tensors that stay on the device; a launch is
timed by the device's clock. Steps and where they are documented (aws-neuron-sdk):

    1. `NKI_ARTIFACTS_DIR`, set before `import nki`: the compiler leaves `kernel.neff` there
       (neuron-runtime/nrtpy/tutorial-debug-neff-nrtpy.rst, step 2).
    2. `kernel[cores](arrays)`: compile and run standalone (the same, and nki/api/nki.api.shared.rst
       for the launch grid).
    3. `NrtpyModel.load_from_neff(path)`, `input_tensors_info`: the names of its inputs, which are
       those of the kernel's parameters (neuron-runtime/nrtpy/model.rst; the tutorial, step 3).
    4. `NrtpyTensor.from_numpy(array, name)` (neuron-runtime/nrtpy/tensor.rst).
    5. `model.benchmark(inputs, ..., mode="device").durations_ms` (neuron-runtime/nrtpy/model.rst).

The runtime that comes with NKI 0.6 calls the two classes SpikeModel and SpikeTensor. One process
uses either the chip or the simulator: this module must not be used where `nki_sim` answers to
`import nki`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import nki
import numpy as np

from lab.chip.device import Job, Untried
from neuron_moe.tools.chip.artifacts import ARTIFACTS
from neuron_moe.tools.chip.environment import job_variables

RUNTIME: Final = "nrtpy"
_MODELS: Final = ("NrtpyModel", "SpikeModel")
_TENSORS: Final = ("NrtpyTensor", "SpikeTensor")


class NeuronDevice:
    """The chip.

    Raises:
        OSError: `import nki` is the simulator here, or there is no runtime to launch with.
    """

    name = "neuron"
    kind: Literal["measured", "simulated"] = "measured"

    def __init__(self) -> None:
        if getattr(nki, "__nki_sim__", False):
            raise OSError(
                "no device: the Neuron SDK's nki is not installed, so kernels would be simulated."
                " Install it on a trn2.3xlarge, or rehearse with --against sim:1."
            )
        runtime = _runtime()
        self._model, self._tensor = _one_of(runtime, _MODELS), _one_of(runtime, _TENSORS)
        self._kept = tempfile.TemporaryDirectory(prefix="neuron-moe-")
        self._number = 0

    def load(self, job: Job) -> LoadedKernel | _Launched:
        """Compile a kernel by its first launch, and load what the compiler made.

        Raises:
            RuntimeError: the compiler left no NEFF, or one with other inputs.
            Untried: the job has several launches, and PyTorch does not run on the chip here.
        """
        os.environ.update(job_variables(job.cores))
        if job.launches > 1:
            return _Launched(_in_one_graph(job))
        artifacts = Path(os.environ.get(ARTIFACTS, ""))
        for old in artifacts.glob("*.neff") if artifacts.name else ():
            old.unlink()
        # Arrays are copied: a kernel may write its inputs.
        found = job.kernel[job.cores](*map(_copy, job.arguments), **job.options)
        model = self._model.load_from_neff(self._keep(artifacts))
        inputs = {
            name: self._tensor.from_numpy(array, name=name)
            for name, array in _inputs(job, model.input_tensors_info).items()
        }
        return LoadedKernel(model, inputs, _as_arrays(found))

    def _keep(self, artifacts: Path) -> Path:
        """Move the compiler's NEFF to where the next one does not replace it."""
        made = sorted(artifacts.glob("*.neff")) if artifacts.name else []
        if not made:
            raise RuntimeError(
                f"{ARTIFACTS}={str(artifacts)!r}: the compiler left no NEFF there. Set it to an"
                " empty folder before Python starts."
            )
        self._number += 1
        return Path(shutil.move(made[0], Path(self._kept.name) / f"kernel{self._number}.neff"))


class LoadedKernel:
    """A kernel on the device, with its inputs.

    Args:
        model: of the runtime.
        inputs: tensors on the device by the names of the kernel's parameters.
        outputs: of the launch that compiled it.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], outputs: Any) -> None:
        self._model, self._inputs, self._outputs = model, inputs, outputs

    def run(self) -> Any:
        """Return what its first launch returned, as NumPy arrays."""
        return self._outputs

    def time_ns(self) -> float:
        """Launch it and return how long that took by the device's clock."""
        found = self._model.benchmark(
            inputs=self._inputs, warmup_iter=0, benchmark_iter=1, mode="device"
        )
        return float(found.durations_ms[0]) * 1e6


class _Launched:
    """Launches that are done; a program of several has no time of its own."""

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def run(self) -> Any:
        """Return what they returned."""
        return self._outputs

    def time_ns(self) -> float:
        """Refuse."""
        raise RuntimeError("a program of several launches is not timed")


def _in_one_graph(job: Job) -> np.ndarray:
    """Launch a kernel several times in one program, through PyTorch: a graph ends at mark_step.

    Tried nowhere. The tensors are float32 (torch has no bridge from ml_dtypes).
    """
    try:
        import torch
        from torch_xla.core import xla_model
    except ImportError as error:
        raise Untried(
            f"{job.name}: {error}; a program of several launches needs torch and torch_xla."
        ) from None
    place = xla_model.xla_device()
    first, *others = (torch.from_numpy(_copy(array)).to(place) for array in job.arguments)
    for _launch in range(job.launches):
        first = job.kernel[job.cores](first, *others, **job.options)
    xla_model.mark_step()
    found: np.ndarray = first.cpu().numpy()
    return found


def _runtime() -> Any:
    try:
        return importlib.import_module(RUNTIME)
    except ImportError as error:
        raise OSError(
            f"no runtime: {RUNTIME} cannot be imported ({error}). It comes with the Neuron SDK's"
            " nki; put /opt/aws/neuron/lib on LD_LIBRARY_PATH."
        ) from None


def _one_of(runtime: Any, names: tuple[str, ...]) -> Any:
    """Return the class that a runtime has under one of its names."""
    for name in names:
        if hasattr(runtime, name):
            return getattr(runtime, name)
    raise OSError(
        f"{RUNTIME}: has none of {', '.join(names)}. Use the one of Neuron SDK 2.30 or later."
    )


def _inputs(job: Job, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a job's arrays by the names that the compiled kernel has for its inputs.

    They are those of the parameters; arrays inside a dict are found by their order.
    """
    signature = inspect.signature(getattr(job.kernel, "func", job.kernel))
    arrays = dict(_arrays_of(signature.bind(*job.arguments, **job.options).arguments))
    if set(wanted) <= set(arrays):
        return {name: arrays[name] for name in wanted}
    shapes = [list(info.shape) for info in wanted.values()]
    if shapes == [list(array.shape) for array in arrays.values()]:
        return dict(zip(wanted, arrays.values(), strict=True))
    raise RuntimeError(
        f"{job.name}: the compiled kernel has the inputs {', '.join(wanted)}, the launch the arrays"
        f" {', '.join(arrays) or 'none'}. Report the version of the SDK."
    )


def _arrays_of(values: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a launch by name, those inside a dict by theirs."""
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _arrays_of(value)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _as_arrays(found: Any) -> Any:
    if isinstance(found, tuple | list):
        return tuple(np.asarray(one) for one in found)
    return np.asarray(found)
