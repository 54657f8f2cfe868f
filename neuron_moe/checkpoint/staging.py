"""Writing safetensors files a part at a time, to be gone on with after an interruption.

Files are laid out first and filled in any order, so memory holds the part that is being written.
They are in a folder of their own, beside a journal of what is finished, until all are complete;
then they get their names.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuron_moe.checkpoint.encodings import StoredShape
from neuron_moe.checkpoint.reader import DTYPES

STAGING_FOLDER = "unfinished-convert"
_JOURNAL = "journal.jsonl"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SYNC_BYTES = 256 << 20
_ALIGNMENT = 8


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which the system releases if this process dies.

    Raises:
        ValueError: another process or call holds it.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{directory}: another save or conversion is writing there; nothing of this one was"
                " kept. Choose another directory, or save from one process only."
            ) from None
        yield
    finally:
        os.close(handle)


class Staging:
    """The files of one conversion until they are complete.

    Args:
        directory: where the files shall be in the end.
        plan: what the conversion is; one with another plan does not go on with these files.

    Raises:
        ValueError: the directory holds an unfinished conversion of another plan.
    """

    def __init__(self, directory: Path, plan: Mapping[str, Any]) -> None:
        self.directory = directory
        self.folder = directory / STAGING_FOLDER
        self.records: dict[str, dict[str, Any]] = {}
        self._places: dict[str, dict[str, tuple[int, StoredShape]]] = {}
        self._touched: set[str] = set()
        self._pending: list[str] = []
        self._num_pending_bytes = 0
        journal = self.folder / _JOURNAL
        if journal.is_file():
            self._read_journal(journal, plan)
        else:
            self.folder.mkdir(exist_ok=True)
            _write_durably(journal, json.dumps({"plan": plan}) + "\n")

    def lay_out(
        self, name: str, entries: Mapping[str, StoredShape], metadata: Mapping[str, str]
    ) -> None:
        """Reserve a file for some tensors; one that is there already is gone on with."""
        ordered = sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for key, stored in ordered:
            end = offset + prod(stored.shape) * stored.dtype.itemsize
            header[key] = {
                "dtype": _NAMES[stored.dtype],
                "shape": list(stored.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        start = 8 + len(text)
        self._places[name] = {
            key: (start + header[key]["data_offsets"][0], stored) for key, stored in ordered
        }
        path = self.folder / name
        if path.is_file() or (self.directory / name).is_file():
            return
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(start + offset)

    def write(self, name: str, key: str, first: int, tensor: Tensor) -> None:
        """Write the part of a tensor that begins at `first` along its first axis.

        Args:
            name: of the file.
            key: of the tensor.
            first: counted in rows of the matrix, of which a row of the tensor may hold several.
            tensor: the part, in the dtype of the whole.
        """
        offset, stored = self._places[name][key]
        assert tensor.dtype == stored.dtype, f"{key}: {tensor.dtype} is not {stored.dtype}"
        assert tuple(tensor.shape[1:]) == stored.shape[1:], f"{key}: {tuple(tensor.shape)}"
        row_bytes = prod(stored.shape[1:]) * stored.dtype.itemsize
        # A copy, for torch calls an expanded axis of one contiguous.
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten())
        data = flat.view(torch.uint8).numpy().data
        place = offset + first // stored.rows * row_bytes
        with (self.folder / name).open("r+b") as stream:
            stream.seek(place)
            stream.write(data)
        self._touched.add(name)
        self._num_pending_bytes += len(data)

    def finish(self, unit: str, record: Mapping[str, Any]) -> None:
        """Note that a unit of work is written; on disk with the units after it, or soon after."""
        self.records[unit] = dict(record)
        self._pending.append(unit)
        if self._num_pending_bytes >= _SYNC_BYTES:
            self.flush()

    def flush(self) -> None:
        """Flush what was written to disk, then the journal of it."""
        for name in sorted(self._touched):
            _sync(self.folder / name)
        lines = (json.dumps({"unit": unit, **self.records[unit]}) for unit in self._pending)
        with (self.folder / _JOURNAL).open("a") as stream:
            stream.write("".join(line + "\n" for line in lines))
            stream.flush()
            os.fsync(stream.fileno())
        self._touched.clear()
        self._pending.clear()
        self._num_pending_bytes = 0

    def publish(self, others: Mapping[str, str]) -> list[Path]:
        """Give the files their names, then write further text files, the last of them last.

        Args:
            others: text by name of file.
        """
        self.flush()
        for name in self._places:
            if (self.folder / name).is_file():
                os.replace(self.folder / name, self.directory / name)
        for name, text in others.items():
            _write_durably(self.directory / name, text)
        shutil.rmtree(self.folder)
        return [self.directory / name for name in (*self._places, *others)]

    def _read_journal(self, journal: Path, plan: Mapping[str, Any]) -> None:
        """Take over what an interrupted conversion finished; a line that was cut is not."""
        lines = []
        for line in journal.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        begun = lines[0].get("plan") if lines else None
        if begun != json.loads(json.dumps(plan)):
            raise ValueError(
                f"{self.folder}: holds an unfinished conversion of another checkpoint or with other"
                " options. Delete that folder, or choose another --out."
            )
        self.records = {line.pop("unit"): line for line in lines[1:]}


def _write_durably(path: Path, text: str) -> None:
    """Write a text file that is either whole or not there."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    unfinished.write_text(text, encoding="utf-8")
    _sync(unfinished)
    os.replace(unfinished, path)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
