"""Proof by counting that everything added before a sum over ranks adds up to one copy.

The layer runs as it is, but its experts and shared experts are replaced by counters that return,
for each token, how much of the work this rank holds: each choice it computes counts as the share of
the intermediate axis whose weights are here, each down bias as the factor it would be added with,
shared experts as the share of their width. After the layer's own dispatch and sum, every token must
show its number of choices, twice, and one set of shared experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuron_moe.backends import Backend
from neuron_moe.moe import MoE
from neuron_moe.plan import LayerParts, Plan, Step
from neuron_moe.router import Routing
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.spec import ExpertSpec, RouterSpec
from neuron_moe.weights.expert_weights import LocalRouting, Packed
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.product_forms import ProductForms

ROUTED, BIAS, SHARED = range(3)
NAMES = ("routed experts", "down bias", "shared experts")


class CopyError(AssertionError):
    """Something is added to the output more or less than once."""


@dataclass(frozen=True, eq=False)
class _CountingPlan(Plan):
    """Counts choices instead of computing experts; routes as the real plan does.

    Attributes:
        real: what it stands in for.
    """

    real: Plan

    def route(self, hidden_TH: Tensor) -> Routing:
        """Route T tokens."""
        return self.real.route(hidden_TH)

    def experts(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Count."""
        weights, whole = self.parts.weights, self.parts.spec.intermediate_size
        hits_T = (routing.expert_index_TK >= 0).sum(1).float()
        # An error here would leave the other ranks waiting: a choice of no local expert shows as
        # NaN after the sum, on every rank.
        is_foreign_T = (routing.expert_index_TK >= weights.num_experts).any(1)
        hits_T = torch.where(is_foreign_T, torch.nan, hits_T)
        count_TH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        count_TH[:, ROUTED] = hits_T * (weights.down_proj_EIH.shape[1] / whole)
        count_TH[:, BIAS] = hits_T * weights.down_bias_scale
        return count_TH


class _CountingBackend:
    """Makes plans that count."""

    name = "counting"
    has_gradient = True  # of a constant
    plans_ahead = False

    def __init__(self, real: Backend) -> None:
        self.real = real

    def check(self, experts: ExpertSpec, router: RouterSpec) -> None:
        self.real.check(experts, router)

    def plan(self, parts: LayerParts, step: Step) -> Plan:
        """Plan a step as the real backend does, several launches in any case."""
        apart = replace(parts, why_apart="experts are counted", fuses_decode=False)
        real = self.real.plan(apart, step)
        return _CountingPlan(step, real.decision, parts, real)

    def pack(self, first_EHI: Tensor, down_EIH: Tensor) -> tuple[Packed, Packed] | str:
        """Pack."""
        return self.real.pack(first_EHI, down_EIH)

    def settle_forms(self, parts: LayerParts, form: str) -> ProductForms | None:
        """Settle forms."""
        return self.real.settle_forms(parts, form)

    def lay_out(self, parts: LayerParts, phase: str) -> LaidOut | None:
        """Lay out."""
        return self.real.lay_out(parts, phase)


@contextmanager
def counting(layer: MoE) -> Iterator[None]:
    """Let a layer count instead of compute."""
    experts, shared = layer.expert_mlps, layer.shared_experts
    backend = experts.backend
    experts.backend = _CountingBackend(backend)
    if shared is not None:
        shared.forward = _shared_counter(shared)  # type: ignore[method-assign]
    try:
        yield
    finally:
        experts.backend = backend
        if shared is not None:
            del shared.forward


def _shared_counter(shared: SharedExperts):  # type: ignore[no-untyped-def]
    whole = shared.spec.intermediate_size

    def count(x: Tensor, seq_len: int = 0, *, part: tuple[int, int] = (0, 1)) -> Tensor:
        count_TH = torch.zeros_like(x)
        index, parts = part
        held = shared.width * (index + 1) // parts - shared.width * index // parts
        count_TH[:, SHARED] = held / whole
        return count_TH

    return count


def check_one_copy(
    layer: MoE,
    hidden_states: Tensor,
    padding_mask: Tensor | None = None,
    *,
    phase: str | None = None,
) -> None:
    """Check that routed experts, biases and shared experts each count once; collective.

    Args:
        layer: hidden_size 3 or more, without a norm that changes the counters' columns.
        hidden_states: this rank's [B, S, H].
        padding_mask: as for the layer, for this rank's tokens.
        phase: as for the layer.

    Raises:
        CopyError: naming what counts wrongly, for which token, and how often.
    """
    with torch.no_grad(), counting(layer):
        counts = layer(hidden_states, padding_mask, phase=phase)[0].flatten(0, 1).float()
    wanted = counts.new_zeros((counts.shape[0], 3))
    wanted[:, :2] = float(layer.expert_mlps.spec.top_k)
    if padding_mask is not None:
        if layer.sequence_parallel_enabled and layer.sequence_axis == 0 and phase is None:
            padding_mask = padding_mask.t()  # into the order of the tokens, [S, B]
        wanted[:, :2] *= (padding_mask.reshape(-1, 1) != 0).float()
    wanted[:, SHARED] = 0.0 if layer.shared_experts is None else 1.0
    for column, name in enumerate(NAMES):
        wrong = ~((counts[:, column] - wanted[:, column]).abs() <= 1e-3)  # catches NaN too
        if bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            raise CopyError(
                f"{name}: token {token} of this rank gets {float(counts[token, column]):g}, must"
                f" get {float(wanted[token, column]):g}. What is added before the sum over ranks"
                " must add up to one copy."
            )
