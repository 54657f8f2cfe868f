"""Starting kernels: on the chip through `nki.jit`, or on the simulator where there is no SDK."""

from typing import Any

import ml_dtypes
import torch
from torch import Tensor

import nki_sim
from nki_kernels import IS_SIMULATED  # whoever imports this module can import nki


def launch(num_cores: int, kernel: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel on all cores of a logical core.

    Args:
        num_cores: physical cores of a logical core (LNC).
        kernel: of `nki_kernels`.
        hidden: its first operand; the others are on the same device.
        args: further operands, weights from `as_operand`.
        kwargs: likewise.

    Raises:
        ValueError: tensors on a device although only the simulator is there.
    """
    if not IS_SIMULATED:
        return kernel[num_cores](hidden, *args, **kwargs)
    if hidden.device.type != "cpu":
        raise ValueError(
            f"backend='nki' on device {hidden.device}: the package `nki` of the Neuron SDK is not"
            " installed, and its simulator takes CPU tensors. Install the SDK, or move the module"
            " to the CPU."
        )
    return nki_sim.run(kernel, hidden, *args, lnc=num_cores, **kwargs).outputs


def as_operand(weight: Tensor) -> Any:
    """Return a weight as kernels take it: e4m3 codes under the name Trainium 2 has for them.

    torch has no name for that type. On the chip codes arrive under torch's name, float8_e4m3fn. Not
    tried is whether its compiler takes that on Trainium 2; codes up to 240 mean the same in both.
    """
    is_on_host = IS_SIMULATED and weight.device.type == "cpu"
    if is_on_host and weight.dtype == torch.float8_e4m3fn:
        bits = weight.detach().contiguous().view(torch.uint8).numpy()
        return bits.view(ml_dtypes.float8_e4m3)
    return weight


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
