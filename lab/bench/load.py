"""neuron-moe bench load: memory and bytes read while one rank's weights stream out of a checkpoint.

    neuron-moe bench load --gib 20 --tp 8 --ep 4

Writes random weights with the layer sizes of Qwen3-30B-A3B, as many layers as fit, in files of
4 GiB: under the published names, experts one by one, and the file of the last rank that `convert`
makes of them. A fresh process then reads the part of the last rank from each, piece by piece, and
drops the pieces of a layer when the next layer begins, as a loader that fills a device would.

The share is what the rank holds. Requested are the bytes the reader copies out of the files; in
pages are all bytes of the pages that hold them, below which no reader through the page cache comes:
of a matrix that is cut along its rows, these are all. From disk are those that the process caused
to be read (/proc/self/io) after the files were dropped from the page cache.
"""

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Checkpoint, LazyTensor, Selection, open_checkpoint
from neuron_moe.checkpoint.lazy import everything, hull, pieces
from neuron_moe.checkpoint.load import PIECE_BYTES, unique_parameters
from neuron_moe.checkpoint.reader import TensorInfo
from neuron_moe.checkpoint.staging import Staging
from neuron_moe.configs import load_config
from neuron_moe.models.conversion import ConversionOptions, convert
from neuron_moe.models.conversion_targets import PublishedTarget
from neuron_moe.models.loader import CONFIG_FILE, build_model, find_model_file, read_config
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.sharded.load import file_name, stream_shard
from neuron_moe.tools.console import format_bytes, format_table, tell_json
from neuron_moe.tools.parsers import Parser

MODEL = "qwen3_30b_a3b"
FILE_BYTES = 4 << 30
SLACK_BYTES = 512 << 20
MOST_READ = 1.1
_POOL_VALUES = 1 << 24


class TouchedPages:
    """The pages of files that hold what was requested."""

    def __init__(self) -> None:
        self._starts_minus_ends: dict[Path, np.ndarray] = {}

    def add(self, info: TensorInfo, selection: Selection) -> None:
        """Count the window of a selection."""
        changes = self._starts_minus_ends.get(info.file)
        if changes is None:
            changes = np.zeros(info.file.stat().st_size // mmap.PAGESIZE + 2, dtype=np.int32)
            self._starts_minus_ends[info.file] = changes
        windows = [hull(indices) for indices in selection]
        row_of = np.zeros(1, dtype=np.int64)
        for size, window in zip(info.shape[:-1], windows[:-1], strict=True):
            row_of = (row_of[:, None] * size + np.arange(window.start, window.stop)).ravel()
        width, last = (info.shape[-1], windows[-1]) if info.shape else (1, range(1))
        first = info.offset + (row_of * width + last.start) * info.dtype.itemsize
        end = first + len(last) * info.dtype.itemsize
        np.add.at(changes, first // mmap.PAGESIZE, 1)
        np.add.at(changes, (end - 1) // mmap.PAGESIZE + 1, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, each once."""
        touched = (np.cumsum(changes) > 0 for changes in self._starts_minus_ends.values())
        return mmap.PAGESIZE * sum(int(pages.sum()) for pages in touched)


@dataclass(frozen=True)
class CountedCheckpoint(Checkpoint):
    """A checkpoint that counts the bytes copied out of its files, and the pages they are in."""

    counts: list[int] = field(default_factory=list)
    pages: TouchedPages = field(default_factory=TouchedPages)

    def lazy(self, name: str) -> LazyTensor:
        """Return a tensor that counts what is read of it."""
        tensor = super().lazy(name)

        def read(selection: Selection) -> Tensor:
            self.counts.append(prod(map(len, selection)) * tensor.dtype.itemsize)
            self.pages.add(self.tensors[name], selection)
            return tensor.read(selection)

        return replace(tensor, read=read)


def main(argv: list[str] | None = None) -> int:
    """Write, measure, print; return 1 where a limit is exceeded."""
    args = _parser().parse_args(argv)
    config = ParallelConfig(tp=args.tp, ep=args.ep)
    if args.worker is not None:
        print(json.dumps(_measure(args.worker, config)))
        return 0
    if args.gib <= 0:
        raise ValueError(f"--gib={args.gib}: must be positive.")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        published, ranks = Path(folder, "published"), Path(folder, "ranks")
        write_checkpoint(published, args.gib)
        last = (config.model_size - 1,)
        convert(published, ranks, ConversionOptions(to="bf16", tp=args.tp, ep=args.ep, ranks=last))
        folders = {"published": published, "rank files": ranks}
        rows = {kind: _run_worker(path, args) for kind, path in folders.items()}
    _print_rows(rows, args)
    is_good = _holds(rows)
    tell_json(
        args.json,
        "bench load",
        kind="measured",
        gib=args.gib,
        tp=args.tp,
        ep=args.ep,
        holds=is_good,
        rows=rows,
    )
    return 0 if is_good else 1


def write_checkpoint(folder: Path, gib: float) -> None:
    """Write random bfloat16 weights of about so many GiB, file for file as they are published.

    Args:
        folder: made; must not exist.
        gib: GiB of weights; at least one layer is written.
    """
    values = {**load_config(MODEL), "num_hidden_layers": 1}
    file = find_model_file(values["model_type"])
    layer_bytes = _bytes_of(file, values | {"num_hidden_layers": 2}) - _bytes_of(file, values)
    rest = _bytes_of(file, values) - layer_bytes
    values["num_hidden_layers"] = max(1, round((gib * 2**30 - rest) / layer_bytes))
    config = file.Config.from_hf(values)
    with torch.device("meta"):
        parameters = unique_parameters(file.Model(config))
    folder.mkdir()
    target = PublishedTarget(parameters, file.weight_map(config), "bf16", None, FILE_BYTES)
    staging = Staging(folder, {})
    pool = torch.randn(_POOL_VALUES, generator=torch.Generator().manual_seed(0))
    pool_bytes = pool.to(torch.bfloat16)
    for name, entries, metadata in target.files():
        staging.lay_out(name, entries, metadata)
        for key, stored in entries.items():
            for _, place in pieces(everything(stored.shape), 2, PIECE_BYTES):
                shape = tuple(map(len, place))
                part = pool_bytes[: prod(shape)].view(shape)
                staging.write(name, key, min(place[0]), part)
    staging.publish({**target.indices(), CONFIG_FILE: json.dumps(values)})


def _bytes_of(file: Any, values: dict[str, Any]) -> int:
    """Return the bytes of a model's parameters in bfloat16."""
    with torch.device("meta"):
        model: nn.Module = file.Model(file.Config.from_hf(values))
    return 2 * sum(parameter.numel() for parameter in model.parameters())


def _run_worker(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, with the files out of the page cache."""
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-m", "neuron_moe.tools.cli", "bench", "load", "--worker", str(path)]
    command += ["--tp", str(args.tp), "--ep", str(args.ep)]
    found: dict[str, Any] = json.loads(subprocess.check_output(command).splitlines()[-1])
    return found


def _measure(folder: Path, config: ParallelConfig) -> dict[str, Any]:
    """Stream the part of the last rank; return bytes and seconds."""
    rank = config.model_size - 1
    with parallel_state.as_rank(config, rank):
        model = build_model(folder)
        parameters = unique_parameters(model)
        path = folder / file_name(rank, config.model_size)
        opened = open_checkpoint(path if path.is_file() else folder)
        checkpoint = CountedCheckpoint(opened.path, opened.tensors, opened.scales)
        if path.is_file():
            stream = _stream_file(checkpoint)
        else:
            values = read_config(folder)
            file = find_model_file(values["model_type"])
            stream = stream_shard(model, checkpoint, file.weight_map(model.config))
        before, disk_before = psutil.Process().memory_info().rss, _disk_bytes()
        start = time.perf_counter()
        num_bytes = _hold_layers(stream)
        seconds = time.perf_counter() - start
    return {
        "share_bytes": sum(tensor.nbytes for tensor in parameters.values()),
        "streamed_bytes": num_bytes,
        "asked_bytes": sum(checkpoint.counts),
        "page_bytes": checkpoint.pages.nbytes,
        "disk_bytes": _disk_bytes() - disk_before,
        "layer_bytes": _largest_layer(parameters),
        "before_bytes": before,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": seconds,
    }


def _stream_file(checkpoint: Checkpoint) -> Iterator[tuple[str, Selection, Tensor]]:
    """Read a rank's own file in pieces."""
    for name in checkpoint.tensors:
        tensor = checkpoint.lazy(name)
        whole = everything(tensor.shape)
        for piece, place in pieces(whole, tensor.dtype.itemsize, PIECE_BYTES):
            yield name, place, tensor.read(piece)


def _hold_layers(stream: Iterator[tuple[str, Selection, Tensor]]) -> int:
    """Hold the pieces of one layer at a time, of other parameters one; return all bytes."""
    held: list[Tensor] = []
    layer, num_bytes = "", 0
    for name, _, tensor in stream:
        here = _layer_of(name)
        if here != layer or not here:
            held.clear()
        layer = here
        held.append(tensor)
        num_bytes += tensor.nbytes
    return num_bytes


def _layer_of(name: str) -> str:
    return name.split(".")[1] if name.startswith("layers.") else ""


def _largest_layer(parameters: dict[str, Tensor]) -> int:
    """Return the bytes of the largest layer of a rank."""
    sizes: dict[str, int] = {}
    for name, tensor in parameters.items():
        if layer := _layer_of(name):
            sizes[layer] = sizes.get(layer, 0) + tensor.nbytes
    return max(sizes.values())


def _disk_bytes() -> int:
    return int(psutil.Process().io_counters().read_bytes)


def _growth(row: dict[str, Any]) -> int:
    return max(0, int(row["peak_bytes"] - row["before_bytes"]))


def _holds(rows: dict[str, dict[str, Any]]) -> bool:
    """Say whether memory and bytes requested stay within the limits."""
    return all(
        _growth(row) <= row["layer_bytes"] + SLACK_BYTES
        and row["asked_bytes"] <= MOST_READ * row["share_bytes"]
        for row in rows.values()
    )


def _print_rows(rows: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    table = [
        (
            "",
            "share",
            "requested",
            "in pages",
            "from disk",
            "layer",
            "memory grew by",
            "peak",
            "seconds",
        )
    ]
    for kind, row in rows.items():
        share = row["share_bytes"]
        table.append(
            (
                kind,
                format_bytes(share),
                f"{row['asked_bytes'] / share:.3f} x",
                f"{row['page_bytes'] / share:.3f} x",
                f"{row['disk_bytes'] / share:.3f} x",
                format_bytes(row["layer_bytes"]),
                format_bytes(_growth(row)),
                format_bytes(row["peak_bytes"]),
                f"{row['seconds']:.1f}",
            )
        )
    print(
        f"{args.gib} GiB in the layer sizes of {MODEL}, last rank of TP {args.tp} x EP {args.ep}\n"
    )
    print(format_table(table))
    print(
        f"\nlimits: memory grows by a layer and {format_bytes(SLACK_BYTES)} at most, {MOST_READ} x"
        " the share is requested  [measured]"
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser("bench load", __doc__)
    parser.add_json_option()
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of weights (default: 2)")
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel ranks (default: 8)")
    parser.add_argument("--ep", type=int, default=4, help="expert-parallel ranks (default: 4)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the usual one)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser
