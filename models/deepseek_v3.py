"""DeepSeek-V3, R1 and V3.1, and Kimi-K2: configuration, latent attention, experts, checkpoint map.

What differs from other decoders: keys and values of all heads are made of one latent vector a
token, beside which one rotated key is kept, so that is what the cache holds; queries may be made of
a latent too; YaRN scales logits as well as rotation. Routing is in `biased_routing`.

Letters beside those of `decoder`: R latent size, N the part of a head that is not rotated, D the
part that is, M latent and rotated key together, W value head size.
Source: transformers, `models/deepseek_v3/modeling_deepseek_v3.py`; arXiv 2412.19437, section 2.1.1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.attention import (
    EVERYTHING,
    AttentionFacts,
    CacheShape,
    CacheView,
    Core,
    CoreSizes,
    attend,
    need_view,
)
from neuron_moe.models.biased_routing import (
    FREQUENCIES,
    BiasedRoutingConfig,
    BiasedRoutingModel,
    biased_routing_map,
    read_feed_forward,
)
from neuron_moe.models.decoder import ConfigT, Tokens
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import RMSNorm
from neuron_moe.models.rope import RopeConfig, apply_rope, yarn_growth

ALIASES = ("kimi_k2",)
LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is
# Choices of training and of other software.
OTHER_KEYS = ("auto_map", "aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config(BiasedRoutingConfig):
    """Facts of one checkpoint; names are those of its config.json.

    Attributes:
        q_lora_rank: size of the queries' latent; None makes them of the hidden state.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DeepseekV3Config":
        """Read config.json as published with the model, or as transformers 4.51 to 5.x write it."""
        reader = ConfigReader.of_family(config, "deepseek_v3", *OTHER_KEYS, aliases=ALIASES)
        return cls.read_latent(
            reader, rope=read_rotated(reader, reader.get("rope_interleave", bool, True))
        )

    @classmethod
    def read_latent(
        cls: type[ConfigT],
        reader: ConfigReader,
        *,
        scores: str = "sigmoid",
        defaults: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> ConfigT:
        """Read what all models with this attention spell alike.

        Args:
            reader: of config.json, opened as a family's.
            scores: what makes scores of a router's logits.
            defaults: as of `read_feed_forward`.
            facts: fields the family read itself, `rope` among them.

        Raises:
            ValueError: a missing, unknown or contradictory key, or a variant nobody published.
        """
        reader.require("scoring_func", scores)
        reader.require("topk_method", "noaux_tc")
        reader.require("moe_layer_freq", 1)
        head_dim = reader.get("qk_nope_head_dim", int) + reader.get("qk_rope_head_dim", int)
        reader.require("qk_head_dim", head_dim)
        return cls.read(
            reader,
            head_dim=head_dim,
            **{**read_feed_forward(reader, defaults=defaults), **facts},
        )

    @property
    def rotated_size(self) -> int:
        """How much of each head is rotated."""
        return self.qk_rope_head_dim

    @property
    def logit_scale(self) -> float:
        """What logits are multiplied with."""
        return latent_logit_scale(self.head_dim, self.rope)


def read_rotated(reader: ConfigReader, is_interleaved: bool) -> RopeConfig:
    """Return the rotary embedding of the part of a head that is rotated, all of that.

    Raises:
        ValueError: config.json says otherwise.
    """
    reader.require("head_dim", reader.get("qk_rope_head_dim", int))  # as transformers 5 has it
    rope = RopeConfig.from_hf(reader, is_interleaved=is_interleaved, default_part=1.0)
    if rope.part != 1:
        raise ValueError(
            f"partial_rotary_factor={rope.part}: must be 1: qk_rope_head_dim says how much of a"
            " head is rotated. Correct config.json."
        )
    return rope


def latent_logit_scale(head_dim: int, rope: RopeConfig) -> float:
    """Return what logits are multiplied with, which yarn makes larger."""
    scale: float = head_dim**-0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_growth(rope.factor, rope.mscale_all_dim) ** 2
    return scale


Config = DeepseekV3Config


def attend_latent(
    layer: AttentionFacts,
    query_USQM: Tensor,
    kept_US1M: Tensor,
    latent_US1R: Tensor,
    view: CacheView | None,
) -> Tensor:
    """Keep latents and rotated keys, then attend to all that the view shows: [U, S, Q * R]."""
    view = need_view(view)
    (kept_U1CM,) = view.extend(kept_US1M.transpose(1, 2))
    latent_U1CR = kept_U1CM[..., : latent_US1R.shape[-1]]
    return attend(query_USQM, kept_U1CM, latent_U1CR, view.mask_USC, layer.sinks, layer.scale)


class LatentAttention(nn.Module):
    """Attention to one latent a token, of which the keys and values of all heads are made.

    The core sees one key head [latent, rotated key] and one value head, the latent itself, with
    queries to match: the same logits with less to keep, and less to compute for few new tokens. For
    many, keys and values are made; for a server's core always, which knows no latents. Attributes
    are those of `GroupedAttention`, but:

    Args:
        config: a `DeepseekV3Config`, or one with its sizes.
        dtype: of the weights.
        has_sinks: there is a learned sink logit for each query head, in float32.
        gates: sigmoids of the layer's input that scale what a head attends to: 1, or `v_head_dim`,
            one for each number; 0: none.

    Attributes:
        core: `attend_latent`, which returns [.., Q * R], or a server's, [.., Q * W].
        whole: projections that every rank holds whole, for they make what heads share.
        read_weights: projections whose weights are read here, so that they stay plain.
    """

    core: Core
    sinks: Tensor | None
    reach = EVERYTHING
    whole = ("q_a_proj", "kv_a_proj_with_mqa")
    read_weights = ("kv_b_proj",)

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        *,
        has_sinks: bool = False,
        gates: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.core, self.scale = config, attend_latent, config.logit_scale
        kept_size = config.kv_lora_rank + config.qk_rope_head_dim
        self.cache_shape: CacheShape = ((1, kept_size),)
        size, heads = config.hidden_size, config.num_attention_heads
        has_bias = config.attention_bias

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)

        q_size, rank = heads * config.head_dim, config.q_lora_rank
        if rank is None:
            self.q_proj = linear(size, q_size)
        else:
            self.q_a_proj = linear(size, rank, has_bias)
            self.q_a_layernorm = RMSNorm(rank, LATENT_EPS, dtype)
            self.q_b_proj = linear(rank, q_size)
        self.kv_a_proj_with_mqa = linear(size, kept_size, has_bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS, dtype)
        made_size = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = linear(config.kv_lora_rank, heads * made_size)
        self.o_proj = linear(heads * config.v_head_dim, size, has_bias)
        self.q_gate_proj = linear(size, heads * gates) if gates else None
        sinks_Q = torch.zeros(heads, dtype=torch.float32) if has_sinks else None
        self.register_parameter("sinks", None if sinks_Q is None else nn.Parameter(sinks_Q))

    def core_sizes(self, new_tokens: int) -> CoreSizes:
        """Return what the core computes with: latents for one new token, made keys for many."""
        config, ((_, kept_size),) = self.config, self.cache_shape
        heads = config.num_attention_heads
        if new_tokens == 1:
            return CoreSizes(heads, 1, kept_size, config.kv_lora_rank)
        return CoreSizes(heads, heads, config.head_dim, config.v_head_dim)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: CacheView | None) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        mixed = self.mix(hidden_USH, tokens, view)
        if self.q_gate_proj is not None:
            gate_USG = self.q_gate_proj(hidden_USH).float().sigmoid().to(mixed.dtype)
            mixed_USGW = mixed.view(*gate_USG.shape, -1)
            mixed = (mixed_USGW * gate_USG.unsqueeze(-1)).flatten(-2)
        out_USH: Tensor = self.o_proj(mixed)
        return out_USH

    def mix(self, hidden_USH: Tensor, tokens: Tokens, view: CacheView | None) -> Tensor:
        """Return what heads attend to, [U, S, Q * W]; arguments as of `forward`."""
        config = self.config
        nope_USQN, rotated_USQD = self._queries(hidden_USH, tokens)
        made_USM = self.kv_a_proj_with_mqa(hidden_USH)
        latent_USR, key_USD = made_USM.tensor_split((config.kv_lora_rank,), dim=-1)
        latent_US1R = self.kv_a_layernorm(latent_USR).unsqueeze(2)
        kept_US1M = torch.cat((latent_US1R, self._turn(key_USD.unsqueeze(2), tokens)), dim=-1)
        if self.core is not attend_latent:
            query_USQD = torch.cat((nope_USQN, rotated_USQD), dim=-1)
            key_UQSD, value_UQSW = self._make(kept_US1M.transpose(1, 2))
            made = key_UQSD.transpose(1, 2), value_UQSW.transpose(1, 2)
            return self.core(self, query_USQD, *made, view)
        if self._makes_keys(need_view(view)):
            query_USQD = torch.cat((nope_USQN, rotated_USQD), dim=-1)
            return self._attend_made(query_USQD, kept_US1M, need_view(view))
        key_QNR, value_QWR = self._makers()
        latent_USQR = torch.einsum("usqn,qnr->usqr", nope_USQN, key_QNR)
        query_USQM = torch.cat((latent_USQR, rotated_USQD), dim=-1)
        out = self.core(self, query_USQM, kept_US1M, latent_US1R, view)
        out_USQR = out.view(*hidden_USH.shape[:2], -1, config.kv_lora_rank)
        return torch.einsum("usqr,qwr->usqw", out_USQR, value_QWR).flatten(2)

    def _queries(self, hidden_USH: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the plain and the rotated part of each head, [U, S, Q, N] and [U, S, Q, D]."""
        config = self.config
        if config.q_lora_rank is None:
            query = self.q_proj(hidden_USH)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_USH)))
        query = query.view(*hidden_USH.shape[:2], -1, config.head_dim)
        plain, rotated = query.tensor_split((config.qk_nope_head_dim,), dim=-1)
        return plain, self._turn(rotated, tokens)

    def _turn(self, heads: Tensor, tokens: Tokens) -> Tensor:
        return apply_rope(heads, *tokens.rope, is_interleaved=self.config.rope.is_interleaved)

    def _makers(self) -> tuple[Tensor, Tensor]:
        """Return what makes keys and values of latents, [Q, N, R] and [Q, W, R]; views."""
        config = self.config
        made_QXR = self.kv_b_proj.weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
        key_QNR, value_QWR = made_QXR.tensor_split((config.qk_nope_head_dim,), dim=1)
        return key_QNR, value_QWR

    def _makes_keys(self, view: CacheView) -> bool:
        """Say whether making keys and values takes fewer products than attending to latents."""
        config, (new, seen) = self.config, view.mask_USC.shape[1:]
        making = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
        on_latents = 2 * config.kv_lora_rank + config.qk_rope_head_dim
        on_heads = config.head_dim + config.v_head_dim
        made = seen * making + new * seen * on_heads
        return bool(made < new * making + new * seen * on_latents)

    def _attend_made(self, query_USQD: Tensor, kept_US1M: Tensor, view: CacheView) -> Tensor:
        """Attend to keys and values of every head, made of all that is kept: [U, S, Q * W]."""
        (kept_U1CM,) = view.extend(kept_US1M.transpose(1, 2))
        key_UQCD, value_UQCW = self._make(kept_U1CM)
        return attend(query_USQD, key_UQCD, value_UQCW, view.mask_USC, self.sinks, self.scale)

    def _make(self, kept_U1CM: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of every head, made of what is kept: [U, Q, C, D or W]."""
        config, heads = self.config, self.config.num_attention_heads
        latent, rotated = kept_U1CM.tensor_split((config.kv_lora_rank,), dim=-1)
        made = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (heads, -1)).transpose(1, 2)
        plain, value_UQCW = made.tensor_split((config.qk_nope_head_dim,), dim=-1)
        return torch.cat((plain, rotated.expand(-1, heads, -1, -1)), dim=-1), value_UQCW


class Model(BiasedRoutingModel):
    """DeepSeek-V3 for generation."""

    config: DeepseekV3Config

    def build_attention(self, layer: int, dtype: torch.dtype) -> LatentAttention:
        """Return latent attention."""
        return LatentAttention(self.config, dtype)


def weight_map(
    config: DeepseekV3Config,
    ignored: Sequence[str] = (),
    rules_of_sparse: Callable[[str], list[Rule]] | None = None,
) -> WeightMap:
    """Map the published tensor names to ours.

    Args:
        config: of the checkpoint.
        ignored: patterns of further tensors that are left out.
        rules_of_sparse: as of `biased_routing_map`.
    """
    return biased_routing_map(
        config, latent_names(config), rules_of_sparse, (FREQUENCIES, *ignored)
    )


def latent_names(config: DeepseekV3Config) -> list[str]:
    """Return what follows `layers.N.` in the names of the attention's tensors."""
    names = [f"kv_{name}.weight" for name in ("a_proj_with_mqa", "a_layernorm", "b_proj")]
    names += ["o_proj.weight"]
    biased = ["kv_a_proj_with_mqa.bias", "o_proj.bias"]
    if config.q_lora_rank is None:
        names += ["q_proj.weight"]
    else:
        names += ["q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"]
        biased += ["q_a_proj.bias"]
    names += biased if config.attention_bias else []
    return [f"self_attn.{name}" for name in names]
