"""What Python may do with a tensor in the world that a layer runs in.

Eager tensors have numbers that Python can read. Those of a graph that is being captured have none:
`torch.compile` and `torch.export` say that they capture, tracers that record operations as they are
called (torch_xla, fake tensors) do not, and are known by the tensor.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Whether torch.compile or torch.export captures what runs, and whether it does so from bytecode, as
# only non-strict export does not. These are torch's functions, which Dynamo takes for constants.
is_captured = torch.compiler.is_compiling
is_captured_by_dynamo = torch.compiler.is_dynamo_compiling


def is_traced(x: Tensor) -> bool:
    """Say whether operations on a tensor are recorded as they are called, and run later; not by
    torch.compile and torch.export, before which plans are made.
    """
    is_lazy = x.device.type == "xla" or isinstance(x, FakeTensor)
    return is_lazy and not is_captured()


def is_exporting() -> bool:
    """Say whether torch.export captures; the public question is answered with yes inside
    torch.compile, too, by torch 2.11.
    """
    return torch.compiler._is_exporting_flag


def has_numbers(x: Tensor) -> bool:
    """Say whether a tensor has numbers in this process now."""
    return not (x.is_meta or is_traced(x))


def can_look(x: Tensor) -> bool:
    """Say whether Python may read numbers of a tensor and decide by them."""
    return has_numbers(x) and not is_captured()
