"""Layers put together from three parts that know nothing of each other: router, transport, experts.

A communication handler brings rows to the experts' ranks, sorted by expert, and home again; another
transport (DeepEP, NVSHMEM) implements its two methods. `MoE` is the layer with everything else:
tensor parallelism, shared experts, padding, plans. This one is for experiments with a transport or
with experts of one's own.

Axes: T tokens, K choices, P = T * K pairs, R rows of this rank, E experts, G groups, H hidden, I
intermediate.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuron_moe.activations import at_least_float32
from neuron_moe.backends.chosen_experts import Matrices, Run, multiply
from neuron_moe.blocks import sort_pairs
from neuron_moe.errors import check_positive_int
from neuron_moe.parallel.collectives import Collectives, all_to_all_rows
from neuron_moe.router import Router


class SentRows(NamedTuple):
    """What the experts of a rank get.

    Attributes:
        rows_RH: [R, H] tokens sorted by expert.
        affinities_R: [R] float32.
        counts_e: [e] int64 rows of each expert of this rank, on the CPU.
    """

    rows_RH: Tensor
    affinities_R: Tensor
    counts_e: Tensor


class CommunicationHandler(Protocol):
    """Brings tokens to the ranks of their experts, and results home; one call of each in turn."""

    def dispatch(self, hidden_TH: Tensor, index_TK: Tensor, affinities_TK: Tensor) -> SentRows:
        """Send each token to its experts; index -1 is none."""

    def combine(self, rows_RH: Tensor) -> Tensor:
        """Return [T, H], the sum of each token's rows in the order of its choices."""


class LocalHandler:
    """Every expert is here: rows are sorted, nothing travels.

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = check_positive_int("num_experts", num_experts)
        self._order_P = torch.empty(0, dtype=torch.int64)
        self._shape_TK = torch.Size((0, 1))

    def dispatch(self, hidden_TH: Tensor, index_TK: Tensor, affinities_TK: Tensor) -> SentRows:
        """Sort the rows by expert."""
        pairs = sort_pairs(index_TK, self.num_experts)
        counts_E = pairs.tokens_per_expert_E.cpu()
        self._order_P = pairs.order_P[: int(counts_E.sum())]
        self._shape_TK = index_TK.shape
        rows_PH = hidden_TH[self._order_P // index_TK.shape[1]]
        return SentRows(rows_PH, affinities_TK.reshape(-1)[self._order_P], counts_E)

    def combine(self, rows_RH: Tensor) -> Tensor:
        """Add up each token's rows."""
        num_tokens, top_k = self._shape_TK
        home_PH = at_least_float32(rows_RH).new_zeros((num_tokens * top_k, rows_RH.shape[1]))
        home_PH = home_PH.index_copy(0, self._order_P, at_least_float32(rows_RH))
        return home_PH.view(num_tokens, top_k, -1).sum(1).to(rows_RH.dtype)


class AllToAllHandler:
    """Experts are spread over ranks in equal runs; each row travels to its expert's rank.

    Args:
        num_experts: E of all ranks.
        group: the ranks.

    Raises:
        ValueError: ranks do not divide the experts.
    """

    def __init__(self, num_experts: int, group: Collectives) -> None:
        if num_experts % group.size:
            raise ValueError(
                f"num_experts={num_experts}: must divide by the {group.size} ranks of group"
                f" {group.name!r}. Use fewer ranks."
            )
        self.local = LocalHandler(num_experts)
        self.group = group
        self._counts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._order_R = torch.empty(0, dtype=torch.int64)

    def dispatch(self, hidden_TH: Tensor, index_TK: Tensor, affinities_TK: Tensor) -> SentRows:
        """Send rows sorted by expert, and sort what arrived from several ranks by expert."""
        group, num_local = self.group, self.local.num_experts // self.group.size
        rows_PH, affinities_P, counts_E = self.local.dispatch(hidden_TH, index_TK, affinities_TK)
        everyone = group.all_gather(counts_E.to(hidden_TH.device).unsqueeze(0)).cpu()
        counts_WDe = everyone.view(group.size, group.size, num_local)
        sent = tuple(counts_WDe[group.rank].sum(1).tolist())
        arriving_We = counts_WDe[:, group.rank]
        received = tuple(arriving_We.sum(1).tolist())
        expert_R = (
            torch.arange(num_local).repeat(group.size).repeat_interleave(arriving_We.flatten())
        )
        self._counts = sent, received
        self._order_R = expert_R.argsort(stable=True).to(hidden_TH.device)
        rows_RH = all_to_all_rows(group, rows_PH, sent, received)[self._order_R]
        affinities_R = all_to_all_rows(group, affinities_P, sent, received)[self._order_R]
        return SentRows(rows_RH, affinities_R, arriving_We.sum(0))

    def combine(self, rows_RH: Tensor) -> Tensor:
        """Send rows back and add up each token's."""
        sent, received = self._counts
        as_arrived_RH = torch.zeros_like(rows_RH).index_copy(0, self._order_R, rows_RH)
        return self.local.combine(all_to_all_rows(self.group, as_arrived_RH, received, sent))


class GroupedLinear(nn.Module):
    """One matrix for each group of rows, without biases; weight [G, in, out].

    Args:
        num_groups: G.
        in_features: width of the rows.
        out_features: width of the result.
        dtype: of the weight.
        device: where it lives.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shape = (num_groups, in_features, out_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from U(-b, b) with b = 1 / sqrt(in_features)."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, rows_Rk: Tensor, counts_G: Tensor | Sequence[int]) -> Tensor:
        """Multiply rows, one group after the other, with their matrices.

        Args:
            rows_Rk: [R, in].
            counts_G: rows of each group, on the CPU.

        Raises:
            ValueError: the counts are of another number of groups or rows.
        """
        counts = counts_G.tolist() if isinstance(counts_G, Tensor) else list(counts_G)
        num_groups, rows = self.weight.shape[0], rows_Rk.shape[0]
        if len(counts) != num_groups or sum(counts) != rows or min(counts) < 0:
            raise ValueError(
                f"counts: {len(counts)} that sum up to {sum(counts)}, must be {num_groups} of"
                f" {rows} rows. Count the rows of every group."
            )
        chosen = [(group, count) for group, count in enumerate(counts) if count]
        if not chosen:
            return rows_Rk @ self.weight[0]
        run = Run([group for group, _ in chosen], [count for _, count in chosen])
        is_grouped = rows_Rk.is_cuda and rows_Rk.dtype == torch.bfloat16
        form = "grouped" if is_grouped else "plain"
        return multiply(
            rows_Rk, Matrices(self.weight, tuple(self.weight.detach()), None, None), run, form
        )


class GroupedSwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), weighed, for rows sorted by expert.

    Args:
        hidden_size: H.
        intermediate_size: I.
        num_experts: of this rank.
        dtype: of the weights.
        device: where they live.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> GroupedLinear:
            return GroupedLinear(num_experts, inputs, outputs, dtype=dtype, device=device)

        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(
        self, rows_RH: Tensor, affinities_R: Tensor, counts_E: Tensor | Sequence[int]
    ) -> Tensor:
        """Return [R, H], still sorted and weighed with the affinities.

        Args:
            rows_RH: [R, H] sorted by expert.
            affinities_R: [R].
            counts_E: rows of each expert, on the CPU.
        """
        gate_RI = at_least_float32(self.gate_proj(rows_RH, counts_E))
        up_RI = at_least_float32(self.up_proj(rows_RH, counts_E))
        middle_RI = (functional.silu(gate_RI) * up_RI).to(rows_RH.dtype)
        output_RH = at_least_float32(self.down_proj(middle_RI, counts_E))
        return (output_RH * affinities_R.unsqueeze(1)).to(rows_RH.dtype)


class HandledMoE(nn.Module):
    """A router, a communication handler and experts of this rank as one layer.

    Args:
        router: chooses experts.
        experts: called as `GroupedSwiGLU` is.
        handler: the transport.

    Attributes:
        tokens_per_expert_E: [E] int64 choices counted since `reset_stats`.
    """

    tokens_per_expert_E: Tensor

    def __init__(self, router: Router, experts: nn.Module, handler: CommunicationHandler) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.handler = handler
        counts_E = torch.zeros(router.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert_E", counts_E, persistent=False)

    def reset_stats(self) -> None:
        """Count from zero."""
        self.tokens_per_expert_E.zero_()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return [.., H] of [.., H] hidden states."""
        hidden_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = self.router(hidden_TH)
        with torch.no_grad():
            pairs = sort_pairs(routing.expert_index_TK, self.router.num_experts)
            self.tokens_per_expert_E += pairs.tokens_per_expert_E
        sent = self.handler.dispatch(
            hidden_TH, routing.expert_index_TK, routing.expert_affinities_TK
        )
        return self.handler.combine(self.experts(*sent)).view_as(hidden_states)
