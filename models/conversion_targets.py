"""Where converted parameters go: checkpoints as they are published, and files of ranks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from neuron_moe.checkpoint import Transform, WeightMap
from neuron_moe.checkpoint.encodings import ENCODINGS, Encoding, Plain, StoredShape
from neuron_moe.checkpoint.lazy import Indices, take
from neuron_moe.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from neuron_moe.checkpoint.scaled import CHANNEL_SUFFIX
from neuron_moe.checkpoint.transforms import identity, whole_numbers
from neuron_moe.checkpoint.weight_map import Rule
from neuron_moe.errors import check_choice
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.sharded.load import INDEX_NAME, file_name, index_text, rank_metadata, scale_name
from neuron_moe.sharded.rank_files import RankPart

NATIVE = "mxfp4"  # the storage form of maps whose publishers write MXFP4 themselves
SEPARATE = "separate"  # the storage form of experts one by one
Part = tuple[str, str, int, Tensor]
"""File, key, first row and tensor of what is to be written."""


class Target(Protocol):
    """What a checkpoint is converted to."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""

    def files(self) -> Iterator[tuple[str, Mapping[str, StoredShape], Mapping[str, str]]]:
        """Yield each file's name, tensors and metadata."""

    def takes_parts(self, name: str) -> bool:
        """Say whether a parameter can be written one expert, or some rows, after the other."""

    def holds(self, name: str, first: int, count: int) -> bool:
        """Say whether anything is written of so many rows of a parameter."""

    def encode(
        self, name: str, first: int, values: Tensor, scale: Tensor | None
    ) -> tuple[list[Part], Tensor]:
        """Return what to write for a part of a parameter, and what a reader sees in it.

        Args:
            name: of the parameter.
            first: where the part begins along the first axis.
            values: the part.
            scale: what multiplied the codes of each value, where there were codes.
        """

    def describe(self) -> dict[str, Any] | None:
        """Return the `quantization_config` of config.json; None without one."""

    def indices(self) -> dict[str, str]:
        """Return the files that say where tensors are, by name."""


def is_expert_matrix(name: str, shape: Sequence[int]) -> bool:
    """Say whether a parameter is the matrices of routed experts, [E, in, out]."""
    return ".mlp_op." in name and name.endswith(".weight") and len(shape) == 3


def is_linear(name: str, shape: Sequence[int]) -> bool:
    """Say whether a parameter is a matrix outside the experts that fp8 checkpoints quantise."""
    is_matrix = name.startswith("layers.") and name.endswith(".weight") and len(shape) == 2
    return is_matrix and ".router." not in name and shape[0] > 1


@dataclass(frozen=True, slots=True)
class _Place:
    """How a parameter is published: its rule, the keys of each source, and how they are stored."""

    rule: Rule
    groups: list[list[str]]
    encoding: Encoding
    in_axis: int

    def encoding_of(self, num_axes: int) -> Encoding:
        """Return how a source is stored; scales that are beside experts (Gemma 4) stay plain."""
        return (
            self.encoding
            if num_axes > 1 or isinstance(self.encoding, Plain)
            else Plain(torch.bfloat16)
        )


class PublishedTarget:
    """A checkpoint under the names of its publishers.

    Args:
        parameters: of the whole model, on the meta device.
        weight_map: of the model.
        to: number format.
        layout: storage form of the map, None for the usual one.
        max_file_bytes: largest file; a single tensor above it gets a file of its own.

    Raises:
        ValueError: a storage form that the map lacks, or one that cannot be stored in the format.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        weight_map: WeightMap,
        to: str,
        layout: str | None,
        max_file_bytes: int,
    ) -> None:
        self.encoding = ENCODINGS[to]
        self.variant = _choose_variant(weight_map.variants(), to, layout)
        self._experts = {
            name for name, tensor in parameters.items() if is_expert_matrix(name, tensor.shape)
        }
        self._places: dict[str, _Place] = {}
        shapes: dict[str, StoredShape] = {}
        for name, (rule, groups) in weight_map.exports(parameters, self.variant).items():
            shape = tuple(parameters[name].shape)
            place = _Place(
                rule, groups, self._encoding_of(name, shape, rule), _in_axis(rule, shape)
            )
            self._places[name] = place
            shapes.update(_stored_shapes(place, parameters[name]))
        self._files = _group(shapes, max_file_bytes)
        self._file_of = {key: file for file, entries in self._files.items() for key in entries}

    def _encoding_of(self, name: str, shape: tuple[int, ...], rule: Rule) -> Encoding:
        if self.variant == NATIVE and rule.variant == NATIVE:
            return Plain(torch.uint8)
        covered = self.encoding.covers_all and is_linear(name, shape)
        if is_expert_matrix(name, shape) or covered:
            return self.encoding
        if rule.transform is whole_numbers:
            return Plain(torch.int64)
        return Plain(torch.float32 if rule.is_exact else torch.bfloat16)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, headers left out."""
        return sum(_num_bytes(entries) for entries in self._files.values())

    def files(self) -> Iterator[tuple[str, Mapping[str, StoredShape], Mapping[str, str]]]:
        """Yield each file's name, tensors and metadata."""
        for name, entries in self._files.items():
            yield name, entries, {"format": "pt"}

    def takes_parts(self, name: str) -> bool:
        """Where nothing is moved, any rows can be written; else experts that stay apart."""
        transform = self._places[name].rule.transform
        return transform is identity or (name in self._experts and transform.keeps_first_axis)

    def holds(self, name: str, first: int, count: int) -> bool:
        """Everything is written."""
        return True

    def encode(
        self, name: str, first: int, values: Tensor, scale: Tensor | None
    ) -> tuple[list[Part], Tensor]:
        """Undo the rule's transform, then encode each source."""
        place = self._places[name]
        transform, decoded = place.rule.transform, []
        sources = transform.invert(values)
        scales = [None] * len(sources) if scale is None else transform.invert(scale)
        parts: list[Part] = []
        for group, source, factor in zip(place.groups, sources, scales, strict=True):
            for number, key, tensor, its_factor in _by_key(place, group, first, source, factor):
                encoding = place.encoding_of(tensor.ndim)
                stored = encoding.encode(key, tensor, place.in_axis, its_factor)
                parts += [(self._file_of[k], k, number, part) for k, part in stored.items()]
                back = encoding.decode(key, stored, place.in_axis)
                decoded.append(back.unsqueeze(0) if place.rule.stacked else back)
        return parts, transform(*decoded)

    def describe(self) -> dict[str, Any] | None:
        """Return what config.json says of the format."""
        if self.variant == NATIVE:
            return {"quant_method": NATIVE}
        return self.encoding.describe()

    def indices(self) -> dict[str, str]:
        """Return the index, where there are several files."""
        if len(self._files) == 1:
            return {}
        metadata = {"total_size": self.num_bytes}
        index = {"metadata": metadata, "weight_map": dict(sorted(self._file_of.items()))}
        return {INDEX_FILE: json.dumps(index, indent=2) + "\n"}


class RankTarget:
    """A file for each rank, parameters under our names, experts in codes with NxD's `scale`.

    Args:
        parameters: of the whole model, on the meta device.
        parts: what each rank holds.
        ranks: those to write.
        to: number format.
        config: layout of the ranks.
        generation: name of this conversion, which all files carry.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        parts: Sequence[RankPart],
        ranks: Sequence[int],
        to: str,
        config: ParallelConfig,
        generation: str,
    ) -> None:
        self._parameters, self._parts = parameters, parts
        self._encoding, self._config, self._generation = ENCODINGS[to], config, generation
        self._selections = {
            rank: {
                name: parts[rank].sharding(name, tuple(whole.shape))
                for name, whole in parameters.items()
            }
            for rank in ranks
        }

    def _encoding_of(self, name: str) -> Encoding:
        tensor = self._parameters[name]
        is_coded = is_expert_matrix(name, tensor.shape)
        return self._encoding if is_coded else Plain(tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, headers left out."""
        return sum(_num_bytes(self._entries(rank)) for rank in self._selections)

    def _entries(self, rank: int) -> dict[str, StoredShape]:
        """Return what a rank's file holds."""
        return {
            _our_key(name, key): stored
            for name, tensor in self._parts[rank].parameters.items()
            for key, stored in self._encoding_of(name).shapes(name, tuple(tensor.shape), -2).items()
        }

    def files(self) -> Iterator[tuple[str, Mapping[str, StoredShape], Mapping[str, str]]]:
        """Yield each file's name, tensors and metadata."""
        for rank in self._selections:
            metadata = rank_metadata(self._parts[rank].sharding, self._generation)
            yield file_name(rank, len(self._parts)), self._entries(rank), metadata

    def takes_parts(self, name: str) -> bool:
        """Always."""
        return True

    def holds(self, name: str, first: int, count: int) -> bool:
        """Say whether one of the ranks has any of the rows."""
        return any(
            True
            for selections in self._selections.values()
            for _ in _runs(selections[name][0], first, count)
        )

    def encode(
        self, name: str, first: int, values: Tensor, scale: Tensor | None
    ) -> tuple[list[Part], Tensor]:
        """Encode a part once, then cut it for each rank."""
        encoding = self._encoding_of(name)
        stored = encoding.encode(name, values, -2, scale)
        parts: list[Part] = []
        for rank, selections in self._selections.items():
            file, (rows, *others) = file_name(rank, len(self._parts)), selections[name]
            for place, local in _runs(rows, first, len(values)):
                for key, tensor in stored.items():
                    inner = [
                        range(1) if size == 1 else indices
                        for size, indices in zip(tensor.shape[1:], others, strict=True)
                    ]
                    parts.append((file, _our_key(name, key), place, take(tensor, (local, *inner))))
        return parts, encoding.decode(name, stored, -2)

    def describe(self) -> dict[str, Any] | None:
        """Files of ranks say themselves what they hold."""
        return None

    def indices(self) -> dict[str, str]:
        """Return the index, which says how ranks share the model."""
        return {INDEX_NAME: index_text(self._config, self._generation)}


def _choose_variant(variants: Sequence[str], to: str, layout: str | None) -> str | None:
    """Return the storage form to write.

    Raises:
        ValueError: the map has none of that name.
    """
    if to == NATIVE and NATIVE in variants and layout is None:
        return NATIVE
    plain = [variant for variant in variants if variant != NATIVE]
    if layout is not None:
        if not plain:
            raise ValueError(f"layout={layout!r}: this model has one layout only. Leave it out.")
        return check_choice("layout", layout, plain)
    if SEPARATE in plain and to != "bf16":
        return SEPARATE
    return plain[0] if plain else None


def _in_axis(rule: Rule, shape: Sequence[int]) -> int:
    """Return which of the last two axes of a published matrix is contracted."""
    is_ours = len(shape) == 3 and not rule.transform.swaps_axes  # [E, in, out], as modules have it
    return -2 if is_ours else -1


def _stored_shapes(place: _Place, parameter: Tensor) -> dict[str, StoredShape]:
    """Return what is stored for a parameter."""
    found: dict[str, StoredShape] = {}
    for group, source in zip(place.groups, _sources(place.rule.transform, parameter), strict=True):
        shape = tuple(source.shape[1:] if place.rule.stacked else source.shape)
        for key in group:
            found.update(place.encoding_of(len(shape)).shapes(key, shape, place.in_axis))
    return found


def _sources(transform: Transform, parameter: Tensor) -> tuple[Tensor, ...]:
    return transform.invert(parameter.to("meta"))


def _by_key(
    place: _Place, group: list[str], first: int, source: Tensor, scale: Tensor | None
) -> Iterator[tuple[int, str, Tensor, Tensor | None]]:
    """Yield the first row, key, tensor and scales of each key that a part of a source fills."""
    if not place.rule.stacked:
        yield first, group[0], source, scale
        return
    for number, tensor in enumerate(source):
        yield 0, group[first + number], tensor, None if scale is None else scale[number]


def _group(shapes: Mapping[str, StoredShape], max_bytes: int) -> dict[str, dict[str, StoredShape]]:
    """Distribute tensors over files, in their order."""
    files: list[dict[str, StoredShape]] = [{}]
    for key, stored in shapes.items():
        if files[-1] and _num_bytes({**files[-1], key: stored}) > max_bytes:
            files.append({})
        files[-1][key] = stored
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    count = len(files)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": entries
        for number, entries in enumerate(files, start=1)
    }


def _num_bytes(entries: Mapping[str, StoredShape]) -> int:
    return sum(prod(stored.shape) * stored.dtype.itemsize for stored in entries.values())


def _our_key(name: str, key: str) -> str:
    """Return the name of what an encoding stores, in a state dict."""
    return scale_name(name) if key == name + CHANNEL_SUFFIX else key


def _runs(rows: Indices, first: int, count: int) -> Iterator[tuple[int, range]]:
    """Yield which rows of a part a rank holds: where a run is there, and where in the part."""
    if isinstance(rows, range):
        begin, end = max(rows.start, first), min(rows.stop, first + count)
        if begin < end:
            yield begin - rows.start, range(begin - first, end - first)
        return
    for place, row in enumerate(rows):
        if first <= row < first + count:
            yield place, range(row - first, row - first + 1)
