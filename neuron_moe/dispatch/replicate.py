"""Every rank sees every token and computes its experts; the results are summed.

Axes: T tokens of all ranks, t this rank's own, N = T rows, K choices, H hidden.
"""

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe.choices import drop_padding
from neuron_moe.dispatch.ranks import OverRanks, TokenSpread, split_evenly
from neuron_moe.dispatch.tokens import Beside, Choose, Entered, Own, Rows, TokenBatch
from neuron_moe.parallel.collectives import (
    Collectives,
    SingleRank,
    all_gather_rows,
    enter_common,
    is_recorded,
    reduce_scatter_rows,
    share_common,
    sum_common,
)
from neuron_moe.parallel.groups import ExpertGroups
from neuron_moe.router import Routing


class Replicate(OverRanks):
    """Replicate tokens, reduce results.

    Static shapes and three collectives: what a compiler for Neuron takes well.

    Args:
        groups: the ranks that share the experts.
        spread: who holds which tokens.
        reduce_dtype: dtype of the sum over ranks; None is that of the hidden states.
    """

    def __init__(
        self, groups: ExpertGroups, spread: TokenSpread, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(groups, spread, reduce_dtype, alike=spread.replica, parted=SingleRank())
        if spread.gather.size == 1:
            self.why_apart = ""

    def enter(self, batch: TokenBatch, choose: Choose) -> Entered:
        """Gather choices, k-wide, then rows."""
        gather, lengths, mask = self.spread.gather, batch.lengths, batch.padding_mask
        hidden_TH = enter_common(self.spread.replica, batch.hidden_TH)
        if gather.size == 1:
            own, routing = choose(Own(hidden_TH, mask, token_ids=batch.token_ids))
            return Entered(batch, own, own, routing)
        is_late = mask is not None and self.is_masked_late(mask, batch)
        own, routing = choose(
            Own(
                hidden_TH,
                None if is_late else mask,
                self.num_before(batch),
                lambda rule, own_TK: self.over_all(batch, rule, own_TK),
                batch.token_ids,
            )
        )
        index_TK, affinities_TK = gather_choices(gather, own.index_TK, own.affinities_TK, lengths)
        hidden_TH = all_gather_rows(gather, own.hidden_TH, lengths)
        if mask is not None and is_late:
            # Rows are gathered rank after rank, each with its part of every sequence.
            mask = mask.reshape(self.num_rows(batch), len(lengths), -1).transpose(0, 1)
            index_TK, affinities_TK = drop_padding(index_TK, affinities_TK, mask)
        return Entered(batch, own, Rows(hidden_TH, index_TK, affinities_TK), routing)

    def leave(
        self, partial_NH: Tensor, entered: Entered, shared: Beside | None
    ) -> tuple[Tensor, Routing | None]:
        """Sum over ranks; each keeps its own tokens."""
        replica, own = self.spread.replica, entered.own
        is_added_after = replica.size == 1 or replica.is_traced
        if shared is not None and not (shared.whole_on_each_rank and is_added_after):
            partial_NH = partial_NH + self._shared_part(entered, shared)
            shared = None
        dtype = partial_NH.dtype
        total = partial_NH if self.reduce_dtype is None else partial_NH.to(self.reduce_dtype)
        total = reduce_scatter_rows(self.spread.gather, total, entered.batch.lengths)
        output_TH = sum_common(replica, total).to(dtype)
        if shared is not None and own is not None:
            output_TH = output_TH + shared(own.hidden_TH)
        if entered.routing is None:
            return output_TH, None
        return output_TH, Routing(*(share_common(replica, each) for each in entered.routing))

    def _shared_part(self, entered: Entered, shared: Beside) -> Tensor:
        """Return [N, H], this rank's part of the shared experts of all rows."""
        rows, own = entered.rows, entered.own
        assert rows is not None
        assert own is not None
        model, replica, num_rows = self.groups.model, self.spread.replica, rows.hidden_TH.shape[0]
        if shared.whole_on_each_rank:
            # Whole weights: the own tokens, sliced over the ranks that hold the same ones.
            start = self.num_before(entered.batch)
            result = shared(own.hidden_TH, part=(replica.rank, replica.size))
        else:
            # Sliced weights: one slice a rank of their group; copies of the group share tokens.
            shares = split_evenly(num_rows, model.size // shared.group.size)
            mine = shares[copy_of(shared.group, model)]
            start, result = mine.start, shared(rows.hidden_TH[mine])
        return functional.pad(result, (0, 0, start, num_rows - start - result.shape[0]))


def gather_choices(
    gather: Collectives, index_TK: Tensor, affinities_TK: Tensor, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Gather k-wide choices in one collective: 8 K bytes a token, never E-wide, never logits.

    In two, where affinities have a gradient, and in NxD's graphs, which do not reinterpret bits.

    Args:
        gather: ranks with different tokens.
        index_TK: [t, K] int32.
        affinities_TK: [t, K] float32.
        lengths: tokens of each rank.
    """
    is_float32 = affinities_TK.dtype == torch.float32
    if is_recorded(affinities_TK) or gather.is_traced or not is_float32:
        index_TK = all_gather_rows(gather, index_TK, lengths)
        return index_TK, all_gather_rows(gather, affinities_TK, lengths)
    packed = torch.cat([index_TK, affinities_TK.view(torch.int32)], dim=1)
    packed = all_gather_rows(gather, packed, lengths)
    index, affinities = packed.chunk(2, dim=1)
    return index, affinities.contiguous().view(torch.float32)


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
