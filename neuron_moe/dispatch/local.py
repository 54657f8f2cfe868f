"""Every token and every expert is here."""

import torch
from torch import Tensor

from neuron_moe.dispatch.tokens import Beside, Choose, Entered, Own, Settings, TokenBatch
from neuron_moe.parallel.collectives import Collectives, SingleRank
from neuron_moe.router import Routing
from neuron_moe.router_losses import LossTokens


class Local:
    """One rank: nothing travels.

    Args:
        reduce_dtype: rounds results as a sum over ranks would; None leaves them.
    """

    why_apart = ""
    alike: Collectives = SingleRank()

    def __init__(self, reduce_dtype: torch.dtype | None = None) -> None:
        self.reduce_dtype = reduce_dtype

    def tokens(self, batch: TokenBatch, _settings: Settings) -> TokenBatch:
        """Return the batch: it has all tokens."""
        mask, num_tokens = batch.padding_mask, batch.hidden_TH.shape[0]
        if mask is None:
            return batch
        if mask.numel() != num_tokens:
            raise ValueError(
                f"padding_mask: shape {tuple(mask.shape)} must have one entry for each of the"
                f" {num_tokens} tokens."
            )
        return batch._replace(padding_mask=mask.reshape(-1))

    def enter(self, batch: TokenBatch, choose: Choose) -> Entered:
        """Route the tokens; they are where their experts are."""
        own, routing = choose(Own(batch.hidden_TH, batch.padding_mask, token_ids=batch.token_ids))
        return Entered(batch, own, own, routing)

    def leave(
        self, partial_NH: Tensor, entered: Entered, shared: Beside | None
    ) -> tuple[Tensor, Routing | None]:
        """Add the shared experts."""
        if self.reduce_dtype is not None:
            partial_NH = partial_NH.to(self.reduce_dtype).to(partial_NH.dtype)
        if shared is not None and entered.own is not None:
            partial_NH = partial_NH + shared(entered.own.hidden_TH)
        return partial_NH, entered.routing

    def loss_tokens(self, batch: TokenBatch) -> LossTokens:
        """Return that all tokens are here."""
        num_tokens, device = batch.hidden_TH.shape[0], batch.hidden_TH.device
        length = max(1, num_tokens // batch.batch_size)
        return LossTokens(torch.arange(num_tokens, device=device) // length, batch.batch_size)
