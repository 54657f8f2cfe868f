"""transformers' model of a checkpoint, one layer at a time: memory for one layer.

Every other layer is replaced by one that hands its input on, before weights are read; so only those
of one layer are, and the model's own code says what the layer gets (masks, rotary embedding).
"""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.models.layerwise import LayerRun
from neuron_moe.tools.reference import check_installed, quiet

# The first is of Gemma 4, beside an MLP; the last are all there is of a layer of Nemotron.
FEED_FORWARD_NAMES = ("router", "mlp", "feed_forward", "ffn", "block_sparse_moe", "mixer")


class _HandOn(nn.Module):
    """A layer that does nothing, with what the model may ask of the one it stands for."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        names = [name for name in vars(layer) if not name.startswith("_")]
        self.__dict__.update({name: vars(layer)[name] for name in names})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class _Reached(Exception):
    """Ends a run behind the layer that was requested."""


class TransformersModel:
    """Runs single layers as transformers computes them; methods as of `LayerwiseModel`.

    Args:
        folder: of the checkpoint.
        dtype: of the parameters.

    Raises:
        ValueError: transformers is missing, or does not know the architecture.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        check_installed()
        self._folder, self._dtype = folder, dtype
        transformers: Any = importlib.import_module("transformers")
        with quiet():
            whole = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        self._config = text = whole.get_text_config(decoder=True)
        auto = transformers.models.auto.modeling_auto
        known = auto.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(text) not in known and type(whole) in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            self._config, known = whole, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if type(self._config) not in known:
            raise ValueError(
                f"reference=transformers: version {transformers.__version__} has no model for"
                f" model_type={self._config.model_type}. Install a newer one, or pass a folder."
            )
        self._class: Any = known[type(self._config)]
        self._num_layers = int(text.num_hidden_layers)
        self._scale = _take_scale(text)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self._num_layers

    def embed(self, input_ids_US: Tensor) -> Tensor:
        """Return the residual stream before the first layer, [U, S, H]."""
        hidden_USH: Tensor = self._read(None).get_input_embeddings()(input_ids_US)
        return hidden_USH * self._scale

    def run_layer(self, index: int, hidden_USH: Tensor) -> LayerRun:
        """Read a layer, run it on sequences without padding, and forget it."""
        model = self._read(index)
        decoder, layers = _decoder_of(model)
        layer, seen, made = layers[index], [], []
        name = next(name for name in FEED_FORWARD_NAMES if hasattr(layer, name))

        def keep_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])

        def keep_output(_: Any, __: Any, output: Any) -> None:
            made.append(output if isinstance(output, Tensor) else output[0])
            raise _Reached

        getattr(layer, name).register_forward_pre_hook(keep_input, with_kwargs=True)
        layer.register_forward_hook(keep_output)
        try:
            with quiet(), torch.inference_mode():
                decoder(inputs_embeds=hidden_USH, use_cache=False)
        except _Reached:
            pass
        return LayerRun(made[0], seen[0].view(hidden_USH.shape))

    def compute_logits(self, hidden_USH: Tensor) -> Tensor:
        """Return logits [U, S, V] of the residual stream after the last layer."""
        with quiet(), torch.inference_mode():
            logits_USV: Tensor = self._read(None)(inputs_embeds=hidden_USH, use_cache=False).logits
        return logits_USV

    def _read(self, index: int | None) -> Any:
        """Return the model with one layer, without embedding and head; or with these alone."""
        own = self._class

        def init(self: Any, config: Any) -> None:
            own.__init__(self, config)
            _, layers = _decoder_of(self)
            for number in range(len(layers)):
                if number != index:
                    layers[number] = _HandOn(layers[number])
            if index is not None:
                _leave_out(self, (self.get_input_embeddings(), self.get_output_embeddings()))

        config = type(self._config).from_dict(self._config.to_dict())
        _take_scale(config.get_text_config(decoder=True))
        if index is not None:
            config.tie_word_embeddings = False  # there is nothing to tie
        members = {"__init__": init, "__module__": own.__module__}
        sliced: Any = type(own.__name__, (own,), members)
        with quiet():
            model = sliced.from_pretrained(
                self._folder, config=config, dtype=self._dtype, local_files_only=True
            )
        return model.eval()


def _take_scale(config: Any) -> float:
    """Return what a model multiplies embeddings with, and let it do so no more.

    It would do so with whatever a layer is given.
    """
    scale = float(getattr(config, "embedding_multiplier", 1.0))
    if hasattr(config, "embedding_multiplier"):
        config.embedding_multiplier = 1.0
    if getattr(config, "mup_enabled", False):
        scale, config.mup_enabled = config.hidden_size**0.5, False
    return scale


def _decoder_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """Return the part of a model with its list of layers, and the list."""
    named = dict(model.named_modules())
    text = next((named[name] for name in named if name.endswith("language_model")), model)
    lists = (
        (owner, child)
        for owner in text.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList)
    )
    return next(lists)


def _leave_out(model: nn.Module, parts: tuple[nn.Module, ...]) -> None:
    """Replace some parts of a model by nothing."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if any(child is part for part in parts):
                setattr(owner, name, nn.Identity())
