"""A layer's decode step as backends that fuse it see it: from the norm to the shared experts."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from neuron_moe.backends import ExpertWeights
from neuron_moe.backends.prepared import Prepared
from neuron_moe.routing import RouterBase
from neuron_moe.shared_experts import SharedExperts

_tried = Prepared()


@dataclass(frozen=True)
class BlockLayer:
    """What one launch computes.

    Attributes:
        router: of the layer.
        weights: of this rank's experts.
        first_expert: number of the first of them among all ranks'.
        num_experts: N.
        scales_input: affinities multiply the experts' input.
        rmsnorm: in front of router and experts, or None.
        shared: shared experts of this rank, or None.
        returns_routing: affinities and choices are wanted.
    """

    router: RouterBase
    weights: ExpertWeights
    first_expert: int
    num_experts: int
    scales_input: bool
    rmsnorm: nn.Module | None
    shared: SharedExperts | None
    returns_routing: bool = False


class BlockOutput(NamedTuple):
    """What a launch gives.

    Attributes:
        output_TH: float32, a partial sum of this rank.
        index_TK: int32 experts of the model, if asked for.
    """

    output_TH: Tensor
    index_TK: Tensor | None


def norm_of(rmsnorm: nn.Module) -> tuple[Tensor, float] | None:
    """Return weight and epsilon of an RMSNorm; None for a module that computes anything else.

    Other norms have a weight and an eps too, hence it is tried on numbers, once for each weight.
    """
    weight = getattr(rmsnorm, "weight", None)
    eps = getattr(rmsnorm, "eps", getattr(rmsnorm, "variance_epsilon", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or weight.ndim != 1:
        return None
    if weight.is_meta:  # nothing to try; a layer without numbers can be explained, not run
        return weight, eps
    is_plain = _tried.get((weight,), f"{id(rmsnorm)} {eps}", lambda: _is_rms(rmsnorm, weight, eps))
    return (weight, eps) if is_plain else None


def _is_rms(rmsnorm: nn.Module, weight: Tensor, eps: float) -> bool:
    """Say whether a norm does what an RMSNorm does, within the rounding of its dtype."""
    row = torch.linspace(-1.0, 2.0, weight.shape[0], device=weight.device).to(weight.dtype)
    with torch.no_grad():
        found = rmsnorm(row.unsqueeze(0))
        wide = row.float()
        wanted = weight.float() * wide * torch.rsqrt(wide.square().mean() + eps)
    if not isinstance(found, Tensor) or found.shape != (1, *row.shape):
        return False
    allowed = 4 * torch.finfo(weight.dtype).eps * float(wanted.abs().max())
    return bool((found[0].float() - wanted).abs().max() <= allowed)


@runtime_checkable
class FusesDecode(Protocol):
    """A backend that computes a whole layer's decode step in one kernel."""

    def refuses_block(self, layer: BlockLayer, tokens: int) -> str:
        """Say why it does not compute T tokens of a layer; '' if it does."""

    def block(self, hidden_TH: Tensor, layer: BlockLayer, mode: str) -> BlockOutput:
        """Compute T tokens; mode is 'selective' or 'all_experts'."""

    def choose_block_mode(self, layer: BlockLayer, tokens: int) -> tuple[str, str]:
        """Return 'selective' or 'all_experts' for T tokens of a layer, and why."""

    def block_notes(self, layer: BlockLayer, tokens: int, mode: str) -> tuple[str, ...]:
        """Return lines for `MoE.explain`."""
