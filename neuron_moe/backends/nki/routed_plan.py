"""Norm and router in a launch of their own, in front of the experts: router_topk.

Shapes: T tokens, H hidden.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from neuron_moe.backends.nki.router import (
    Norm,
    Route,
    router_call,
    router_config,
    router_form,
)
from neuron_moe.plan import Forms, Plan
from neuron_moe.router import Routing


@dataclass(frozen=True, eq=False)
class RoutedPlan(Plan):
    """A plan whose experts take choices that are made; which tokens these are of, ranks agree upon
    between the launches.
    """

    @cached_property
    def norm(self) -> Norm | None:
        """Weight and epsilon of the norm, if the launch with the router computes it."""
        parts, router = self.parts, self.parts.router
        if router is None or parts.fuses_decode is False:
            return None
        norm = norm_of(parts.norm, parts.forms)
        weight = router_form(router, parts.forms)
        sizes = (self.step.tokens, torch.bfloat16, weight.dtype, parts.tuning.num_cores)
        try:
            router_config(router, *sizes, norm)
        except ValueError:  # no room for both
            return None
        return norm

    @property
    def has_norm(self) -> bool:
        """Whether that launch computes the norm."""
        return self.norm is not None

    @cached_property
    def _route(self) -> Route:
        parts = self.parts
        assert parts.router is not None
        return router_call(parts.router, parts.forms, parts.tuning.num_cores, self.norm)

    def prepare(self) -> None:
        """Put the router's weight in the form that runs, and look at the norm."""
        if self.parts.router is not None:
            router_form(self.parts.router, self.parts.forms)
        _ = self.norm

    def enter(self, hidden_TH: Tensor) -> tuple[Tensor, Routing]:
        """Route T tokens, which are normalised first if `has_norm`."""
        return self._route(hidden_TH)

    def route(self, hidden_TH: Tensor) -> Routing:
        """Route T tokens, which are normalised first if `has_norm`."""
        return self.enter(hidden_TH)[1]


def norm_of(rmsnorm: nn.Module | None, forms: Forms) -> Norm | None:
    """Return weight and epsilon of an RMSNorm; None for a module that computes anything else.

    Other norms have a weight and an eps too, hence it is tried on numbers, once for each weight.
    """
    weight = getattr(rmsnorm, "weight", None)
    eps = getattr(rmsnorm, "eps", getattr(rmsnorm, "variance_epsilon", None))
    if rmsnorm is None or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if weight.ndim != 1:
        return None
    if weight.is_meta:  # nothing to try; a layer without numbers can be explained, not run
        return weight, eps
    is_plain = forms.get("is an RMSNorm", partial(_is_rms, rmsnorm, weight, eps))
    return (weight, eps) if is_plain else None


def _is_rms(rmsnorm: nn.Module, weight: Tensor, eps: float) -> bool:
    """Say whether a norm does what an RMSNorm does, within the rounding of its dtype."""
    row = torch.linspace(-1.0, 3.0, weight.shape[0], device=weight.device).to(weight.dtype)
    with torch.no_grad():
        found = rmsnorm(row.clone().view(1, 1, -1))  # as the layer calls it
        wide = row.float()
        wanted = weight.float() * wide * torch.rsqrt(wide.square().mean() + eps)
    if not isinstance(found, Tensor) or found.shape != (1, 1, *row.shape):
        return False
    allowed = 4 * torch.finfo(weight.dtype).eps * float(wanted.abs().max())
    return bool((found[0, 0].float() - wanted).abs().max() <= allowed)
