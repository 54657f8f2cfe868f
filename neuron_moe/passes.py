"""What a layer keeps of a pass: the load it counts, and losses that are still to be added.

Activation checkpointing runs a layer a second time, within a backward pass. Such a pass counts
nothing, and its losses belong to whoever takes them within it. Compiled graphs cannot ask which
pass is under way; operators they do not look into do, when they run.

Axes: T tokens, K choices, E experts.
"""

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuron_moe.blocks import sort_pairs
from neuron_moe.device import is_captured

_NO_BACKWARD = -1  # the number of the backward pass that is under way


class _Owed(NamedTuple):
    """The loss of one pass.

    Attributes:
        backward: number of the backward pass that ran the layer.
        is_recorded: gradients were recorded.
        loss: gives it.
    """

    backward: int | Tensor
    is_recorded: bool
    loss: Callable[[], Tensor | None]


class OwedLosses:
    """Losses of a layer's passes that nobody has taken yet; a copy of the layer owes none."""

    def __init__(self) -> None:
        self._owed: list[_Owed] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as an empty one: graphs of gradients belong to their passes."""
        return OwedLosses, ()

    def add(self, loss: Tensor, output: Tensor) -> None:
        """Note the loss of a pass.

        Args:
            loss: [].
            output: what the layer goes on with. A backward pass that comes to it before the loss
                was taken warns; not in a compiled graph.
        """
        if is_captured():
            backward = torch.ops.neuron_moe.backward_pass(loss.detach())
            self._owed.append(_Owed(backward, torch.is_grad_enabled(), partial(_itself, loss)))
            return
        number = torch._C._current_graph_task_id()
        if output.requires_grad:
            output.register_hook(partial(self._check_taken, loss))  # type: ignore[no-untyped-call]
        # A graph that is computed again for its numbers alone must not be held beyond them.
        is_first = number == _NO_BACKWARD
        owed = partial(_itself, loss) if is_first else weakref.ref(loss)
        self._owed.append(_Owed(number, torch.is_grad_enabled(), owed))

    def take(self) -> list[Tensor]:
        """Return the losses that were noted in the pass that is under way, and forget them.

        Raises:
            RuntimeError: gradients are wanted, and none of the passes recorded any.
        """
        now = torch._C._current_graph_task_id()
        mine = [each for each in self._owed if int(each.backward) == now]
        # What a backward pass noted that is over is of nobody.
        self._owed[:] = [each for each in self._owed if int(each.backward) == _NO_BACKWARD != now]
        if mine and torch.is_grad_enabled():
            mine = [each for each in mine if each.is_recorded]
            if not mine:
                raise RuntimeError(
                    "router losses: a layer ran without gradients, as under torch.utils.checkpoint"
                    " with use_reentrant=True. Pass use_reentrant=False, or call auxiliary_loss()"
                    " within the checkpointed function and return what it gives."
                )
        return [loss for each in mine if (loss := each.loss()) is not None]

    def clear(self) -> None:
        """Forget all."""
        self._owed.clear()

    def _check_taken(self, loss: Tensor, _gradient: Tensor) -> None:
        """Warn of a loss that comes too late, and forget it."""
        kept = [each for each in self._owed if each.loss() is not loss]
        if len(kept) < len(self._owed):
            self._owed[:] = kept
            warnings.warn(
                "router losses: the backward pass began before they were added to the loss, and"
                " goes without them. Write loss = loss + auxiliary_loss(model), of"
                " neuron_moe.router_losses, or leave them out with use_router_losses(None).",
                stacklevel=2,
            )


def count_load(load_E: Tensor, index_TK: Tensor) -> None:
    """Add the tokens of each expert to a load, in place; nothing within a backward pass.

    Args:
        load_E: [E] int64.
        index_TK: [T, K] integer experts; -1 for none.
    """
    if is_captured():
        torch.ops.neuron_moe.count_load(load_E, index_TK)
    else:
        _count_load(load_E, index_TK)


def _itself(loss: Tensor) -> Tensor:
    return loss


def _count_load(load_E: Tensor, index_TK: Tensor) -> None:
    if torch._C._current_graph_task_id() == _NO_BACKWARD:
        load_E += sort_pairs(index_TK, load_E.shape[0]).tokens_per_expert_E


def _backward_pass(like: Tensor) -> Tensor:
    return torch.tensor(torch._C._current_graph_task_id())


torch.library.custom_op("neuron_moe::count_load", _count_load, mutates_args=("load_E",))
_number = torch.library.custom_op("neuron_moe::backward_pass", _backward_pass, mutates_args=())
_number.register_fake(lambda like: torch.empty((), dtype=torch.int64))
