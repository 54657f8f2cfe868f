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
from neuron_moe.router import Router

_HEAD, _HEAD_BIAS = "lm_head.weight", "lm_head.bias"
_EMBEDDING = "embed_tokens.weight"


class LayerRun(NamedTuple):
    """What a layer made of its input.

    Attributes:
        hidden_USH: [U, S, H] the residual stream after it.
        feed_forward_in_USH: [U, S, H] what its feed-forward part was given.
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
        ValueError: config.json, a name or a shape is not as it must be, or layers need more than
            one residual stream.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, **model_options: Any) -> None:
        model = build_model(folder, dtype=dtype, **model_options)
        self._model = cast(DecoderModel, model.eval().requires_grad_(False))
        if not self._model.runs_layers_alone:
            raise ValueError(
                f"{folder}: layers of model_type={read_config(folder)['model_type']!r} take several"
                " residual streams and token ids, so none runs alone. Compare logits of the whole."
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
        weight_VH = self._read(_EMBEDDING)[_EMBEDDING]
        return nn.functional.embedding(input_ids_US, weight_VH)

    def run_layer(self, index: int, hidden_USH: Tensor) -> LayerRun:
        """Read a layer, run it on sequences without padding, and forget it."""
        layer = self._fill(self._model.layers[index], f"layers.{index}.")
        seen: list[Tensor] = []
        handle = layer.post_attention_layernorm.register_forward_hook(
            lambda _module, _args, normed_USH: seen.append(normed_USH)
        )
        shape = hidden_USH.shape[:2]
        places_US = torch.arange(shape[1]).expand(shape)
        real_US = torch.ones(shape, dtype=torch.bool)
        tokens = self._model.describe_tokens(places_US, None)
        view = self._model.make_views(real_US, places_US, 0, None)[index]
        with torch.inference_mode():
            out_USH = layer(hidden_USH, tokens, view)
        handle.remove()
        return LayerRun(out_USH, seen[0].view_as(hidden_USH))  # a sparse layer norms rows of tokens

    def read_router(self, index: int) -> Router | None:
        """Return the router of a layer; None where it is dense."""
        layer: Any = self._model.layers[index]
        if not layer.is_sparse:
            return None
        return cast(Router, self._fill(layer.moe.router, f"layers.{index}.moe.router."))

    def compute_logits(self, hidden_USH: Tensor) -> Tensor:
        """Return logits [U, S, V] of the residual stream after the last layer."""
        norm = self._fill(self._model.norm, "norm.")
        is_tied = self._model.config.tie_word_embeddings
        ((_, weight_VH),) = self._read(_EMBEDDING if is_tied else _HEAD).items()
        bias_V = self._read(_HEAD_BIAS).get(_HEAD_BIAS)
        with torch.inference_mode():
            return nn.functional.linear(norm(hidden_USH), weight_VH, bias_V)

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
