"""Norm and router in a launch of their own, in front of the experts: router_topk.

Shapes: T tokens, H hidden.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from neuron_moe.backends.nki.launch import Launch, check_call, run
from neuron_moe.backends.nki.router import (
    Norm,
    check_router,
    different_choices,
    router_config,
    router_form,
    router_launch,
)
from neuron_moe.device import is_traced
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

    @abstractmethod
    def expert_launches(self) -> tuple[Launch, ...]:
        """Return the launches behind the router."""

    def launches(self, own_tokens: int | None = None) -> tuple[Launch, ...]:
        """Return the router's launch, if there is a router, and those of the experts."""
        if self.parts.router is None:
            return self.expert_launches()
        front = self.router_launch(own_tokens or self.step.tokens, torch.bfloat16)
        return (front, *self.expert_launches())

    def prepare(self) -> None:
        """Put weights in the form that runs; how many tokens this rank routes is seen later."""
        if self.parts.router is not None:
            router_form(self.parts.router, self.parts.forms)
        _ = self.norm, self.expert_launches()

    @cached_property
    def _front(self) -> dict[tuple[int, torch.dtype], Launch]:
        return {}

    def router_launch(self, num_tokens: int, dtype: torch.dtype) -> Launch:
        """Return the launch that routes the tokens that this rank holds."""
        parts, found = self.parts, self._front.get((num_tokens, dtype))
        if found is None:
            assert parts.router is not None
            sizes = (num_tokens, dtype, parts.tuning.num_cores)
            found = router_launch(parts.router, parts.forms, *sizes, self.norm)
            self._front[num_tokens, dtype] = found
        return found

    def enter(self, hidden_TH: Tensor) -> tuple[Tensor, Routing]:
        """Route T tokens, which are normalised first if `has_norm`."""
        check_call(hidden_TH)
        check_router(self.parts.router)
        if not hidden_TH.shape[0]:  # a rank without tokens has nothing to launch
            assert self.parts.router is not None
            return hidden_TH, self.parts.router(hidden_TH)
        launch = self.router_launch(hidden_TH.shape[0], hidden_TH.dtype)
        affinities_TK, index_TK, logits_TE, *normed = run(launch, hidden=hidden_TH)
        routing = Routing(logits_TE, affinities_TK, different_choices(index_TK))
        return (normed[0] if normed else hidden_TH), routing

    def route(self, hidden_TH: Tensor) -> Routing:
        """Route T tokens, which are normalised first if `has_norm`."""
        return self.enter(hidden_TH)[1]


def norm_of(rmsnorm: nn.Module | None, forms: Forms) -> Norm | None:
    """Return weight and epsilon of an RMSNorm; None for a module that computes anything else.

    Other norms have a weight and an eps too, hence it is tried on numbers, once for each weight; a
    norm without any, in a graph that is traced, stays outside.
    """
    weight = getattr(rmsnorm, "weight", None)
    eps = getattr(rmsnorm, "eps", getattr(rmsnorm, "variance_epsilon", None))
    if rmsnorm is None or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if weight.ndim != 1 or is_traced(weight):
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
