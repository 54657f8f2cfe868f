"""Starting kernels: on the chip through `nki.jit`, or on the simulator where there is no SDK."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import torch
from torch import Tensor

import nki_sim
from neuron_moe.backends.nki import operators
from nki_kernels import IS_SIMULATED  # whoever imports this module can import nki


def launch(num_cores: int, kernel: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel on all cores of a logical core, or put it into the graph being captured.

    Args:
        num_cores: physical cores of a logical core (LNC).
        kernel: of `nki_kernels`.
        hidden: its first operand; the others are on the same device.
        args: further operands.
        kwargs: likewise.

    Raises:
        ValueError: tensors on a device although only the simulator is there.
    """
    if torch.compiler.is_compiling():
        return _put(num_cores, kernel, hidden, *args, **kwargs)
    return _run(kernel, num_cores, (hidden, *args), kwargs)


def _run(
    kernel: Any, num_cores: int, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    if not IS_SIMULATED:
        return kernel[num_cores](*args, **kwargs)
    if args[0].device.type != "cpu":
        raise ValueError(
            f"backend='nki' on device {args[0].device}: the package `nki` of the Neuron SDK is not"
            " installed, and its simulator takes CPU tensors. Install the SDK, or move the module"
            " to the CPU."
        )
    operands = [_as_operand(value) for value in args]
    named = {name: _as_operand(value) for name, value in kwargs.items()}
    return nki_sim.run(kernel, *operands, lnc=num_cores, **named).outputs


_put = operators.register(_run)


def _as_operand(value: Any) -> Any:
    """Return an operand as the simulator takes it: e4m3 codes under Trainium 2's name for them.

    torch has no name for that type. On the chip codes arrive under torch's name, float8_e4m3fn. Not
    tried is whether its compiler takes that on Trainium 2; codes up to 240 mean the same in both.
    """
    if isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn:
        bits = value.detach().contiguous().view(torch.uint8).numpy()
        return bits.view(ml_dtypes.float8_e4m3)
    return value


def check_capture() -> None:
    """Raise ValueError where Python itself is captured, of which plans take a lot."""
    if torch.compiler.is_dynamo_compiling():
        raise ValueError(
            "backend='nki' inside torch.compile or torch.export(strict=True): plans are made in"
            " Python, which they would capture. Use torch.export.export(..., strict=False) after"
            " prepare(), or backend='torch'."
        )


def check_call(hidden_TH: Tensor) -> None:
    """Raise ValueError where kernels cannot stand in for torch operations."""
    if torch.is_grad_enabled() and hidden_TH.requires_grad:
        raise ValueError(
            "hidden_states.requires_grad=True: backend='nki' has no gradient. Use"
            " torch.no_grad(), or backend='torch' to train."
        )


def dtype_name(of: Tensor | torch.dtype) -> str:
    """Return a dtype, or that of a tensor, as kernels spell it."""
    dtype = of.dtype if isinstance(of, Tensor) else of
    return str(dtype).removeprefix("torch.")
