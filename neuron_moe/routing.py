"""Routers: scores, top-k choice and expert affinities.

One specification, `RouterSpec`, covers the family used by current models; `RouterTopK` and
`GroupLimitedRouter` are
constructors of it with NxD's arguments. All arithmetic is float32, whatever the dtype of weights
and hidden states.

| model | score | choice on | weights | then |
| --- | --- | --- | --- | --- |
| GPT-OSS | softmax over the chosen k | logits + linear bias | softmax of the k logits | |
| Llama4 | sigmoid | logits | sigmoid | scales the expert input |
| Qwen3-MoE, Mixtral, DBRX | softmax over all | logits | probability | / sum of k |
| DeepSeek-V3, GLM, Kimi | sigmoid | score + bias, in expert groups | score | / sum of k, x scale |

Axes: T tokens, E experts, K experts per token, H hidden, G expert groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuron_moe.config import ROUTER_ACTIVATIONS, as_dtype, check_top_k
from neuron_moe.errors import (
    check_bools,
    check_choice,
    check_finite,
    check_instance,
    check_positive_int,
    names_its_keys,
)
from neuron_moe.state import refuse_wrong_weights


class Routing(NamedTuple):
    """What a router decides for T tokens.

    Attributes:
        router_logits_TE: [T, E] float32.
        expert_affinities_TK: [T, K] float32, after activation, renormalisation and scaling; 0 for
            no expert.
        expert_index_TK: [T, K] int32, highest selection score first; the lower expert wins a tie;
            -1 is no expert.
    """

    router_logits_TE: Tensor
    expert_affinities_TK: Tensor
    expert_index_TK: Tensor


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Everything that defines a router except its weights.

    Args:
        num_experts: E, up to 512.
        top_k: K, up to 16.
        hidden_size: H.
        act_fn: 'softmax' or 'sigmoid'.
        act_over_topk: apply act_fn to the K chosen logits only (GPT-OSS).
        has_bias: the linear layer has a bias.
        has_selection_bias: add a float32 bias to the scores for the choice, not for the weights.
        n_group: number of equal expert groups (1: none).
        topk_group: groups a token may choose from; ranked by the sum of their two best scores.
        out_of_group_fill: score of experts outside these groups: -inf (as transformers 5 fills) or
            0.0 (as NxD fills).
        renormalize: divide the K weights by their sum + renormalize_eps.
        renormalize_eps: guards against a zero sum.
        routed_scaling_factor: multiplies the weights, last.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    act_fn: str = "softmax"
    act_over_topk: bool = False
    has_bias: bool = False
    has_selection_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    out_of_group_fill: float = float("-inf")
    renormalize: bool = False
    renormalize_eps: float = 1e-20
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        check_top_k(self.top_k, self.num_experts)
        check_positive_int("hidden_size", self.hidden_size)
        check_choice("act_fn", self.act_fn, ROUTER_ACTIVATIONS)
        check_bools(self, ("act_over_topk", "has_bias", "has_selection_bias", "renormalize"))
        for name in ("renormalize_eps", "routed_scaling_factor"):
            check_finite(name, getattr(self, name))
        if self.act_over_topk and (self.has_selection_bias or self.n_group > 1):
            raise ValueError(
                "act_over_topk=True: the choice is made on logits, so selection bias and expert"
                " groups"
                " (which rank scores) do not apply. Drop one of them."
            )
        self._check_groups()

    def _check_groups(self) -> None:
        check_positive_int("n_group", self.n_group)
        check_positive_int("topk_group", self.topk_group)
        if self.topk_group > self.n_group:
            raise ValueError(
                f"topk_group={self.topk_group}: must not exceed n_group={self.n_group}."
                " Lower topk_group."
            )
        if self.out_of_group_fill not in (0.0, float("-inf")):
            raise ValueError(
                f"out_of_group_fill={self.out_of_group_fill!r}: must be 0.0 or float('-inf')."
            )
        if self.n_group == 1:
            return
        size, rest = divmod(self.num_experts, self.n_group)
        if rest or size < 2:
            raise ValueError(
                f"n_group={self.n_group}: num_experts={self.num_experts} must split into equal"
                f" groups"
                " of at least 2 experts."
            )
        if self.top_k > self.topk_group * size:
            raise ValueError(
                f"top_k={self.top_k}: topk_group={self.topk_group} groups of {size} experts offer"
                f" only"
                f" {self.topk_group * size}. Raise topk_group or lower top_k."
            )


def top_k_lowest_first(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return values and indices of the K largest scores; of equal ones the lowest index comes
    first.

    `torch.topk` leaves the order of ties open; a stable sort fixes it, so that every backend and
    every rank agrees.
    """
    values_TE, index_TE = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
    return values_TE[:, :top_k], index_TE[:, :top_k]


def mask_groups(scores_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Return scores in which experts outside the chosen groups hold `out_of_group_fill`."""
    num_tokens = scores_TE.shape[0]
    grouped = scores_TE.reshape(num_tokens, spec.n_group, spec.num_experts // spec.n_group)
    group_scores_TG = grouped.topk(2, dim=-1).values.sum(-1)
    _, chosen = top_k_lowest_first(group_scores_TG, spec.topk_group)
    keep_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter(1, chosen, True)
    masked = torch.where(keep_TG.unsqueeze(-1), grouped, spec.out_of_group_fill)
    return masked.reshape(num_tokens, spec.num_experts)


def route(
    router_logits_TE: Tensor, spec: RouterSpec, selection_bias_E: Tensor | None = None
) -> Routing:
    """Choose K experts for each token and weigh them.

    Args:
        router_logits_TE: [T, E] any float dtype; computed in float32.
        spec: the router.
        selection_bias_E: [E] float32, required if spec.has_selection_bias.

    Returns:
        The routing; expert_affinities_TK is differentiable with respect to the logits.
    """
    logits_TE = router_logits_TE.float()
    if spec.act_over_topk:
        chosen_TK, index_TK = top_k_lowest_first(logits_TE, spec.top_k)
        affinities_TK = _activate(chosen_TK, spec.act_fn)
    else:
        scores_TE = _activate(logits_TE, spec.act_fn)
        # Both activations are monotone: without a bias or groups, logits rank alike and never
        # saturate into ties.
        ranked_TE = logits_TE
        if selection_bias_E is not None or spec.n_group > 1:
            ranked_TE = scores_TE.detach()
            if selection_bias_E is not None:
                ranked_TE = ranked_TE + selection_bias_E.float()
        if spec.n_group > 1:
            ranked_TE = mask_groups(ranked_TE, spec)
        _, index_TK = top_k_lowest_first(ranked_TE, spec.top_k)
        affinities_TK = scores_TE.gather(1, index_TK)
    if spec.renormalize:
        affinities_TK = affinities_TK / (affinities_TK.sum(-1, keepdim=True) + spec.renormalize_eps)
    if spec.routed_scaling_factor != 1.0:
        affinities_TK = affinities_TK * spec.routed_scaling_factor
    return Routing(logits_TE, affinities_TK, index_TK.detach().to(torch.int32))


def _activate(scores: Tensor, act_fn: str) -> Tensor:
    return torch.softmax(scores, dim=-1) if act_fn == "softmax" else torch.sigmoid(scores)


class RouterBase(nn.Module):
    """A linear layer and a RouterSpec; `forward` gives the Routing of [.., H] hidden states.

    State dict: `linear_router.weight` [E, H], `linear_router.bias` [E] if the spec has a bias, and
    `e_score_correction_bias` [E] float32 if it has a selection bias.
    """

    e_score_correction_bias: nn.Parameter | None

    def __init__(
        self,
        spec: RouterSpec,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        jitter_eps: float = 0.0,
    ) -> None:
        super().__init__()
        dtype = as_dtype("dtype", dtype)
        check_finite("jitter_eps", jitter_eps)
        if not 0 <= jitter_eps < 1:
            raise ValueError(
                f"jitter_eps={jitter_eps}: must be at least 0 and below 1. Use 0 for no noise."
            )
        self.spec = spec
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.tensor_model_parallel_group = tensor_model_parallel_group
        self.jitter_eps = jitter_eps
        self.linear_router = nn.Linear(
            spec.hidden_size, spec.num_experts, bias=spec.has_bias, dtype=dtype, device=device
        )
        if spec.has_selection_bias:
            bias_E = torch.zeros(spec.num_experts, dtype=torch.float32, device=device)
            self.e_score_correction_bias = nn.Parameter(bias_E, requires_grad=False)
        else:
            self.register_parameter("e_score_correction_bias", None)
        refuse_wrong_weights(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RouterBase":
        """Move and cast as torch does, except that the selection bias stays float32.

        Rounded to bfloat16 it would change which experts are chosen.
        """
        bias_E = self.e_score_correction_bias
        exact_E = None if bias_E is None else bias_E.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        cast_E = self.e_score_correction_bias
        if exact_E is not None and cast_E is not None and cast_E.dtype != exact_E.dtype:
            cast_E.data = exact_E.to(cast_E.device)
        return self

    @property
    def num_experts(self) -> int:
        """E."""
        return self.spec.num_experts

    @property
    def top_k(self) -> int:
        """K."""
        return self.spec.top_k

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.spec.hidden_size

    @property
    def act_fn(self) -> str:
        """'softmax' or 'sigmoid'."""
        return self.spec.act_fn

    def get_router_logits(self, hidden_states: Tensor) -> Tensor:
        """Return [T, E] float32 logits of [.., H] hidden states of any float dtype."""
        check_instance("hidden_states", hidden_states, Tensor)
        if hidden_states.shape[-1] != self.spec.hidden_size:
            raise ValueError(
                f"hidden_states: shape {tuple(hidden_states.shape)} must end in"
                f" hidden_size={self.spec.hidden_size} of the router. Check the layer's input."
            )
        hidden_TH = hidden_states.reshape(-1, self.spec.hidden_size).float()
        if self.training and self.jitter_eps:
            noise = torch.empty_like(hidden_TH).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)
            hidden_TH = hidden_TH * noise
        bias_E = self.linear_router.bias
        return nn.functional.linear(
            hidden_TH, self.linear_router.weight.float(), None if bias_E is None else bias_E.float()
        )

    def forward(self, hidden_states: Tensor) -> Routing:
        """Route [.., H] hidden states; leading axes are flattened to T."""
        return route(self.get_router_logits(hidden_states), self.spec, self.e_score_correction_bias)

    def extra_repr(self) -> str:
        """Show the specification in the module's repr."""
        return repr(self.spec)


@names_its_keys
class RouterTopK(RouterBase):
    """Top-k routing with NxD's arguments (GPT-OSS, Llama4, Qwen3-MoE, Mixtral, DBRX), and four
    more.

    Args:
        num_experts: E.
        top_k: K.
        hidden_size: H.
        sequence_parallel_enabled: this rank routes its own part of the sequence.
        sequence_dimension: axis that sequence parallelism splits.
        dtype: dtype of the weights, or its name; arithmetic is float32.
        device: where the weights live.
        bias: the linear layer has a bias.
        tensor_model_parallel_group: ranks that share the sequence.
        act_fn: 'softmax' or 'sigmoid'.
        apply_act_fn_over_topk: apply act_fn to the chosen logits only.
        jitter_eps: multiplies the input by U(1 - eps, 1 + eps) while training.
        store_transposed_weights: accepted for NxD; the kernels here read [E, H].
        selection_bias: float32 bias of the choice, `e_score_correction_bias` (not in NxD).
        renormalize: divide the K affinities by their sum (not in NxD, which does it in
            ExpertMLPsV2).
        renormalize_eps: added to that sum.
        routed_scaling_factor: multiplies the affinities.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        bias: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        act_fn: str = "softmax",
        apply_act_fn_over_topk: bool = False,
        jitter_eps: float = 0.0,
        store_transposed_weights: bool = False,
        *,
        selection_bias: bool = False,
        renormalize: bool = False,
        renormalize_eps: float = 1e-20,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        spec = RouterSpec(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            act_fn=act_fn,
            act_over_topk=apply_act_fn_over_topk,
            has_bias=bias,
            has_selection_bias=selection_bias,
            renormalize=renormalize,
            renormalize_eps=renormalize_eps,
            routed_scaling_factor=routed_scaling_factor,
        )
        self.store_transposed_weights = store_transposed_weights
        super().__init__(
            spec,
            dtype=dtype,
            device=device,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            tensor_model_parallel_group=tensor_model_parallel_group,
            jitter_eps=jitter_eps,
        )


@names_its_keys
class GroupLimitedRouter(RouterBase):
    """Group-limited sigmoid routing without auxiliary loss (DeepSeek-V3), with NxD's arguments and
    more.

    Args:
        num_experts: E.
        top_k: K.
        hidden_size: H.
        n_group: equal groups the experts are split in.
        topk_group: groups a token may choose from.
        sequence_parallel_enabled: this rank routes its own part of the sequence.
        sequence_dimension: axis that sequence parallelism splits.
        dtype: dtype of the weights, or its name; arithmetic is float32.
        device: where the weights live.
        tensor_model_parallel_group: ranks that share the sequence.
        jitter_eps: multiplies the input by U(1 - eps, 1 + eps) while training.
        renormalize: divide the K affinities by their sum + renormalize_eps (the published gate
            does).
        renormalize_eps: 1e-20, as published.
        routed_scaling_factor: 2.5 for DeepSeek-V3.
        out_of_group_fill: -inf, with which an expert outside the chosen groups never wins, or NxD's
            0.0, with which it beats an expert inside whose biased score is negative.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        n_group: int,
        topk_group: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        jitter_eps: float = 0.0,
        *,
        renormalize: bool = False,
        renormalize_eps: float = 1e-20,
        routed_scaling_factor: float = 1.0,
        out_of_group_fill: float = float("-inf"),
    ) -> None:
        spec = RouterSpec(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            act_fn="sigmoid",
            has_selection_bias=True,
            n_group=n_group,
            topk_group=topk_group,
            out_of_group_fill=out_of_group_fill,
            renormalize=renormalize,
            renormalize_eps=renormalize_eps,
            routed_scaling_factor=routed_scaling_factor,
        )
        super().__init__(
            spec,
            dtype=dtype,
            device=device,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            tensor_model_parallel_group=tensor_model_parallel_group,
            jitter_eps=jitter_eps,
        )
