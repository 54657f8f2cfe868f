"""Where the tokens of a layer are, and how they meet the experts: what a layer knows of ranks.

`TokenExchange.enter` settles for one call who holds which tokens; the `Crossing` it returns brings
them to the experts and home. On one rank every collective is the identity.

What is added up before a sum over ranks counts once in total: each routed expert is on one
expert-parallel rank (or its tokens take turns between replicas), its slices on the tensor parallel
ranks, its down bias is divided by them, and shared experts are either sliced over the ranks that
are summed or computed for a share of the tokens. `neuron_moe.parallel.invariant` checks it by
counting.

Axes: T tokens of all ranks, t this rank's own, N rows that reach this rank's experts, H hidden, K
choices, B sequences, S positions.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe.choices import drop_padding
from neuron_moe.errors import check_choice
from neuron_moe.parallel.collectives import (
    Collectives,
    SingleRank,
    TorchCollectives,
    all_gather_rows,
    enter_common,
    gather_lengths,
    reduce_scatter_rows,
    share_common,
)
from neuron_moe.parallel.failure import (
    check_same_on_all_ranks,
    compare_settings,
    wait_for_start,
)
from neuron_moe.parallel.groups import ExpertGroups
from neuron_moe.parallel.strategy import (
    Dispatched,
    Rows,
    Strategy,
    TokenSpread,
    build_strategy,
    split_evenly,
)
from neuron_moe.paths import DECODE_PHASES, PHASES
from neuron_moe.router_losses import LossTokens
from neuron_moe.shared_experts import SharedExperts

_NO_ROWS = Rows(*(torch.empty(0, 0) for _ in Rows._fields))
Settings = Callable[[], dict[str, object]]
"""Returns what must agree between ranks."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens a rank was given.

    Args:
        hidden_TH: [t, H].
        batch_size: B, sequences; 1 if they are not to be told apart.
        padding_mask: nonzero for real tokens, one entry for each of these tokens or for those of
            all ranks; None: all are real.
        phase: one of paths.PHASES; None decides by the length of the sequences.
        is_sequence_part: this rank has its part of each sequence, other ranks have others.
    """

    hidden_TH: Tensor
    batch_size: int
    padding_mask: Tensor | None
    phase: str | None
    is_sequence_part: bool


class TokenExchange:
    """The ranks one layer is spread over.

    Args:
        groups: for 'prefill' and 'decode', with the group outputs are summed over.
        num_physical: experts of all ranks, replicas counted.
        shared: this rank's shared experts, or None.
        reduce_dtype: dtype of the sum over ranks; None is the dtype of the hidden states.

    Raises:
        ValueError: the shared experts' group does not fit.
    """

    def __init__(
        self,
        groups: Mapping[str, ExpertGroups],
        num_physical: int,
        shared: SharedExperts | None,
        *,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.groups = dict(groups)
        self.num_physical = num_physical
        self.reduce_dtype = reduce_dtype
        for phase, group in self.groups.items():
            if shared is not None and group.model.size % shared.group.size:
                raise ValueError(
                    f"shared experts split over {shared.group.size} ranks: must divide the"
                    f" {group.model.size} ranks that are summed in {phase}. Use"
                    " sequence_parallel_enabled=True, which keeps them whole on each rank."
                )
            has_copies = shared is not None and 1 < shared.group.size < group.model.size
            if has_copies and group.model.is_traced:
                raise ValueError(
                    f"shared experts split over some of the {group.model.size} ranks that are"
                    f" summed in {phase}: one graph for all ranks cannot say which tokens each"
                    " takes. Split them over all of them."
                )
        self._strategies: dict[tuple[str, bool], Strategy] = {}
        self._is_checked = False

    def use_groups(self, groups: Mapping[str, ExpertGroups]) -> None:
        """Communicate through other groups of the same ranks, such as ones that count bytes."""
        self.groups = dict(groups)
        self._strategies.clear()

    def strategy(self, phase: str | None, is_sequence_part: bool) -> Strategy:
        """Return how tokens reach experts in a phase; None is prefill."""
        key = "decode" if phase in DECODE_PHASES else "prefill"
        if torch.compiler.is_compiling():
            # A graph that looked here would be captured anew when another call adds an entry.
            return self._build_strategy(key, is_sequence_part)
        found = self._strategies.get((key, is_sequence_part))
        if found is None:
            found = self._strategies[key, is_sequence_part] = self._build_strategy(
                key, is_sequence_part
            )
        return found

    def _build_strategy(self, key: str, is_sequence_part: bool) -> Strategy:
        groups = self.groups[key]
        spread = (
            TokenSpread.sequence(groups.model)
            if is_sequence_part
            else TokenSpread(groups.data, groups.attention)
        )
        per_rank = self.num_physical // groups.ep.size
        return build_strategy(groups, spread, per_rank, self.reduce_dtype)

    def enter(self, batch: TokenBatch, settings: Settings) -> "Crossing":
        """Settle phase and place of the tokens; collective where ranks hold different ones.

        Args:
            batch: of this rank.
            settings: of the layer, compared between ranks before the first collective.
        """
        num_tokens = batch.hidden_TH.shape[0]
        phase = batch.phase
        if phase is not None:
            check_choice("phase", phase, PHASES)
        if phase is None and not batch.is_sequence_part:
            phase = _phase_of(num_tokens, batch.batch_size)
        strategy = self.strategy(phase, batch.is_sequence_part)
        self._check_ranks_once(strategy, batch, settings)
        lengths = _compare_step(strategy, batch, phase)
        if lengths is None:
            lengths = gather_lengths(strategy.spread.gather, num_tokens, batch.hidden_TH.device)
        if phase is None:
            phase = _phase_of(sum(lengths), batch.batch_size)
        return Crossing(strategy, lengths, phase, batch)

    def _check_ranks_once(self, strategy: Strategy, batch: TokenBatch, settings: Settings) -> None:
        """Compare the layer between ranks before its first collective."""
        if torch.compiler.is_compiling() or self._is_checked:
            return
        self._is_checked = True
        group = strategy.groups.model
        if not isinstance(group, TorchCollectives):
            return
        compared = settings() | {
            "dtype": batch.hidden_TH.dtype,
            "strategy": strategy.name,
            "sequence_parallel": batch.is_sequence_part,
        }
        wait_for_start(group.group)
        check_same_on_all_ranks("MoE layer", compared, group.group)


def _compare_step(
    strategy: Strategy, batch: TokenBatch, phase: str | None
) -> tuple[int, ...] | None:
    """Compare, before any token travels, what the ranks of a layer were called with.

    Other counts would end the process inside gloo, other masks would sum wrongly. One gather of
    five numbers; not in graphs, whose shapes are static, nor where reading it would stop a device.

    Returns:
        The tokens of each rank that holds different ones, in order; None if nothing was compared.

    Raises:
        ValueError: ranks disagree; every one raises.
    """
    model, spread = strategy.groups.model, strategy.spread
    is_host = batch.hidden_TH.device.type == "cpu"
    if torch.compiler.is_compiling() or not is_host or not isinstance(model, TorchCollectives):
        return None
    mask, num_real, digest = batch.padding_mask, -1, 0
    if mask is not None:
        is_real = (mask.reshape(-1) != 0).cpu().numpy()
        num_real, digest = int(is_real.sum()), zlib.crc32(is_real.tobytes())
    here = model.ranks[model.rank]
    first_alike = min(spread.replica.ranks, default=here)
    num_tokens = batch.hidden_TH.shape[0]
    mine = torch.tensor([[first_alike, _phase_number(phase), num_tokens, num_real, digest]])
    everyone = dict(zip(model.ranks, model.all_gather(mine).tolist(), strict=True))
    advice = "Call the layer with the same on each."
    phases = [{"phase": _phase_name(numbers[1])} for numbers in everyone.values()]
    compare_settings("MoE layer", model.ranks, phases, advice=advice)
    for first in sorted({numbers[0] for numbers in everyone.values()}):
        alike = {rank: each[2:] for rank, each in everyone.items() if each[0] == first}
        compare_settings(
            "MoE layer",
            list(alike),
            [_describe_step(*numbers) for numbers in alike.values()],
            advice=f"These ranks hold the same tokens. {advice}",
        )
    return tuple(everyone[rank][2] for rank in spread.gather.ranks or (here,))


def _phase_number(phase: str | None) -> int:
    return -1 if phase is None else PHASES.index(phase)


def _phase_name(number: int) -> str:
    return PHASES[number] if number >= 0 else "open"


def _describe_step(num_tokens: int, num_real: int, digest: int) -> dict[str, str]:
    mask = f"of {num_real} real tokens (crc32 {digest:08x})" if num_real >= 0 else "missing"
    return {"tokens": str(num_tokens), "padding_mask": mask}


def _phase_of(num_tokens: int, batch_size: int) -> str:
    """Return the phase of sequences by their length."""
    seq_len = num_tokens // batch_size if batch_size else 0
    return "decode" if seq_len == 1 else "prefill"


class Crossing:
    """One call's way from this rank's tokens to the experts and back.

    Attributes:
        phase: settled, one of paths.PHASES.
        num_tokens: T of all ranks.
        own: the tokens, of those this rank was given, that it routes.
        first_token: number of the first of them among all.
    """

    def __init__(
        self, strategy: Strategy, lengths: tuple[int, ...], phase: str, batch: TokenBatch
    ) -> None:
        gather = strategy.spread.gather
        own = strategy.own_slice(batch.hidden_TH.shape[0])
        self._strategy = strategy
        self._lengths = lengths
        self._batch_size = batch.batch_size if strategy.spread.is_sequence else 1
        self._num_sequences = batch.batch_size
        self._before = sum(lengths[: gather.rank])
        self.phase = phase
        self.is_part = batch.is_sequence_part
        self.num_tokens = sum(lengths)
        self.own = own
        self.first_token = self._before + own.start

    def own_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the padding mask of the own tokens, from theirs or from that of all ranks; None
        if there is none, or `dispatch` applies it.
        """
        if mask is None or self._is_masked_late(mask):
            return None
        mine = self._lengths[self._strategy.spread.gather.rank]
        if mask.numel() == mine:
            mask = mask.reshape(-1)
        elif mask.numel() == self.num_tokens:
            rows = mask.reshape(self._batch_size, -1)
            start = self._before // self._batch_size
            mask = rows[:, start : start + mine // self._batch_size].reshape(-1)
        else:
            raise ValueError(
                f"padding_mask: shape {tuple(mask.shape)} must have one entry for each of the"
                f" {mine} tokens of this rank, or of the {self.num_tokens} of all ranks."
            )
        return mask[self.own]

    def over_all_tokens(self, rule: Callable[[Tensor], Tensor], own_TK: Tensor) -> Tensor:
        """Apply a rule of all tokens, in their order, and return its result for the own ones."""
        gather = self._strategy.spread.gather
        everyone_TK = all_gather_rows(gather, self._strategy.gather_own(own_TK), self._lengths)
        order = self._token_order(own_TK.device)
        result_TK = torch.empty_like(everyone_TK, dtype=torch.bool)
        result_TK = result_TK.index_copy(0, order, rule(everyone_TK[order]))
        return result_TK[self.first_token : self.first_token + self.own.stop - self.own.start]

    def _token_order(self, device: torch.device) -> Tensor:
        """Return the rows, as gathered rank after rank, in the order of the sequences."""
        parts = torch.split(torch.arange(self.num_tokens, device=device), list(self._lengths))
        return torch.cat([part.view(self._batch_size, -1) for part in parts], dim=1).flatten()

    def dispatch(
        self, own_TH: Tensor, index_TK: Tensor, affinities_TK: Tensor, mask: Tensor | None
    ) -> Dispatched:
        """Bring the own tokens to the ranks that hold their experts.

        Args:
            own_TH: [t, H] the own tokens.
            index_TK: [t, K] their physical experts.
            affinities_TK: [t, K] their affinities.
            mask: of which `own_mask` gave the own part.
        """
        sent = self._strategy.dispatch(Rows(own_TH, index_TK, affinities_TK), self._lengths)
        if mask is None or not self._is_masked_late(mask):
            return sent
        # Rows are gathered rank after rank, each with its part of every sequence.
        mask = mask.reshape(self._batch_size, len(self._lengths), -1).transpose(0, 1)
        hidden_TH, index_TK, affinities_TK = sent.rows
        index_TK, affinities_TK = drop_padding(index_TK, affinities_TK, mask)
        return replace(sent, rows=Rows(hidden_TH, index_TK, affinities_TK))

    def _is_masked_late(self, mask: Tensor) -> bool:
        """Say whether which part of a mask is the own one depends on a rank that is data."""
        gather = self._strategy.spread.gather
        return gather.is_traced and mask.numel() == self.num_tokens

    def combine(self, partial_NH: Tensor, sent: Dispatched | None = None) -> Tensor:
        """Bring results home and add them up; return [t, H] for the own tokens.

        Args:
            partial_NH: what this rank computed.
            sent: from `dispatch`; None where every rank holds the same tokens and none was sent.
        """
        if sent is None:
            sent = Dispatched(_NO_ROWS, self.num_tokens, self._lengths)
        return self._strategy.combine(partial_NH, sent)

    def enter(self, x: Tensor) -> Tensor:
        """Return what ranks with the same tokens begin to use each in its own way."""
        replica = self._strategy.spread.replica
        return x if replica.size == 1 else enter_common(replica, x)

    def loss_tokens(self, device: torch.device) -> LossTokens:
        """Return which tokens the own ones are, for losses over all."""
        spread = self._strategy.spread
        mine = self._lengths[spread.gather.rank]
        num_sequences = self._num_sequences
        length = max(1, mine // num_sequences)
        parted = spread.replica if self._strategy.name == "all_to_all" else SingleRank()

        def over_sequences(x: Tensor) -> Tensor:
            x = parted.all_reduce(x)
            return spread.gather.all_reduce(x) if spread.is_sequence else x

        def over_all(x: Tensor) -> Tensor:
            return spread.gather.all_reduce(parted.all_reduce(x))

        sequence_T = torch.arange(mine, device=device)[self.own] // length
        return LossTokens(sequence_T, num_sequences, over_all, over_sequences)

    def share_losses(self, x: Tensor) -> Tensor:
        """Return a loss of the own tokens, of which ranks that own the same ones have a share."""
        is_common = self._strategy.name != "all_to_all"
        return share_common(self._strategy.spread.replica, x) if is_common else x

    def gather_own(self, x: Tensor) -> Tensor:
        """Join what ranks with the same tokens computed for their own parts."""
        return self._strategy.gather_own(x)

    def share_own(self, x: Tensor) -> Tensor:
        """Join what ranks with the same tokens decided for them."""
        return self._strategy.share_own(x)

    def add_shared(
        self, partial_NH: Tensor, own_TH: Tensor, sent: Dispatched, shared: SharedExperts | None
    ) -> Tensor:
        """Add this rank's part of the shared experts to what will be summed over ranks.

        Where this rank alone has their result for its tokens, `add_own_shared` adds it after the
        sum.
        """
        if shared is None or self._is_added_after(shared):
            return partial_NH
        spread, model = self._strategy.spread, self._strategy.groups.model
        num_rows = partial_NH.shape[0]
        if shared.whole_on_each_rank:
            # Whole weights: the own tokens, sliced over the ranks that hold the same ones.
            start = sum(sent.lengths[: spread.gather.rank])
            result = shared(own_TH, part=(spread.replica.rank, spread.replica.size))
        else:
            # Sliced weights: one slice a rank of their group; copies of the group share tokens.
            rows = split_evenly(num_rows, model.size // shared.group.size)
            mine = rows[copy_of(shared.group, model)]
            start = mine.start
            result = shared(sent.rows.hidden_TH[mine])
        return partial_NH + functional.pad(
            result, (0, 0, start, num_rows - start - result.shape[0])
        )

    def add_own_shared(
        self, output_TH: Tensor, own_TH: Tensor, shared: SharedExperts | None
    ) -> Tensor:
        """Add the shared experts of the own tokens, completely, where `add_shared` did not."""
        if shared is None or not self._is_added_after(shared):
            return output_TH
        if shared.whole_on_each_rank or shared.group.size == 1:
            whole: Tensor = shared(own_TH)
            return output_TH + whole
        lengths = gather_lengths(shared.group, own_TH.shape[0], own_TH.device)
        rows = all_gather_rows(shared.group, own_TH, lengths)
        return output_TH + reduce_scatter_rows(shared.group, shared(rows), lengths)

    def _is_added_after(self, shared: SharedExperts) -> bool:
        """Say whether shared experts of the own tokens are added after the sum over ranks."""
        if self._strategy.name != "replicate":
            return True
        replica = self._strategy.spread.replica
        return shared.whole_on_each_rank and (replica.size == 1 or replica.is_traced)


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
