"""Starting kernels: on the chip through `nki.jit`, or on the simulator where there is no SDK."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import torch
from torch import Tensor

from nki_kernels import IS_SIMULATED  # whoever imports this module can import nki

Launch = Callable[..., Any]
"""Runs a kernel on all cores of a logical core: (kernel, *args, **kwargs) -> outputs."""


def launch(num_cores: int, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel.

    Args:
        num_cores: physical cores of a logical core (LNC).
        kernel: of `nki_kernels`.
        args: its operands, tensors on one device.
        kwargs: likewise.

    Raises:
        ValueError: tensors on a device although only the simulator is there.
    """
    if not IS_SIMULATED:
        return kernel[num_cores](*args, **kwargs)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device
    if device.type != "cpu":
        raise ValueError(
            f"backend='nki' on device {device}: the package `nki` of the Neuron SDK is not"
            " installed, and its simulator takes CPU tensors. Install the SDK, or move the module"
            " to the CPU."
        )
    import nki_sim

    given = [_as_chip_reads(value) for value in args]
    named = {name: _as_chip_reads(value) for name, value in kwargs.items()}
    return nki_sim.run(kernel, *given, lnc=num_cores, **named).outputs


def _as_chip_reads(value: Any) -> Any:
    """Return e4m3 codes as the type Trainium 2 takes them for; torch has no name for it.

    On the chip they arrive under torch's name, float8_e4m3fn. Not tried is whether its compiler
    takes that on Trainium 2; codes up to 240 mean the same in both.
    """
    if isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn:
        bits = value.detach().contiguous().view(torch.uint8).numpy()
        return bits.view(ml_dtypes.float8_e4m3)
    return value


def check_call(hidden_TH: Tensor) -> None:
    """Raise ValueError where kernels cannot stand in for torch operations."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "backend='nki' inside torch.export or torch.compile: kernels are launched eagerly."
            " Capture the graph with backend='torch'."
        )
    if torch.is_grad_enabled() and hidden_TH.requires_grad:
        raise ValueError(
            "hidden_states.requires_grad=True: backend='nki' has no gradient. Use"
            " torch.no_grad(), or backend='torch' to train."
        )


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype as kernels spell it."""
    return str(tensor.dtype).removeprefix("torch.")
