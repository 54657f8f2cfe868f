"""vLLM's pages as the core of attention to entries, as DeepSeek-V4 has it.

A sequence has one page, which holds what all layers keep of it: the latest keys, the entries of as
many tokens as the server takes, and values of tokens whose entries are not complete. vLLM copies,
frees and hands out such pages as those of recurrent layers.

Letters: U sequences, S new tokens of each, T tokens of all sequences, W window, D head size, C
positions at hand, H hidden.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.config import VllmConfig

from neuron_moe.models.attention import CacheView
from neuron_moe.models.compressed_attention import CompressedAttention
from neuron_moe.models.compressed_entries import PooledView
from neuron_moe.models.decoder import DecoderModel, Tokens
from neuron_moe.serving.options import page_shapes
from neuron_moe.serving.vllm_states import Run, StatePages


class EntryCore:
    """Computes one layer, sequence by sequence where several tokens of each are new.

    Args:
        pages: of all layers.
        states: which of their states are of this layer.
    """

    def __init__(self, pages: StatePages, states: slice) -> None:
        self._pages, self._states = pages, states

    def __call__(
        self, layer: CompressedAttention, hidden_USH: Tensor, tokens: Tokens, _view: None
    ) -> Tensor:
        """Return [U, S, H]; arguments as of `attend_pooled`, the last one unread."""
        runs = self._pages.runs()
        if runs is None:  # nothing is kept
            return torch.zeros_like(hidden_USH)
        cos, sin = tokens.rope
        flat = [part.flatten(0, 1) for part in (hidden_USH, tokens.places_US, cos, sin)]
        parts = []
        for run in runs:
            axis = int(run.is_decode)
            hidden, places_US, *rope = (part[run.tokens].unsqueeze(axis) for part in flat)
            own = Tokens(places_US, (rope[0], rope[1]), None)
            parts.append(self._compute(layer, hidden, own, run).squeeze(axis))
        return torch.cat(parts).view(hidden_USH.shape)

    def _compute(
        self, layer: CompressedAttention, hidden_USH: Tensor, tokens: Tokens, run: Run
    ) -> Tensor:
        """Return [U, S, H] of sequences that go on from their pages, and keep there what is new."""
        places_US, states = tokens.places_US, self._pages.states[self._states]
        longest = int(places_US.max()) + 1
        rows = [shape.sizes[0] for shape in layer.sequence_shapes(longest)]
        kept = [state[run.pages_U, :end] for state, end in zip(states, rows, strict=True)]
        if run.is_new:
            kept = [torch.zeros_like(each) for each in kept]
        window = _window_view(kept[0], places_US)
        seen_U, total_U = places_US[:, 0], places_US[:, -1] + 1
        view = PooledView(window, tuple(kept[1:]), seen_U, total_U, longest)
        out_USH = layer.compute(hidden_USH, tokens, view)
        kept[0] = window.tensors[0][:, 0, places_US.shape[1] :]
        for state, end, new in zip(states, rows, kept, strict=True):
            state[run.pages_U, :end] = new
        return out_USH


def _window_view(latest_UwD: Tensor, places_US: Tensor) -> CacheView:
    """Return what new tokens see of the W - 1 keys before them, and of their own."""
    num_kept, num_new = latest_UwD.shape[1], places_US.shape[1]
    columns_C = torch.arange(num_kept + num_new, device=places_US.device)
    place_UC = places_US[:, :1] - num_kept + columns_C
    back_USC = places_US.unsqueeze(-1) - place_UC.unsqueeze(1)
    mask_USC = (back_USC >= 0) & (back_USC <= num_kept) & (place_UC >= 0).unsqueeze(1)
    keys_U1CD = F.pad(latest_UwD, (0, 0, 0, num_new)).unsqueeze(1)
    return CacheView(mask_USC, (keys_U1CD,), columns_C[num_kept:])


def put_entry_cores(model: DecoderModel, config: VllmConfig, prefix: str) -> None:
    """Put one page for each sequence under all layers with entries; without these do nothing."""
    layers = [each for each in model.attentions if isinstance(each, CompressedAttention)]
    if not layers:
        return
    longest, dtype = config.model_config.max_model_len, model.embed_tokens.weight.dtype
    name = f"{prefix}.layers.0.self_attn".lstrip(".")
    pages = StatePages(page_shapes(model, longest), config, dtype, name)
    first = 0
    for layer in layers:
        end = first + len(layer.sequence_shapes(longest))
        layer.core = EntryCore(pages, slice(first, end))
        first = end
