"""Routers: scores, top-k choice and expert affinities.

One formula covers the family used by current models. All arithmetic is float32, whatever the dtype
of weights and hidden states; float64 hidden states are routed in float64.

| model | score | choice on | weights | then |
| --- | --- | --- | --- | --- |
| GPT-OSS | softmax over the chosen k | logits + linear bias | softmax of the k logits | |
| Llama4 | sigmoid | logits | sigmoid | scales the expert input |
| Qwen3-MoE, Mixtral, DBRX | softmax over all | logits | probability | / sum of k |
| DeepSeek-V3, GLM, Kimi | sigmoid | score + bias, in expert groups | score | / sum of k, x scale |
| DeepSeek-V4 | sqrt(softplus) | score + bias, or a table of token ids | score | the same |
| LongCat | softmax over all, identities too | score + bias | probability | x scale |
| Phi-3.5 | sparsemixer | logits | see `mix_sparsely` | |
| Laguna | as DeepSeek-V3, of logits that may be capped | | | |

Axes: T tokens, E experts, K experts per token, H hidden, G expert groups.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from neuron_moe.activations import at_least_float32
from neuron_moe.errors import check_finite, check_instance
from neuron_moe.spec import RouterSpec, as_dtype
from neuron_moe.weights.checks import refuse_wrong_weights
from nki_kernels.common.formula import RouterFormula


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


def top_k_lowest_first(scores_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return values and indices of the K largest scores; of equal ones the lowest index comes
    first.

    `torch.topk` leaves the order of ties open; a stable sort fixes it, so that every backend and
    every rank agrees.
    """
    values_TE, index_TE = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
    return values_TE[:, :top_k], index_TE[:, :top_k]


def take_turns(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """Return [T, K] int64 experts in turn, K a token."""
    turns = torch.arange(num_tokens * top_k, device=device)
    return (turns % num_experts).view(num_tokens, top_k)


def mask_groups(scores_TE: Tensor, formula: RouterFormula) -> Tensor:
    """Return scores in which experts outside the chosen groups hold `out_of_group_fill`."""
    num_tokens, num_experts = scores_TE.shape
    grouped = scores_TE.reshape(num_tokens, formula.n_group, num_experts // formula.n_group)
    group_scores_TG = grouped.topk(2, dim=-1).values.sum(-1)
    _, chosen = top_k_lowest_first(group_scores_TG, formula.topk_group)
    keep_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter(1, chosen, True)
    masked = torch.where(keep_TG.unsqueeze(-1), grouped, formula.out_of_group_fill)
    return masked.reshape(num_tokens, num_experts)


def route(
    router_logits_TE: Tensor,
    formula: RouterFormula,
    selection_bias_E: Tensor | None = None,
    *,
    forced_index_TK: Tensor | None = None,
) -> Routing:
    """Choose K experts for each token and weigh them.

    Args:
        router_logits_TE: [T, E] any float dtype; computed in float32.
        formula: of the router.
        selection_bias_E: [E] float32, required if formula.has_selection_bias.
        forced_index_TK: [T, K] int64 experts to choose whatever the scores.

    Returns:
        The routing; expert_affinities_TK is differentiable with respect to the logits.
    """
    logits_TE = at_least_float32(router_logits_TE)
    index_TK = forced_index_TK
    if formula.act_over_topk:
        if index_TK is None:
            _, index_TK = top_k_lowest_first(logits_TE, formula.top_k)
        chosen_TK = logits_TE.gather(1, index_TK)
        affinities_TK = activate(chosen_TK, formula.act_fn)
    else:
        scores_TE = activate(logits_TE, formula.act_fn)
        if index_TK is None:
            ranked_TE = _rank(logits_TE, scores_TE.detach(), formula, selection_bias_E)
            _, index_TK = top_k_lowest_first(ranked_TE, formula.top_k)
        affinities_TK = scores_TE.gather(1, index_TK)
    if formula.renormalize:
        affinities_TK = affinities_TK / (
            affinities_TK.sum(-1, keepdim=True) + formula.renormalize_eps
        )
    if formula.routed_scaling_factor != 1.0:
        affinities_TK = affinities_TK * formula.routed_scaling_factor
    return Routing(logits_TE, affinities_TK, index_TK.detach().to(torch.int32))


def mix_sparsely(
    router_logits_TE: Tensor, jitter: float, *, forced_index_TK: Tensor | None = None
) -> Routing:
    """Choose the two experts of the highest logits, and weigh each by a softmax of its own.

    A softmax is over the experts that are left and whose logit l is near the highest m of them:
    (m - l) / max(|l|, m) <= 2 * jitter. Source: arXiv 2409.12136, for inference.

    Args:
        router_logits_TE: [T, E] any float dtype; computed in float32.
        jitter: not below 0.
        forced_index_TK: [T, 2] int64 experts to choose whatever the logits.
    """
    logits_TE = left_TE = at_least_float32(router_logits_TE)
    index_TK = forced_index_TK
    if index_TK is None:
        _, index_TK = top_k_lowest_first(logits_TE, 2)
    affinities = []
    for index_T1 in (index_TK[:, :1], index_TK[:, 1:]):
        highest_T1 = left_TE.amax(1, keepdim=True)
        share_TE = (highest_T1 - logits_TE) / logits_TE.abs().maximum(highest_T1)
        near_TE = left_TE.masked_fill(share_TE > 2 * jitter, -torch.inf)
        affinities.append(near_TE.softmax(1).gather(1, index_T1))
        left_TE = left_TE.scatter(1, index_T1, -torch.inf)
    return Routing(logits_TE, torch.cat(affinities, dim=1), index_TK.detach().to(torch.int32))


def selection_scores(
    router_logits_TE: Tensor, formula: RouterFormula, selection_bias_E: Tensor | None = None
) -> Tensor:
    """Return [T, E] float32, by which experts are ranked; arguments as of `route`."""
    logits_TE = at_least_float32(router_logits_TE)
    if formula.act_over_topk:
        return logits_TE
    return _rank(logits_TE, activate(logits_TE, formula.act_fn), formula, selection_bias_E)


def selection_margin(scores_TE: Tensor, top_k: int) -> Tensor:
    """Return how clear a choice was, [T]: the last chosen score above the first that was not.

    Args:
        scores_TE: of `selection_scores`.
        top_k: K; where every expert is chosen, the margin is infinite.
    """
    if top_k == scores_TE.shape[-1]:
        return torch.full_like(scores_TE[:, 0], torch.inf)
    values = scores_TE.topk(top_k + 1, dim=-1).values
    return values[:, -2] - values[:, -1]


def _rank(
    logits_TE: Tensor, scores_TE: Tensor, formula: RouterFormula, selection_bias_E: Tensor | None
) -> Tensor:
    """Return what ranks experts where the activation comes before the choice.

    Activations are monotone: without a bias or groups, logits rank alike and never saturate into
    ties.
    """
    if selection_bias_E is None and formula.n_group == 1:
        return logits_TE
    ranked_TE = scores_TE if selection_bias_E is None else scores_TE + selection_bias_E
    return mask_groups(ranked_TE, formula) if formula.n_group > 1 else ranked_TE


def _keep_float32(router: "Router", _incompatible: object) -> None:
    """Keep the selection bias in float32 where `assign=True` puts in what a checkpoint has."""
    bias_E = router.e_score_correction_bias
    if bias_E is not None and bias_E.dtype != torch.float32:
        bias_E.data = bias_E.to(torch.float32)


def activate(scores: Tensor, act_fn: str) -> Tensor:
    """Return scores of logits [.., E], by one of ROUTER_ACTIVATIONS."""
    if act_fn == "sqrtsoftplus":
        return nn.functional.softplus(scores).sqrt()
    return torch.softmax(scores, dim=-1) if act_fn == "softmax" else torch.sigmoid(scores)


def _join_repeated(routing: Routing) -> Routing:
    """Give an expert that a table names twice the weight of both, and the second choice nobody."""
    logits_TE, affinities_TK, index_TK = routing
    same_TKK = index_TK.unsqueeze(2) == index_TK.unsqueeze(1)
    is_later_TK = same_TKK.tril(-1).any(2)
    joined_TK = (affinities_TK.unsqueeze(1) * same_TKK).sum(2).masked_fill(is_later_TK, 0.0)
    return Routing(logits_TE, joined_TK, index_TK.masked_fill(is_later_TK, -1))


class Router(nn.Module):
    """A linear layer and a formula; `forward` gives the Routing of [.., H] hidden states.

    State dict: `linear_router.weight` [E, H], `linear_router.bias` [E] if the spec has a bias, and
    `e_score_correction_bias` [E] float32 if it has a selection bias: a buffer, since no optimizer
    moves it, and no mixed precision may round it; `expert_table` [V, K] int64 if a table chooses.
    Identities count among the E.

    Args:
        spec: sizes and formula.
        dtype: dtype of the weights, or its name.
        device: where they live.
        jitter_eps: multiplies the input by U(1 - eps, 1 + eps) while training.

    Attributes:
        forces_balance: while training, experts take turns whatever the scores, which still weigh
            them: a run's time and memory without the router's say. Set it; False at first.
    """

    forces_balance: bool = False
    e_score_correction_bias: Tensor | None
    expert_table: Tensor | None

    def __init__(
        self,
        spec: RouterSpec,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
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
        self.jitter_eps = jitter_eps
        self.linear_router = nn.Linear(
            spec.hidden_size,
            spec.num_classes,
            bias=spec.formula.has_bias,
            dtype=dtype,
            device=device,
        )
        bias_E = None
        if spec.formula.has_selection_bias:
            bias_E = torch.zeros(spec.num_classes, dtype=torch.float32, device=device)
        self.register_buffer("e_score_correction_bias", bias_E)
        table_VK = None
        if spec.table_size:
            where = torch.get_default_device() if device is None else torch.device(device)
            table_VK = take_turns(spec.table_size, spec.num_experts, spec.top_k, where)
        self.register_buffer("expert_table", table_VK)
        refuse_wrong_weights(self)
        self.register_load_state_dict_post_hook(_keep_float32)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
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
        """One of ROUTER_ACTIVATIONS."""
        return self.spec.formula.act_fn

    def get_router_logits(self, hidden_states: Tensor) -> Tensor:
        """Return [T, E] float32 logits of [.., H] hidden states of any float dtype."""
        check_instance("hidden_states", hidden_states, Tensor)
        if hidden_states.shape[-1] != self.spec.hidden_size:
            raise ValueError(
                f"hidden_states: shape {tuple(hidden_states.shape)} must end in"
                f" hidden_size={self.spec.hidden_size} of the router. Check the layer's input."
            )
        hidden_TH = at_least_float32(hidden_states.reshape(-1, self.spec.hidden_size))
        if self.training and self.jitter_eps:
            noise = torch.empty_like(hidden_TH).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)
            hidden_TH = hidden_TH * noise
        bias = self.linear_router.bias
        weight_EH = self.linear_router.weight.to(hidden_TH.dtype)
        bias_E = None if bias is None else bias.to(hidden_TH.dtype)
        device = hidden_TH.device.type
        if torch.is_autocast_enabled(device):  # it would multiply in bfloat16
            with torch.autocast(device, enabled=False):
                logits_TE = nn.functional.linear(hidden_TH, weight_EH, bias_E)
        else:
            logits_TE = nn.functional.linear(hidden_TH, weight_EH, bias_E)
        cap = self.spec.logit_softcap
        return torch.tanh(logits_TE / cap) * cap if cap else logits_TE

    def forward(self, hidden_states: Tensor, *, token_ids: Tensor | None = None) -> Routing:
        """Route [.., H] hidden states; leading axes are flattened to T.

        Args:
            hidden_states: of T tokens.
            token_ids: theirs, which a table needs; [..] of any integer type.
        """
        logits_TE = self.get_router_logits(hidden_states)
        forced_TK = self.choose(logits_TE)
        if self.expert_table is not None:
            if token_ids is None or token_ids.numel() != logits_TE.shape[0]:
                raise ValueError(
                    f"token_ids: a table of {self.spec.table_size} token ids chooses the experts,"
                    f" must be one for each of the {logits_TE.shape[0]} tokens. Pass token_ids."
                )
            forced_TK = self.expert_table[token_ids.reshape(-1).long()]
        if self.spec.mixer_jitter is not None:
            return self._mix(logits_TE, forced_TK)
        found = route(
            logits_TE, self.spec.formula, self.e_score_correction_bias, forced_index_TK=forced_TK
        )
        return found if self.expert_table is None else _join_repeated(found)

    def _mix(self, logits_TE: Tensor, forced_TK: Tensor | None) -> Routing:
        """Route by sparsemixer, for inference."""
        jitter = self.spec.mixer_jitter
        if self.training:
            raise ValueError(
                f"mixer_jitter={jitter}: sparsemixer trains by sampling, which is not implemented."
                " Call eval() of the model."
            )
        return mix_sparsely(logits_TE, jitter or 0.0, forced_index_TK=forced_TK)

    def choose(self, logits_TE: Tensor) -> Tensor | None:
        """Return [T, K] int64 experts that are taken whatever the scores, or None."""
        if not (self.training and self.forces_balance):
            return None
        return take_turns(logits_TE.shape[0], self.num_experts, self.top_k, logits_TE.device)

    def extra_repr(self) -> str:
        """Show the specification in the module's repr."""
        return repr(self.spec)
