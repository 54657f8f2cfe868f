"""Phi-3.5-MoE: configuration, attention, experts and checkpoint map.

What differs from other decoders: a token takes two experts, each weighed by a softmax of its own
over the experts whose logits are near the highest one that is left (sparsemixer); norms subtract
the mean and have biases, as projections and the head may. Rotary frequencies are divided by a
list of numbers (LongRoPE): those of config.json's short context are computed, up to its length;
longer sequences, whose frequencies would be others, are refused by `max_position_embeddings`.
Source: transformers, `models/phimoe/modular_phimoe.py`; microsoft/Phi-3.5-MoE-instruct.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, Experts
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import router_spec
from neuron_moe.models.rope import LONGROPE, RopeConfig
from neuron_moe.models.weight_rules import (
    block_sparse_rules,
    decoder_map,
    decoder_rules,
    projection_names,
)

ROPE_THETA, JITTER = 1000000.0, 0.01  # where config.json does not say
CONTEXT = "original_max_position_embeddings"
SECTIONS = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhimoeConfig(DecoderConfig):
    """Facts of one Phi-3.5-MoE checkpoint; names are those of its config.json.

    Attributes:
        max_position_embeddings: at most the context of the short frequencies.
        router_jitter_noise: how near logits must be, in inference as well.
    """

    length_reason: ClassVar[str] = (
        f", config.json's {CONTEXT}: longer sequences have frequencies that are not computed here"
    )
    intermediate_size: int
    num_local_experts: int
    router_jitter_noise: float = JITTER
    sliding_window: int | None
    attention_bias: bool = False
    lm_head_bias: bool = False

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if self.rope.kind == LONGROPE and len(self.rope.divisors) != self.head_dim // 2:
            raise ValueError(
                f"short_factor: must be a list of {self.head_dim // 2} numbers, half of head_dim="
                f"{self.head_dim}, but has {len(self.rope.divisors)}. Correct config.json."
            )

    @property
    def experts(self) -> Experts:
        """Experts in every layer."""
        router = router_spec(self.num_local_experts, self.hidden_size, top_k=2)
        return Experts(
            replace(router, mixer_jitter=self.router_jitter_noise), self.intermediate_size
        )

    def make_norm(self, size: int, dtype: torch.dtype) -> nn.LayerNorm:
        """Return a norm that subtracts the mean, with a bias."""
        return nn.LayerNorm(size, self.rms_norm_eps, dtype=dtype)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "PhimoeConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        # The input's noise is of training.
        reader = ConfigReader.of_family(config, "phimoe", "input_jitter_noise", CONTEXT)
        reader.require("num_experts_per_tok", 2)
        rope, context = _read_rope(reader)
        longest = reader.get("max_position_embeddings", int)
        return cls.read(
            reader,
            rope=rope,
            max_position_embeddings=longest if context is None else min(longest, context),
        )


def _read_rope(reader: ConfigReader) -> tuple[RopeConfig, int | None]:
    """Return the rotary embedding, and the context that it is of where there is a longer one."""
    section = next((found for key in SECTIONS if (found := reader.get_section(key))), {})
    fields = ConfigReader(section, SECTIONS[0])
    kind = fields.get_optional("rope_type", str) or fields.get("type", str, "default")
    if kind == "default":
        return RopeConfig.from_hf(reader, default_theta=ROPE_THETA), None
    if kind != LONGROPE:
        raise ValueError(
            f"rope_type={kind!r}: must be 'default' or {LONGROPE!r}; nothing else is implemented"
            " for this architecture. Correct config.json."
        )
    context = fields.get(CONTEXT, int, reader.get_optional(CONTEXT, int))
    divisors = section.get("short_factor")
    numbers = divisors if isinstance(divisors, list) else []
    if not numbers or not all(isinstance(each, int | float) and each > 0 for each in numbers):
        raise ValueError(
            f"short_factor={divisors!r}: must be a list of positive numbers. Correct config.json."
        )
    theta = reader.get("rope_theta", float, ROPE_THETA)
    rope = RopeConfig(
        theta=fields.get("rope_theta", float, theta),
        kind=LONGROPE,
        attention_factor=fields.get("short_mscale", float),
        divisors=tuple(map(float, numbers)),
    )
    fields.ignore("type", "long_factor", "short_factor", "long_mscale", "factor")
    fields.finish()
    return rope, context


Config = PhimoeConfig


class Model(DecoderModel):
    """Phi-3.5-MoE for generation."""

    config: PhimoeConfig

    def __init__(
        self, config: PhimoeConfig, *, dtype: torch.dtype = torch.bfloat16, backend: str = "torch"
    ) -> None:
        super().__init__(config, dtype=dtype, backend=backend)
        if config.lm_head_bias:
            self.lm_head.bias = nn.Parameter(torch.zeros(config.vocab_size, dtype=dtype))


def weight_map(config: PhimoeConfig) -> WeightMap:
    """Map the published tensor names to ours, and those of transformers' modules."""
    norms = [f"{name}_layernorm.bias" for name in ("input", "post_attention")]
    names = [*projection_names(has_bias=config.attention_bias), *norms]
    rules = [
        *decoder_rules(names),
        Rule("model.norm.bias", "norm.bias"),
        *([Rule("lm_head.bias", "lm_head.bias")] if config.lm_head_bias else ()),
        *block_sparse_rules("router"),
    ]
    return decoder_map(config, rules, expert=config.num_local_experts)
