"""DBRX base and instruct: configuration, attention, experts and checkpoint map.

What differs from other decoders: norms subtract the mean and have no bias, queries, keys and values
are one product whose values are limited, and the experts of a layer are published below each other
in one matrix.
Source: transformers, `models/dbrx/modeling_dbrx.py`; databricks/dbrx-instruct.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, WeightMap, chain, concat_gate_up, split_rows, transpose
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, Experts, GroupedAttention
from neuron_moe.models.hf_config import ConfigReader, respell
from neuron_moe.models.layers import router_spec
from neuron_moe.models.rope import RopeConfig

NORM_EPS = 1e-5  # torch's; config.json has no key for it
# Dropout, and attributes that transformers wrote into sections of their own.
OTHER_KEYS = ("auto_map", "emb_pdrop", "resid_pdrop")
SECTION_KEYS = (
    *("_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "id2label"),
    *("is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states"),
    *("problem_type", "return_dict", "torch_dtype"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DbrxConfig(DecoderConfig):
    """Facts of one DBRX checkpoint.

    Attributes:
        clip_qkv: largest magnitude of a query, key or value; None for no limit.
        is_normalised: affinities are divided by their sum.
    """

    clip_qkv: float | None
    ffn_hidden_size: int
    moe_num_experts: int
    moe_top_k: int
    is_normalised: bool

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            raise ValueError(f"clip_qkv={self.clip_qkv}: must be positive. Correct config.json.")

    @property
    def experts(self) -> Experts:
        """Experts in every layer, chosen by a softmax."""
        top_k, renormalize = self.moe_top_k, self.is_normalised
        router = router_spec(
            self.moe_num_experts, self.hidden_size, top_k=top_k, renormalize=renormalize
        )
        return Experts(router, self.ffn_hidden_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DbrxConfig":
        """Read config.json as transformers 4.40 to 5.x write it."""
        given = respell(config, {"max_position_embeddings": "max_seq_len"})
        reader = ConfigReader.of_family(given, "dbrx", *OTHER_KEYS)
        reader.require("tie_word_embeddings", False)
        attention = _read_section(reader, "attn_config", "attn_pdrop")
        size, heads = reader.get("d_model", int), reader.get("n_heads", int)
        kv_heads = attention.get("kv_n_heads", int)
        reader.require("num_key_value_heads", kv_heads)  # transformers 5 writes it twice
        facts = cls(
            vocab_size=reader.get("vocab_size", int),
            hidden_size=size,
            num_hidden_layers=reader.get("n_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=size // max(heads, 1),
            max_position_embeddings=reader.get("max_position_embeddings", int),
            rms_norm_eps=NORM_EPS,
            rope=RopeConfig.from_hf(
                reader,
                default_theta=attention.get_optional("rope_theta", float),
            ),
            eos_token_ids=reader.get_ints("eos_token_id", "token id"),
            pad_token_id=reader.get_optional("pad_token_id", int),
            clip_qkv=attention.get_optional("clip_qkv", float),
            **_read_experts(reader, size),
        )
        attention.finish()
        reader.finish()
        return facts

    def make_norm(self, size: int, dtype: torch.dtype) -> nn.LayerNorm:
        """Return a norm that subtracts the mean."""
        return nn.LayerNorm(size, self.rms_norm_eps, bias=False, dtype=dtype)


def _read_section(reader: ConfigReader, key: str, *ignored: str) -> ConfigReader:
    section = ConfigReader(reader.get_section(key), f"config.json (dbrx), {key}")
    section.ignore(*SECTION_KEYS, *ignored)
    return section


def _read_experts(reader: ConfigReader, hidden_size: int) -> dict[str, Any]:
    """Return the fields that stand in the section of the experts."""
    section = _read_section(reader, "ffn_config", "moe_jitter_eps", "moe_loss_weight")
    activation = ConfigReader(section.get_section("ffn_act_fn"), "ffn_act_fn")
    section.require("hidden_size", hidden_size)
    norm = "moe_normalize_expert_weights"  # the exponent; null leaves weights as they are
    section.require(norm, 1.0)
    facts = {
        "hidden_act": activation.get("name", str, "silu"),
        "is_normalised": not section.is_null(norm),
        "ffn_hidden_size": section.get("ffn_hidden_size", int),
        "moe_num_experts": section.get("moe_num_experts", int),
        "moe_top_k": section.get("moe_top_k", int),
    }
    activation.finish()
    section.finish()
    return facts


Config = DbrxConfig


class Attention(GroupedAttention):
    """Grouped-query attention whose queries, keys and values are one limited product."""

    def __init__(self, config: DbrxConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        del self.q_proj, self.k_proj, self.v_proj
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        width = heads * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=False, dtype=dtype)
        self.limit = config.clip_qkv

    def products(self, hidden_USH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [U, S, heads * D] each, limited."""
        product: Tensor = self.qkv_proj(hidden_USH)
        if self.limit is not None:
            product = product.clamp(-self.limit, self.limit)
        kept = self.cache_shape[0][0] * self.head_dim
        sizes = [product.shape[-1] - 2 * kept, kept, kept]
        query, key, value = torch.split(product, sizes, dim=-1)
        return query, key, value


class Model(DecoderModel):
    """DBRX for generation."""

    config: DbrxConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> Attention:
        """Return attention with limited queries, keys and values."""
        return Attention(self.config, dtype)


def weight_map(config: DbrxConfig) -> WeightMap:
    """Map the published tensor names to ours: w1 is gate, v1 up, w2 down, [E * I, H] each."""
    source, ours = "transformer.blocks.{layer}.", "layers.{layer}."
    experts, mlp_op = source + "ffn.experts.mlp.", ours + "moe.expert_mlps.mlp_op."
    split = split_rows(config.moe_num_experts)
    names = {
        "transformer.wte.weight": "embed_tokens.weight",
        "transformer.norm_f.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
        source + "norm_attn_norm.norm_1.weight": ours + "input_layernorm.weight",
        source + "norm_attn_norm.attn.Wqkv.weight": ours + "self_attn.qkv_proj.weight",
        source + "norm_attn_norm.attn.out_proj.weight": ours + "self_attn.o_proj.weight",
        source + "norm_attn_norm.norm_2.weight": ours + "post_attention_layernorm.weight",
        source + "ffn.router.layer.weight": ours + "moe.router.linear_router.weight",
    }
    rules = [
        *(Rule(theirs, target) for theirs, target in names.items()),
        Rule(
            (experts + "w1", experts + "v1"),
            mlp_op + "gate_up_proj.weight",
            chain(split, concat_gate_up, transpose),
        ),
        Rule(experts + "w2", mlp_op + "down_proj.weight", split),
    ]
    return WeightMap(rules, {"layer": config.num_hidden_layers})
