"""A model run one layer at a time, each read when it is needed: memory for one layer.

Letters: U sequences, S tokens of each, H hidden, V vocabulary.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import (
    Match,
    match_parameters,
    open_checkpoint,
    read_matched,
    unique_parameters,
)
from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.loader import build_model, find_model_file, read_config
from neuron_moe.moe import MoE
from neuron_moe.router import Router


class LayerRun(NamedTuple):
    """What a layer made of its input.

    Attributes:
        hidden_USH: [U, S, H] the residual stream after it.
        feed_forward_in_USH: [U, S, H] what its router was given; what it ended with where it has
            none.
    """

    hidden_USH: Tensor
    feed_forward_in_USH: Tensor


class LayerwiseModel:
    """A model of this package whose weights stay in their files until a layer runs.

    Args:
        folder: of the checkpoint.
        dtype: of the parameters.
        model_options: further arguments of the model's constructor, such as `backend`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: config.json, a name or a shape is not as it must be, or no layer runs alone.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, **model_options: Any) -> None:
        model = build_model(folder, dtype=dtype, **model_options)
        self._model = cast(DecoderModel, model.eval().requires_grad_(False))
        if not self._model.runs_layers_alone:
            raise ValueError(
                f"{folder}: layers of model_type={read_config(folder)['model_type']!r} take more"
                " than one residual stream and one attention, so none runs alone. Compare logits of"
                " the whole."
            )
        self.config = self._model.config
        weight_map = find_model_file(read_config(folder)["model_type"]).weight_map(self.config)
        parameters = unique_parameters(model)
        self._work = match_parameters(open_checkpoint(folder), weight_map, parameters)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self._model.layers)

    def embed(self, input_ids_US: Tensor) -> Tensor:
        """Return the residual stream before the first layer, [U, S, H]."""
        embedding = self._fill(self._model.embed_tokens, "embed_tokens.")
        with torch.inference_mode():
            return self._with(embed_tokens=embedding).embed(input_ids_US)

    def run_layer(self, index: int, hidden_USH: Tensor) -> LayerRun:
        """Read a layer, run it on sequences without padding, and forget it."""
        layer = self._fill(self._model.layers[index], f"layers.{index}.")
        seen: list[Tensor] = []
        handle = _listen(layer.moe, seen) if layer.is_sparse else None
        shape = hidden_USH.shape[:2]
        places_US = torch.arange(shape[1]).expand(shape)
        real_US = torch.ones(shape, dtype=torch.bool)
        tokens = self._model.describe_tokens(places_US, None)
        view = self._model.make_views(real_US, places_US, 0, None)[index]
        with torch.inference_mode():
            out_USH = layer(hidden_USH, tokens, view)
        if handle is not None:
            handle.remove()
        # A sparse layer norms rows of tokens.
        return LayerRun(out_USH, seen[0].view_as(hidden_USH) if seen else out_USH)

    def read_router(self, index: int) -> Router | None:
        """Return the router of a layer; None where it is dense."""
        layer: Any = self._model.layers[index]
        if not layer.is_sparse:
            return None
        return cast(Router, self._fill(layer.moe.router, f"layers.{index}.moe.router."))

    def compute_logits(self, hidden_USH: Tensor) -> Tensor:
        """Return logits [U, S, V] of the residual stream after the last layer."""
        head = copy.deepcopy(self._model.lm_head)
        if self._model.config.tie_word_embeddings:
            head.weight = self._fill(self._model.embed_tokens, "embed_tokens.").weight
        else:
            head = self._fill(head, "lm_head.")
        norm = self._fill(self._model.norm, "norm.")
        with torch.inference_mode():
            return self._with(norm=norm, lm_head=head).compute_logits(hidden_USH)

    def _with(self, **parts: nn.Module) -> DecoderModel:
        """Return the model with some of its parts in place of those without weights."""
        model = copy.copy(self._model)
        model.__dict__["_modules"] = {**model._modules, **parts}
        return model

    def _read(self, prefix: str) -> dict[str, Tensor]:
        """Read the parameters whose names begin so."""
        work: list[Match] = [match for match in self._work if match[0].target.startswith(prefix)]
        return read_matched(work)

    def _fill(self, module: nn.Module, prefix: str) -> Any:
        """Return a copy of a part of the model, with its weights."""
        part = copy.deepcopy(module)
        tensors = self._read(prefix)
        state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        part.load_state_dict(state, assign=True)
        return part.requires_grad_(False)


def _listen(moe: MoE, seen: list[Tensor]) -> Any:
    """Keep what the router of a layer is given; return what ends it."""
    if moe.rmsnorm is not None:
        return moe.rmsnorm.register_forward_hook(lambda _module, _args, out: seen.append(out))
    return moe.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
