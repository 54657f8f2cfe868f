"""Load balance: measure it, and move routers towards it.

Axes: T tokens, K choices, E experts, W ranks, L layers.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from neuron_moe.moe import MoE
from neuron_moe.parallel.collectives import Collectives, as_collectives
from neuron_moe.parallel.placement import ExpertPlacement
from neuron_moe.router import Router


@dataclass(frozen=True, slots=True)
class BalanceStats:
    """How evenly work is spread over experts or ranks.

    Attributes:
        busiest_over_mean: the largest load over the mean; the time of a layer follows it.
        coefficient_of_variation: standard deviation over mean.
        idle_share: share of those without any load.
        effective: exp of the entropy of the load: as many equally loaded ones would look alike.
    """

    busiest_over_mean: float
    coefficient_of_variation: float
    idle_share: float
    effective: float

    @classmethod
    def of(cls, load: Tensor) -> "BalanceStats":
        """Compute from a vector of loads, any unit.

        Raises:
            ValueError: there is no load.
        """
        load = load.to(torch.float64)
        total = float(load.sum())
        if load.ndim != 1 or total <= 0:
            raise ValueError(
                f"load: shape {tuple(load.shape)} with sum {total:g} must be a vector with some"
                " load. Record more tokens."
            )
        mean = total / load.numel()
        share = load[load > 0] / total
        return cls(
            busiest_over_mean=float(load.max()) / mean,
            coefficient_of_variation=float(load.std(correction=0)) / mean,
            idle_share=float((load == 0).double().mean()),
            effective=float(torch.exp(-(share * share.log()).sum())),
        )

    def to_dict(self) -> dict[str, float]:
        """Return the numbers, for JSON."""
        return {
            "busiest_over_mean": self.busiest_over_mean,
            "coefficient_of_variation": self.coefficient_of_variation,
            "idle_share": self.idle_share,
            "effective": self.effective,
        }


def expert_load(index_TK: Tensor, num_experts: int) -> Tensor:
    """Return the tokens of each expert, [E] int64; choices of no expert are left out."""
    flat = index_TK.reshape(-1).to(torch.int64)
    return torch.bincount(flat[flat >= 0], minlength=num_experts)


def rank_rows(index_TK: Tensor, placement: ExpertPlacement) -> Tensor:
    """Return the (token, expert) rows each rank computes for a trace, [W] int64, turns included."""
    physical_TK = placement.to_physical(index_TK)
    load_P = expert_load(physical_TK, placement.num_physical)
    return load_P.view(placement.num_ranks, -1).sum(1)


def gather_expert_load(layer: MoE, group: ProcessGroup | Collectives | None = None) -> Tensor:
    """Return the load that a layer counted on all ranks and in all copies, [E] int64; collective.

    Args:
        layer: its counters are on.
        group: ranks that hold the layer or a copy of it; default: all of `torch.distributed`.

    Raises:
        ValueError: counters are off.
    """
    load = layer.expert_load
    if load is None:
        raise ValueError("expert_load: counters are off. Call layer.enable_load_counters() first.")
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    # A rank counts the tokens it routes: its own under sequence parallelism and all-to-all, else
    # those of all ranks that hold the same.
    alike = layer.dispatch("prefill", layer.sequence_parallel_enabled).alike
    return as_collectives(group, "copies").all_reduce(load) // alike.size


@torch.no_grad()
def update_selection_bias(router: Router, load_E: Tensor, rate: float = 1e-3) -> None:
    """Move a router's selection bias against the load, without an auxiliary loss.

    bias += rate * sign(mean load - load), then the mean of the bias is taken off, so that biases do
    not drift. The bias changes which experts are chosen, never their weights.

    Source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts.

    Args:
        router: with a selection bias.
        load_E: [E] tokens each expert got since the last update, over all ranks.
        rate: step; 1e-3 in the paper.

    Raises:
        ValueError: the router has no selection bias, or the load has another shape.
    """
    bias_E = router.e_score_correction_bias
    if bias_E is None:
        raise ValueError(
            "router: has no selection bias to update. Build it with selection_bias=True, or as a"
            " GroupLimitedRouter."
        )
    if load_E.shape != bias_E.shape:
        raise ValueError(f"load_E: shape {tuple(load_E.shape)} must be {tuple(bias_E.shape)}.")
    whole_E = bias_E.full_tensor() if isinstance(bias_E, DTensor) else bias_E
    load = load_E.to(whole_E)
    moved_E = whole_E + rate * torch.sign(load.mean() - load)
    moved_E -= moved_E.mean()
    if isinstance(bias_E, DTensor):
        moved_E = distribute_tensor(
            moved_E, bias_E.device_mesh, bias_E.placements, src_data_rank=None
        )
    bias_E.copy_(moved_E)


def step_selection_biases(
    model: nn.Module, rate: float = 1e-3, group: ProcessGroup | Collectives | None = None
) -> None:
    """Move every selection bias of a model against the load since the last call; call it after the
    optimizer's step. Collective.

    Counters that are off are enabled, and count tokens of training from then on.

    Args:
        model: with MoE layers; those without a selection bias are left alone.
        rate: see `update_selection_bias`.
        group: see `gather_expert_load`.

    Raises:
        ValueError: no router of the model has a selection bias.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    biased = [each for each in layers if each.router.e_score_correction_bias is not None]
    if not biased:
        raise ValueError(
            f"model: no router of its {len(layers)} MoE layers has a selection bias to move. Build"
            " them with selection_bias=True, or balance by use_router_losses."
        )
    for layer in biased:
        if layer.expert_load is not None:
            update_selection_bias(layer.router, gather_expert_load(layer, group), rate)
        layer.enable_load_counters(training_only=True)


def uniform_trace(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    """Draw K distinct experts for each token, all alike; return [T, K] int32."""
    return skewed_trace(torch.ones(num_experts), num_tokens, top_k, seed)


def zipf_trace(
    num_tokens: int, num_experts: int, top_k: int, exponent: float = 1.0, seed: int = 0
) -> Tensor:
    """Draw K distinct experts for each token, the r-th popular with weight r ** -exponent.

    Which experts are popular is itself drawn, so that they do not share a rank by number.
    """
    generator = torch.Generator().manual_seed(seed)
    weight_E = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -exponent
    return skewed_trace(
        weight_E[torch.randperm(num_experts, generator=generator)], num_tokens, top_k, seed
    )


def skewed_trace(weight_E: Tensor, num_tokens: int, top_k: int, seed: int = 0) -> Tensor:
    """Draw K distinct experts for each token without replacement, with given weights.

    Uses the Gumbel top-k trick: the K largest of log weight + Gumbel noise are such a draw.

    Args:
        weight_E: [E] relative popularity; zero is never drawn unless nothing else is left.
        num_tokens: T.
        top_k: K.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (num_tokens, weight_E.numel())
    noise_TE = -torch.log(torch.empty(shape).exponential_(generator=generator).clamp_min(1e-30))
    scores_TE = weight_E.clamp_min(1e-30).log().float() + noise_TE
    return scores_TE.topk(top_k, dim=1).indices.to(torch.int32)


def stretch_load(load_E: Tensor, num_experts: int) -> Tensor:
    """Return a load of the same shape, sorted from busiest down, for another number of experts.

    A recorded model rarely has as many experts as the planned one; what carries over is how the
    load falls off from the busiest expert to the idlest, which is interpolated.
    """
    ordered = load_E.to(torch.float64).sort(descending=True).values
    place = (torch.arange(num_experts) + 0.5) * ordered.numel() / num_experts - 0.5
    low = place.floor().long().clamp(0, ordered.numel() - 1)
    high = (low + 1).clamp(max=ordered.numel() - 1)
    between = (place - low).clamp(0.0, 1.0)
    return ordered[low] * (1 - between) + ordered[high] * between
