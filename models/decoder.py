"""Everything that decoder-only MoE models share: facts, attention, layers, the model.

A model file adds its own facts to `DecoderConfig`, which reads those that are not given by name and
type, and lists its checkpoint's tensors in `weight_map`. `experts` of its configuration says which
feed-forward parts the layers have; `Model` builds attention or these itself where they are others.

Letters: U sequences, S new tokens of each, T tokens of all sequences, C cached positions, H hidden,
V vocabulary, Q query heads, J key/value heads, D head size, d rotary frequencies. Positions and
places are those of `neuron_moe.models.attention`.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from neuron_moe.activations import HIDDEN_ACTIVATIONS
from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.models.attention import (
    EVERYTHING,
    CacheShape,
    CacheView,
    Core,
    CoreSizes,
    KVCache,
    Reach,
    StateView,
    View,
    attend_cached,
    attention_mask,
    count_places,
)
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import GatedMLP, RMSNorm, build_shared, gated_moe
from neuron_moe.models.rope import DYNAMIC, RopeConfig, apply_rope, rope_tables
from neuron_moe.moe import MoE
from neuron_moe.router import Router
from neuron_moe.spec import ExpertFormula, RouterSpec

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ConfigT = TypeVar("ConfigT", bound="DecoderConfig")
Norm = RMSNorm | nn.LayerNorm
_KINDS = (int, float, bool, str)  # of fields that are read by themselves
_OPTIONAL: dict[Any, type[Any]] = {kind | None: kind for kind in _KINDS}
_OTHER_NAMES = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}  # of activations


class Experts(NamedTuple):
    """The feed-forward parts of a decoder's layers.

    Attributes:
        router: how experts are chosen, in float32.
        size: columns of a routed expert.
        formula: what it computes; None: act(gate) * up, as other parts do.
        scales_input: affinities scale an expert's input, not its output.
        shared_size: columns of the shared experts together; None: there are none.
        is_gated: a gate scales these, token by token.
        is_fused: their gate and up projections are one matrix.
        layers: those with experts; None: all.
        dense_size: columns of the others' MLPs.
    """

    router: RouterSpec
    size: int
    formula: ExpertFormula | None = None
    scales_input: bool = False
    shared_size: int | None = None
    is_gated: bool = False
    is_fused: bool = False
    layers: Container[int] | None = None
    dense_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Facts that every decoder has; names are those of config.json.

    Attributes:
        hidden_act: of all feed-forward parts, where the architecture does not fix it.
        tie_word_embeddings: the vocabulary projection is the embedding.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    # What messages say behind a max_position_embeddings that is not config.json's.
    length_reason: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_size = field.type in (int, int | None) and field.name != "pad_token_id"
            if is_size and (value is not None or field.type is int):
                check_positive_int(field.name, value)
        check_choice("hidden_act", self.hidden_act, HIDDEN_ACTIVATIONS)
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(
                f"rms_norm_eps={self.rms_norm_eps}: must not be negative. Correct config.json."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads}: must be a multiple of"
                f" num_key_value_heads={self.num_key_value_heads}. Correct config.json."
            )
        self.check_rotated(self.rotated_size)
        _ = self.experts

    @property
    def experts(self) -> Experts | None:
        """The feed-forward parts; None where a family builds its own.

        Raises:
            ValueError: experts cannot be chosen so.
        """
        return None

    def reach(self, layer: int) -> Reach:
        """Return how far back a token sees in a layer."""
        return Reach(window=getattr(self, "sliding_window", None))

    def check_rotated(self, size: int) -> None:
        """Raise ValueError unless so much of a head can be rotated."""
        if size % 2 or not size:
            raise ValueError(
                f"head_dim={self.head_dim}: must be even, and so must the rotated part of a head,"
                f" here {size}. Rotary embedding rotates pairs."
            )

    @property
    def rotated_size(self) -> int:
        """How much of each head is rotated."""
        return int(self.head_dim * self.rope.part)

    @property
    def longest(self) -> int:
        """Positions of the longest sequence; a dynamic rotary embedding stretches them."""
        positions = self.max_position_embeddings
        if self.rope.kind != DYNAMIC or self.length_reason:
            return positions
        return int(positions * self.rope.factor)

    @property
    def kv_head_counts(self) -> set[int]:
        """How many key/value heads layers have; one number, for most."""
        return {self.num_key_value_heads}

    def make_norm(self, size: int, dtype: torch.dtype) -> Norm:
        """Return the norm of the architecture for rows of `size` numbers."""
        return RMSNorm(size, self.rms_norm_eps, dtype)

    @classmethod
    def read(cls: type[ConfigT], reader: ConfigReader, **facts: Any) -> ConfigT:
        """Read the fields that are not given under their own names; refuse keys that nobody read.

        A field with a default may be absent, one that may be None null as well.

        Args:
            reader: of the whole config.json.
            facts: fields the family read itself, `rope` among them, `head_dim` where it is not a
                head's part of the hidden size unless a key says so, `tie_word_embeddings` where the
                class ties them unless a key says not, and a shorter `max_position_embeddings`.

        Raises:
            ValueError: a missing, unknown or contradictory key.
        """
        reader.ignore("head_dim", "hidden_act", "tie_word_embeddings")  # where the family has them
        for field in fields(cls):
            name = field.name
            if name in facts:
                continue
            if name == "head_dim":
                usual = facts["hidden_size"] // max(facts["num_attention_heads"], 1)
                facts[name] = reader.get(name, int, usual)
            elif name == "hidden_act":
                act = reader.get(name, str, "silu")
                facts[name] = _OTHER_NAMES.get(act, act)
            elif name == "eos_token_ids":
                facts[name] = reader.get_ints("eos_token_id", "token id")
            elif field.type in _KINDS:
                usual = None if field.default is MISSING else field.default
                facts[name] = reader.get(name, field.type, usual)
            elif field.type in _OPTIONAL:
                facts[name] = reader.get_optional(name, _OPTIONAL[field.type])
        config = cls(**facts)
        reader.finish()
        return config


def check_layer_types(layer_types: Sequence[str], num_layers: int, known: Sequence[str]) -> None:
    """Raise ValueError unless `layer_types` names one of `known` for each layer."""
    if not set(layer_types) <= set(known) or len(layer_types) != num_layers:
        raise ValueError(
            f"layer_types={list(layer_types)}: must name num_hidden_layers={num_layers} layers,"
            f" each {' or '.join(known)}. Leave the key out for the usual alternation."
        )


class Tokens(NamedTuple):
    """The new tokens of a step, as every layer needs to know them.

    Attributes:
        places_US: [U, S] int64, counted within each sequence.
        rope: cos and sin at these places, [U, S, d] float32 each.
        real_US: [U, S] bool, False at padding, which goes to no expert; None: all are real.
        ids_US: [U, S] token ids, for models whose experts are chosen by them; None for others.
    """

    places_US: Tensor
    rope: tuple[Tensor, Tensor]
    real_US: Tensor | None = None
    ids_US: Tensor | None = None


# So that the captured graph of a layer can be saved: these are among its inputs.
for _kind in (Tokens, CacheView):
    pytree._register_namedtuple(_kind, serialized_type_name=f"neuron_moe.{_kind.__name__}")


class GroupedAttention(nn.Module):
    """Grouped-query attention: projections and rotary embedding around an exchangeable core.

    Args:
        config: sizes.
        dtype: of the parameters.
        reach: how far back a token sees.
        bias: names of the projections with a bias, such as "q_proj".
        has_sinks: there is a learned sink logit for each query head.
        norms: queries and keys are normalised before they are rotated: "" for not, "by head" for
            each head by itself, "jointly" for all heads together.
        value_dim: size of a value; None: that of a head.
        rotates: queries and keys are rotated, so that they know their places.

    Attributes:
        core: computes [.., Q * D] from queries, keys and values; see `attention.Core`.
        reach: see above.
        scale: of the logits.
        sinks: [Q], or None.
        norms: see above.
        cache_shape: what the core that comes with the model keeps of a token.
    """

    core: Core
    sinks: Tensor | None

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        *,
        reach: Reach = EVERYTHING,
        bias: Sequence[str] = (),
        has_sinks: bool = False,
        norms: str = "",
        value_dim: int | None = None,
        rotates: bool = True,
    ) -> None:
        super().__init__()
        self.head_dim, self.is_interleaved = config.head_dim, config.rope.is_interleaved
        self.core, self.reach, self.scale = attend_cached, reach, config.head_dim**-0.5
        self.value_dim = value_dim = value_dim or config.head_dim
        self.rotates = rotates
        kv_heads, hidden_size = config.num_key_value_heads, config.hidden_size
        self.cache_shape: CacheShape = (kv_heads, config.head_dim), (kv_heads, value_dim)
        q_size = config.num_attention_heads * config.head_dim
        kv_size = kv_heads * config.head_dim

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=name in bias, dtype=dtype)

        self.q_proj = linear("q_proj", hidden_size, q_size)
        self.k_proj = linear("k_proj", hidden_size, kv_size)
        self.v_proj = linear("v_proj", hidden_size, kv_heads * value_dim)
        self.o_proj = linear("o_proj", config.num_attention_heads * value_dim, hidden_size)
        sinks_Q = torch.zeros(config.num_attention_heads, dtype=dtype) if has_sinks else None
        self.register_parameter("sinks", None if sinks_Q is None else nn.Parameter(sinks_Q))
        self.q_norm = self.k_norm = None
        self.norms = norms
        if check_choice("norms", norms, ("", "by head", "jointly")):
            sizes = (q_size, kv_size) if norms == "jointly" else (config.head_dim,) * 2
            self.q_norm, self.k_norm = (config.make_norm(size, dtype) for size in sizes)

    def core_sizes(self, new_tokens: int) -> CoreSizes:
        """Return what the core computes with, however many tokens of a sequence are new."""
        (kv_heads, size), (_, value_size) = self.cache_shape
        return CoreSizes(self.o_proj.in_features // value_size, kv_heads, size, value_size)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: CacheView | None) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        out_USH: Tensor = self.o_proj(self.mix(self.project(hidden_USH), tokens, view))
        return out_USH

    def mix(
        self, projected: tuple[Tensor, Tensor, Tensor], tokens: Tokens, view: CacheView | None
    ) -> Tensor:
        """Return what the core makes of queries, keys and values, [U, S, Q * D]."""
        leading, sizes = projected[0].shape[:2], (self.head_dim, self.head_dim, self.value_dim)
        query, key, value_USJD = (
            part.view(*leading, -1, size) for part, size in zip(projected, sizes, strict=True)
        )
        query_USQD, key_USJD = self.rotate(query, key, tokens)
        return self.core(self, query_USQD, key_USJD, value_USJD, view)

    def project(self, hidden_USH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [U, S, heads * D] each, normalised where they are."""
        query, key, value = self.products(hidden_USH)
        return normalise(query, self.q_norm), normalise(key, self.k_norm), value

    def products(self, hidden_USH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three projections, [U, S, heads * D] each; a server may put in its own."""
        return self.q_proj(hidden_USH), self.k_proj(hidden_USH), self.v_proj(hidden_USH)

    def rotate(self, query_USQD: Tensor, key_USJD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return queries and keys that know their places, where the layer rotates them."""
        if not self.rotates:
            return query_USQD, key_USJD
        query_USQD, key_USJD = (
            apply_rope(part, *tokens.rope, is_interleaved=self.is_interleaved)
            for part in (query_USQD, key_USJD)
        )
        return query_USQD, key_USJD


def normalise(hidden: Tensor, norm: Norm | None) -> Tensor:
    """Return [.., n * N] of which each N numbers were normalised by themselves, N as the norm."""
    if norm is None:
        return hidden
    normed: Tensor = norm(hidden.view(*hidden.shape[:-1], -1, norm.weight.numel()))
    return normed.flatten(-2)


class LayerParts(nn.Module):
    """Attention and a feed-forward part, and the norm before each; how they join is the layer's.

    Args:
        config: makes the norms.
        dtype: of the norms.
        attention: the first part.
        feed_forward: the second, a `MoE` or an MLP.

    Attributes:
        moe: the feed-forward part of a sparse layer.
        mlp: that of a dense one.
    """

    moe: nn.Module
    mlp: nn.Module

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        attention: nn.Module,
        feed_forward: nn.Module,
    ) -> None:
        super().__init__()
        self.input_layernorm = config.make_norm(config.hidden_size, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = config.make_norm(config.hidden_size, dtype)
        self.is_sparse = isinstance(feed_forward, MoE)
        self.add_module("moe" if self.is_sparse else "mlp", feed_forward)

    def feed(self, hidden_USH: Tensor, tokens: Tokens) -> Tensor:
        """Return the feed-forward part of what its norm makes of the input, [U, S, H]."""
        normed_USH = self.post_attention_layernorm(hidden_USH)
        if self.is_sparse:
            given = {"padding_mask": tokens.real_US, "token_ids": tokens.ids_US}
            out_USH: Tensor = self.moe(normed_USH, **given)[0]
            return out_USH
        mlp_out_USH: Tensor = self.mlp(normed_USH)
        return mlp_out_USH


class DecoderLayer(LayerParts):
    """Parts with a residual each; the MoE of a sparse layer computes its norm and residual too.

    Shapes are static.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        attention: nn.Module,
        feed_forward: nn.Module,
    ) -> None:
        super().__init__(config, dtype, attention, feed_forward)
        if isinstance(feed_forward, MoE):
            feed_forward.take_frame(self.post_attention_layernorm)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: View | None = None) -> Tensor:
        """Return the layer's output `[U, S, H]`.

        Args:
            hidden_USH: [U, S, H] residual stream.
            tokens: the new tokens.
            view: what they see of the cache; None where another core finds keys and values itself.
        """
        attention_in_USH = self.input_layernorm(hidden_USH)
        hidden_USH = hidden_USH + self.self_attn(attention_in_USH, tokens, view)
        if self.is_sparse:
            out_USH: Tensor = self.moe(hidden_USH, padding_mask=tokens.real_US)[0]
            return out_USH
        return hidden_USH + self.feed(hidden_USH, tokens)


class DecoderModel(nn.Module):
    """Token ids in, logits out, keys and values in a cache; a model file fills in the layers.

    Attributes:
        runs_layers_alone: a layer needs one residual stream and no token ids.
        biased: projections with a bias, where config.json has `attention_bias`.
        norms: of queries and keys, see `GroupedAttention`.
    """

    runs_layers_alone: ClassVar[bool] = True
    biased: ClassVar[Sequence[str]] = PROJECTIONS
    norms: ClassVar[str] = ""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "torch",
    ) -> None:
        super().__init__()
        self.config = config
        numbers = range(config.num_hidden_layers)
        layers = (self.build_layer(layer, dtype, backend) for layer in numbers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = config.make_norm(config.hidden_size, dtype)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> nn.Module:
        """Return a layer, called as `DecoderLayer` is."""
        attention = self.build_attention(layer, dtype)
        feed_forward = self.build_feed_forward(layer, dtype, backend)
        return DecoderLayer(self.config, dtype, attention, feed_forward)

    def build_attention(self, layer: int, dtype: torch.dtype) -> nn.Module:
        """Return the attention of a layer, called as `GroupedAttention` is."""
        config = self.config
        bias = self.biased if getattr(config, "attention_bias", False) else ()
        return GroupedAttention(
            config, dtype, reach=config.reach(layer), bias=bias, norms=self.norms
        )

    def build_feed_forward(self, layer: int, dtype: torch.dtype, backend: str) -> nn.Module:
        """Return the `MoE` of a layer, or what it has instead, called with [U, S, H]."""
        config, parts = self.config, self.config.experts
        assert parts is not None
        size, act = config.hidden_size, config.hidden_act
        if parts.layers is not None and layer not in parts.layers:
            return GatedMLP(size, parts.dense_size, dtype, act)
        shared = None
        if parts.shared_size is not None:
            shared = build_shared(
                size,
                parts.shared_size,
                dtype,
                act,
                is_gated=parts.is_gated,
                is_fused=parts.is_fused,
            )
        return gated_moe(
            Router(parts.router),
            parts.size,
            dtype,
            backend,
            shared,
            hidden_act=act,
            scales_input=parts.scales_input,
            formula=parts.formula,
        )

    @property
    def attentions(self) -> list[Any]:
        """The attention of each layer."""
        return [layer.self_attn for layer in self.layers]

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Return an empty cache of `capacity` positions a sequence, in the model's dtype."""
        return KVCache(
            [attention.cache_shape for attention in self.attentions],
            batch_size=batch_size,
            capacity=capacity,
            like=self.embed_tokens.weight,
            states=[getattr(attention, "state_shapes", ()) for attention in self.attentions],
        )

    def forward(
        self,
        input_ids_US: Tensor,
        *,
        real_US: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Return logits `[U, S, V]`, or `[U, 1, V]` with `last_only`.

        Args:
            input_ids_US: [U, S] integer token ids, padded on the left where lengths differ; they
                go to the device of the model.
            real_US: [U, S] bool, False at padding; None where all tokens are real.
            cache: what layers keep of the tokens before; extended in place.
            last_only: compute the vocabulary projection of the last token only.
        """
        device = self.embed_tokens.weight.device
        input_ids_US = input_ids_US.to(device)
        real_US = None if real_US is None else real_US.to(device)
        real_UC = torch.ones_like(input_ids_US, dtype=torch.bool) if real_US is None else real_US
        start, end = 0, input_ids_US.shape[1]
        if cache is not None:
            start, end = cache.reserve(real_UC)
            real_UC = cache.real_UC[:, :end]
        places_UC = count_places(real_UC)
        hidden_USH = self._run(
            input_ids_US,
            self.describe_tokens(places_UC[:, start:], real_US),
            self.make_views(real_UC, places_UC, start, cache),
        )
        return self.compute_logits(hidden_USH[:, -1:] if last_only else hidden_USH)

    def forward_tokens(
        self,
        input_ids_T: Tensor,
        places_T: Tensor,
        *,
        phase: str = "prefill",
        real_T: Tensor | None = None,
        views: Sequence[Any] | None = None,
    ) -> Tensor:
        """Return the last hidden states `[T, H]`, for `compute_logits`, of tokens in a flat list.

        For servers that keep the cache: every attention's `core` must be one that finds keys and
        values itself. It gets [1, T, heads, D] in prefill and [T, 1, heads, D] in decode. A
        recurrent layer's finds the state of each sequence, see `delta_net.Recurrence`.

        Args:
            input_ids_T: [T] integer token ids of any number of sequences.
            places_T: [T] int64, where each token is in its own sequence.
            phase: 'prefill' or 'decode', which chooses the path of the experts.
            real_T: [T] bool, False at padding, which goes to no expert; None: all are real.
            views: what the core of each layer gets as its view; None for cores that need none.
        """
        axis = 1 if check_choice("phase", phase, ("prefill", "decode")) == "decode" else 0
        real_US = None if real_T is None else real_T.unsqueeze(axis)
        tokens = self.describe_tokens(places_T.unsqueeze(axis), real_US)
        views = [None] * len(self.attentions) if views is None else views
        hidden_USH = self._run(input_ids_T.unsqueeze(axis), tokens, views)
        return hidden_USH.squeeze(axis)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the first hidden states `[.., H]` of token ids `[..]`."""
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[.., V]` of the last hidden states `[.., H]`."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def _run(self, input_ids_US: Tensor, tokens: Tokens, views: Sequence[View | None]) -> Tensor:
        """Return the residual stream after the last layer, [U, S, H]."""
        hidden_USH = self.embed(input_ids_US)
        for layer, view in zip(self.layers, views, strict=True):
            hidden_USH = layer(hidden_USH, tokens, view)
        return hidden_USH

    def describe_tokens(self, places_US: Tensor, real_US: Tensor | None) -> Tokens:
        """Return what all layers need to know of the new tokens."""
        rope = rope_tables(self.config.rope, self.config.rotated_size, places_US)
        return Tokens(places_US, rope, real_US)

    def make_views(
        self, real_UC: Tensor, places_UC: Tensor, start: int, cache: KVCache | None
    ) -> list[View]:
        """Return what the new tokens, at positions from `start` on, see in each layer."""
        end = real_UC.shape[1]
        positions_S = torch.arange(start, end, device=real_UC.device)
        masks: dict[Reach, tuple[int, Tensor]] = {}
        views: list[View] = []
        for layer, attention in enumerate(self.attentions):
            reach = attention.reach
            if reach is None:
                views.append(StateView(() if cache is None else cache.states[layer]))
                continue
            if reach not in masks:
                # No layer of this reach reads the positions before.
                first = reach.first_position(start)
                seen = real_UC[:, first:], positions_S, first, reach, places_UC[:, first:]
                masks[reach] = first, attention_mask(*seen)
            first, mask_USC = masks[reach]
            tensors = () if cache is None else cache.view(layer, first, end)
            views.append(CacheView(mask_USC, tensors, positions_S - first))
        return views
