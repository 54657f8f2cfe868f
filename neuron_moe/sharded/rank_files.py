"""The files of all ranks of a sharded checkpoint, read as one checkpoint."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint.lazy import LazyTensor, Selection
from neuron_moe.checkpoint.load import unique_parameters
from neuron_moe.checkpoint.reader import Checkpoint, open_checkpoint
from neuron_moe.checkpoint.scaled import decode, expand_scales
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.sharded.load import INDEX_NAME, file_name, scales_of
from neuron_moe.sharded.sharding import ModuleSharding, sharding_of


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank holds of a model.

    Args:
        sharding: which part of each parameter.
        parameters: in the shapes of this rank, on the meta device.
    """

    sharding: ModuleSharding
    parameters: Mapping[str, Tensor]


def rank_parts(build: Callable[[], nn.Module], config: ParallelConfig) -> list[RankPart]:
    """Return what each rank of a layout holds.

    Args:
        build: makes the model; called under the meta device, once for each rank.
        config: the layout.

    Raises:
        ValueError: the model does not divide so.
    """
    parts = []
    for rank in range(config.model_size):
        with parallel_state.as_rank(config, rank), torch.device("meta"):
            model = build()
            parts.append(RankPart(sharding_of(model), unique_parameters(model)))
    return parts


def read_layout(directory: Path) -> ParallelConfig:
    """Return the layout a sharded checkpoint was cut for.

    Raises:
        ValueError: its index is not as it must be.
    """
    path = directory / INDEX_NAME
    try:
        return ParallelConfig(**json.loads(path.read_text(encoding="utf-8"))["parallel"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: must say how ranks share the model, but {error}.") from error


def merge_ranks(
    directory: Path, parts: Sequence[RankPart], whole: Mapping[str, Tensor]
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Return the parameters of the whole model, and what multiplies the codes of those in fp8.

    Args:
        directory: of the sharded checkpoint.
        parts: what each rank holds.
        whole: the parameters of the model, on the meta device.

    Raises:
        FileNotFoundError: a rank's file is missing.
        ValueError: a file lacks a tensor, or has one of another shape.
    """
    files = [open_checkpoint(directory / file_name(rank, len(parts))) for rank in range(len(parts))]
    values, scales = {}, {}
    for name, parameter in whole.items():
        shape = tuple(parameter.shape)
        selections = [part.sharding(name, shape) for part in parts]
        held = [
            _open(file, name, selection) for file, selection in zip(files, selections, strict=True)
        ]
        values[name] = _join(name, shape, selections, [value for value, _ in held])
        factors = [factor for _, factor in held if factor is not None]
        if len(factors) == len(held):
            scales[name] = _join(name, shape, selections, factors)
    return values, scales


def _open(
    file: Checkpoint, name: str, selection: Selection
) -> tuple[LazyTensor, LazyTensor | None]:
    """Return a rank's part of a parameter, and of its scales where it is in fp8."""
    shape = tuple(map(len, selection))
    found = file.tensors.get(name)
    if found is None or found.shape != shape:
        have = "has none" if found is None else f"has {list(found.shape)}"
        raise ValueError(
            f"{file.path}: {name} must be {list(shape)}, but the file {have}. Shard the checkpoint"
            " again."
        )
    codes, scale = file.lazy(name), scales_of(file).get(name)
    if scale is None:
        return codes, None
    factors = file.lazy(scale)
    return decode(codes, factors), expand_scales(codes, factors)


def _join(
    name: str,
    shape: tuple[int, ...],
    selections: Sequence[Selection],
    parts: Sequence[LazyTensor],
) -> LazyTensor:
    """Return a tensor that is put together of what ranks hold; of copies the first is read."""
    places: dict[tuple[int, int], Tensor] = {}

    def place(rank: int, axis: int) -> Tensor:
        """Where each index of an axis is in a rank's part; -1 where it does not."""
        if (rank, axis) not in places:
            held = torch.tensor(selections[rank][axis], dtype=torch.long)
            where = torch.full((shape[axis],), -1, dtype=torch.long)
            places[rank, axis] = where.index_copy_(0, held, torch.arange(len(held)))
        return places[rank, axis]

    def read(selection: Selection) -> Tensor:
        result = torch.empty(tuple(map(len, selection)), dtype=parts[0].dtype)
        missing, filled = result.numel(), set()
        for rank, part in enumerate(parts):
            local = [
                place(rank, axis)[torch.tensor(indices, dtype=torch.long)]
                for axis, indices in enumerate(selection)
            ]
            found = [(index >= 0).nonzero().flatten() for index in local]
            region = tuple(index.numpy().tobytes() for index in found)
            if region in filled or any(len(index) == 0 for index in found):
                continue
            inner = tuple(
                tuple(index[where].tolist()) for index, where in zip(local, found, strict=True)
            )
            values = part.read(inner)
            result[torch.meshgrid(*found, indexing="ij")] = values
            missing -= values.numel()
            filled.add(region)
        assert missing == 0, f"{name}: ranks overlap, or leave {missing} values out"
        return result

    return LazyTensor(name, shape, parts[0].dtype, read)
