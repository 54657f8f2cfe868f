"""Calling the vendor's torch references: arrays to tensors and back, one expert at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def as_tensor(value: Any) -> Any:
    """Return a float32 (or integer) tensor of an array, as the vendor's harness does.

    16-bit and 8-bit floats are widened, uint32 becomes int32; packed x4 arrays and everything
    else pass unchanged.
    """
    if not isinstance(value, np.ndarray) or "x4" in str(value.dtype):
        return value
    if value.dtype == np.uint32:
        return torch.from_numpy(value.astype(np.int32))
    if value.dtype.kind in "iub" or value.dtype in (np.float32, np.float64):
        return torch.from_numpy(value)
    return torch.from_numpy(value.astype(np.float32))


class Experts:
    """A stack of expert weights that widens one expert when it is indexed.

    It stands for the [E, ...] tensor a reference expects; widening all experts at once would take
    up to 30 GiB. Supports what the references do with weights: `shape`, `float()`, `reshape`,
    `[e]` and `[e, :, :]`.
    """

    def __init__(self, stack: np.ndarray, shape: tuple[int, ...] | None = None) -> None:
        self.stack = stack
        self.shape = tuple(stack.shape) if shape is None else shape

    def float(self) -> "Experts":
        """Return itself: indexing gives float32 anyway."""
        return self

    def reshape(self, *shape: int) -> "Experts":
        """Return the stack with each expert reshaped."""
        return Experts(self.stack, tuple(shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        expert, rest = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        tensor = as_tensor(np.ascontiguousarray(self.stack[int(expert)])).reshape(self.shape[1:])
        return tensor[rest] if rest else tensor


def as_array(value: Any) -> np.ndarray:
    """Return the NumPy array of a reference's result."""
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy()
    array: np.ndarray = np.asarray(value)
    return array


def run_reference(
    function: Callable[..., Any], arguments: dict[str, Any], names: tuple[str, ...] = ("out",)
) -> dict[str, np.ndarray]:
    """Call a reference with tensors; return its results by name."""
    with torch.no_grad():
        result = function(**{name: as_tensor(value) for name, value in arguments.items()})
    if isinstance(result, dict):
        return {name: as_array(value) for name, value in result.items()}
    values = result if isinstance(result, (tuple, list)) else (result,)
    return {name: as_array(value) for name, value in zip(names, values, strict=True)}
