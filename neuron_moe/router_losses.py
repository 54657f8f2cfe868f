"""Auxiliary losses of a router: they spread tokens over experts and keep logits small.

Axes: T tokens, K choices, E experts, U sequences. With p the scores of a token over all experts,
divided by their sum:

    balance   E / (K T^2)    sum_e count_e  sum_t p_te               over all tokens of all ranks
    sequence  E / (K T)      sum_u sum_e count_ue / S_u  sum_t p_te  within each sequence
    z         1 / T          sum_t logsumexp(logits_t)^2

Both balance losses are 1 times their weight where the load is even, as DeepSeek's are; K times that
of `balance` is transformers' `load_balancing_loss_func` of one layer. Counts have no gradient and
are summed over ranks; the rest is a sum over tokens, of which a rank with others has its part.

Sources: Fedus et al. 2021, Switch Transformers; DeepSeek-AI 2024, DeepSeek-V3 (sequence-wise); Zoph
et al. 2022, ST-MoE (z-loss).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuron_moe.blocks import sort_pairs
from neuron_moe.errors import check_finite
from neuron_moe.passes import OwedLosses
from neuron_moe.router import Routing, activate

OverRanks = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks that hold other tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """Weights of a router's auxiliary losses; 0 leaves one out.

    Args:
        balance: over all tokens of a step.
        sequence: within each sequence.
        z: on the size of the logits.

    Raises:
        ValueError: a weight below 0 or not finite.
    """

    balance: float = 0.0
    sequence: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            check_finite(field.name, value)
            if value < 0:
                raise ValueError(f"{field.name}={value}: must be 0 or more. Use 0 to leave it out.")

    @classmethod
    def named(cls, formula: str, weight: float, top_k: int) -> "RouterLosses":
        """Return the weights with which a layer has the loss of another library or paper.

        Args:
            formula: 'deepseek' (V3's, within sequences), 'switch' (over all tokens), 'transformers'
                (`load_balancing_loss_func` of one layer), 'st_moe' (z-loss).
            weight: that its coefficient has there.
            top_k: K of the router.

        Raises:
            ValueError: an unknown formula; torchtitan's, which is no loss.
        """
        if formula == "torchtitan":
            raise ValueError(
                "formula='torchtitan': has no loss, it moves selection biases against the load."
                " Call neuron_moe.train.balance.step_selection_biases instead."
            )
        known = {
            "deepseek": {"sequence": weight},
            "switch": {"balance": weight},
            "transformers": {"balance": top_k * weight},
            "st_moe": {"z": weight},
        }
        if formula not in known:
            raise ValueError(f"formula={formula!r}: must be one of {', '.join(known)}.")
        return cls(**known[formula])


def _alone(x: Tensor) -> Tensor:
    return x


class LossTokens(NamedTuple):
    """Which tokens a rank has, for losses over all of them.

    Attributes:
        sequence_T: [t] int64 sequence of each own token.
        num_sequences: U that this rank has tokens of.
        over_all: sums over ranks with other tokens.
        over_sequences: sums over ranks with other tokens of the same sequences.
        share: returns a loss of which each rank with the same tokens has a share of the gradient.
    """

    sequence_T: Tensor
    num_sequences: int
    over_all: OverRanks = _alone
    over_sequences: OverRanks = _alone
    share: OverRanks = _alone


def router_losses(
    routing: Routing, act_fn: str, weights: RouterLosses, tokens: LossTokens
) -> dict[str, Tensor]:
    """Return the weighted losses that are requested, this rank's part of each.

    Args:
        routing: of the own tokens; a token whose first choice is -1 is padding.
        act_fn: as the router has it.
        weights: of the losses.
        tokens: which tokens these are.
    """
    logits_TE, _, index_TK = routing
    num_experts, top_k = logits_TE.shape[1], index_TK.shape[1]
    is_real_T = (index_TK >= 0).any(1).to(logits_TE.dtype)
    total = tokens.over_all(is_real_T.sum()).clamp(min=1)
    losses = {}
    if weights.z:
        z_T = torch.logsumexp(logits_TE, dim=-1).square()
        losses["z"] = weights.z * (z_T * is_real_T).sum() / total
    if not (weights.balance or weights.sequence):
        return losses
    score_TE = _scores(logits_TE, act_fn) * is_real_T.unsqueeze(1)
    scale = num_experts / (top_k * total)
    if weights.balance:
        count_E = tokens.over_all(sort_pairs(index_TK, num_experts).tokens_per_expert_E)
        even = (count_E.to(score_TE.dtype) * score_TE.sum(0)).sum()
        losses["balance"] = weights.balance * scale * even / total
    if weights.sequence:
        by_sequence = tokens.sequence_T.unsqueeze(1) * num_experts
        flat_TK = torch.where(index_TK >= 0, index_TK + by_sequence, -1)
        count_UE = sort_pairs(flat_TK, tokens.num_sequences * num_experts).tokens_per_expert_E
        count_UE = tokens.over_sequences(count_UE).view(-1, num_experts).to(score_TE.dtype)
        length_U1 = (count_UE.sum(1, keepdim=True) / top_k).clamp(min=1)
        zeros_UE = torch.zeros_like(count_UE)
        score_UE = zeros_UE.index_add(0, tokens.sequence_T, score_TE)
        losses["sequence"] = weights.sequence * scale * (count_UE / length_U1 * score_UE).sum()
    return losses


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the sum of the losses of a model's routers since it was last requested, with gradient.

    Part of the loss like any other: whatever divides or scales the loss for batches in parts or
    narrow gradients, scales these as well.

        loss = criterion(model(batch), target) + auxiliary_loss(model)
        (loss / number_of_parts).backward()

    A function under `torch.utils.checkpoint` with use_reentrant=True has the gradients of what it
    returns alone: call this at its end, and return the loss beside the output.

    Args:
        model: with MoE layers that `use_router_losses`; those that did not run add nothing.

    Returns:
        [] float32, or float64 of such layers; zero if there is nothing to add.

    Raises:
        RuntimeError: a layer ran without gradients, which are wanted now.
    """
    total = torch.zeros(())
    for module in model.modules():
        owed = getattr(module, "owed_losses", None)
        for loss in owed.take() if isinstance(owed, OwedLosses) else ():
            total = total.to(loss) + loss
    return total


def _scores(logits_TE: Tensor, act_fn: str) -> Tensor:
    return functional.normalize(activate(logits_TE, act_fn), p=1.0, dim=-1)
