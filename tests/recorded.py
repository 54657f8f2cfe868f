"""What a call of a layer records where its operations are not run."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):
    """Notes the kernels of this project that are called.

    Attributes:
        names: of the kernels, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note a kernel, and go on."""
        if func.namespace == "neuron_moe":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
