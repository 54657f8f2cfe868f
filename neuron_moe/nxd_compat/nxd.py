"""NxD itself, where this process has loaded it; nothing here imports it."""

import functools
import os
import sys
from types import ModuleType
from typing import Any

from torch import nn

NXD_STATE = "neuronx_distributed.parallel_layers.parallel_state"
NXD_LAYERS = "neuronx_distributed.parallel_layers.layers"
NXD_QUANTIZED = "neuronx_distributed.quantization.quantization_mappings"
NXD_MOE_GROUPS = "neuronx_distributed.modules.moe.moe_process_group"


def loaded(name: str) -> ModuleType | None:
    """Return a module that was imported before, or None."""
    return sys.modules.get(name)


def is_on_cpu() -> bool:
    """Say whether NxD is set to use gloo groups."""
    return int(os.environ.get("NXD_CPU_MODE", "0") or 0) > 0


def as_parallel_layer(module: nn.Module, name: str = "BaseParallelLinear") -> None:
    """Make a module an instance of NxD's class too, by which its sharder knows what to slice.

    Nothing of that class runs: ours comes first, and its constructor is not called.
    """
    layers = loaded(NXD_LAYERS)
    base: type | None = getattr(layers, name, None)
    if base is not None and not isinstance(module, base):
        module.__class__ = _joined(type(module), base)  # type: ignore[arg-type]


def set_quantized_form(module: nn.Module, form: type) -> None:
    """Let NxD's `quantize.convert` turn modules of a class by `form.from_float`."""
    mappings = loaded(NXD_QUANTIZED)
    if mappings is not None:
        mappings.DEFAULT_QUANT_MODULE_MAPPINGS[type(module)] = form


@functools.cache
def _joined(ours: type, base: type) -> Any:
    return type(ours.__name__, (ours, base), {"__module__": ours.__module__})
