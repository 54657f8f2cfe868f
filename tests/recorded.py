"""What a call of a layer records where its operations are not run."""

import re
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):
    """Notes the kernels of this project that are called.

    Attributes:
        names: of the kernels, in order.
        block_sizes: slots of a block, of those that have blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.block_sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note a kernel, and go on."""
        if func.namespace == "neuron_moe":
            self.names.append(func._opname)
            records = " ".join(each for each in args if isinstance(each, str))
            self.block_sizes += map(int, re.findall(r'"block_size":(\d+)', records))
        return func(*args, **(kwargs or {}))
