"""Which layers of a model are alike: a step takes the same time in each of them."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

from neuron_moe.moe import MoE


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers with the same shapes and the same reach of attention.

    Attributes:
        name: such as "window 128, experts".
        layers: their numbers.
        attention: of the first of them; None where it has none.
        feed_forward: of the first of them, a `MoE` where it has experts; None where it has none.
        beside: an MLP that stands beside the experts.
    """

    name: str
    layers: tuple[int, ...]
    attention: Any
    feed_forward: nn.Module | None
    beside: nn.Module | None = None

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether experts are routed to."""
        return isinstance(self.feed_forward, MoE)


def layer_kinds(model: nn.Module) -> list[LayerKind]:
    """Return the kinds of layers of a decoder, in the order in which they first occur.

    Args:
        model: a `DecoderModel`, which may be on the meta device.
    """
    numbers: dict[Hashable, list[int]] = {}
    layers: list[Any] = list(model.layers)  # type: ignore[arg-type]
    for number, layer in enumerate(layers):
        numbers.setdefault(_signature(layer), []).append(number)
    kinds = []
    for found in numbers.values():
        first = layers[found[0]]
        attention = None if first.self_attn.core is None else first.self_attn
        mlp = getattr(first, "mlp", None)
        feed_forward = first.moe if first.is_sparse else mlp
        names = _attention_name(attention), _feed_forward_name(feed_forward)
        kinds.append(
            LayerKind(
                name=", ".join(name for name in names if name),
                layers=tuple(found),
                attention=attention,
                feed_forward=feed_forward,
                beside=mlp if first.is_sparse else None,
            )
        )
    return kinds


def _signature(layer: Any) -> Hashable:
    """Return what layers of one kind have in common."""
    shapes = tuple((name, tuple(value.shape)) for name, value in layer.named_parameters())
    return type(layer.self_attn), layer.self_attn.reach, layer.is_sparse, shapes


def _attention_name(attention: Any) -> str:
    if attention is None:
        return ""
    reach = attention.reach
    if reach is None:
        return "recurrent"
    limits = [f"{name} {limit}" for name, limit in reach._asdict().items() if limit is not None]
    return limits[0] if limits else "full attention"


def _feed_forward_name(feed_forward: Any) -> str:
    if feed_forward is None:
        return ""
    if not isinstance(feed_forward, MoE):
        return "dense"
    return "experts" if feed_forward.shared_experts is None else "routed and shared experts"
