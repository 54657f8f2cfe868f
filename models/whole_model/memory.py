"""What a rank's memory holds while a model serves: weights, cache, states, scratch, a reserve."""

from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import nn

from neuron_moe.blocks import num_blocks
from neuron_moe.errors import check_positive_int
from neuron_moe.experts import RoutedExperts
from neuron_moe.models.attention import CoreSizes
from neuron_moe.models.sizes import (
    Spread,
    cache_bytes_per_token,
    rank_bytes,
    state_bytes,
)
from neuron_moe.planner.coefficients import Machine

RESERVED = 0.1  # of a rank's memory, for compiled code, rings of collectives and the runtime
_BF16, _FLOAT32, _INT32 = 2, 4, 4
_MOST_PARTIALS = 2  # sums of an expert's slices, one a core, which combine adds up


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """What memory is laid out for.

    Args:
        batch: sequences that are decoded at once.
        max_length: positions of the cache of each.
        prefill_tokens: of the longest prefill step.
        block_size: token slots of a block of expert kernels in that step.

    Raises:
        ValueError: a number that is not positive.
    """

    batch: int
    max_length: int
    prefill_tokens: int
    block_size: int = 128

    def __post_init__(self) -> None:
        for name in ("batch", "max_length", "prefill_tokens", "block_size"):
            check_positive_int(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank, computed.

    Attributes:
        weights: by group of `sizes.GROUPS`.
        kv_cache: of all sequences at full length.
        state: of recurrent layers.
        scratch: hidden states, rows of experts, logits: the most that is alive at once, by formula.
        reserve: kept free for what is not known here, assumed.
        hbm: what the rank has.
    """

    weights: dict[str, int]
    kv_cache: int
    state: int
    scratch: int
    reserve: int
    hbm: int

    @property
    def needed(self) -> int:
        """All of it but the reserve."""
        return sum(self.weights.values()) + self.kv_cache + self.state + self.scratch

    @property
    def allowed(self) -> int:
        """What may be needed."""
        return self.hbm - self.reserve

    @property
    def fits(self) -> bool:
        """Whether the rank holds it."""
        return self.needed <= self.allowed

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "weights": sum(self.weights.values()),
            "weights_by_group": {name: size for name, size in self.weights.items() if size},
            "kv_cache": self.kv_cache,
            "state": self.state,
            "scratch": self.scratch,
            "needed": self.needed,
            "reserve": self.reserve,
            "hbm": self.hbm,
        }


def rank_memory(
    model: nn.Module,
    config: Any,
    spread: Spread,
    expert_format: str,
    load: ServingLoad,
    machine: Machine,
) -> RankMemory:
    """Compute what a rank holds.

    Args:
        model: the whole one, which may be on the meta device.
        config: its facts.
        spread: how it is cut.
        expert_format: of the routed experts, one of `sizes.EXPERT_FORMATS`.
        load: what is served.
        machine: where.

    Raises:
        ValueError: an axis that does not divide.
    """
    hbm = machine.hbm_bytes
    return RankMemory(
        weights=rank_bytes(model, config, spread, expert_format),
        kv_cache=cache_bytes_per_token(model, spread, _BF16) * load.batch * load.max_length,
        state=state_bytes(model, spread, _BF16) * load.batch,
        scratch=scratch_bytes(model, config, spread, load),
        reserve=round(RESERVED * hbm),
        hbm=hbm,
    )


def scratch_bytes(model: nn.Module, config: Any, spread: Spread, load: ServingLoad) -> int:
    """Return the most that a prefill step keeps in HBM at once, beside weights and cache.

    Either the heads of a layer's attention, or what its experts gather and give: hidden states of
    all tokens, one row for each slot of the blocks that any routing may need, lists of slots, and
    the sum. The residual stream and the normed tokens are alive all the time, logits at the end.
    """
    tokens, hidden = load.prefill_tokens, int(config.hidden_size)
    stream = 2 * tokens * hidden * _BF16
    heads = max(_head_rows(attention, spread) for attention in _attentions(model))
    experts = max(
        (
            _expert_bytes(module, spread, load)
            for module in model.modules()
            if isinstance(module, RoutedExperts)
        ),
        default=0,
    )
    logits: int = load.batch * ceil(config.vocab_size / spread.dense) * _FLOAT32
    return stream + max(tokens * heads * _BF16, experts) + logits


def _attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "cache_shape")]


def _head_rows(attention: Any, spread: Spread) -> int:
    """Return the numbers of a token that a rank's attention makes: queries, keys, values, sum."""
    if attention.reach is None:
        row_width: int = attention.row_width
        return ceil(row_width / spread.dense)
    core: CoreSizes = attention.core_sizes(2)
    queries, keys = ceil(core.query_heads / spread.dense), ceil(core.kv_heads / spread.dense)
    return (queries + keys) * (core.key_size + core.value_size)


def _expert_bytes(experts: RoutedExperts, spread: Spread, load: ServingLoad) -> int:
    spec, tokens = experts.spec, load.prefill_tokens
    hidden: int = spec.hidden_size
    local = spec.num_experts // spread.ep
    slots = num_blocks(tokens, spec.top_k, local, load.block_size) * load.block_size
    rows = tokens * (_BF16 + _FLOAT32) + _MOST_PARTIALS * slots * _BF16
    return rows * hidden + 2 * (slots + tokens * spec.top_k) * _INT32
