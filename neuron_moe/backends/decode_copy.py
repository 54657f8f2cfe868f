"""A second copy of experts, in the order in which the decode kernel reads them.

Rows of a plain matrix that is cut into chunks are short; laid out for decode, everything that a
partition needs of a chunk is one run. It costs as much memory again, so it is made on request.
"""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from neuron_moe.backends.prepared import Stamp

_NUMPY_TYPES: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True, eq=False)
class DecodeCopy:
    """The matrices of some experts with biases of the gates, and scales.

    Attributes:
        gate_up_ECpn: [E, C, h, run] for C chunks of the intermediate axis.
        down_ECiH: [E, C, I / C, H].
        made_from: the weights, by which one sees whether they changed since.
    """

    gate_up_ECpn: Tensor
    down_ECiH: Tensor
    made_from: Stamp | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.gate_up_ECpn.nbytes + self.down_ECiH.nbytes

    def run(self, experts: slice) -> "DecodeCopy":
        """Return a run of the experts; a view."""
        return DecodeCopy(self.gate_up_ECpn[experts], self.down_ECiH[experts], self.made_from)

    def to(self, device: torch.device) -> "DecodeCopy":
        """Return the same on a device."""
        return DecodeCopy(self.gate_up_ECpn.to(device), self.down_ECiH.to(device), self.made_from)


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
    integers, _ = _NUMPY_TYPES[dtype]
    width = np.int16 if integers == torch.int16 else np.uint8
    return torch.from_numpy(np.ascontiguousarray(array).view(width)).view(dtype)
