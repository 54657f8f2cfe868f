"""vLLM's pages of states as the core of our recurrent layers.

A sequence has one page in each such layer, which holds all that the layer knows of it; of models
whose layers all keep entries, one for all of them (`serving/vllm_entries.py`). vLLM says
which page that is, and lines sequences up: first those that add one token and go on, then those
that add several or begin.

Letters: T tokens of all sequences, U sequences of one token, S tokens of one sequence.
"""

import itertools
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from neuron_moe.models.attention import StateShape, StateView
from neuron_moe.models.delta_net import Inputs, Recurrent, State, bytes_of
from neuron_moe.models.loader import build_model
from neuron_moe.serving.options import page_shapes, text_places


class Run(NamedTuple):
    """Tokens of a step that go on from their pages together.

    Attributes:
        tokens: which of all tokens.
        pages_U: [U] the page of each sequence.
        is_decode: each sequence has one token; else there is one sequence.
        is_new: it begins: what its page holds is of another one.
    """

    tokens: slice
    pages_U: Tensor
    is_decode: bool
    is_new: bool


class StatePages(MambaBase):  # type: ignore[misc]
    """Pages of states, of which a sequence has one; every rank keeps them whole.

    To vLLM a page is so many bytes. It holds the states in turn, the last first: that is the one
    of float32, so that each is at a multiple of its numbers' size.

    Args:
        shapes: of the states.
        config: of the server.
        dtype: of the model, and so of states that name none.
        prefix: name of the layer, unique in the model.

    Attributes:
        states: [pages, ..] each, as `shapes`.
    """

    def __init__(
        self, shapes: Sequence[StateShape], config: VllmConfig, dtype: torch.dtype, prefix: str
    ) -> None:
        self._shapes, self._dtype, self._prefix = shapes, dtype, prefix
        self.states: State = ()
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
        self.states = tuple(reversed(states))

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

    def runs(self) -> list[Run] | None:
        """Return all tokens of this step in their order; None in vLLM's warm-up."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return None
        facts, found = metadata[self._prefix], []
        if facts.num_decodes:
            pages_U = facts.state_indices_tensor_d[:, 0].long()
            found.append(Run(slice(facts.num_decodes), pages_U, is_decode=True, is_new=False))
        if facts.num_prefills:
            ends = (facts.query_start_loc_p + facts.num_decode_tokens).tolist()
            has_state, pages = facts.has_initial_states_p, facts.state_indices_tensor_p.long()
            for row, (first, last) in enumerate(itertools.pairwise(ends)):
                is_new = not has_state[row]
                page_1 = pages[row : row + 1]
                found.append(Run(slice(first, last), page_1, is_decode=False, is_new=is_new))
        return found


class StateCore(StatePages):
    """Keeps the states of a recurrent layer in pages of its own.

    Args:
        layer: the module it computes for.
        config, dtype, prefix: as of `StatePages`.
    """

    def __init__(
        self, layer: Recurrent, config: VllmConfig, dtype: torch.dtype, prefix: str
    ) -> None:
        super().__init__(layer.state_shapes, config, dtype, prefix)

    def __call__(self, layer: Recurrent, inputs: Inputs, _view: StateView | None) -> Tensor:
        """Return [.., N, V]; arguments as of `models.delta_net.Recurrence`, the last one unread."""
        leading, flat = inputs.mixed_USC.shape[:2], [part.flatten(0, 1) for part in inputs[:3]]
        runs = self.runs()
        if runs is None:
            new = Inputs(*(part[None] for part in flat))
            return layer.recur(new, layer.empty_state(1, flat[0]))[0].view(*leading, *layer.answer)
        parts = []
        for run in runs:
            axis = int(run.is_decode)
            tokens = Inputs(*(part[run.tokens].unsqueeze(axis) for part in flat))
            parts.append(self._go_on(layer, tokens, run).squeeze(axis))
        return torch.cat(parts).view(*leading, *layer.answer)

    def _go_on(self, layer: Recurrent, tokens: Inputs, run: Run) -> Tensor:
        """Return [U, S, N, V]; go on from the state in each page, or nothing, and keep the new."""
        if run.is_new:
            state = layer.empty_state(1, tokens.mixed_USC)
        else:
            state = tuple(kept[run.pages_U] for kept in self.states)
        out_USNV, new = layer.recur(tokens, state)
        for kept, tensor in zip(self.states, new, strict=True):
            kept[run.pages_U] = tensor.to(kept.dtype)
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
        shapes = page_shapes(model, settings.max_model_len)
        return ((bytes_of(shapes, settings.dtype),),)

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
