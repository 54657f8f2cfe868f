"""Weights of one rank: from a published checkpoint, and from files that were sharded before.

`load_shard` reads a rank's slices straight out of safetensors. Models that are started often are
better served by a sharded checkpoint: one file for each rank, read without any rearranging.

    sharded.json                        the ParallelConfig, and which save the files are of
    rank-00003-of-00008.safetensors     parameters and buffers of rank 3, under their own names

Every file carries the generation of the save that wrote it. The ranks write under other names
first; the files get theirs once all are complete, `sharded.json` last. What a save leaves that did
not finish is either the checkpoint from before, or a mixture that no rank loads.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from neuron_moe.checkpoint.lazy import Selection
from neuron_moe.checkpoint.load import (
    Progress,
    read_parameters,
    stream_parameters,
    unique_parameters,
)
from neuron_moe.checkpoint.reader import Checkpoint, open_checkpoint
from neuron_moe.checkpoint.scaled import FP8_DTYPES
from neuron_moe.checkpoint.weight_map import WeightMap, placeholders
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import TorchCollectives
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.parallel.failure import gather_objects
from neuron_moe.sharded.sharding import ModuleSharding, sharding_of

INDEX_NAME = "sharded.json"
FORMAT_VERSION = 1


def load_shard(
    model: nn.Module,
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    *,
    progress: Progress | None = None,
) -> None:
    """Fill a model that was built for one rank; on any error it is untouched.

    Only the slices this rank holds are read, before anything is stacked or decoded. A second copy
    of the experts (hybrid layouts) is read in a second pass.

    Args:
        model: may be on the meta device.
        checkpoint: where from.
        weight_map: how.
        progress: called with the bytes filled and all bytes, of the first pass.

    Raises:
        ValueError: as `neuron_moe.checkpoint.load_weights`.
    """
    sharding = sharding_of(model)
    unique = unique_parameters(model)
    first = {name: tensor for name, tensor in unique.items() if name not in sharding.sources}
    filled = read_parameters(checkpoint, weight_map, first, shard=sharding, progress=progress)
    filled.update(_read_second_copies(checkpoint, weight_map, unique, sharding))
    _assign(model, unique, filled)


def stream_shard(
    model: nn.Module,
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    *,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Selection, Tensor]]:
    """Read what `load_shard` would fill a model with, a piece at a time, and keep none of it.

    Args:
        model: built for one rank, on the meta device.
        checkpoint: where from.
        weight_map: how.
        progress: called with the bytes that were read and all bytes.

    Yields:
        Name of the parameter, place of the piece in this rank's part of it, and the piece. Second
        copies of experts (hybrid layouts) are not among them.

    Raises:
        ValueError: as `neuron_moe.checkpoint.load_weights`.
    """
    sharding = sharding_of(model)
    unique = unique_parameters(model)
    first = {name: tensor for name, tensor in unique.items() if name not in sharding.sources}
    yield from stream_parameters(checkpoint, weight_map, first, shard=sharding, progress=progress)


def _read_second_copies(
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    unique: Mapping[str, Tensor],
    sharding: ModuleSharding,
) -> dict[str, Tensor]:
    """Read the parameters that hold other slices of tensors read before."""
    copies = {source: name for name, source in sharding.sources.items()}
    if not copies:
        return {}
    wanted = {source: unique[name] for source, name in copies.items()}
    read = read_parameters(
        checkpoint,
        _only(weight_map, set(wanted)),
        wanted,
        shard=lambda source, shape: sharding(copies[source], shape),
    )
    return {copies[source]: tensor for source, tensor in read.items()}


def _only(weight_map: WeightMap, targets: set[str]) -> WeightMap:
    """Return the rules that fill some targets; what the others read is ignored."""
    kept, ignored = [], list(weight_map.ignored)
    for rule in weight_map.rules:
        first = rule.target.format(**dict.fromkeys(placeholders(rule.target), 0))
        if first in targets:
            kept.append(rule)
        else:
            ignored.extend(rule.patterns)
    return replace(weight_map, rules=kept, ignored=ignored)


def scales_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return for each weight of a rank's file that is fp8 codes the name of its scales."""
    pairs = ((name, scale_name(name)) for name in checkpoint.tensors if name.endswith(".weight"))
    return {name: scale for name, scale in pairs if scale in checkpoint.tensors}


def scale_name(weight: str) -> str:
    """Return what the scales of a weight are called in a state dict, NxD's name."""
    return weight.removesuffix("weight") + "scale"


def _assign(
    model: nn.Module,
    unique: Mapping[str, Tensor],
    filled: Mapping[str, Tensor],
    scales: Mapping[str, Tensor] | None = None,
) -> None:
    loaded = {
        id(tensor): nn.Parameter(filled[name], requires_grad=False)
        if isinstance(tensor, nn.Parameter)
        else filled[name]
        for name, tensor in unique.items()
    }
    state = model.state_dict(keep_vars=True)
    whole = {name: loaded[id(tensor)] for name, tensor in state.items()}
    model.load_state_dict({**whole, **(scales or {})}, assign=True)


def save_sharded(model: nn.Module, directory: str | Path, *, generation: str | None = None) -> Path:
    """Write this rank's part of a model; every rank calls it with the same directory.

    Among running ranks it is collective. Ranks that are made up (`parallel_state.as_rank`) save one
    after another.

    Args:
        model: built under `parallel_state`, and filled.
        directory: made if missing; must not hold a sharded checkpoint of another layout.
        generation: name of the save that made-up ranks belong to; default: the one in the
            directory, or a new one if this rank's file is of it already.

    Returns:
        The file written.

    Raises:
        ValueError: no groups exist, or the directory holds another layout.
    """
    config, rank = _place()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    index = directory / INDEX_NAME
    if index.is_file():
        _check_index(index, config)
    path = directory / file_name(rank, config.model_size)
    if _is_made_up():
        generation = generation or _generation_to_join(index, path)
        unfinished = _write_rank(model, path, generation)
        _write_index(index, config, generation)
        os.replace(unfinished, path)
    else:
        _save_together(model, path, index, config)
    return path


def _save_together(model: nn.Module, path: Path, index: Path, config: ParallelConfig) -> None:
    """Write this rank's file; give it its name when every rank has written, the index last."""
    generation = gather_objects("save_sharded", secrets.token_hex(8))[0]
    problem: Exception | None = None
    try:
        unfinished = _write_rank(model, path, generation)
    except Exception as error:  # noqa: BLE001  raised below, when the other ranks know
        problem = error
    problems = gather_objects("save_sharded", problem and f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    try:
        for rank, other in enumerate(problems):
            if other is not None:
                raise RuntimeError(
                    f"{path}: rank {rank} could not write its part ({other}). No file was replaced;"
                    " save again."
                )
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    gather_objects("save_sharded", "named")
    if dist.get_rank() == 0:
        _write_index(index, config, generation)
    gather_objects("save_sharded", "published")


def _is_made_up() -> bool:
    """Say whether this rank has no processes beside it to wait for."""
    groups = parallel_state.get_groups()
    assert groups is not None
    return not isinstance(groups.model, TorchCollectives)


def _generation_to_join(index: Path, path: Path) -> str:
    """Return the generation in a directory if this rank's file is not of it yet, else a new one."""
    found = _read_index(index).get("generation") if index.is_file() else None
    if found is None or (path.is_file() and _metadata(path).get("generation") == found):
        return secrets.token_hex(8)
    return str(found)


def _write_rank(model: nn.Module, path: Path, generation: str) -> Path:
    """Write this rank's file under a name for the time being; return that."""
    tensors = {
        name: tensor.detach().contiguous() for name, tensor in unique_parameters(model).items()
    }
    unfinished = path.with_name(f"unfinished-{generation}-{secrets.token_hex(4)}-{path.name}")
    try:
        save_file(tensors, unfinished, metadata=rank_metadata(sharding_of(model), generation))
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return unfinished


def rank_metadata(sharding: ModuleSharding, generation: str) -> dict[str, str]:
    """Return what the header of a rank's file says beside its tensors."""
    return {"layout": json.dumps(dict(sharding.layout)), "generation": generation}


def index_text(config: ParallelConfig, generation: str) -> str:
    """Return what the index of a sharded checkpoint says."""
    described = {
        "format": FORMAT_VERSION,
        "parallel": config.to_dict(),
        "generation": generation,
    }
    return json.dumps(described, indent=1) + "\n"


def _write_index(path: Path, config: ParallelConfig, generation: str) -> None:
    unfinished = path.with_name(f"unfinished-{secrets.token_hex(4)}-{path.name}")
    unfinished.write_text(index_text(config, generation), encoding="utf-8")
    os.replace(unfinished, path)


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as header:
        return header.metadata() or {}


def load_sharded(model: nn.Module, directory: str | Path) -> None:
    """Fill a model from what `save_sharded` wrote for this rank; on any error it is untouched.

    Raises:
        FileNotFoundError: the directory or this rank's file is missing.
        ValueError: the files are for another layout or of several saves, or tensors are missing,
            extra or do not fit.
    """
    config, rank = _place()
    directory = Path(directory)
    _check_index(directory / INDEX_NAME, config)
    path = directory / file_name(rank, config.model_size)
    checkpoint = open_checkpoint(path)
    _check_generation(directory, config.model_size)
    saved = json.loads(_metadata(path).get("layout", "{}"))
    layout = sharding_of(model).layout
    for module in sorted(saved.keys() | layout.keys()):
        if saved.get(module) != layout.get(module):
            raise ValueError(
                f"{path}: {module} holds {saved.get(module, 'nothing')}, the model needs"
                f" {layout.get(module, 'nothing')}. Shard the checkpoint again for this layout and"
                " placement."
            )
    unique = unique_parameters(model)
    scales = scales_of(checkpoint)
    odd = sorted(unique.keys() ^ (checkpoint.tensors.keys() - set(scales.values())))
    if odd:
        raise ValueError(
            f"{path}: {odd[0]} must be both in the file and in the model ({len(odd)} names are"
            " not). Shard the checkpoint again for this model."
        )
    for name, tensor in unique.items():
        info = checkpoint.tensors[name]
        dtypes = FP8_DTYPES if name in scales else (tensor.dtype,)
        if info.shape != tuple(tensor.shape) or info.dtype not in dtypes:
            raise ValueError(
                f"{path}: {name} is {info.dtype} {list(info.shape)}, must be {tensor.dtype}"
                f" {list(tensor.shape)}. Shard the checkpoint again for this model."
            )
    filled = {name: checkpoint.read(name) for name in unique}
    _assign(model, unique, filled, {name: checkpoint.read(name) for name in scales.values()})


def shard_checkpoint(
    build: Callable[[], nn.Module],
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    config: ParallelConfig,
    directory: str | Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write the sharded checkpoint of every rank from one process, one rank in memory at a time.

    Args:
        build: makes the model; called under the meta device, once for each rank.
        checkpoint: the whole model.
        weight_map: how its tensors become parameters.
        config: the layout.
        directory: where to.
        progress: called with the ranks written and all ranks.

    Returns:
        The files written.
    """
    written, generation = [], secrets.token_hex(8)
    for rank in range(config.model_size):
        with parallel_state.as_rank(config, rank):
            with torch.device("meta"):
                model = build()
            load_shard(model, checkpoint, weight_map)
            written.append(save_sharded(model, directory, generation=generation))
        if progress is not None:
            progress(rank + 1, config.model_size)
    return written


def _place() -> tuple[ParallelConfig, int]:
    groups = parallel_state.get_groups()
    if groups is None:
        raise ValueError(
            "sharded checkpoint: this process has no rank. Call"
            " parallel_state.initialize_model_parallel() or use parallel_state.as_rank() first."
        )
    return groups.config, groups.rank


def _check_generation(directory: Path, num_ranks: int) -> None:
    """Refuse, on every rank alike, files of which one is not of the save that finished last."""
    published = _read_index(directory / INDEX_NAME).get("generation")
    for path in (directory / file_name(rank, num_ranks) for rank in range(num_ranks)):
        if path.is_file() and (found := _metadata(path).get("generation")) != published:
            raise ValueError(
                f"{path}: of save {found}, but {INDEX_NAME} is of save {published}: a save did not"
                " finish, so the files do not belong together. Save the model again."
            )


def _read_index(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _check_index(path: Path, config: ParallelConfig) -> None:
    """Refuse a sharded checkpoint of another layout."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: must exist beside the files of the ranks. Save with save_sharded()."
        )
    found = _read_index(path)
    if found.get("format") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format={found.get('format')!r} must be {FORMAT_VERSION}. Shard again."
        )
    # How tokens travel does not change what a rank holds.
    irrelevant = ("strategy", "decode_strategy", "sp", "dp", "replicas")
    for name, value in config.to_dict().items():
        saved = found["parallel"].get(name)
        if name not in irrelevant and saved != value:
            raise ValueError(
                f"{path}: sharded for {name}={saved}, must be {name}={value} as this process runs."
                " Shard the checkpoint again, or start with its layout."
            )


def file_name(rank: int, num_ranks: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}.safetensors"
