"""The flat form that servers call, against the padded batch."""

import torch
from torch import Tensor

from neuron_moe.models.attention import (
    AttentionFacts,
    CacheView,
    StateView,
    attend,
    attention_mask,
    count_places,
)
from neuron_moe.models.compressed_attention import CompressedAttention
from neuron_moe.models.compressed_entries import PooledView
from neuron_moe.models.decoder import DecoderModel, Tokens
from neuron_moe.models.delta_net import Inputs, Recurrent, State

LENGTHS = (5, 21, 12)  # more than two windows of eight


class Pages:
    """A core with its own store: keys and values of each sequence, grown token by token."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], list[Tensor]] = {}
        self.rows: list[tuple[int, int]] = []  # sequence and count of the tokens of this step

    def __call__(
        self,
        layer: AttentionFacts,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        view: CacheView | None,
    ) -> Tensor:
        assert view is None
        out, first = [], 0
        flat = [part.flatten(0, 1) for part in (query, key, value)]
        for sequence, count in self.rows:
            query_TQD, *new = (part[first : first + count] for part in flat)
            old = self.kept.get((id(layer), sequence))
            kept = new if old is None else [torch.cat(pair) for pair in zip(old, new, strict=True)]
            self.kept[id(layer), sequence] = kept
            real = torch.ones(1, len(kept[0]), dtype=torch.bool)
            positions = torch.arange(len(kept[0]) - count, len(kept[0]))
            mask = attention_mask(real, positions, 0, layer.reach, count_places(real))
            keys, values = (part.transpose(0, 1)[None] for part in kept)
            out.append(attend(query_TQD[None], keys, values, mask, layer.sinks, layer.scale)[0])
            first += count
        return torch.cat(out).view(*query.shape[:2], -1)


class States:
    """A recurrence with its own store: the state of each sequence."""

    def __init__(self, pages: Pages) -> None:
        self.kept: dict[tuple[int, int], State] = {}
        self.pages = pages

    def __call__(self, layer: Recurrent, inputs: Inputs, view: StateView | None) -> Tensor:
        assert view is None
        out, first = [], 0
        flat = [part.flatten(0, 1) for part in inputs[:3]]
        for sequence, count in self.pages.rows:
            own = Inputs(*(part[None, first : first + count] for part in flat))
            old = self.kept.get((id(layer), sequence))
            made, new = layer.recur(own, old or layer.empty_state(1, own.mixed_USC))
            self.kept[id(layer), sequence] = new
            out.append(made[0])
            first += count
        return torch.cat(out).view(*inputs.mixed_USC.shape[:2], *out[0].shape[1:])


class Entries:
    """Attention to entries that keeps what comes in of each sequence, and pools it all anew."""

    def __init__(self, model: DecoderModel, pages: Pages) -> None:
        self.kept: dict[tuple[int, int], list[Tensor]] = {}
        self.model, self.pages = model, pages

    def __call__(
        self, layer: CompressedAttention, hidden: Tensor, tokens: Tokens, view: PooledView | None
    ) -> Tensor:
        assert view is None
        out, first = [], 0
        flat = [part.flatten(0, 1) for part in (hidden, tokens.places_US, *tokens.rope)]
        for sequence, count in self.pages.rows:
            new = [part[first : first + count] for part in flat]
            old = self.kept.get((id(layer), sequence), [part[:0] for part in new])
            kept = [torch.cat(pair) for pair in zip(old, new, strict=True)]
            self.kept[id(layer), sequence] = kept
            whole, places, cos, sin = (part[None] for part in kept)
            views = self.model.make_views(torch.ones_like(places).bool(), places, 0, None)
            own = Tokens(places, (cos, sin), None)
            made = layer.compute(whole, own, views[self.model.attentions.index(layer)])
            out.append(made[0, -count:])
            first += count
        return torch.cat(out).view(hidden.shape)


@torch.inference_mode()
def assert_flat_form_agrees(model: DecoderModel, vocab_size: int) -> None:
    """Prefill of several sequences in one flat list, then decode, against the padded batch."""
    prompts = [torch.randint(0, vocab_size, (1, count)) for count in LENGTHS]
    step = torch.randint(0, vocab_size, (len(LENGTHS),))
    expected = []
    for row, prompt in enumerate(prompts):
        cache = model.new_cache(1, prompt.shape[1] + 1)
        expected.append(model(prompt, cache=cache)[0])
        expected.append(model(step[row].view(1, 1), cache=cache)[0])
    pages = Pages()
    states = States(pages)
    entries = Entries(model, pages)
    for attention in model.attentions:
        attention.core = states if attention.reach is None else pages
        if isinstance(attention, CompressedAttention):
            attention.core = entries
    pages.rows = list(enumerate(LENGTHS))
    places = torch.cat([torch.arange(count) for count in LENGTHS])
    hidden_TH = model.forward_tokens(torch.cat(prompts, dim=1)[0], places)
    parts = list(model.compute_logits(hidden_TH).split(LENGTHS))
    pages.rows = [(row, 1) for row in range(len(LENGTHS))]
    hidden_TH = model.forward_tokens(step, torch.tensor(LENGTHS), phase="decode")
    last = model.compute_logits(hidden_TH)
    for row in range(len(LENGTHS)):
        pairs = (parts[row], expected[2 * row]), (last[row : row + 1], expected[2 * row + 1])
        for found, wanted in pairs:  # a wrong cache: above 1e-2
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=3e-4)
