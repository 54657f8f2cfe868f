"""A strict reader of safetensors files that never holds more than the part requested.

The format: eight bytes, little endian, give the length of a JSON header; the header gives dtype,
shape and byte range of each tensor; the data follows without gaps.
Source: huggingface/safetensors, README, section Format.
"""

import itertools
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_moe.checkpoint.lazy import LazyTensor, Selection, hull, runs, take, within
from neuron_moe.checkpoint.scaled import FP8_DTYPES, decode, expand_scales, pair_scales
from neuron_moe.quantize.bf16 import is_finite

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE = "a pickle, which is not read: convert it."
OTHER_FORMATS = {
    **dict.fromkeys((".bin", ".pt", ".pth"), _PICKLE),
    ".gguf": "llama.cpp's format, which is not read. Take the model it was made of.",
}
_MOST_RUNS = 8  # more gaps than these are read too, and dropped
_MOST_AT_ONCE = 1 << 20  # bytes that are read with the gaps between rows
LFS_POINTER = b"version https://git-lfs"
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# NumPy has no bfloat16 and no fp8: bytes travel as integers of the same width.
_CARRIERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is, without its data.

    Args:
        name: its key.
        shape: its shape.
        dtype: its torch dtype.
        file: the file that holds it.
        offset: its first byte, counted from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        return prod(self.shape) * self.dtype.itemsize


ReadPart = Callable[[TensorInfo, Selection], Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint by name, their data still on disk.

    Args:
        path: the directory or file it was opened from.
        tensors: what it holds; of a quantised weight its codes, under the name of the weight.
        scales: what multiplies the codes of a weight, by its name.
        reads_scales: `lazy` gives the scales of quantised weights in the place of their values.
        read_part: where the data comes from in place of the files; given a tensor and a selection.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    scales: Mapping[str, TensorInfo] = field(default_factory=dict)
    reads_scales: bool = False
    read_part: ReadPart | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in (*self.tensors.values(), *self.scales.values()))

    def lazy(self, name: str) -> LazyTensor:
        """Return a tensor that reads parts of `name`, decoded, and refuses NaN and infinity.

        Raises:
            ValueError: codes and scales that do not belong together.
        """
        codes = self._plain(self.tensors[name])
        if name not in self.scales:
            return codes
        scales, is_fp8 = self._plain(self.scales[name]), codes.dtype in FP8_DTYPES
        wants_scales = self.reads_scales and is_fp8
        return expand_scales(codes, scales) if wants_scales else decode(codes, scales)

    def _plain(self, info: TensorInfo) -> LazyTensor:
        """Return a tensor as it is stored."""
        read_part = self.read_part or _read_part

        def read(selection: Selection) -> Tensor:
            return _check_finite(info, read_part(info, selection))

        return LazyTensor(info.name, info.shape, info.dtype, read)

    def is_fp8(self, names: Iterable[str]) -> bool:
        """Say whether all of some tensors are fp8 codes with scales."""
        return all(name in self.scales and self.tensors[name].dtype in FP8_DTYPES for name in names)

    def of_scales(self) -> "Checkpoint":
        """Return a view that reads, for each element of an fp8 weight, what multiplies its code."""
        return replace(self, reads_scales=True)

    def read(self, name: str) -> Tensor:
        """Read one whole tensor.

        Raises:
            ValueError: if the checkpoint has no such tensor, or it holds NaN or infinity.
        """
        if name not in self.tensors:
            raise ValueError(
                f"{name}: {self.path} holds no such tensor. Look among Checkpoint.tensors."
            )
        lazy = self.lazy(name)
        return lazy.read(tuple(range(size) for size in lazy.shape))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint and check its headers; no tensor data is read.

    Args:
        path: a directory with `model.safetensors` or with `model.safetensors.index.json` and its
            shards, or one `.safetensors` file.

    Raises:
        FileNotFoundError: if nothing of that kind is there, or a shard is missing.
        ValueError: if a header or the index is corrupt, or a file is truncated.
    """
    path = Path(path)
    if path.is_file():
        return Checkpoint(path, *pair_scales(_read_header(path)))
    if (path / SINGLE_FILE).is_file():
        return Checkpoint(path, *pair_scales(_read_header(path / SINGLE_FILE)))
    if (path / INDEX_FILE).is_file():
        return Checkpoint(path, *pair_scales(_read_shards(path)))
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: must be a checkpoint directory or a .safetensors file, but does not exist. "
            "Check the path."
        )
    hint = "Check the path, or download the checkpoint again."
    for entry in sorted(path.iterdir()):
        if entry.suffix in OTHER_FORMATS:
            hint = f"{entry.name} is {OTHER_FORMATS[entry.suffix]}"
            break
    raise FileNotFoundError(
        f"{path}: must hold {SINGLE_FILE} or {INDEX_FILE} with its shards, but holds neither."
        f" {hint}"
    )


def _read_shards(directory: Path) -> dict[str, TensorInfo]:
    """Read the headers of all shards; they must hold exactly what the index says."""
    index_path = directory / INDEX_FILE
    advice = "Download the index again, or rebuild it from the shards."
    try:
        index = json.loads(index_path.read_bytes(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index_path}: must be JSON, but {error}. {advice}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(
            f"{index_path}: must have a `weight_map` from tensor name to file name. {advice}"
        )
    shards = sorted(set(files.values()))
    for file in shards:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{index_path}: shard {file!r} must be the plain name of a .safetensors file "
                f"beside the index. {advice}"
            )
        if not (directory / file).is_file():
            raise FileNotFoundError(
                f"{directory / file}: missing, but must be there, for {INDEX_FILE} names it. "
                "Download the shard again."
            )
    tensors: dict[str, TensorInfo] = {}
    for file in shards:
        found = _read_header(directory / file)
        promised = {name for name, place in files.items() if place == file}
        if difference := sorted(promised ^ found.keys()):
            raise ValueError(
                f"{index_path}: {difference[0]!r} is only in the index or only in {file} (as are "
                f"{len(difference) - 1} more); both must agree. {advice}"
            )
        tensors.update(found)
    return tensors


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """Read and check the header of one file."""
    advice = "Download or copy the file again."
    size = file.stat().st_size
    with file.open("rb") as stream:
        if (first := stream.read(len(LFS_POINTER))) == LFS_POINTER:
            raise ValueError(
                f"{file}: {size} bytes, which name a file of Git LFS and are not it. Fetch it with "
                "git lfs pull, or download it."
            )
        stream.seek(8)
        header_size = int.from_bytes(first[:8], "little")
        if size < 8 or header_size > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{file}: {size} bytes, header of {header_size} bytes: the header must fit the "
                f"file and stay below {MAX_HEADER_BYTES} bytes. The file is truncated or no "
                f"safetensors. {advice}"
            )
        raw = stream.read(header_size)
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the header must be JSON, but {error}. {advice}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the header must be a JSON object. {advice}")
    header.pop("__metadata__", None)
    start = 8 + header_size
    tensors = {name: _read_entry(file, start, name, entry) for name, entry in header.items()}
    position = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            raise ValueError(
                f"{file}: {info.name} begins at byte {info.offset}, must begin at {position}, "
                f"where the tensor before it ends. The header is corrupt. {advice}"
            )
        position += info.nbytes
    if position > size:
        cut = [info.name for info in tensors.values() if info.offset + info.nbytes > size]
        raise ValueError(
            f"{file}: {size} bytes, must be {position} by its header. The file is truncated: "
            f"{min(cut, key=lambda name: tensors[name].offset)} is incomplete, {len(cut) - 1} "
            f"more are. {advice}"
        )
    if position < size:
        raise ValueError(
            f"{file}: {size} bytes, must be {position} by its header. The tensors are followed by "
            f"foreign bytes. {advice}"
        )
    return tensors


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from JSON pairs; refuse a key that comes twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in result if names.count(name) > 1)
        raise ValueError(f"{twice!r} comes twice")
    return result


def _read_entry(file: Path, start: int, name: str, entry: object) -> TensorInfo:
    """Check one entry of a header."""
    advice = "Download or copy the file again."
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(
            f"{file}: {name} must have dtype, shape and data_offsets in the header. {advice}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"{file}: {name} has dtype {dtype!r}, must be one of {', '.join(DTYPES)}. "
            "Convert the checkpoint."
        )
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{file}: {name} has shape {shape} and data_offsets {offsets}, must be lists of "
            f"integers of 0 and more. The header is corrupt. {advice}"
        )
    info = TensorInfo(name, tuple(shape), DTYPES[dtype], file, start + offsets[0])
    if offsets[1] - offsets[0] != info.nbytes:
        raise ValueError(
            f"{file}: {name} {shape} {dtype} has {offsets[1] - offsets[0]} bytes, must have "
            f"{info.nbytes}. The header is corrupt. {advice}"
        )
    return info


def _are_counts(values: object) -> bool:
    """Say whether a value is a list of integers of 0 and more."""
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def _check_finite(info: TensorInfo, tensor: Tensor) -> Tensor:
    """Return part of a tensor; refuse NaN and infinity."""
    if not tensor.is_floating_point():
        return tensor
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    if not is_finite(values):
        count = int((~torch.isfinite(values)).sum())
        raise ValueError(
            f"{info.name} in {info.file} holds {count} NaN or infinite values: weights must be "
            "finite. The file is damaged or its training diverged; download it again."
        )
    return tensor


def _read_part(info: TensorInfo, selection: Selection) -> Tensor:
    """Copy the selected part of a tensor out of its file, run by run where indices leave gaps."""
    if 0 in info.shape or not all(map(len, selection)):
        return take(torch.empty(info.shape, dtype=info.dtype), selection)
    for axis, indices in enumerate(selection):
        if isinstance(indices, range) or len(spans := runs(indices)) > _MOST_RUNS:
            continue
        if len(spans) > 1 or spans[0] != hull(indices):
            parts = [
                _read_part(info, (*selection[:axis], span, *selection[axis + 1 :]))
                for span in spans
            ]
            return torch.cat(parts, dim=axis)
    return _read_window(info, selection)


def _read_window(info: TensorInfo, selection: Selection) -> Tensor:
    """Copy the smallest window that holds a selection, then take the selection.

    Read are the bytes of the window alone: a map of the file, or the system reading ahead, would
    read twice as many where a rank takes a part of each matrix (measured).
    """
    window = tuple(hull(indices) for indices in selection)
    part = np.empty(tuple(map(len, window)), dtype=_CARRIERS[info.dtype.itemsize])
    with info.file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        _read_rows(stream, info, window, part)
    tensor = torch.from_numpy(part).view(info.dtype)
    local = tuple(
        within(indices, axis.start) for indices, axis in zip(selection, window, strict=True)
    )
    return take(tensor, local)


def _read_rows(
    stream: FileIO, info: TensorInfo, window: tuple[range, ...], part: np.ndarray
) -> None:
    """Fill a window, matrix by matrix; whole trailing axes make one longer row."""
    axes = len(window)
    while axes > 1 and len(window[axes - 1]) == info.shape[axes - 1]:
        axes -= 1
    shape = (1, 1, *info.shape[: axes - 1], prod(info.shape[axes - 1 :]))
    inner = shape[-1] // info.shape[axes - 1] if axes else 1
    first = window[axes - 1].start * inner if axes else 0
    outer = (range(1), range(1), *window[: max(0, axes - 1)])
    rows = len(outer[-1])
    data_nb = part.reshape(prod(map(len, outer)), -1).view(np.uint8)
    for number, place in enumerate(itertools.product(*outer[:-1])):
        row = int(np.ravel_multi_index((*place, outer[-1].start), shape[:-1]))
        offset = info.offset + (row * shape[-1] + first) * info.dtype.itemsize
        matrix_nb = data_nb[number * rows : (number + 1) * rows]
        _read_matrix(stream, offset, shape[-1] * info.dtype.itemsize, matrix_nb)


def _read_matrix(stream: FileIO, offset: int, stride: int, rows_nb: np.ndarray) -> None:
    """Fill rows from bytes that are `stride` apart in a file; gaps below a page are read too."""
    num_rows, row_bytes = rows_nb.shape
    if num_rows == 1 or stride == row_bytes:
        _read_exactly(stream, offset, rows_nb)
        return
    if stride - row_bytes >= mmap.PAGESIZE:
        for number, row_b in enumerate(rows_nb):
            _read_exactly(stream, offset + number * stride, row_b)
        return
    at_once = max(1, _MOST_AT_ONCE // stride)
    buffer_nb = np.empty((min(at_once, num_rows), stride), dtype=np.uint8)
    for start in range(0, num_rows, at_once):
        rows = min(at_once, num_rows - start)
        num_bytes = (rows - 1) * stride + row_bytes  # the last row may end the file
        _read_exactly(stream, offset + start * stride, buffer_nb.reshape(-1)[:num_bytes])
        rows_nb[start : start + rows] = buffer_nb[:rows, :row_bytes]


def _read_exactly(stream: FileIO, offset: int, target: np.ndarray) -> None:
    """Fill contiguous memory from a place of a file."""
    stream.seek(offset)
    left = target.data.cast("B")
    while left:
        count = stream.readinto(left)
        if not count:
            raise ValueError(
                f"{stream.name}: ends at byte {stream.tell()}, but was longer when it was opened."
                " Load it again when nothing writes there."
            )
        left = left[count:]
