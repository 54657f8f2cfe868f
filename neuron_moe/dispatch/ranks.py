"""What every layout over several ranks has: who holds which tokens, compared before any travels.

Axes: T tokens of all ranks, t this rank's own, H hidden, K choices, B sequences, S positions.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_moe.device import is_captured
from neuron_moe.dispatch.tokens import Settings, TokenBatch
from neuron_moe.parallel.collectives import (
    Collectives,
    SingleRank,
    TorchCollectives,
    all_gather_rows,
    gather_lengths,
    share_common,
)
from neuron_moe.parallel.failure import check_same_on_all_ranks, compare_settings, wait_for_start
from neuron_moe.parallel.groups import ExpertGroups
from neuron_moe.paths import PHASES
from neuron_moe.plan import phase_of
from neuron_moe.router_losses import LossTokens


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
    def sequence(cls, model: Collectives) -> "TokenSpread":
        """Every rank holds its part of the sequences."""
        return cls(model, SingleRank("replica"), is_sequence=True)


class OverRanks:
    """The ranks one layer is spread over.

    Args:
        groups: the ranks that share the experts.
        spread: who holds which tokens.
        reduce_dtype: dtype of the sum over ranks; None is that of the hidden states.
        alike: ranks that route the same tokens as this one.
        parted: ranks that were given the same tokens, and route a share of them each.
    """

    why_apart = "tokens travel between ranks after routing"

    def __init__(
        self,
        groups: ExpertGroups,
        spread: TokenSpread,
        reduce_dtype: torch.dtype | None,
        *,
        alike: Collectives,
        parted: Collectives,
    ) -> None:
        self.groups = groups
        self.spread = spread
        self.reduce_dtype = reduce_dtype
        self.alike = alike
        self.parted = parted
        self._is_checked = False

    def tokens(self, batch: TokenBatch, settings: Settings) -> TokenBatch:
        """Return the batch with phase, lengths and the own part of its mask settled; collective."""
        self._check_ranks_once(batch, settings)
        lengths = _compare_step(self.groups.model, self.spread, batch)
        if lengths is None:
            hidden_TH = batch.hidden_TH
            lengths = gather_lengths(self.spread.gather, hidden_TH.shape[0], hidden_TH.device)
        phase = batch.phase
        if batch.is_sequence_part:
            phase = phase_of(sum(lengths), batch.batch_size)
        batch = batch._replace(phase=phase, lengths=lengths)
        return batch._replace(padding_mask=self._own_mask(batch))

    def _check_ranks_once(self, batch: TokenBatch, settings: Settings) -> None:
        """Compare the layer between ranks before its first collective."""
        group = self.groups.model
        if is_captured() or self._is_checked:
            return
        self._is_checked = True
        if not isinstance(group, TorchCollectives):
            return
        compared = settings() | {
            "dtype": batch.hidden_TH.dtype,
            "strategy": self.groups.strategy,
            "sequence_parallel": batch.is_sequence_part,
        }
        wait_for_start(group.group)
        check_same_on_all_ranks("MoE layer", compared, group.group)

    def _own_mask(self, batch: TokenBatch) -> Tensor | None:
        """Return the own part of a padding mask; all of it where `enter` has to apply it."""
        mask, gather = batch.padding_mask, self.spread.gather
        if mask is None or self.is_masked_late(mask, batch):
            return mask
        mine = batch.lengths[gather.rank]
        if mask.numel() == mine:
            return mask.reshape(-1)
        if mask.numel() != sum(batch.lengths):
            raise ValueError(
                f"padding_mask: shape {tuple(mask.shape)} must have one entry for each of the"
                f" {mine} tokens of this rank, or of the {sum(batch.lengths)} of all ranks."
            )
        num_rows = self.num_rows(batch)
        start = self.num_before(batch) // num_rows
        return mask.reshape(num_rows, -1)[:, start : start + mine // num_rows].reshape(-1)

    def is_masked_late(self, mask: Tensor, batch: TokenBatch) -> bool:
        """Say whether which part of a mask is the own one depends on a rank that is data."""
        return self.spread.gather.is_traced and mask.numel() == sum(batch.lengths)

    def num_rows(self, batch: TokenBatch) -> int:
        """Return B where ranks have parts of the same sequences, else 1."""
        return batch.batch_size if self.spread.is_sequence else 1

    def num_before(self, batch: TokenBatch) -> int:
        """Return the tokens of the ranks before this one."""
        return sum(batch.lengths[: self.spread.gather.rank])

    def own_slice(self, batch: TokenBatch) -> slice:
        """Return which of the tokens this rank was given it routes."""
        return slice(0, batch.hidden_TH.shape[0])

    def join(self, _batch: TokenBatch, own: Tensor) -> Tensor:
        """Join what ranks with the same tokens found for those they route."""
        return own

    def over_all(
        self, batch: TokenBatch, rule: Callable[[Tensor], Tensor], own_TK: Tensor
    ) -> Tensor:
        """Apply a rule of all tokens, in their order, and return its result for the own ones."""
        joined_TK = self.join(batch, own_TK)
        everyone_TK = all_gather_rows(self.spread.gather, joined_TK, batch.lengths)
        # Rows are rank after rank; their order is that of the sequences.
        rows_T = torch.arange(sum(batch.lengths), device=own_TK.device)
        parts = torch.split(rows_T, list(batch.lengths))
        num_rows = self.num_rows(batch)
        order_T = torch.cat([part.view(num_rows, -1) for part in parts], dim=1).flatten()
        result_TK = torch.empty_like(everyone_TK, dtype=torch.bool)
        result_TK = result_TK.index_copy(0, order_T, rule(everyone_TK[order_T]))
        first = self.num_before(batch) + self.own_slice(batch).start
        return result_TK[first : first + own_TK.shape[0]]

    def loss_tokens(self, batch: TokenBatch) -> LossTokens:
        """Return which tokens the own ones are, for losses over all."""
        spread, mine, device = self.spread, batch.hidden_TH.shape[0], batch.hidden_TH.device
        length = max(1, mine // batch.batch_size)

        def over_sequences(x: Tensor) -> Tensor:
            x = self.parted.all_reduce(x)
            return spread.gather.all_reduce(x) if spread.is_sequence else x

        def over_all(x: Tensor) -> Tensor:
            return spread.gather.all_reduce(self.parted.all_reduce(x))

        sequence_T = torch.arange(mine, device=device)[self.own_slice(batch)] // length
        return LossTokens(
            sequence_T,
            batch.batch_size,
            over_all,
            over_sequences,
            lambda loss: share_common(self.alike, loss),
        )


def _compare_step(
    model: Collectives, spread: TokenSpread, batch: TokenBatch
) -> tuple[int, ...] | None:
    """Compare, before any token travels, what the ranks of a layer were called with.

    Other counts would end the process inside gloo, other masks would sum wrongly. One gather of
    five numbers; not in graphs, whose shapes are static, nor where reading it would stop a device.

    Returns:
        The tokens of each rank that holds different ones, in order; None if nothing was compared.

    Raises:
        ValueError: ranks disagree; every one raises.
    """
    is_host = batch.hidden_TH.device.type == "cpu"
    if is_captured() or not is_host or not isinstance(model, TorchCollectives):
        return None
    mask, num_real, digest = batch.padding_mask, -1, 0
    if mask is not None:
        is_real = (mask.reshape(-1) != 0).cpu().numpy()
        num_real, digest = int(is_real.sum()), zlib.crc32(is_real.tobytes())
    here = model.ranks[model.rank]
    first_alike = min(spread.replica.ranks, default=here)
    num_tokens = batch.hidden_TH.shape[0]
    phase = -1 if batch.is_sequence_part else PHASES.index(batch.phase)
    mine = torch.tensor([[first_alike, phase, num_tokens, num_real, digest]])
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


def _phase_name(number: int) -> str:
    return PHASES[number] if number >= 0 else "open"


def _describe_step(num_tokens: int, num_real: int, digest: int) -> dict[str, str]:
    mask = f"of {num_real} real tokens (crc32 {digest:08x})" if num_real >= 0 else "missing"
    return {"tokens": str(num_tokens), "padding_mask": mask}


def split_evenly(num_tokens: int, parts: int) -> list[slice]:
    """Split tokens in contiguous parts whose sizes differ by one at most, larger ones first."""
    size, rest = num_tokens // parts, num_tokens % parts
    starts = [part * size + min(part, rest) for part in range(parts + 1)]
    return [slice(starts[part], starts[part + 1]) for part in range(parts)]
