"""Loaders of vllm-neuron, one for each parameter, made from our weight map.

The plugin opens the files and hands each loader slices of the tensors it names; what it makes of
them is one assignment of the map, cut for this rank before anything is stacked or decoded.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import (
    Match,
    Selection,
    TensorInfo,
    WeightMap,
    match_parameters,
    open_checkpoint,
    read_matched,
    unique_parameters,
)
from neuron_moe.checkpoint.lazy import hull, take, within
from neuron_moe.models.dense_parts import Part
from neuron_moe.sharded.sharding import sharding_of

Transform = Callable[[Sequence[Any], int], Tensor]


@dataclass(frozen=True, slots=True)
class ParameterLoader:
    """What fills one parameter.

    Attributes:
        keys: tensors of the checkpoint, as the files name them.
        transform: given their slices in this order and the rank, returns the parameter.
    """

    keys: tuple[str, ...]
    transform: Transform


def parameter_loaders(
    model: nn.Module,
    weight_map: WeightMap,
    folder: str | Path,
    parts: Mapping[str, Part] | None = None,
) -> dict[str, ParameterLoader]:
    """Return the loader of every parameter of a model that was built for one rank.

    Args:
        model: may be on the meta device.
        weight_map: of the model.
        folder: of the checkpoint; headers are read, no data.
        parts: what `neuron_dense.cut_dense` left of dense weights.

    Raises:
        ValueError: as `neuron_moe.checkpoint.load_weights`; nothing was read.
    """
    source = _Slices()
    checkpoint = replace(open_checkpoint(folder), read_part=source.read)
    of_experts, parts = sharding_of(model), parts or {}

    def shard(name: str, shape: tuple[int, ...]) -> Selection:
        return parts[name].selection(shape) if name in parts else of_experts(name, shape)

    matches = match_parameters(checkpoint, weight_map, unique_parameters(model), shard=shard)
    stored = {
        name: tuple(
            info.name for info in (checkpoint.tensors[name], checkpoint.scales.get(name)) if info
        )
        for name in checkpoint.tensors
    }
    loaders = {}
    for match in matches:
        keys = tuple(key for name in match[0].keys for key in stored[name])
        name = match[0].target
        loaders[name] = ParameterLoader(keys, _transform(match, keys, source, parts.get(name)))
    return loaders


class _Slices(threading.local):
    """Reads parts of the slices that a loader was handed, in its own thread."""

    def __init__(self) -> None:
        self.by_key: Mapping[str, Any] = {}

    def read(self, info: TensorInfo, selection: Selection) -> Tensor:
        """Return the selected part of a tensor: slices take ranges, the rest is picked after."""
        spans = [hull(indices) for indices in selection]
        part: Tensor = self.by_key[info.name][tuple(slice(s.start, s.stop) for s in spans)]
        local = (within(each, span.start) for each, span in zip(selection, spans, strict=True))
        return take(part, tuple(local))


def _transform(
    match: Match, keys: tuple[str, ...], source: _Slices, part: Part | None
) -> Transform:
    def transform(slices: Sequence[Any], rank: int) -> Tensor:
        if len(slices) != len(keys):
            raise ValueError(
                f"{match[0].target}: {len(slices)} slices, must be those of {len(keys)} tensors:"
                f" {', '.join(keys[:4])}. Map the parameter to all of them."
            )
        source.by_key = dict(zip(keys, slices, strict=True))
        try:
            read = read_matched([match])[match[0].target]
            return read if part is None else part.clear(read)
        finally:
            source.by_key = {}

    return transform


def assign(model: nn.Module, loaded: Mapping[str, Tensor], device: torch.device) -> None:
    """Put loaded tensors into a model in place of its parameters.

    Raises:
        ValueError: one is missing.
    """
    unique = unique_parameters(model)
    missing = sorted(unique.keys() - loaded.keys())
    if missing:
        raise ValueError(
            f"{missing[0]}: not loaded, as are {len(missing) - 1} more. Load all parameters."
        )
    by_id = {
        id(tensor): nn.Parameter(loaded[name].to(device), requires_grad=False)
        for name, tensor in unique.items()
    }
    state = model.state_dict(keep_vars=True)
    model.load_state_dict({name: by_id[id(each)] for name, each in state.items()}, assign=True)
