"""Facts of a DeepSeek-V4 checkpoint.

Two spellings are read: that of the publishers, with `compress_ratios`, `num_hash_layers` and
`qk_rope_head_dim`, and that of transformers 5, with lists of layer types and two rotary sections.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.activations import activation_of
from neuron_moe.errors import check_positive_int
from neuron_moe.models.attention import Reach
from neuron_moe.models.decoder import DecoderConfig, check_layer_types
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.hyper_connections import StreamSpec
from neuron_moe.models.rope import RopeConfig
from neuron_moe.spec import ExpertFormula, RouterFormula, RouterSpec, limits

SLIDING, SPARSE, HEAVY = LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # of compress_ratios
HASH, PLAIN = MLP_TYPES = ("hash_moe", "moe")
ROPES = ("main", "compress")
USUAL_PART = 64 / 512  # of a head that is rotated
USUAL = {
    "head_dim": 512,
    "sliding_window": 128,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
}
# What transformers does not read, or what says how weights are stored.
OTHER_KEYS = (
    *("attention_bias", "expert_dtype", "num_nextn_predict_layers", "router_jitter_noise"),
    *("moe_quant_algo", "scale_fmt"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config(DecoderConfig):
    """Facts of one checkpoint; names are those of its config.json.

    Attributes:
        rope: of layers that slide only; `entry_rope` is that of the others, and of their entries.
        layer_types: one of LAYER_TYPES a layer.
        mlp_layer_types: one of MLP_TYPES a layer; a table of token ids chooses experts in HASH.
        rates: for how many tokens there is an entry, by layer type.
        streams: of the residual.
        prediction_layers: how many layers after the last one predict further tokens.
    """

    entry_rope: RopeConfig
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rates: Mapping[str, int]
    streams: StreamSpec
    sliding_window: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    prediction_layers: int

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        num_layers, rotated = self.num_hidden_layers, self.rotated_of(self.entry_rope)
        check_layer_types(self.layer_types, num_layers, LAYER_TYPES)
        self.check_rotated(rotated)
        for kind, rate in self.rates.items():
            check_positive_int(f"compress_rates[{kind!r}]", rate)
        if set(self.mlp_layer_types) - set(MLP_TYPES) or len(self.mlp_layer_types) != num_layers:
            raise ValueError(
                f"mlp_layer_types={list(self.mlp_layer_types)}: must name"
                f" num_hidden_layers={num_layers} layers, each {' or '.join(MLP_TYPES)}."
                " Correct it, or leave it out."
            )
        if self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"o_groups={self.o_groups}: must divide"
                f" num_attention_heads={self.num_attention_heads}. Correct config.json."
            )
        if SPARSE in self.layer_types and self.index_head_dim < rotated:
            raise ValueError(
                f"index_head_dim={self.index_head_dim}: must not be below the {rotated} numbers of"
                " it that are rotated. Correct config.json."
            )
        if not self.swiglu_limit > 0:
            raise ValueError(f"swiglu_limit={self.swiglu_limit}: must be positive. Correct it.")
        for layer in range(num_layers):
            self.router_spec(layer)

    @property
    def longest(self) -> int:
        """Positions of the longest sequence: those of entries are not stretched."""
        return self.max_position_embeddings

    def reach(self, layer: int) -> Reach:
        """Return how far back a token sees other tokens, and not entries of them."""
        return Reach(window=self.sliding_window)

    @property
    def formula(self) -> ExpertFormula:
        """What routed and shared experts compute."""
        limit = self.swiglu_limit
        return ExpertFormula(
            activation_of(self.hidden_act),
            gate_limits=limits(None, limit),
            up_limits=limits(-limit, limit),
        )

    def rotated_of(self, rope: RopeConfig) -> int:
        """Return how much of each head an embedding rotates."""
        return int(self.head_dim * rope.part)

    def router_spec(self, layer: int) -> RouterSpec:
        """How experts are chosen; raises ValueError where that is not possible."""
        is_hash = self.mlp_layer_types[layer] == HASH
        formula = RouterFormula(
            self.num_experts_per_tok,
            act_fn="sqrtsoftplus",
            has_selection_bias=not is_hash,
            renormalize=True,
            routed_scaling_factor=self.routed_scaling_factor,
        )
        return RouterSpec(
            num_experts=self.n_routed_experts,
            hidden_size=self.hidden_size,
            formula=formula,
            table_size=self.vocab_size if is_hash else 0,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DeepseekV4Config":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "deepseek_v4", *OTHER_KEYS)
        reader.require("norm_topk_prob", True)
        reader.require("mlp_bias", False)
        for key in ("n_shared_experts", "num_key_value_heads", "n_group", "topk_group"):
            reader.require(key, 1)
        reader.require("scoring_func", "sqrtsoftplus")
        reader.require("topk_method", "noaux_tc")
        reader.require("first_k_dense_replace", 0)
        streams = StreamSpec(
            hidden_size=reader.get("hidden_size", int),
            num_streams=reader.get_size("hc_mult", 4),
            iterations=reader.get_size("hc_sinkhorn_iters", 20),
            eps=reader.get("hc_eps", float, 1e-6),
            norm_eps=reader.get("rms_norm_eps", float),
        )
        kinds, mlp_kinds = _read_kinds(reader)
        found = {name: reader.get_size(name, usual) for name, usual in USUAL.items()}
        return cls.read(
            reader,
            layer_types=kinds,
            mlp_layer_types=mlp_kinds,
            rates=_read_rates(reader),
            streams=streams,
            prediction_layers=max(0, reader.get("num_nextn_predict_layers", int, 1)),
            **found,
            **_read_ropes(reader, found["head_dim"]),
        )


Config = DeepseekV4Config


def _read_kinds(reader: ConfigReader) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the kinds of attention and of experts; lists may go on behind the last layer.

    Raises:
        ValueError: a ratio that stands for no kind.
    """
    num_layers = reader.get("num_hidden_layers", int)
    ratios = reader.get_ints("compress_ratios")
    if unknown := set(ratios) - set(RATIOS):
        raise ValueError(
            f"compress_ratios: {min(unknown)} must be one of {', '.join(map(str, RATIOS))}; no"
            " other stands for a kind of attention. Correct config.json."
        )
    usual = [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(num_layers)]
    kinds = reader.get_strings("layer_types") or tuple(RATIOS[ratio] for ratio in ratios) or usual
    num_hash = reader.get("num_hash_layers", int, 3)
    by_number = tuple(HASH if layer < num_hash else PLAIN for layer in range(num_layers))
    mlp_kinds = reader.get_strings("mlp_layer_types") or by_number
    return tuple(kinds[:num_layers]), tuple(mlp_kinds[:num_layers])


def _read_rates(reader: ConfigReader) -> dict[str, int]:
    """Return for how many tokens there is an entry, by layer type."""
    section = ConfigReader(reader.get_section("compress_rates"), "compress_rates")
    rates = {}
    for ratio, kind, old in ((4, SPARSE, "csa"), (128, HEAVY, "hca")):
        rates[kind] = reader.get(f"compress_rate_{old}", int, section.get_size(kind, ratio))
    section.ignore(SLIDING)
    section.finish()
    return rates


def _read_ropes(reader: ConfigReader, head_dim: int) -> dict[str, RopeConfig]:
    """Read the two rotary sections, or the one that scales only entries and what attends to them.

    Raises:
        ValueError: two spellings that disagree, or a section that is not as it must be.
    """
    longest = reader.get("max_position_embeddings", int)
    rotated = reader.get("qk_rope_head_dim", int, int(head_dim * USUAL_PART))
    part = reader.get("partial_rotary_factor", float, rotated / head_dim)
    usual = {"rope_theta": 10000.0, "compress_rope_theta": 160000.0}
    thetas = [reader.get(key, float, theta) for key, theta in usual.items()]
    scaling, given = (reader.get_section(key) for key in ("rope_scaling", "rope_parameters"))
    if scaling and given and scaling != given:
        raise ValueError(
            f"rope_scaling={scaling!r}, rope_parameters={given!r}: the two spellings disagree. Keep"
            " one of them."
        )
    given = given or scaling
    if all(isinstance(given.get(name), Mapping) for name in ROPES):
        sections = [given[name] for name in ROPES]
    else:
        own = [{"rope_theta": theta, "partial_rotary_factor": part} for theta in thetas]
        sections = [own[0], {**given, **own[1]}]
        if sections[1].get("rope_type", sections[1].get("type")) == "yarn":
            sections[1].setdefault("attention_factor", 1.0)  # nothing but frequencies is scaled
    ropes = []
    for name, section in zip(ROPES, sections, strict=True):
        values = {"rope_parameters": section, "max_position_embeddings": longest}
        fields = ConfigReader(values, f"rope_parameters.{name}")
        ropes.append(RopeConfig.from_hf(fields, is_interleaved=True, default_part=part))
    return {"rope": ropes[0], "entry_rope": ropes[1]}
