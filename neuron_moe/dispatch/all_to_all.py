"""Tokens travel only to ranks that hold one of their experts, once per rank.

Axes: T tokens of all ranks, t this rank's own, N rows to compute here, K choices, H hidden, D
destinations (expert parallel ranks).
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neuron_moe.activations import at_least_float32, sum_dtype
from neuron_moe.device import is_captured
from neuron_moe.dispatch.ranks import OverRanks, TokenSpread, split_evenly
from neuron_moe.dispatch.tokens import Beside, Choose, Entered, Own, Rows, TokenBatch
from neuron_moe.parallel.collectives import (
    SingleRank,
    all_gather_rows,
    all_to_all_rows,
    enter_common,
    gather_common,
    gather_lengths,
    is_recorded,
    reduce_scatter_rows,
)
from neuron_moe.parallel.groups import ExpertGroups
from neuron_moe.router import Routing


@dataclass(frozen=True, slots=True)
class Exchange:
    """Where the rows of an all-to-all came from.

    Args:
        place_of_row: [rows sent] int64, place of each returning row among the own tokens' results.
        num_places: results each own token can get, min(K, D).
        send_counts: rows sent to each destination.
        receive_counts: rows received from each rank of the expert group.
        tensor_lengths: rows each tensor parallel neighbour received.
    """

    place_of_row: Tensor
    num_places: int
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    tensor_lengths: tuple[int, ...]


class AllToAll(OverRanks):
    """All-to-all of rows and back.

    A token with several experts on one rank is sent once, with its k-wide choices, and comes back
    as one weighted row. Rows cross the expert group first; the tensor parallel neighbours that hold
    the other slices of the same experts then gather them among themselves, where links are short.

    Counts are computed on the device; reading them is the one synchronisation with the host.
    Tokens that several ranks hold are divided among them first.

    Args:
        groups: the ranks that share the experts.
        spread: who holds which tokens.
        num_per_rank: physical experts of each rank.
        reduce_dtype: dtype of the rows on the way back; None is that of the hidden states.
    """

    def __init__(
        self,
        groups: ExpertGroups,
        spread: TokenSpread,
        num_per_rank: int,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(groups, spread, reduce_dtype, alike=SingleRank(), parted=spread.replica)
        self.num_per_rank = num_per_rank

    def enter(self, batch: TokenBatch, choose: Choose) -> Entered:
        """Send each token to the ranks of its experts."""
        if is_captured():
            raise ValueError(
                "strategy='all_to_all': sends a number of rows that the data decides, which a graph"
                " cannot hold. Use strategy='replicate' for torch.export and torch.compile."
            )
        hidden_TH, mask = enter_common(self.spread.replica, batch.hidden_TH), batch.padding_mask
        share = self.own_slice(batch)
        own, routing = choose(
            Own(
                hidden_TH[share],
                None if mask is None else mask[share],
                self.num_before(batch) + share.start,
                lambda rule, own_TK: self.over_all(batch, rule, own_TK),
                None if batch.token_ids is None else batch.token_ids[share],
            )
        )
        expert, tensor = self.groups.ep, self.groups.tp
        hits_tD = destinations(own.index_TK, self.num_per_rank, expert.size)
        counts = self._exchange_counts(hits_tD)
        send_counts = counts[tensor.rank][expert.rank]
        receive_counts = tuple(
            counts[tensor.rank][source][expert.rank] for source in range(expert.size)
        )
        tensor_lengths = tuple(
            sum(counts[neighbour][source][expert.rank] for source in range(expert.size))
            for neighbour in range(tensor.size)
        )
        token_of_row, place_of_row, num_places = _rows_by_destination(
            hits_tD, own.index_TK.shape[1]
        )

        def travel(part: Tensor) -> Tensor:
            part = all_to_all_rows(expert, part, send_counts, receive_counts)
            return all_gather_rows(tensor, part, tensor_lengths)

        if is_recorded(own.hidden_TH) or is_recorded(own.affinities_TK):
            rows = Rows(*(travel(part[token_of_row]) for part in own))
        else:
            rows = unpack_rows(travel(pack_rows(own, token_of_row)), own)
        exchange = Exchange(place_of_row, num_places, send_counts, receive_counts, tensor_lengths)
        return Entered(batch, own, rows, routing, exchange)

    def leave(
        self, partial_NH: Tensor, entered: Entered, shared: Beside | None
    ) -> tuple[Tensor, Routing | None]:
        """Sum the slices of an expert, send rows home, add what each token got, in fixed order."""
        exchange, own, routing = entered.exchange, entered.own, entered.routing
        assert own is not None
        assert routing is not None
        num_own = own.hidden_TH.shape[0]
        rows = partial_NH if self.reduce_dtype is None else partial_NH.to(self.reduce_dtype)
        rows = reduce_scatter_rows(self.groups.tp, rows, exchange.tensor_lengths)
        rows = all_to_all_rows(self.groups.ep, rows, exchange.receive_counts, exchange.send_counts)
        places = rows.new_zeros(
            (num_own * exchange.num_places, rows.shape[1]), dtype=sum_dtype(rows)
        )
        places = places.index_copy(0, exchange.place_of_row, at_least_float32(rows))
        output = (
            places.view(num_own, exchange.num_places, rows.shape[1]).sum(1).to(partial_NH.dtype)
        )
        if shared is not None:
            output = output + _of_own(shared, own.hidden_TH)
        join = partial(self.join, entered.batch)
        return join(output), Routing(*map(join, routing))

    def own_slice(self, batch: TokenBatch) -> slice:
        """Return this rank's share of the tokens that it holds in common with others."""
        return self._shares(batch)[self.spread.replica.rank]

    def join(self, batch: TokenBatch, own: Tensor) -> Tensor:
        """Join the shares of the ranks that hold the same tokens."""
        lengths = [share.stop - share.start for share in self._shares(batch)]
        return gather_common(self.spread.replica, own, lengths)

    def _shares(self, batch: TokenBatch) -> list[slice]:
        return split_evenly(batch.hidden_TH.shape[0], self.spread.replica.size)

    def _exchange_counts(self, hits_tD: Tensor) -> list[list[tuple[int, ...]]]:
        """Return rows sent, as [tensor rank][source][destination], known to all neighbours."""
        expert, tensor = self.groups.ep, self.groups.tp
        counts_D = hits_tD.sum(0, dtype=torch.int32)
        counts_SD = expert.all_gather(counts_D.unsqueeze(0))
        counts = tensor.all_gather(counts_SD.unsqueeze(0)).tolist()
        return [[tuple(row) for row in matrix] for matrix in counts]


def _of_own(shared: Beside, own_TH: Tensor) -> Tensor:
    """Return the complete result of shared experts for the own tokens."""
    if shared.group.size == 1:  # or whole on each rank
        whole: Tensor = shared(own_TH)
        return whole
    lengths = gather_lengths(shared.group, own_TH.shape[0], own_TH.device)
    rows = all_gather_rows(shared.group, own_TH, lengths)
    return reduce_scatter_rows(shared.group, shared(rows), lengths)


def destinations(index_TK: Tensor, num_per_rank: int, num_ranks: int) -> Tensor:
    """Return [T, D] bool: does the token have an expert on this rank."""
    rank_TK = torch.where(index_TK < 0, num_ranks, index_TK // num_per_rank).to(torch.int64)
    hits = torch.zeros((index_TK.shape[0], num_ranks + 1), dtype=torch.bool, device=index_TK.device)
    return hits.scatter(1, rank_TK, True)[:, :num_ranks]


def _rows_by_destination(hits_tD: Tensor, top_k: int) -> tuple[Tensor, Tensor, int]:
    """Return the token of each row to send, destination by destination, and its place on return."""
    num_places = min(top_k, hits_tD.shape[1])
    place_tD = hits_tD.cumsum(1) - 1
    destination, token_of_row = hits_tD.t().nonzero(as_tuple=True)
    place_of_row = token_of_row * num_places + place_tD[token_of_row, destination]
    return token_of_row, place_of_row, num_places


def pack_rows(rows: Rows, token_of_row: Tensor) -> Tensor:
    """Return [n, bytes] uint8: hidden row, choices and affinities of each row, as one parcel."""
    parts = (rows.hidden_TH, rows.index_TK, rows.affinities_TK)
    return torch.cat([part[token_of_row].contiguous().view(torch.uint8) for part in parts], dim=1)


def unpack_rows(parcel: Tensor, like: Rows) -> Rows:
    """Undo `pack_rows`; `like` gives widths and dtypes."""
    widths = [part.shape[1] * part.element_size() for part in like]
    hidden, index, affinities = (part.contiguous() for part in torch.split(parcel, widths, dim=1))
    return Rows(
        hidden.view(like.hidden_TH.dtype),
        index.view(like.index_TK.dtype),
        affinities.view(like.affinities_TK.dtype),
    )
