"""One MoE layer over several ranks: from this rank's tokens to this rank's outputs.

`MoE.forward` hands its tokens to `ParallelLayer.run`. On one rank every collective is the identity
and what remains is route, experts, shared experts, sum.

What is added up before a sum over ranks counts once in total: each routed expert is on one
expert-parallel rank (or its tokens take turns between replicas), its slices on the tensor parallel
ranks, its down bias is divided by them, and shared experts are either sliced over the ranks that
are summed or computed for a share of the tokens. `neuron_moe.parallel.invariant` checks it by
counting.

Axes: T tokens of all ranks, t this rank's own, N rows that reach this rank's experts, H hidden, K
choices, B sequences, S positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe.experts import ExpertMLPsV2
from neuron_moe.parallel.collectives import (
    Collectives,
    TorchCollectives,
    all_gather_rows,
    gather_lengths,
    reduce_scatter_rows,
)
from neuron_moe.parallel.failure import check_same_on_all_ranks
from neuron_moe.parallel.groups import ExpertGroups
from neuron_moe.parallel.hybrid import DECODE_PHASES
from neuron_moe.parallel.strategy import (
    Dispatched,
    Rows,
    Strategy,
    TokenSpread,
    build_strategy,
    split_evenly,
)
from neuron_moe.routing import RouterBase, Routing
from neuron_moe.shared_experts import SharedExperts


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens a rank was given.

    Args:
        hidden_TH: [t, H].
        batch_size: B, sequences; 1 if they are not to be told apart.
        padding_mask: nonzero for real tokens, one entry for each of these tokens or for those of
            all ranks; None: all are real.
        phase: one of dispatch.PHASES; None decides by the length of the sequences.
        is_sequence_part: this rank has its part of each sequence, other ranks have others.
    """

    hidden_TH: Tensor
    batch_size: int
    padding_mask: Tensor | None
    phase: str | None
    is_sequence_part: bool


class LayerOutput(NamedTuple):
    """What a layer computes for the tokens of a rank.

    Attributes:
        output_TH: [t, H].
        routing: of the same tokens, experts numbered as in the model.
    """

    output_TH: Tensor
    routing: Routing


class ParallelLayer:
    """Router, experts and shared experts of one layer, and the ranks they are spread over.

    Args:
        router: weights are the same on every rank.
        experts: this rank's part.
        shared: this rank's part, or None.
        model: the group outputs are summed over; default: that of the experts.
        reduce_dtype: dtype of that sum; None is the dtype of the hidden states.

    Raises:
        ValueError: a group is missing, or the shared experts' group does not fit.
    """

    def __init__(
        self,
        router: RouterBase,
        experts: ExpertMLPsV2,
        shared: SharedExperts | None,
        *,
        model: Collectives | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.reduce_dtype = reduce_dtype
        self.groups = {phase: groups.summed_over(model) for phase, groups in experts.groups.items()}
        for phase, groups in self.groups.items():
            if shared is not None and groups.model.size % shared.group.size:
                raise ValueError(
                    f"shared experts split over {shared.group.size} ranks: must divide the"
                    f" {groups.model.size} ranks that are summed in {phase}. Use"
                    " sequence_parallel_enabled=True, which keeps them whole on each rank."
                )
        self._strategies: dict[tuple[str, bool], Strategy] = {}
        self._is_checked = False

    def use_groups(self, groups: dict[str, ExpertGroups]) -> None:
        """Communicate through other groups of the same ranks, such as ones that count bytes."""
        self.groups = groups
        self._strategies.clear()

    def strategy(self, phase: str | None, is_sequence_part: bool) -> Strategy:
        """Return how tokens reach experts in a phase; None is prefill."""
        key = "decode" if phase in DECODE_PHASES else "prefill"
        if (key, is_sequence_part) not in self._strategies:
            groups = self.groups[key]
            spread = (
                TokenSpread.sequence(groups.model)
                if is_sequence_part
                else TokenSpread(groups.data, groups.attention)
            )
            self._strategies[key, is_sequence_part] = build_strategy(
                groups, spread, self.experts.num_slots // groups.ep.size, self.reduce_dtype
            )
        return self._strategies[key, is_sequence_part]

    def run(self, batch: TokenBatch) -> LayerOutput:
        """Compute the layer."""
        hidden_TH = batch.hidden_TH
        num_tokens = hidden_TH.shape[0]
        seq_len = num_tokens // batch.batch_size if batch.batch_size else 0
        layout_phase = batch.phase
        if layout_phase is None and not batch.is_sequence_part:
            layout_phase = "decode" if seq_len == 1 else "prefill"
        strategy = self.strategy(layout_phase, batch.is_sequence_part)
        self._check_ranks_once(strategy, batch)
        lengths = gather_lengths(strategy.spread.gather, num_tokens, hidden_TH.device)
        if layout_phase is None:
            total = sum(lengths) // batch.batch_size if batch.batch_size else 0
            layout_phase = "decode" if total == 1 else "prefill"
        place = _Place(strategy, lengths, num_tokens, batch.batch_size)
        own = slice(place.own.start, place.own.stop)
        own_hidden_TH = hidden_TH[own]
        routing = self.experts.backend.route(own_hidden_TH, self.router)
        self.experts.check_hidden(own_hidden_TH)
        mask = place.own_mask(batch.padding_mask)
        index_TK, affinities_TK = self.experts.select(
            routing.expert_affinities_TK,
            routing.expert_index_TK,
            sum(lengths),
            mask,
            layout_phase,
            first_token=place.first_token,
            over_all_tokens=place.over_all_tokens,
        )
        sent = strategy.dispatch(Rows(own_hidden_TH, index_TK, affinities_TK), lengths)
        partial_NH = self.experts.compute(*sent.rows, sent.num_tokens, layout_phase)
        if self.shared is not None and strategy.name == "replicate":
            partial_NH = _add_shared_part(partial_NH, own_hidden_TH, sent, self.shared, strategy)
        output_TH = strategy.combine(partial_NH, sent)
        if self.shared is not None and strategy.name != "replicate":
            output_TH = output_TH + _shared_of_own(own_hidden_TH, self.shared)
        return LayerOutput(
            strategy.gather_own(output_TH), Routing(*map(strategy.gather_own, routing))
        )

    def sum_over_ranks(self, partial_TH: Tensor, hidden_TH: Tensor, phase: str) -> Tensor:
        """Sum what the ranks computed of tokens that all of them hold.

        Args:
            partial_TH: [T, H] of this rank.
            hidden_TH: [T, H] what it was computed from.
            phase: one of dispatch.PHASES.
        """
        strategy = self.strategy(phase, False)
        self._check_ranks_once(strategy, TokenBatch(hidden_TH, 1, None, phase, False))
        none = partial_TH.new_empty((0, 0))
        num_tokens = partial_TH.shape[0]
        sent = Dispatched(Rows(partial_TH, none, none), num_tokens, (num_tokens,))
        return strategy.combine(partial_TH, sent)

    def _check_ranks_once(self, strategy: Strategy, batch: TokenBatch) -> None:
        """Compare the layer between ranks before its first collective."""
        group = strategy.groups.model
        if self._is_checked or torch.compiler.is_compiling():
            return
        self._is_checked = True
        if not isinstance(group, TorchCollectives):
            return
        config = self.experts.config
        settings = {
            "router": self.router.spec,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "activation": self.experts.mlp_op.activation,
            "bias": config.bias,
            "capacity_factor": config.capacity_factor,
            "dtype": batch.hidden_TH.dtype,
            "expert_placement": self.experts.placement,
            "strategy": strategy.name,
            "sequence_parallel": batch.is_sequence_part,
            "shared_experts": None if self.shared is None else self.shared.describe(),
        }
        if strategy.spread.gather.size == 1:
            settings["tokens"] = batch.hidden_TH.shape[0]
        check_same_on_all_ranks("MoE layer", settings, group.group)


class _Place:
    """Where this rank's tokens lie among all of them."""

    def __init__(
        self, strategy: Strategy, lengths: Sequence[int], num_tokens: int, batch_size: int
    ) -> None:
        gather = strategy.spread.gather
        self.strategy = strategy
        self.lengths = tuple(lengths)
        self.batch_size = batch_size if strategy.spread.is_sequence else 1
        self.before = sum(lengths[: gather.rank])
        self.own = strategy.own_range(num_tokens)
        self.first_token = self.before + self.own.start

    def own_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the padding mask of the own tokens, from theirs or from that of all ranks."""
        gather = self.strategy.spread.gather
        if mask is None:
            return None
        mine, everyone = self.lengths[gather.rank], sum(self.lengths)
        if mask.numel() == mine:
            mask = mask.reshape(-1)
        elif mask.numel() == everyone:
            rows = mask.reshape(self.batch_size, -1)
            start = self.before // self.batch_size
            mask = rows[:, start : start + mine // self.batch_size].reshape(-1)
        else:
            raise ValueError(
                f"padding_mask: shape {tuple(mask.shape)} must have one entry for each of the"
                f" {mine} tokens of this rank, or of the {everyone} of all ranks."
            )
        return mask[self.own.start : self.own.stop]

    def over_all_tokens(self, rule: Callable[[Tensor], Tensor], own_TK: Tensor) -> Tensor:
        """Apply a rule of all tokens, in their order, and return its result for the own ones."""
        gather = self.strategy.spread.gather
        everyone_TK = all_gather_rows(gather, self.strategy.gather_own(own_TK), self.lengths)
        order = self._token_order(own_TK.device)
        result_TK = torch.empty_like(everyone_TK, dtype=torch.bool)
        result_TK = result_TK.index_copy(0, order, rule(everyone_TK[order]))
        return result_TK[self.first_token : self.first_token + len(self.own)]

    def _token_order(self, device: torch.device) -> Tensor:
        """Return the rows, as gathered rank after rank, in the order of the sequences."""
        parts = torch.split(torch.arange(sum(self.lengths), device=device), list(self.lengths))
        return torch.cat([part.view(self.batch_size, -1) for part in parts], dim=1).flatten()


def _add_shared_part(
    partial_NH: Tensor,
    own_hidden_TH: Tensor,
    sent: Dispatched,
    shared: SharedExperts,
    strategy: Strategy,
) -> Tensor:
    """Add this rank's part of the shared experts to what will be summed over ranks."""
    spread = strategy.spread
    num_rows = partial_NH.shape[0]
    if shared.sequence_parallel_enabled:
        # Whole weights: the own tokens, sliced over the ranks that hold the same ones.
        start = sum(sent.lengths[: spread.gather.rank])
        part = (spread.replica.rank, spread.replica.size)
        result = shared(own_hidden_TH, part=part)
    else:
        # Sliced weights: one slice for each rank of their group; copies of the group share tokens.
        copies = strategy.groups.model.size // shared.group.size
        rows = split_evenly(num_rows, copies)[copy_of(shared.group, strategy.groups.model)]
        start = rows.start
        result = shared(sent.rows.hidden_TH[rows.start : rows.stop])
    return partial_NH + functional.pad(result, (0, 0, start, num_rows - start - result.shape[0]))


def _shared_of_own(own_hidden_TH: Tensor, shared: SharedExperts) -> Tensor:
    """Compute the shared experts of the own tokens, completely."""
    if shared.sequence_parallel_enabled or shared.group.size == 1:
        whole: Tensor = shared(own_hidden_TH)
        return whole
    lengths = gather_lengths(shared.group, own_hidden_TH.shape[0], own_hidden_TH.device)
    rows = all_gather_rows(shared.group, own_hidden_TH, lengths)
    return reduce_scatter_rows(shared.group, shared(rows), lengths)


def copy_of(part: Collectives, model: Collectives) -> int:
    """Return which of several groups like `part`, that together make up `model`, this rank is in.

    Raises:
        ValueError: the groups are neither contiguous runs nor evenly strided.
    """
    copies = model.size // part.size
    if copies == 1:
        return 0
    if part.ranks:
        members = [model.ranks.index(rank) for rank in part.ranks]
        if members == list(range(members[0], model.size, copies)):
            return members[0]
        if members != list(range(members[0], members[0] + part.size)):
            raise ValueError(
                f"group {part.name!r}: its ranks {members} of the model must be neighbours or"
                " evenly spaced."
            )
    return model.rank // part.size
