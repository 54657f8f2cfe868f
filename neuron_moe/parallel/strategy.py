"""How tokens reach their experts and come back: strategies behind one pair of methods.

`dispatch` brings tokens to the rank that computes them, `combine` brings the results home and adds
them up. Between the two, the experts see rows and k-wide routings and know nothing of ranks. What
dispatch learned travels to combine in a frozen record.

| strategy | dispatch | combine | a token travels, each way |
| --- | --- | --- | --- |
| replicate | all-gather of rows and routings | reduce-scatter, all-reduce | to every rank |
| all_to_all | rows to ranks with a chosen expert | all-to-all back | to these ranks, once each |

Axes: T tokens of all ranks, t this rank's own, N rows to compute here, K choices, H hidden, D
destinations (expert parallel ranks).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neuron_moe.activations import at_least_float32, sum_dtype
from neuron_moe.parallel.collectives import (
    Collectives,
    SingleRank,
    all_gather_rows,
    all_to_all_rows,
    gather_common,
    gather_lengths,
    is_recorded,
    reduce_scatter_rows,
    share_common,
    sum_common,
)
from neuron_moe.parallel.groups import ExpertGroups

INDEX_BYTES = 4  # int32
AFFINITY_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class TokenSpread:
    """Which ranks hold which tokens when a layer is entered.

    Args:
        gather: ranks with different tokens, in token order.
        replica: ranks with the same tokens as this one.
        is_sequence: the different tokens are parts of the same sequences.
    """

    gather: Collectives
    replica: Collectives
    is_sequence: bool = False

    @classmethod
    def replicated(cls, model: Collectives) -> "TokenSpread":
        """Every rank holds every token."""
        return cls(SingleRank("tokens"), model)

    @classmethod
    def sequence(cls, model: Collectives) -> "TokenSpread":
        """Every rank holds its part of the sequences."""
        return cls(model, SingleRank("replica"), is_sequence=True)


class Rows(NamedTuple):
    """Tokens with their routing.

    Attributes:
        hidden_TH: [T, H].
        index_TK: [T, K] int32 physical expert, -1 for none.
        affinities_TK: [T, K] float32.
    """

    hidden_TH: Tensor
    index_TK: Tensor
    affinities_TK: Tensor


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What the experts of this rank compute, and what combine needs.

    Args:
        rows: the tokens to compute here.
        num_tokens: T of all ranks together.
        lengths: tokens each rank of `gather` brought.
        trip: what the strategy must remember.
    """

    rows: Rows
    num_tokens: int
    lengths: tuple[int, ...]
    trip: "Trip | None" = None


class Strategy(Protocol):
    """One way to bring tokens and experts together."""

    name: str
    groups: ExpertGroups
    spread: TokenSpread

    def own_slice(self, num_tokens: int) -> slice:
        """Return which of the tokens this rank was given it is responsible for."""

    def dispatch(self, own: Rows, lengths: tuple[int, ...]) -> Dispatched:
        """Bring tokens to the ranks that compute them."""

    def combine(self, partial_NH: Tensor, sent: Dispatched) -> Tensor:
        """Bring partial results home; return [t, H] sums for the own tokens."""

    def gather_own(self, x: Tensor) -> Tensor:
        """Join what ranks with the same tokens computed for their own parts."""

    def share_own(self, x: Tensor) -> Tensor:
        """Join what ranks with the same tokens decided; of what they computed alike each has a
        share.
        """


class ReplicateAndReduce:
    """Every rank sees every token and computes its experts; the results are summed.

    Static shapes and three collectives: what a compiler for Neuron takes well.

    Args:
        groups: the ranks that share the experts.
        spread: who holds which tokens.
        reduce_dtype: dtype of the sum over ranks; None is that of the hidden states.
    """

    name = "replicate"

    def __init__(
        self, groups: ExpertGroups, spread: TokenSpread, reduce_dtype: torch.dtype | None = None
    ) -> None:
        self.groups = groups
        self.spread = spread
        self.reduce_dtype = reduce_dtype

    def own_slice(self, num_tokens: int) -> slice:
        """Return all: ranks with the same tokens do the same."""
        return slice(0, num_tokens)

    def dispatch(self, own: Rows, lengths: tuple[int, ...]) -> Dispatched:
        """Gather routings, k-wide, then rows."""
        gather = self.spread.gather
        if gather.size == 1:
            return Dispatched(own, own.hidden_TH.shape[0], lengths)
        index_TK, affinities_TK = gather_routing(gather, own.index_TK, own.affinities_TK, lengths)
        hidden_TH = all_gather_rows(gather, own.hidden_TH, lengths)
        return Dispatched(Rows(hidden_TH, index_TK, affinities_TK), sum(lengths), lengths)

    def combine(self, partial_NH: Tensor, sent: Dispatched) -> Tensor:
        """Sum over ranks; each keeps its own tokens."""
        dtype = partial_NH.dtype
        total = partial_NH if self.reduce_dtype is None else partial_NH.to(self.reduce_dtype)
        total = reduce_scatter_rows(self.spread.gather, total, sent.lengths)
        replica = self.spread.replica
        total = total if replica.size == 1 else sum_common(replica, total)
        return total if total.dtype == dtype else total.to(dtype)

    def gather_own(self, x: Tensor) -> Tensor:
        """Return x: the own tokens are all tokens."""
        return x

    def share_own(self, x: Tensor) -> Tensor:
        """Return x, with this rank's share of its gradient."""
        replica = self.spread.replica
        return x if replica.size == 1 else share_common(replica, x)


def gather_routing(
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


@dataclass(frozen=True, slots=True)
class Trip:
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


class AllToAll:
    """Tokens travel only to ranks that hold one of their experts, once per rank.

    A token with several experts on one rank is sent once, with its k-wide routing, and comes back
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

    name = "all_to_all"

    def __init__(
        self,
        groups: ExpertGroups,
        spread: TokenSpread,
        num_per_rank: int,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.groups = groups
        self.spread = spread
        self.num_per_rank = num_per_rank
        self.reduce_dtype = reduce_dtype

    def own_slice(self, num_tokens: int) -> slice:
        """Return this rank's share of the tokens that it holds in common with others."""
        return split_evenly(num_tokens, self.spread.replica.size)[self.spread.replica.rank]

    def dispatch(self, own: Rows, lengths: tuple[int, ...]) -> Dispatched:
        """Send each token to the ranks of its experts."""
        if torch.compiler.is_compiling():
            raise ValueError(
                "strategy='all_to_all': sends a number of rows that the data decides, which a graph"
                " cannot hold. Use strategy='replicate' for torch.export and torch.compile."
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
        trip = Trip(place_of_row, num_places, send_counts, receive_counts, tensor_lengths)
        return Dispatched(rows, sum(lengths), lengths, trip)

    def combine(self, partial_NH: Tensor, sent: Dispatched) -> Tensor:
        """Sum the slices of an expert, send rows home, add what each token got, in fixed order."""
        trip = sent.trip
        assert trip is not None
        dtype = partial_NH.dtype
        rows = partial_NH if self.reduce_dtype is None else partial_NH.to(self.reduce_dtype)
        rows = reduce_scatter_rows(self.groups.tp, rows, trip.tensor_lengths)
        rows = all_to_all_rows(self.groups.ep, rows, trip.receive_counts, trip.send_counts)
        own = self.own_slice(sent.lengths[self.spread.gather.rank])
        num_own = own.stop - own.start
        places = rows.new_zeros((num_own * trip.num_places, rows.shape[1]), dtype=sum_dtype(rows))
        places = places.index_copy(0, trip.place_of_row, at_least_float32(rows))
        return places.view(num_own, trip.num_places, rows.shape[1]).sum(1).to(dtype)

    def gather_own(self, x: Tensor) -> Tensor:
        """Join the shares of the ranks that hold the same tokens."""
        replica = self.spread.replica
        if replica.size == 1:
            return x
        lengths = gather_lengths(replica, x.shape[0], x.device)
        return gather_common(replica, x, lengths)

    def share_own(self, x: Tensor) -> Tensor:
        """Join the shares: each rank decided for its own."""
        return self.gather_own(x)

    def _exchange_counts(self, hits_tD: Tensor) -> list[list[tuple[int, ...]]]:
        """Return rows sent, as [tensor rank][source][destination], known to all neighbours."""
        expert, tensor = self.groups.ep, self.groups.tp
        counts_D = hits_tD.sum(0, dtype=torch.int32)
        counts_SD = expert.all_gather(counts_D.unsqueeze(0))
        counts = tensor.all_gather(counts_SD.unsqueeze(0)).tolist()
        return [[tuple(row) for row in matrix] for matrix in counts]


def split_evenly(num_tokens: int, parts: int) -> list[slice]:
    """Split tokens in contiguous parts whose sizes differ by one at most, larger ones first."""
    size, rest = num_tokens // parts, num_tokens % parts
    starts = [part * size + min(part, rest) for part in range(parts + 1)]
    return [slice(starts[part], starts[part + 1]) for part in range(parts)]


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


def build_strategy(
    groups: ExpertGroups,
    spread: TokenSpread,
    num_per_rank: int,
    reduce_dtype: torch.dtype | None = None,
) -> Strategy:
    """Return the strategy that `groups` name."""
    if groups.strategy == "all_to_all":
        return AllToAll(groups, spread, num_per_rank, reduce_dtype)
    return ReplicateAndReduce(groups, spread, reduce_dtype)
