"""What passes between a layer and its dispatch.

Axes: T tokens of all ranks, t this rank's own, N rows that reach this rank's experts, H hidden, K
choices, B sequences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from neuron_moe.parallel.collectives import Collectives
from neuron_moe.router import Routing
from neuron_moe.router_losses import LossTokens

INDEX_BYTES = 4  # int32
AFFINITY_BYTES = 4  # float32
Settings = Callable[[], dict[str, object]]
"""Returns what must agree between ranks."""


class TokenBatch(NamedTuple):
    """The tokens a rank was given.

    Attributes:
        hidden_TH: [t, H].
        batch_size: B, sequences; 1 if they are not to be distinguished.
        padding_mask: nonzero for real tokens, one entry for each of these tokens or for those of
            all ranks; None: all are real.
        phase: one of paths.PHASES; of parts of sequences, as long as these parts would have it.
        is_sequence_part: this rank has its part of each sequence, other ranks have others.
        lengths: tokens of each rank that holds different ones, in their order.
        token_ids: [t], if the layer was given them.
    """

    hidden_TH: Tensor
    batch_size: int
    padding_mask: Tensor | None
    phase: str
    is_sequence_part: bool
    lengths: tuple[int, ...]
    token_ids: Tensor | None = None


class Own(NamedTuple):
    """The tokens that this rank routes.

    Attributes:
        hidden_TH: [t, H].
        padding_mask: [t] nonzero for real tokens; None if there is none, or `enter` applies it.
        first_token: number of the first of them among all.
        token_ids: [t], where they were given.
        over_all: applies a rule of all tokens' choices [T, K], in their order, and returns its
            [t, K] result for the own ones; None where these are all.
    """

    hidden_TH: Tensor
    padding_mask: Tensor | None
    first_token: int = 0
    over_all: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None
    token_ids: Tensor | None = None


class Rows(NamedTuple):
    """Tokens with their choices.

    Attributes:
        hidden_TH: [T, H] as experts take them.
        index_TK: [T, K] int32 physical expert, -1 for none.
        affinities_TK: [T, K] float32.
    """

    hidden_TH: Tensor
    index_TK: Tensor
    affinities_TK: Tensor


class Entered(NamedTuple):
    """What the experts of this rank compute, and what `leave` needs.

    Attributes:
        batch: that entered.
        own: what this rank chose for its tokens; None where one launch does all.
        rows: [N] what to compute here; likewise.
        routing: of the own tokens; likewise.
        exchange: what the layout must remember.
    """

    batch: TokenBatch
    own: Rows | None = None
    rows: Rows | None = None
    routing: Routing | None = None
    exchange: Any = None


Choose = Callable[[Own], tuple[Rows, Routing]]


class Beside(Protocol):
    """What is added to the sum of the routed experts, as `SharedExperts` is."""

    @property
    def group(self) -> Collectives:
        """Ranks whose results add up to the whole."""

    @property
    def whole_on_each_rank(self) -> bool:
        """Whether each rank computes its own tokens."""

    def __call__(self, x: Tensor, *, part: tuple[int, int] = (0, 1)) -> Tensor:
        """Return [.., H], the i-th of n summands for `part` (i, n)."""


class Dispatch(Protocol):
    """One way in which tokens reach their experts.

    Attributes:
        why_apart: why one launch cannot do all between `tokens` and `leave`; '' if it can.
        alike: ranks that route the same tokens as this one.
    """

    why_apart: str
    alike: Collectives

    def tokens(self, batch: TokenBatch, settings: Settings) -> TokenBatch:
        """Return a batch with its phase and lengths settled, and its mask that of its own tokens;
        collective where ranks hold different ones.

        Args:
            batch: of this rank.
            settings: of the layer, compared between ranks before the first collective.
        """

    def enter(self, batch: TokenBatch, choose: Choose) -> Entered:
        """Let `choose` route the own tokens, and send them to the ranks of their experts."""

    def leave(
        self, partial_NH: Tensor, entered: Entered, shared: Beside | None
    ) -> tuple[Tensor, Routing | None]:
        """Send partial results back and add them up, and shared experts to them.

        Returns:
            [t, H] and the routing, of the tokens that this rank was given.
        """

    def loss_tokens(self, batch: TokenBatch) -> LossTokens:
        """Return which tokens the own ones are, for losses over all."""
