"""A second copy of experts, in the order in which a kernel reads them.

Rows of a plain matrix that is cut into parts are short; laid out, a part is one run, or everything
a partition needs of it is. It costs as much memory again, so it is made on request.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from neuron_moe.weights.stamps import Stamp

_NUMPY_TYPES: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True, eq=False)
class LaidOut:
    """The matrices of some experts, experts first; further axes are the kernel's.

    Attributes:
        gate_up: gate and up projections; for decode with their biases and scales.
        down: down projections; for decode with their bias, where there is a spare row.
        parts: for prefill, in how many parts each of the two is stored.
        made_from: the weights, by which one sees whether they changed since.
    """

    gate_up: Tensor
    down: Tensor
    parts: tuple[int, int] | None = None
    made_from: Stamp | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.gate_up.nbytes + self.down.nbytes

    def run(self, experts: slice) -> "LaidOut":
        """Return a run of the experts; a view."""
        return replace(self, gate_up=self.gate_up[experts], down=self.down[experts])

    def to(self, device: torch.device) -> "LaidOut":
        """Return the same on a device."""
        return replace(self, gate_up=self.gate_up.to(device), down=self.down.to(device))


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the elements as NumPy names them; shares memory where it can."""
    if tensor.dtype not in _NUMPY_TYPES:
        return tensor.detach().cpu().numpy()
    integers, kind = _NUMPY_TYPES[tensor.dtype]
    return tensor.detach().cpu().contiguous().view(integers).numpy().view(kind)


def from_numpy(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """Return a tensor of `dtype`; the inverse of `to_numpy`."""
    if dtype not in _NUMPY_TYPES:
        return torch.from_numpy(np.ascontiguousarray(array))
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).view(dtype)
