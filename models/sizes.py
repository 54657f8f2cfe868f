"""Parameters and memory of a model, whole and per rank, computed from shapes alone.

A rank holds routed experts of its expert-parallel group, their intermediate axis cut over the
tensor-parallel ranks. The rest is cut as `dense_parts` says, over those ranks and repeated over
expert-parallel groups, or over more ranks (`Spread.dense_tp`).

Letters: E experts, H hidden, I intermediate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from torch import Tensor, nn

from neuron_moe.errors import check_positive_int
from neuron_moe.experts import RoutedExperts
from neuron_moe.models.attention import CacheShape
from neuron_moe.models.delta_net import GatedDeltaNet
from neuron_moe.models.dense_parts import DenseSplit, is_norm
from neuron_moe.quantize import MXFP4_GROUP_SIZE
from neuron_moe.router import Router
from neuron_moe.shared_experts import SharedExperts

GROUPS = (
    "routed experts",
    "shared experts",
    "dense layers",
    "router",
    "attention",
    "vocabulary",
    "norms",
)
EXPERT_FORMATS = ("bf16", "mxfp4", "e4m3", "e5m2")
_FP8_FORMATS = ("e4m3", "e5m2")
_SCALE_BYTES = 4  # float32, one for each output channel
_MXFP4_GROUP_BYTES = MXFP4_GROUP_SIZE // 2 + 1  # 32 codes of four bits and one scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a model is cut: `tp` tensor-parallel ranks in each of `ep` expert-parallel groups.

    Args:
        tp: ranks that split each expert.
        ep: ranks that split the experts.
        dense_tp: ranks that split everything else; None: `tp`. With NxDI's settings it is tp * ep,
            and heads that do not divide are padded.
    """

    tp: int = 1
    ep: int = 1
    dense_tp: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("tp", self.tp)
        check_positive_int("ep", self.ep)
        if self.dense_tp is not None:
            check_positive_int("dense_tp", self.dense_tp)

    @property
    def ranks(self) -> int:
        """Ranks of the model."""
        return self.tp * self.ep

    @property
    def dense(self) -> int:
        """Ranks that split everything but the routed experts."""
        return self.tp if self.dense_tp is None else self.dense_tp

    def check(self, config: Any, model: nn.Module) -> None:
        """Raise ValueError where an axis does not divide."""
        if self.dense_tp is None:
            self._check_heads(config, _kv_heads(model))
        for experts in (m for m in model.modules() if isinstance(m, RoutedExperts)):
            inner, count = experts.spec.intermediate_size, experts.spec.num_experts
            if inner % self.tp:
                raise ValueError(
                    f"tp={self.tp}: must divide intermediate_size={inner} of the experts."
                    " Raise ep instead."
                )
            if count % self.ep:
                raise ValueError(f"ep={self.ep}: must divide num_experts={count}. Lower it.")

    def _check_heads(self, config: Any, kv_heads: int) -> None:
        heads, counts = config.num_attention_heads, config.kv_head_counts
        if heads % self.tp:
            raise ValueError(f"tp={self.tp}: must divide num_attention_heads={heads}. Lower it.")
        if len(counts) > 1 and min(counts) % self.tp:
            raise ValueError(
                f"tp={self.tp}: must divide num_key_value_heads={min(counts)} of every layer."
                " Lower it."
            )
        if max(kv_heads, self.tp) % min(kv_heads, self.tp):
            raise ValueError(
                f"tp={self.tp}: must divide num_key_value_heads={kv_heads}, or be a multiple of it."
                " Choose another."
            )


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each of GROUPS."""
    return _sum_groups(model, lambda _module, parameter, _name: parameter.numel())


def count_active_parameters(model: nn.Module) -> int:
    """Return how many parameters one token meets: K of E routed experts, one embedding row."""
    total = sum(parameter.numel() for parameter in model.parameters())
    heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            routed = sum(parameter.numel() for parameter in module.parameters())
            total -= routed - routed * module.spec.top_k // module.spec.num_experts
        elif isinstance(module, nn.Embedding) and id(module.weight) not in heads:
            total -= module.weight.numel() - module.embedding_dim
    return total


def rank_bytes(model: nn.Module, config: Any, spread: Spread, expert_format: str) -> dict[str, int]:
    """Return the bytes of parameters one rank holds, for each of GROUPS.

    Args:
        model: may be on the meta device; other parameters count in the dtype they have there.
        config: with `num_attention_heads` and `kv_head_counts`.
        spread: how many ranks.
        expert_format: of the routed expert matrices, one of EXPERT_FORMATS.

    Raises:
        ValueError: an axis that does not divide.
    """
    spread.check(config, model)
    rule = DenseRule(model, config, spread)

    def held(module: nn.Module, parameter: nn.Parameter, name: str) -> int:
        if isinstance(module, RoutedExperts):
            return _expert_bytes(parameter, name, spread, expert_format)
        return prod(rule.shape(module, parameter, name)) * parameter.element_size()

    return _sum_groups(model, held)


class DenseRule:
    """How much of a parameter outside the routed experts a rank holds.

    Args:
        model: may be on the meta device.
        config: with `num_attention_heads` and `kv_head_counts`.
        spread: how many ranks.
    """

    def __init__(self, model: nn.Module, config: Any, spread: Spread) -> None:
        is_even = len(config.kv_head_counts) == 1
        self._split = DenseSplit(
            size=spread.dense,
            heads=config.num_attention_heads,
            kv_heads=_kv_heads(model) if is_even else min(config.kv_head_counts),
            is_even=is_even,
            recurrent=getattr(config, "linear_attention", None),
        )
        self._whole = {name for part in model.modules() for name in getattr(part, "whole", ())}

    def shape(self, module: nn.Module, parameter: Tensor, name: str) -> tuple[int, ...]:
        """Return the shape a rank holds of a parameter.

        Args:
            module: the router or the shared experts that own it, or any other.
            parameter: the whole one.
            name: in the model, or in such a module.
        """
        if isinstance(module, Router):
            return tuple(parameter.shape)
        return self._split.shape(name, parameter.shape, self._whole)


def cache_bytes_per_token(model: nn.Module, spread: Spread, element_size: int) -> int:
    """Return the bytes that one token adds to the cache on one rank, over all layers."""
    parts = (part for shape in _kept(model) for part in shape)
    values: int = sum(ceil(heads / spread.dense) * size for heads, size in parts)
    return values * element_size


def state_bytes(model: nn.Module, spread: Spread, element_size: int) -> int:
    """Return the bytes that recurrent layers keep of one sequence on one rank; 0 without such.

    Args:
        model: may be on the meta device.
        spread: heads are cut over its ranks for what is no routed expert; other states evenly.
        element_size: bytes of a number, of states that have no dtype of their own.
    """
    total = 0
    for layer in _attentions(model):
        shapes, ranks = getattr(layer, "state_shapes", ()), spread.dense
        if isinstance(layer, GatedDeltaNet):
            shapes, ranks = layer.sizes.shared_by(spread.dense).state_shapes, 1
        for state in shapes:
            size = element_size if state.dtype is None else state.dtype.itemsize
            total += ceil(prod(state.sizes) / ranks) * size
    return total


def _attentions(model: nn.Module) -> list[Any]:
    """Return the modules that keep something of each token or sequence."""
    return [module for module in model.modules() if hasattr(module, "cache_shape")]


def _kept(model: nn.Module) -> list[CacheShape]:
    """Return what each layer keeps of a token, of those that keep something."""
    shapes: list[CacheShape] = [attention.cache_shape for attention in _attentions(model)]
    return [shape for shape in shapes if shape]


def _kv_heads(model: nn.Module) -> int:
    """Return into how many heads what is kept of a token is cut."""
    return _kept(model)[0][0][0]


def _expert_bytes(parameter: nn.Parameter, name: str, spread: Spread, expert_format: str) -> int:
    """Bytes of one rank's part of [E, in, out] matrices or [E, out] biases."""
    num_experts = parameter.shape[0] // spread.ep
    is_down = name.startswith("mlp_op.down_proj")
    if parameter.ndim == 2:
        columns = parameter.shape[1] if is_down else parameter.shape[1] // spread.tp
        return num_experts * columns * parameter.element_size()
    contracted, columns = parameter.shape[1:]
    if is_down:
        contracted //= spread.tp
    else:
        columns //= spread.tp
    if expert_format == "mxfp4":
        groups = ceil(contracted / MXFP4_GROUP_SIZE)
        return num_experts * columns * groups * _MXFP4_GROUP_BYTES
    if expert_format in _FP8_FORMATS:
        return num_experts * columns * (contracted + _SCALE_BYTES)
    return num_experts * columns * contracted * parameter.element_size()


def _group(module: nn.Module, name: str) -> str:
    if isinstance(module, RoutedExperts):
        return "routed experts"
    if isinstance(module, SharedExperts):
        return "shared experts"
    if isinstance(module, Router):
        return "router"
    parts = name.split(".")
    if is_norm(name):
        return "norms"
    if "self_attn" in parts:
        return "attention"
    if "mlp" in parts:
        return "dense layers"
    return "vocabulary" if name.startswith(("embed_tokens.", "lm_head.")) else "norms"


def _sum_groups(
    model: nn.Module, measure: Callable[[nn.Module, nn.Parameter, str], int]
) -> dict[str, int]:
    """Add up a measure of each parameter by group; it is given the module that owns it."""
    owners = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts | SharedExperts | Router)
    }
    totals = dict.fromkeys(GROUPS, 0)
    for name, parameter in model.named_parameters():
        prefix = name.rpartition(".")[0]
        while prefix and prefix not in owners:
            prefix = prefix.rpartition(".")[0]
        module = owners.get(prefix, model)
        local = name.removeprefix(f"{prefix}.") if prefix else name
        totals[_group(module, local)] += measure(module, parameter, local)
    return totals
