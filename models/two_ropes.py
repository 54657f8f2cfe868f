"""Decoders whose sliding layers rotate queries and keys by a rotary embedding of their own.

The tables of both stand side by side in `Tokens.rope`, and each layer takes its part.

Letters: those of `decoder`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_moe.models.biased_routing import ATTENTION_TYPES, BiasedRoutingModel, SlidingConfig
from neuron_moe.models.decoder import GroupedAttention, Tokens
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig, rope_tables

Ropes = Mapping[str, Mapping[str, Any]]
"""A section of config.json for each of ATTENTION_TYPES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoRopesConfig(SlidingConfig):
    """Facts of a checkpoint with two rotary embeddings.

    Attributes:
        sliding_rope: of the layers that slide; `rope` is that of the others.
    """

    sliding_rope: RopeConfig

    def __post_init__(self) -> None:
        SlidingConfig.__post_init__(self)
        self.check_rotated(self.rotated_of(self.sliding_rope))

    def rotated_of(self, rope: RopeConfig) -> int:
        """Return how much of each head an embedding rotates."""
        return int(self.head_dim * rope.part)


def read_ropes(reader: ConfigReader, usual: Ropes) -> dict[str, RopeConfig]:
    """Read `rope_parameters`, a section for each of ATTENTION_TYPES.

    Args:
        reader: of config.json.
        usual: what the architecture takes where there is none; its parts also where a section
            names none.

    Raises:
        ValueError: a section is missing or not as it must be.
    """
    sections = ConfigReader(reader.get_section("rope_parameters") or usual, "rope_parameters")
    longest, ropes = reader.get("max_position_embeddings", int), []
    for kind in ATTENTION_TYPES:
        if not (section := sections.get_section(kind)):
            raise ValueError(
                f"rope_parameters: {kind} is missing: both kinds of layers have a section of their"
                " own. Add it to config.json."
            )
        values = {"rope_parameters": section, "max_position_embeddings": longest}
        part = usual[kind]["partial_rotary_factor"]
        ropes.append(RopeConfig.from_hf(ConfigReader(values, kind), default_part=part))
    sections.finish()
    return {"sliding_rope": ropes[0], "rope": ropes[1]}


class TurnedAttention(GroupedAttention):
    """Grouped-query attention that rotates by the embedding of its kind of layer.

    Args:
        config: sizes, those of this layer.
        layer: its number.
        dtype: of the parameters.
        more: of `GroupedAttention`.
    """

    def __init__(self, config: TwoRopesConfig, layer: int, dtype: torch.dtype, **more: Any) -> None:
        super().__init__(config, dtype, reach=config.reach(layer), **more)
        self.slides = config.layer_types[layer] == ATTENTION_TYPES[0]
        count = config.rotated_size // 2
        self.columns = slice(count, None) if self.slides else slice(count)

    def rotate(self, query_USQD: Tensor, key_USJD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return queries and keys that know their places."""
        cos_USd, sin_USd = (table[..., self.columns] for table in tokens.rope)
        return super().rotate(query_USQD, key_USJD, tokens._replace(rope=(cos_USd, sin_USd)))


class TwoRopesModel(BiasedRoutingModel):
    """A model with two rotary embeddings."""

    config: TwoRopesConfig

    def describe_tokens(self, places_US: Tensor, real_US: Tensor | None) -> Tokens:
        """Return what all layers need to know of the new tokens."""
        config = self.config
        ropes = config.rope, config.sliding_rope
        tables = [rope_tables(rope, config.rotated_of(rope), places_US) for rope in ropes]
        cos_USd, sin_USd = (torch.cat(parts, dim=-1) for parts in zip(*tables, strict=True))
        return Tokens(places_US, (cos_USd, sin_USd), real_US)
