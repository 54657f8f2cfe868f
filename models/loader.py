"""From a checkpoint directory to a model that is ready to run.

A model file is named as the `model_type` of its config.json and exports three things: `Config`,
with `Config.from_hf(dict)`, which raises ValueError for a missing, unknown or contradictory key, or
a variant nobody published; `Model(config, *, dtype, ...)`; and `weight_map(config)`. Where it reads
further model types, it lists them in `ALIASES`.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import neuron_moe.models
from neuron_moe.checkpoint import Checkpoint, Progress, Shard, load_weights, open_checkpoint
from neuron_moe.errors import check_choice, reject_unknown
from neuron_moe.experts import RoutedExperts
from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.dense_forms import settle_linears
from neuron_moe.models.hf_config import read_json_object
from neuron_moe.models.other_files import what_is_in, what_it_is
from neuron_moe.parallel import parallel_state
from neuron_moe.sharded.load import INDEX_NAME as SHARDED_INDEX
from neuron_moe.sharded.load import load_shard, load_sharded
from neuron_moe.sharded.rank_files import read_layout
from neuron_moe.spec import Tuning
from neuron_moe.weights.linear import ExpertLinear

CONFIG_FILE = "config.json"
MODEL_FILE_EXPORTS = ("Config", "Model", "weight_map")
# Of `load` and `load_model`, beside those of the model.
_LOAD_OPTIONS = ("download", "shard", "progress", "product_form", "tuning")
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard: Shard | None = None,
    progress: Progress | None = None,
    product_form: str | None = None,
    tuning: Tuning | None = None,
    **model_options: Any,
) -> nn.Module:
    """Build the model a checkpoint is for, and fill it; memory peaks little above its parameters.

    Args:
        directory: holds config.json and the safetensors, or the files of ranks that `convert`
            wrote, of which this rank reads its own.
        dtype: of the parameters; the model file may keep some, such as the router, in float32.
        shard: which part of each parameter this rank holds; by default what `parallel_state`, if
            it was initialised, gives the model.
        progress: called with the bytes filled and the bytes of all parameters.
        product_form: how a CPU multiplies with experts and dense projections, 'measured' or
            fixed; see `RoutedExperts.settle_forms` and `dense_forms`. None leaves weights plain.
        tuning: how the kernels of every MoE layer go about it; experts are laid out by parts where
            its plans read them so.
        model_options: further keyword arguments of the model's constructor.

    Returns:
        The model in evaluation mode, without gradients. With backend='nki' its experts are packed,
        see `RoutedExperts.pack_weights`.

    Raises:
        FileNotFoundError: if a file of the checkpoint is missing.
        TypeError: if the model takes no such option.
        ValueError: if config.json or a tensor is not as it must be; no model is returned then.
    """
    if dtype not in _DTYPES:
        raise ValueError(
            f"dtype={dtype!r}: must be torch.bfloat16, torch.float32 or torch.float16. Use"
            " torch.bfloat16."
        )
    model = build_model(directory, dtype=dtype, **model_options)
    if tuning is not None:
        for experts in _experts_of(model):
            experts.tuning = tuning
    fill_model(model, directory, shard=shard, progress=progress, product_form=product_form)
    return model


def fill_model(
    model: nn.Module,
    directory: str | Path,
    *,
    shard: Shard | None = None,
    progress: Progress | None = None,
    product_form: str | None = None,
) -> None:
    """Fill what `build_model` built of a checkpoint, for inference; see `load_model`."""
    model_file, config = _read_model(directory)
    weight_map = model_file.weight_map(config)
    if (Path(directory) / SHARDED_INDEX).is_file():
        _check_has_rank(Path(directory))
        load_sharded(model, directory)
    else:
        checkpoint = open_checkpoint(directory)
        if getattr(config, "tie_word_embeddings", False):
            _check_tied(checkpoint)
        if shard is None and parallel_state.model_parallel_is_initialized():
            load_shard(model, checkpoint, weight_map, progress=progress)
        else:
            load_weights(model, checkpoint, weight_map, shard=shard, progress=progress)
    _check_filled(model)
    model.eval().requires_grad_(False)
    for experts in _experts_of(model):
        # The kernels read half the bytes where a checkpoint was in 8 bits or less.
        if experts.backend.name == "nki":
            plans = experts.tuning.tuned.prefill
            experts.pack_weights(for_prefill=any(plan.weights == "by parts" for plan in plans))
    if product_form is not None:
        settle_experts(model, product_form)
        settle_linears(model, product_form)


def _check_tied(checkpoint: Checkpoint) -> None:
    """Refuse a head of its own where config.json says that the embedding is the head."""
    ends = {"lm_head.weight": "head.weight", "embed_tokens.weight": "embed.weight"}  # DeepSeek-V4's
    named = [
        next((key for key in checkpoint.tensors if key == whole or key.endswith(name)), None)
        for name, whole in ends.items()
    ]
    if None in named:
        return
    head, embedding = map(str, named)
    if not torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
        raise ValueError(
            f"{head}: differs from {embedding}, while tie_word_embeddings says that they are one."
            " Set tie_word_embeddings to false in config.json."
        )


def settle_experts(model: nn.Module, form: str) -> None:
    """Choose how a CPU multiplies with the experts of a model; see `load_model`."""
    for experts in _experts_of(model):
        if experts.backend.name != "nki":
            experts.settle_forms(form)


def _experts_of(model: nn.Module) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def build_model(directory: str | Path, **model_options: Any) -> nn.Module:
    """Return the model a checkpoint is for as `load_model` builds it, on the meta device.

    Raises:
        FileNotFoundError: if config.json is missing.
        ValueError: if it is not as it must be, or the ranks of `parallel_state` do not fit.
    """
    return _build(*_read_model(directory), **model_options)


def _read_model(directory: str | Path) -> tuple[ModuleType, Any]:
    """Return the file of a checkpoint's model, and its configuration."""
    return parse_config(read_config(directory), Path(directory) / CONFIG_FILE)


def parse_config(raw_config: Mapping[str, Any], where: str | Path) -> tuple[ModuleType, Any]:
    """Return the file of a model, and its configuration.

    Args:
        raw_config: a config.json.
        where: what messages call it.

    Raises:
        ValueError: no file of this folder reads it, or as the file's `Config.from_hf`.
    """
    try:
        files, model_type = _model_files(), raw_config.get("model_type")
        if not isinstance(model_type, str) or model_type not in files:
            raise ValueError(what_it_is(raw_config, list(files)))
        model_file = files[model_type]
        return model_file, model_file.Config.from_hf(raw_config)
    except ValueError as error:
        raise type(error)(f"{where}: {error}") from error


def _build(model_file: ModuleType, config: Any, **options: Any) -> nn.Module:
    known = {  # also what a class only hands on to the next one
        name
        for each in model_file.Model.__mro__
        if issubclass(each, DecoderModel)
        for name, given in inspect.signature(each.__init__).parameters.items()
        if given.kind is inspect.Parameter.KEYWORD_ONLY
    }
    reject_unknown("load", options, {*_LOAD_OPTIONS, *known})
    # On the meta device parameters have a shape and no memory, until the loaded ones replace them.
    with torch.device("meta"):
        model: nn.Module = model_file.Model(config, **options)
    return model


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return config.json as a dict.

    Raises:
        FileNotFoundError: if it is missing.
        ValueError: if it is not a JSON object.
    """
    path = Path(directory) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: must exist beside the weights, but does not. {what_is_in(Path(directory))}"
        )
    return read_json_object(path)


def find_model_file(model_type: object) -> ModuleType:
    """Return the module of a model type.

    Raises:
        ValueError: if no file of this folder is a model of that type.
    """
    files = _model_files()
    return files[check_choice("model_type", model_type, list(files))]


def model_types() -> list[str]:
    """Return the model types that a file in this folder reads."""
    return list(_model_files())


def _model_files() -> dict[str, ModuleType]:
    """Return the model file of each model type."""
    names = [module.name for module in pkgutil.iter_modules(neuron_moe.models.__path__)]
    files = {name: file for name in names if is_model_file(file := _import(name))}
    aliases = {alias: file for file in files.values() for alias in getattr(file, "ALIASES", ())}
    return files | aliases


def is_model_file(module: ModuleType) -> bool:
    """Say whether a module exports what a model file must."""
    return all(hasattr(module, name) for name in MODEL_FILE_EXPORTS)


def _import(name: str) -> ModuleType:
    """Import a module of this folder."""
    return importlib.import_module(f"{neuron_moe.models.__name__}.{name}")


def _check_has_rank(directory: Path) -> None:
    """Refuse files of ranks where this process is none."""
    if not parallel_state.model_parallel_is_initialized():
        layout = read_layout(directory)
        raise ValueError(
            f"{directory}: holds files of tp={layout.tp} x ep={layout.ep} ranks, must be loaded by"
            " as many. Start them, as `generate --tp --ep` does, or merge the files with"
            " `neuron-moe convert`."
        )


def _check_filled(model: nn.Module) -> None:
    """Refuse a model that still has tensors without memory."""
    # Of weights kept as codes a shape without memory stays.
    packed = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, ExpertLinear) and module.kept is not None
    }
    named = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in named if tensor.is_meta and id(tensor) not in packed]
    if empty:
        raise ValueError(
            f"{empty[0]}: still on the meta device after loading, as are {len(empty) - 1} more. "
            'A buffer outside the state dict must be made with device="cpu" in the model file.'
        )
