"""Expert matrices packed for CPU inference.

oneDNN multiplies a few rows with a matrix it has seen before two to three times as fast as torch's
plain matmul does,
because the matrix is in its own blocked layout already. `neuron-moe bench cpu` measures it. The
packed form replaces
the plain one (no second copy); it has no gradient.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# How many rows oneDNN is to expect; measured best for 1 to 128 rows on AMD and Intel.
_ROWS_HINT = {torch.float32: 64, torch.bfloat16: 4}
FEWEST_ROWS = 4  # fewer rows take a slower kernel than 4 on some machines (measured): pad there


@cache
def is_packing_available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this build of torch has oneDNN's packed linear layer of a type for this CPU.

    torch packs bfloat16 only where the processor has AVX-512 or converts bfloat16 itself.
    """
    if not (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    ):
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(8, 8, dtype=dtype), _ROWS_HINT[dtype])
    except RuntimeError:
        return False
    return True


class PackedMatrices(Sequence[Tensor]):
    """The matrices of some experts, [in, out] each, in oneDNN's layout.

    Args:
        weight_Ekn: [E, in, out] float32 or bfloat16 on the CPU.
    """

    DTYPES = (torch.float32, torch.bfloat16)

    def __init__(self, weight_Ekn: Tensor) -> None:
        if weight_Ekn.device.type != "cpu" or weight_Ekn.dtype not in self.DTYPES:
            raise ValueError(
                f"pack_weights(): weights are {weight_Ekn.dtype} on {weight_Ekn.device}; must be"
                " float32 or bfloat16 on the CPU. Move or cast the module first."
            )
        if not is_packing_available(weight_Ekn.dtype):
            raise ValueError(
                f"pack_weights(): torch and this processor have no packed {weight_Ekn.dtype}"
                " products of oneDNN. Use the weights unpacked."
            )
        self.shape = weight_Ekn.shape
        self.dtype = weight_Ekn.dtype
        with torch.no_grad():
            self._packed = [
                torch.ops.mkldnn._reorder_linear_weight(
                    matrix.t().contiguous(), _ROWS_HINT[self.dtype]
                )
                for matrix in weight_Ekn
            ]

    @classmethod
    def of_linears(cls, weights_nk: Sequence[Tensor]) -> "list[PackedMatrices]":
        """Pack [out, in] matrices of dense projections, each by itself."""
        return [cls(weight_nk.t().unsqueeze(0)) for weight_nk in weights_nk]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as plain matrices, which are packed again: the blocks have no format."""
        return PackedMatrices, (self.unpack(),)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, expert: int) -> Tensor:  # type: ignore[override]
        """Return the [in, out] matrix of one expert, unpacked."""
        matrix: Tensor = self._packed[expert].to_dense()
        return matrix.t()

    def run(self, experts: slice) -> "PackedMatrices":
        """Return a run of the experts; shares their memory."""
        part = object.__new__(PackedMatrices)
        part.dtype = self.dtype
        part._packed = self._packed[experts]
        part.shape = torch.Size((len(part._packed), *self.shape[1:]))
        return part

    def unpack(self) -> Tensor:
        """Return [E, in, out]."""
        return torch.stack([self[expert] for expert in range(len(self))])

    def multiply(self, rows_nk: Tensor, expert: int, *, pads: bool = True) -> Tensor:
        """Return rows [n, in] times the matrix of one expert, [n, out].

        Args:
            rows_nk: [n, in].
            expert: number of the matrix.
            pads: fewer rows than four are padded to four.
        """
        num_rows = rows_nk.shape[0]
        if pads and num_rows < FEWEST_ROWS:
            rows_nk = F.pad(rows_nk, (0, 0, 0, FEWEST_ROWS - num_rows))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows_nk, self._packed[expert], None, "none", [], ""
        )
        return product[:num_rows] if pads else product
