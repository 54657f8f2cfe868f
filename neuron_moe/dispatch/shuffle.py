"""Token shuffling: ranks exchange tokens at random before a layer, and back after it.

Prompts of one kind prefer the same experts; after the shuffle every rank holds an even mixture.
Outputs do not change, only who holds which token.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neuron_moe.dispatch.tokens import Beside, Choose, Dispatch, Entered, Settings, TokenBatch
from neuron_moe.errors import check_positive_int
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import Collectives, all_to_all_rows
from neuron_moe.router import Routing
from neuron_moe.router_losses import LossTokens


@dataclass(frozen=True, slots=True)
class ShuffleOrder:
    """How to undo a shuffle.

    Args:
        inverse_T: [t] position of each token before the own tokens were permuted.
        counts: rows exchanged with each rank.
    """

    inverse_T: Tensor
    counts: tuple[int, ...]


class TokenShuffle:
    """Permute the own tokens, then exchange equal parts with the other ranks.

    Args:
        group: ranks that exchange tokens; they hold different ones, equally many.
        seed: of the permutation; each rank and each call draws another one.
    """

    def __init__(self, group: Collectives, seed: int) -> None:
        self.group = group
        self.generator = torch.Generator().manual_seed(seed + 7919 * group.rank)

    def forth(self, batch: TokenBatch) -> tuple[TokenBatch, ShuffleOrder]:
        """Shuffle a batch; return it and how to undo it.

        Raises:
            ValueError: the tokens cannot be exchanged in equal parts, or every rank has the same.
        """
        num_tokens, size = batch.hidden_TH.shape[0], self.group.size
        if not batch.is_sequence_part:
            raise ValueError(
                f"token_shuffle_group_size={size}: shuffling needs different tokens on each rank."
                " Use a sequence parallel layer, or leave the size at 1."
            )
        if num_tokens % size:
            raise ValueError(
                f"token_shuffle_group_size={size}: must divide the {num_tokens} tokens of a rank."
                " Pad the sequence."
            )
        mask = batch.padding_mask
        if mask is not None and mask.numel() != num_tokens:
            raise ValueError(
                f"padding_mask: shape {tuple(mask.shape)} must have one entry for each of the"
                f" {num_tokens} tokens of this rank; the mask of all ranks cannot be shuffled."
            )
        device = batch.hidden_TH.device
        permutation_T = torch.randperm(num_tokens, generator=self.generator).to(device)
        counts = (num_tokens // size,) * size
        order = ShuffleOrder(permutation_T.argsort(), counts)
        hidden_TH = all_to_all_rows(self.group, batch.hidden_TH[permutation_T], counts, counts)
        if mask is not None:
            flat = (mask.reshape(-1) != 0).to(torch.uint8)
            mask = self.group.all_to_all(flat[permutation_T], counts, counts)
        return batch._replace(hidden_TH=hidden_TH, padding_mask=mask, batch_size=1), order

    def back(self, x: Tensor, order: ShuffleOrder) -> Tensor:
        """Send rows of shuffled tokens back."""
        return all_to_all_rows(self.group, x, order.counts, order.counts)[order.inverse_T]


class Shuffled:
    """A layout whose tokens are shuffled between ranks when they enter, and back when they leave.

    Args:
        layout: in between.
        shuffle: of the tokens.
    """

    why_apart = "tokens are shuffled between ranks"

    def __init__(self, layout: Dispatch, shuffle: TokenShuffle) -> None:
        self.layout = layout
        self.shuffle = shuffle
        self.alike = layout.alike

    def tokens(self, batch: TokenBatch, settings: Settings) -> TokenBatch:
        """Settle the batch."""
        return self.layout.tokens(batch, settings)

    def enter(self, batch: TokenBatch, choose: Choose) -> Entered:
        """Shuffle, and enter."""
        batch, order = self.shuffle.forth(batch)
        entered = self.layout.enter(batch, choose)
        return entered._replace(exchange=(order, entered.exchange))

    def leave(
        self, partial_NH: Tensor, entered: Entered, shared: Beside | None
    ) -> tuple[Tensor, Routing | None]:
        """Leave, and send tokens back."""
        order, exchange = entered.exchange
        output_TH, routing = self.layout.leave(
            partial_NH, entered._replace(exchange=exchange), shared
        )
        assert routing is not None
        home = partial(self.shuffle.back, order=order)
        return home(output_TH), Routing(*map(home, routing))

    def loss_tokens(self, batch: TokenBatch) -> LossTokens:
        """Return which tokens the own ones are, of no sequence."""
        return self.layout.loss_tokens(batch)


def build_shuffle(group_size: int, seed: int | None) -> TokenShuffle | None:
    """Return the shuffle of a layer, or None for size 1.

    Raises:
        ValueError: the groups were not built, or have another size.
    """
    if check_positive_int("token_shuffle_group_size", group_size) == 1:
        return None
    group = parallel_state.get_token_shuffle_group()
    if group is None or group.size != group_size:
        found = "none were built" if group is None else f"those built have {group.size} ranks"
        raise ValueError(
            f"token_shuffle_group_size={group_size}: needs groups of that size, but {found}. Call"
            f" parallel_state.initialize_token_shuffle_group({group_size}) first."
        )
    return TokenShuffle(group, 0 if seed is None else seed)
