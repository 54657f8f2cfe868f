"""Converting checkpoints: another number format, another layout, cut for ranks, or merged again.

What is converted are parameters as modules hold them, one expert or some rows at a time: a source
reads and decodes a part, a target encodes it and says where it is. A published checkpoint and the
files of ranks can each be either. Tensors that a model leaves out, such as a vision tower or layers
that predict further tokens, are left out here too.
"""

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import (
    LazyTensor,
    Progress,
    Selection,
    match_parameters,
    open_checkpoint,
    unique_parameters,
)
from neuron_moe.checkpoint.encodings import ENCODINGS
from neuron_moe.checkpoint.lazy import everything
from neuron_moe.checkpoint.scaled import BLOCK
from neuron_moe.checkpoint.staging import STAGING_FOLDER, Staging, only_writer
from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.models.conversion_targets import (
    PublishedTarget,
    RankTarget,
    Target,
    is_expert_matrix,
)
from neuron_moe.models.loader import CONFIG_FILE, parse_config, read_config
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.sharded.load import INDEX_NAME
from neuron_moe.sharded.rank_files import merge_ranks, rank_parts, read_layout

FORMATS = tuple(ENCODINGS)
RANK_FORMATS = ("bf16", "e4m3", "e5m2")
_PIECE_BYTES = 32 << 20
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # tokenizer, templates and the like


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """What a checkpoint shall become.

    Args:
        to: number format of the experts, one of FORMATS; "fp8_blocks" stores all linear layers so.
        layout: storage form of the model's map, such as "separate" or "fused"; by default the one
            that is published in this format.
        tp: tensor-parallel ranks; with `ep` None, one checkpoint for all ranks is written.
        ep: expert-parallel ranks.
        ranks: the ranks to write, where a machine needs some of them only; None for all.
        max_shard_mib: largest file in MiB, where ranks do not say it.

    Raises:
        ValueError: an unknown format, or one that ranks do not read.
    """

    to: str
    layout: str | None = None
    tp: int | None = None
    ep: int | None = None
    ranks: tuple[int, ...] | None = None
    max_shard_mib: int = 4096

    def __post_init__(self) -> None:
        check_choice("to", self.to, FORMATS)
        check_positive_int("max_shard_mib", self.max_shard_mib)
        for name in ("tp", "ep"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        if self.ranks is not None and not set(self.ranks) <= set(range(self.parallel.model_size)):
            raise ValueError(
                f"ranks={list(self.ranks)}: must be below tp * ep = {self.parallel.model_size}."
            )
        if not self.for_ranks:
            return
        if self.to not in RANK_FORMATS:
            raise ValueError(
                f"to={self.to!r}: files of ranks hold {', '.join(RANK_FORMATS)}, what the kernels"
                " read. Use e5m2, which holds MXFP4 weights without loss, or leave tp and ep out."
            )
        if self.layout is not None:
            raise ValueError(
                f"layout={self.layout!r}: files of ranks have one layout, that of the modules."
                " Leave it out."
            )

    @property
    def for_ranks(self) -> bool:
        """Whether there is a file for each rank."""
        return (self.tp, self.ep) != (None, None)

    @property
    def parallel(self) -> ParallelConfig:
        """The layout of the ranks."""
        return ParallelConfig(tp=self.tp or 1, ep=self.ep or 1)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that is read.

    Args:
        directory: where it is.
        raw_config: its config.json.
        model_file: of its family.
        model: on the meta device.
        values: the parameters, decoded.
        scales: what multiplied the codes of each value, for parameters that were fp8.
    """

    directory: Path
    raw_config: Mapping[str, Any]
    model_file: ModuleType
    model: nn.Module
    values: Mapping[str, LazyTensor]
    scales: Mapping[str, LazyTensor]


@dataclass(slots=True)
class LayerError:
    """How far the stored weights of a layer are from those that were read.

    Args:
        squares: sum of squared differences.
        total: sum of squared weights, of parts in which any changed.
        largest: largest difference.
        values: how many weights were compared.
        changed: how many of them differ.
    """

    squares: float = 0.0
    total: float = 0.0
    largest: float = 0.0
    values: int = 0
    changed: int = 0

    @property
    def relative(self) -> float:
        """Root mean square of the differences over that of the weights, of parts that changed."""
        return (self.squares / self.total) ** 0.5 if self.total else 0.0

    def compare(self, read: Tensor, stored: Tensor) -> None:
        """Add a part."""
        self.values += read.numel()
        read, stored = read.float(), stored.float()
        if torch.equal(read, stored):
            return
        difference = stored - read
        self.changed += int(torch.count_nonzero(difference))
        self.squares += float(torch.linalg.vector_norm(difference)) ** 2
        self.total += float(torch.linalg.vector_norm(read)) ** 2
        self.largest = max(self.largest, float(torch.linalg.vector_norm(difference, ord=math.inf)))

    def add(self, other: "LayerError") -> None:
        """Add another one."""
        self.squares += other.squares
        self.total += other.total
        self.largest = max(self.largest, other.largest)
        self.values += other.values
        self.changed += other.changed


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did.

    Args:
        files: what was written.
        errors: by layer, "other" for what belongs to none.
        bytes_read: of parameters, as modules hold them.
        resumed: how many parameters an interrupted conversion had done.
    """

    files: list[Path]
    errors: dict[str, LayerError] = field(default_factory=dict)
    bytes_read: int = 0
    resumed: int = 0


def convert(
    source: str | Path,
    out: str | Path,
    options: ConversionOptions,
    *,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint; called again after an interruption, go on where it stopped.

    Memory holds a few copies of one expert's matrix, whatever the size of the checkpoint.

    Args:
        source: folder of a published checkpoint, or of files of ranks.
        out: folder to write; made if missing. It must not hold weights.
        options: what to make.
        progress: called with the bytes of parameters that are done and those of all.

    Raises:
        FileNotFoundError: a file of the source is missing.
        ValueError: source or options are wrong, or `out` holds something else.
    """
    directory = Path(out)
    opened = open_source(Path(source))
    target = _make_target(opened, options)
    directory.mkdir(parents=True, exist_ok=True)
    with only_writer(directory):
        _check_empty(directory, opened.directory)
        staging = Staging(directory, _plan(opened.directory, options))
        _check_space(directory, target, staging)
        for name, entries, metadata in target.files():
            staging.lay_out(name, entries, metadata)
        resumed = len(staging.records)
        total = _convert_all(opened, target, staging, progress)
        files = staging.publish(_texts(opened, target))
    return Conversion(files, _sum_errors(staging.records), total, resumed)


def open_source(directory: Path) -> Source:
    """Open a checkpoint of either kind; no weights are read.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not as it must be.
    """
    raw_config = read_config(directory)
    model_file, config = parse_config(raw_config, directory / CONFIG_FILE)

    def build() -> nn.Module:
        model: nn.Module = model_file.Model(config)
        return model

    with torch.device("meta"):
        model = build()
    parameters = unique_parameters(model)
    if (directory / INDEX_NAME).is_file():
        parts = rank_parts(build, read_layout(directory))
        values, scales = merge_ranks(directory, parts, parameters)
        return Source(directory, raw_config, model_file, model, values, scales)
    checkpoint, weight_map = open_checkpoint(directory), model_file.weight_map(config)
    work = match_parameters(checkpoint, weight_map, parameters)
    fp8 = {assignment.target for assignment, _, _ in work if checkpoint.is_fp8(assignment.keys)}
    factors = match_parameters(checkpoint.of_scales(), weight_map, parameters) if fp8 else []
    return Source(
        directory,
        raw_config,
        model_file,
        model,
        {assignment.target: assignment.source for assignment, _, _ in work},
        {a.target: a.source for a, _, _ in factors if a.target in fp8},
    )


def _make_target(source: Source, options: ConversionOptions) -> Target:
    parameters = unique_parameters(source.model)
    if not options.for_ranks:
        weight_map = source.model_file.weight_map(source.model.config)
        return PublishedTarget(
            parameters, weight_map, options.to, options.layout, options.max_shard_mib << 20
        )
    config, model_file = source.model.config, source.model_file
    parts = rank_parts(lambda: model_file.Model(config), options.parallel)
    # The same on every machine that writes some of the ranks.
    plan = _plan(source.directory, replace(options, ranks=None))
    plan["source"] = [fact[:2] for fact in plan["source"]]
    generation = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]
    ranks = range(len(parts)) if options.ranks is None else options.ranks
    return RankTarget(parameters, parts, ranks, options.to, options.parallel, generation)


def _convert_all(
    source: Source, target: Target, staging: Staging, progress: Progress | None
) -> int:
    """Convert every parameter that is not done; return the bytes of all."""
    parameters = unique_parameters(source.model)
    total = sum(tensor.nbytes for tensor in parameters.values())
    done = 0
    for name, parameter in parameters.items():
        if name not in staging.records:
            error = LayerError()
            for values, stored in _convert_parameter(source, target, staging, name):
                error.compare(values, stored)
                if progress is not None:
                    progress(min(done + error.values * parameter.element_size(), total), total)
            staging.finish(name, asdict(error))
        done += parameter.nbytes
    return total


def _convert_parameter(
    source: Source, target: Target, staging: Staging, name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Convert a parameter part by part; yield what was read, and what a reader will see."""
    values, scales = source.values[name], source.scales.get(name)
    for piece, first in _cut(values, target, name):
        if target.holds(name, first, len(piece[0]) if piece else 1):
            read = values.read(piece)
            scale = None if scales is None else scales.read(piece)
            parts, stored = target.encode(name, first, read, scale)
            for file, key, place, tensor in parts:
                staging.write(file, key, place, tensor)
            yield read, stored


def _cut(source: LazyTensor, target: Target, name: str) -> Iterator[tuple[Selection, int]]:
    """Yield the parts to convert one after the other, each a run of the first axis."""
    whole = everything(source.shape)
    if not source.shape or not target.takes_parts(name):
        yield whole, 0
        return
    step = 1
    if not is_expert_matrix(name, source.shape):
        row_bytes = max(1, source.dtype.itemsize * math.prod(source.shape[1:]))
        step = max(_PIECE_BYTES // row_bytes // BLOCK, 1) * BLOCK
    for first in range(0, source.shape[0], step):
        yield (range(first, min(first + step, source.shape[0])), *whole[1:]), first


def _plan(directory: Path, options: ConversionOptions) -> dict[str, Any]:
    """Return what distinguishes conversions: the files that are read, and the options."""
    files = sorted([directory / CONFIG_FILE, *directory.glob("*.safetensors*")])
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {"version": 1, "source": facts, "options": asdict(options)}


def _check_empty(directory: Path, source: Path) -> None:
    """Refuse to mix a conversion with other weights."""
    if directory.resolve() == source.resolve():
        raise ValueError(f"out={directory}: must be another folder than the one that is read.")
    present = sorted(path.name for path in directory.glob("*.safetensors*"))
    if present and not (directory / STAGING_FOLDER).is_dir():
        raise ValueError(
            f"{directory}: must not hold weights yet, but has {present[0]}. Choose another folder,"
            " or delete them."
        )


def _check_space(directory: Path, target: Target, staging: Staging) -> None:
    """Refuse to begin what the disk cannot hold."""
    needed = target.num_bytes
    free = shutil.disk_usage(directory).free
    if not staging.records and needed > free:
        raise ValueError(
            f"{directory}: the conversion needs {needed} bytes, the disk has {free} free. Free"
            " some, or choose another folder."
        )


def _texts(source: Source, target: Target) -> dict[str, str]:
    """Return the text files beside the weights: config.json the last of them."""
    config = copy.deepcopy(dict(source.raw_config))
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            section.pop("quantization_config", None)
    described = target.describe()
    if described is not None:
        config["quantization_config"] = described
    copied = {
        file.name: file.read_text(encoding="utf-8")
        for file in sorted(source.directory.iterdir())
        if file.suffix in _COPIED and file.name not in (CONFIG_FILE, INDEX_NAME)
        if not file.name.endswith(".safetensors.index.json")
    }
    return {**copied, **target.indices(), CONFIG_FILE: json.dumps(config, indent=2) + "\n"}


def _sum_errors(records: Mapping[str, Mapping[str, Any]]) -> dict[str, LayerError]:
    """Add up the errors of the parameters of each layer."""
    sums: dict[str, LayerError] = {}
    for name, record in records.items():
        parts = name.split(".")
        layer = f"layer {parts[1]}" if parts[0] == "layers" else "other"
        sums.setdefault(layer, LayerError()).add(LayerError(**record))
    return sums
