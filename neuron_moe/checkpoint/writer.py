"""Writing checkpoints in the layout of their publishers."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from neuron_moe.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from neuron_moe.checkpoint.weight_map import WeightMap
from neuron_moe.errors import check_positive_int
from neuron_moe.quantize.bf16 import FLOAT_DTYPES, is_finite, round_to_bf16


def save_checkpoint(
    parameters: Mapping[str, Tensor],
    weight_map: WeightMap,
    directory: str | Path,
    *,
    variant: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_mib: int = 4096,
) -> list[Path]:
    """Write parameters as safetensors, through the map run backward; no file unless all succeed.

    At most one shard is in memory beside the parameters.

    Args:
        parameters: every parameter and persistent buffer, `unique_parameters(model)`.
        weight_map: the model's map.
        directory: where to; made if missing. It must not hold weights already.
        variant: storage form, such as "mxfp4", where the map knows several.
        dtype: what float tensors are stored as; bfloat16 or float32. Those of an exact rule stay
            float32.
        max_shard_mib: largest shard in MiB; a single tensor above it gets a shard of its own.

    Returns:
        The files written: `model.safetensors`, or the shards and their index.

    Raises:
        ValueError: if the directory holds weights, parameters and map do not match, or a value is
            not finite.
    """
    check_positive_int("max_shard_mib", max_shard_mib)
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"dtype={dtype}: must be bfloat16 or float32, what checkpoints of float weights use."
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if present := sorted(path.name for path in directory.glob("*.safetensors*")):
        raise ValueError(
            f"{directory}: must not hold weights yet, but has {present[0]}. "
            "Choose another directory, or delete them."
        )
    shards: list[tuple[Path, dict[str, int]]] = []
    pending: dict[str, Tensor] = {}
    exact = weight_map.exact_keys()
    try:
        for key, tensor in weight_map.export(parameters, variant):
            stored = _to_stored(key, tensor, torch.float32 if key in exact else dtype)
            size = sum(waiting.nbytes for waiting in pending.values()) + stored.nbytes
            if pending and size > max_shard_mib << 20:
                _write_shard(directory, shards, pending)
            pending[key] = stored
        _write_shard(directory, shards, pending)
        return _name_shards(directory, shards)
    finally:
        for path, _ in shards:
            path.unlink(missing_ok=True)


def _to_stored(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor of the dtype it is stored in."""
    if tensor.dtype in FLOAT_DTYPES:
        if not is_finite(tensor):
            raise ValueError(
                f"{key} {list(tensor.shape)} holds NaN or infinity: a checkpoint must be finite. "
                "Repair the parameter."
            )
        tensor = round_to_bf16(tensor) if dtype == torch.bfloat16 else tensor.to(dtype)
    return tensor.contiguous()


def _write_shard(
    directory: Path, shards: list[tuple[Path, dict[str, int]]], pending: dict[str, Tensor]
) -> None:
    """Write the waiting tensors under a name for the time being, and forget them."""
    path = directory / f"unfinished-{len(shards):05d}.safetensors"
    shards.append((path, {key: tensor.nbytes for key, tensor in pending.items()}))
    save_file(pending, path, metadata={"format": "pt"})
    pending.clear()


def _name_shards(directory: Path, shards: list[tuple[Path, dict[str, int]]]) -> list[Path]:
    """Give the shards their final names, which tell their number, and write the index."""
    if len(shards) == 1:
        return [shards[0][0].rename(directory / SINGLE_FILE)]
    files, weight_map = [], {}
    for number, (path, sizes) in enumerate(shards, start=1):
        file = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(path.rename(file))
        weight_map.update(dict.fromkeys(sizes, file.name))
    total = sum(size for _, sizes in shards for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    index_file = directory / INDEX_FILE
    index_file.write_text(json.dumps(index, indent=2) + "\n")
    return [*files, index_file]
