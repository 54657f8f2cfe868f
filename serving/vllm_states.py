"""vLLM's pages of states as the core of our recurrent layers.

A sequence has one page in each such layer, which holds all that the layer knows of it. vLLM says
which page that is, and lines sequences up: first those that bring one token and go on, then those
that bring several or begin.

Letters: T tokens of all sequences, U sequences of one token, S tokens of one sequence.
"""

import itertools
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from neuron_moe.models.attention import StateView
from neuron_moe.models.delta_net import Inputs, Recurrent, State, bytes_of
from neuron_moe.models.loader import build_model
from neuron_moe.serving.options import text_places


class StateCore(MambaBase):  # type: ignore[misc]
    """Keeps the states of a recurrent layer in vLLM's pages; every rank keeps them whole.

    To vLLM a page is so many bytes. It holds the states in turn, the last first: that is the one
    of float32, so that each lies at a multiple of its numbers' size.

    Args:
        layer: the module it computes for.
        config: of the server.
        dtype: of the model, and so of states that name none.
        prefix: name of the layer, unique in the model.
    """

    def __init__(
        self, layer: Recurrent, config: VllmConfig, dtype: torch.dtype, prefix: str
    ) -> None:
        self._shapes, self._dtype, self._prefix = layer.state_shapes, dtype, prefix
        self._states: State = ()
        self.kv_cache: State = ()
        config.compilation_config.static_forward_context[prefix] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take [pages, 1, 1, bytes] int8 as the pages."""
        super().bind_kv_cache(kv_cache)
        pages, first, states = self.kv_cache[0], 0, []
        for shape in reversed(self._shapes):
            dtype = shape.dtype or self._dtype
            last = first + prod(shape.sizes) * dtype.itemsize
            states.append(pages[:, first:last].view(dtype).view(-1, *shape.sizes))
            first = last
        self._states = tuple(reversed(states))

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a page."""
        return ((bytes_of(self._shapes, self._dtype),),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return its dtype."""
        return (torch.int8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The plainest of vLLM's kinds: which page, and whether it holds anything yet."""
        return MambaAttentionBackendEnum.SHORT_CONV

    def __call__(self, layer: Recurrent, inputs: Inputs, _view: StateView | None) -> Tensor:
        """Return [.., N, V]; arguments as of `models.delta_net.Recurrence`, the last one unread."""
        leading, flat = inputs.mixed_USC.shape[:2], [part.flatten(0, 1) for part in inputs[:3]]
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # vLLM's warm-up
            new = Inputs(*(part[None] for part in flat))
            return layer.recur(new, layer.empty_state(1, flat[0]))[0].view(*leading, *layer.answer)
        facts = metadata[self._prefix]
        parts = []
        if facts.num_decodes:
            page_U = facts.state_indices_tensor_d[:, 0].long()
            tokens = Inputs(*(part[: facts.num_decodes, None] for part in flat))
            parts.append(self._go_on(layer, tokens, page_U)[:, 0])
        if facts.num_prefills:
            ends = (facts.query_start_loc_p + facts.num_decode_tokens).tolist()
            has_state, pages = facts.has_initial_states_p, facts.state_indices_tensor_p.long()
            for row, (first, last) in enumerate(itertools.pairwise(ends)):
                tokens = Inputs(*(part[None, first:last] for part in flat))
                page_1 = pages[row : row + 1]
                parts.append(self._go_on(layer, tokens, page_1, is_new=not has_state[row])[0])
        return torch.cat(parts).view(*leading, *layer.answer)

    def _go_on(
        self, layer: Recurrent, tokens: Inputs, page_U: Tensor, *, is_new: bool = False
    ) -> Tensor:
        """Return [U, S, N, V]; go on from the state in each page, or nothing, and keep the new."""
        if is_new:
            state = layer.empty_state(len(page_U), tokens.mixed_USC)
        else:
            state = tuple(kept[page_U] for kept in self._states)
        out_USNV, new = layer.recur(tokens, state)
        for kept, tensor in zip(self._states, new, strict=True):
            kept[page_U] = tensor.to(kept.dtype)
        return out_USNV


class HybridPages:
    """What vLLM asks a class of models with recurrent layers, beside attention.

    Attributes:
        is_hybrid: read by vLLM, and so the next ones: some layers keep states.
        supports_mamba_prefix_caching: states at the ends of blocks may be kept for other requests.
        supports_mrope: places of images have three axes; those of text are alike.
    """

    is_hybrid = True
    has_inner_state = True
    supports_mamba_prefix_caching = True
    supports_mrope = True

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a page of bytes, which all recurrent layers of a model share."""
        settings = vllm_config.model_config
        model: Any = build_model(Path(settings.model), dtype=settings.dtype)
        layers = [each for each in model.attentions if isinstance(each, Recurrent)]
        return ((bytes_of(layers[0].state_shapes, settings.dtype) if layers else 0,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Return its dtype."""
        return (torch.int8,)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        """Return how a page is copied to another: whole."""
        return dict.fromkeys(mamba_types, (get_temporal_copy_spec,))

    def get_mrope_input_positions(
        self, input_tokens: Sequence[int], mm_features: Sequence[Any]
    ) -> tuple[Tensor, int]:
        """Return the places of a prompt of text on three axes, and what to add in decode."""
        return text_places(input_tokens, mm_features)
