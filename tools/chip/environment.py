"""The machine in words: device, driver, SDK, logical cores, versions; a process with a limit."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

PACKAGES: Final = (
    "neuron-moe",
    "nki",
    "neuronx-cc",
    "torch-neuronx",
    "nrtpy",
    "torch",
    "numpy",
    "ml_dtypes",
)
LNC_VARIABLES: Final = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
LNC: Final = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing about the machine.

    Attributes:
        name: what it is about.
        is_right: whether kernels can run with it.
        text: one sentence; the way out where it is not right.
    """

    name: str
    is_right: bool
    text: str


def read_environment(
    root: Path = Path("/"), variables: Mapping[str, str] = os.environ
) -> list[Fact]:
    """Return what is known of the machine without running anything.

    Args:
        root: where /dev, /sys and /proc are.
        variables: of the environment.
    """
    return [_device(root), _driver(root), _sdk(), _runtime(), _cores(variables), *versions()]


def simulated_environment(name: str) -> list[Fact]:
    """Return the same for a chip that is simulated."""
    return [Fact(name="device", is_right=True, text=f"{name}, simulated: no chip"), *versions()]


def _device(root: Path) -> Fact:
    found = sorted(path.name for path in (root / "dev").glob("neuron[0-9]*"))
    product = root / "sys/devices/virtual/dmi/id/product_name"
    machine = product.read_text().strip() if product.is_file() else platform.machine()
    if not found:
        return Fact(
            name="device",
            is_right=False,
            text=f"no device: {machine} has no /dev/neuron0. Use a trn2.3xlarge with the Neuron"
            " driver, or rehearse with --against sim:1.",
        )
    return Fact(name="device", is_right=True, text=f"{machine}: {', '.join(found)}")


def _driver(root: Path) -> Fact:
    version = root / "sys/module/neuron/version"
    if version.is_file():
        return Fact(name="driver", is_right=True, text=f"neuron {version.read_text().strip()}")
    return Fact(
        name="driver",
        is_right=False,
        text="driver: the kernel module neuron is not loaded. Install aws-neuronx-dkms.",
    )


def _sdk() -> Fact:
    """Tell whether `import nki` gives the compiler's NKI, not the registry's empty package."""
    try:
        files = metadata.files("nki") or []
    except metadata.PackageNotFoundError:
        files = []
    if any("isa" in str(file) for file in files):
        return _language(metadata.version("nki"))
    return Fact(
        name="SDK",
        is_right=False,
        text="SDK: no nki with an instruction set is installed. Install it from the Neuron SDK's"
        " package index, in this Python environment.",
    )


def _language(version: str) -> Fact:
    """Tell whether the kernels here are written for a version of NKI: 0.7, or 0.6 with limits."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= (0, 7):
        return Fact(name="SDK", is_right=True, text=f"nki {version}")
    if numbers == (0, 6):
        return Fact(
            name="SDK",
            is_right=True,
            text=f"nki {version}: kernels here are for 0.7 (SDK 2.33). 0.6 parses a subset of"
            " Python: a row that does not compile may say nothing about the chip, and dynamic loops"
            " have failed (#1388). Set NKI_COMPILER_FRONTEND=tracer, or install 0.7.",
        )
    return Fact(
        name="SDK",
        is_right=False,
        text=f"SDK: nki {version} is older than 0.6. Install 0.7, of the Neuron SDK 2.33.",
    )


def _runtime() -> Fact:
    """Tell whether compiled kernels can be loaded and timed from Python."""
    if importlib.util.find_spec("nrtpy") is not None:
        return Fact(name="runtime", is_right=True, text="nrtpy, which loads and times kernels")
    return Fact(
        name="runtime",
        is_right=False,
        text="runtime: no nrtpy is installed. It comes with the nki of the Neuron SDK 2.30 or"
        " later.",
    )


def _cores(variables: Mapping[str, str]) -> Fact:
    """Tell what a logical core is here; each job sets it for itself."""
    named = [f"{name}={variables[name]}" for name in LNC_VARIABLES if name in variables]
    text = f"{', '.join(named) or 'not set'}; each job sets its own, {LNC} as a rule"
    return Fact(name="LNC", is_right=True, text=text)


def job_variables(cores: int) -> dict[str, str]:
    """Return the variables that make compiler and runtime take so many cores for a logical one.

    Unset, NKI compiles for 1 and neuronx-cc for 2 (NCC_EVRF066).
    """
    return dict.fromkeys(LNC_VARIABLES, str(cores))


def run_process(
    command: Sequence[str], limit_s: float, variables: Mapping[str, str]
) -> tuple[int | None, str]:
    """Run a command in a group of its own; return status (None: ended after the limit), output."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=dict(variables),
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output


def versions() -> list[Fact]:
    """Return the version of everything a time may depend on."""
    found = [f"Python {platform.python_version()}", platform.platform()]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return [Fact(name="versions", is_right=True, text=", ".join(found))]
