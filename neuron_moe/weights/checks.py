"""Weights a module is given: refused by name where shape or dtype is wrong."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.errors import WeightError
from neuron_moe.quantize.bf16 import FLOAT_DTYPES


def refuse_wrong_weights(module: nn.Module) -> None:
    """Make `load_state_dict` raise WeightError for a weight of `module` that does not fit.

    torch alone copies integer and fp8 codes into float weights as if they were numbers.
    """
    module.register_load_state_dict_pre_hook(_check_entries)  # type: ignore[no-untyped-call]


def before_load(module: Any, prepare: Callable[..., None]) -> None:
    """Call prepare(module, state_dict, prefix, ..) before a state dict is checked and copied in."""
    handle = module.register_load_state_dict_pre_hook(prepare)
    module._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)


def check_weight(name: str, found: Tensor, shape: Sequence[int]) -> None:
    """Raise WeightError unless a weight has a shape and a float dtype."""
    if tuple(found.shape) != tuple(shape):
        raise WeightError(
            f"{name}: shape {list(found.shape)} must be {list(shape)}. Check its order of axes, and"
            " that module and weights have the same sizes."
        )
    if found.dtype not in (*FLOAT_DTYPES, torch.float64):
        raise WeightError(
            f"{name}: dtype {found.dtype} must be a float dtype of 16 bits or more. Decode"
            " quantised weights first, see neuron_moe.quantize; cast others."
        )


def _check_entries(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object
) -> None:
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        found = state_dict.get(prefix + name)
        if not isinstance(found, Tensor):
            continue
        if weight.is_floating_point():
            check_weight(prefix + name, found, weight.shape)
        elif found.shape != weight.shape or found.is_floating_point():
            raise WeightError(
                f"{prefix}{name}: {found.dtype} of shape {list(found.shape)} must be integers of"
                f" shape {list(weight.shape)}. Check what the checkpoint calls so."
            )
