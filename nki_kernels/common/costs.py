"""What a kernel moves and multiplies, predicted by the `cost_` function beside each kernel.

The prediction is exact: tests hold it against the trace of a run.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The work of one launch, all cores together.

    Attributes:
        read_bytes: bytes read from HBM.
        written_bytes: bytes written to HBM.
        matmul_columns: moving columns that pass through the tensor engine, transposes included;
            a float32 matmul counts its columns once, though the engine passes them four times.
    """

    read_bytes: int
    written_bytes: int
    matmul_columns: int

    def __add__(self, other: "KernelCost") -> "KernelCost":
        """Return the work of both."""
        return KernelCost(
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
            self.matmul_columns + other.matmul_columns,
        )
