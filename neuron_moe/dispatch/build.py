"""The dispatch of a layer, for each way in which its tokens come."""

from collections.abc import Mapping

import torch

from neuron_moe.dispatch.all_to_all import AllToAll
from neuron_moe.dispatch.local import Local
from neuron_moe.dispatch.ranks import TokenSpread
from neuron_moe.dispatch.replicate import Replicate
from neuron_moe.dispatch.shuffle import Shuffled, TokenShuffle
from neuron_moe.dispatch.tokens import Dispatch
from neuron_moe.parallel.collectives import Collectives
from neuron_moe.parallel.groups import ExpertGroups
from neuron_moe.shared_experts import SharedExperts


def build_dispatches(
    groups: Mapping[str, ExpertGroups],
    num_physical: int,
    shared: SharedExperts | None,
    reduce_dtype: torch.dtype | None = None,
    shuffle: TokenShuffle | None = None,
) -> dict[str, Dispatch]:
    """Return how tokens reach experts in 'prefill', in 'decode', and in a prefill of which this
    rank is given its 'part' of each sequence.

    Args:
        groups: the ranks that share the experts, for 'prefill' and 'decode'.
        num_physical: experts of all ranks, replicas counted.
        shared: this rank's shared experts, or None.
        reduce_dtype: dtype of the sum over ranks; None is the dtype of the hidden states.
        shuffle: stands around each, if there is one.

    Raises:
        ValueError: the shared experts' group does not fit.
    """
    for phase, ranks in groups.items():
        _check_shared(shared, ranks.model, phase)

    def build(ranks: ExpertGroups, spread: TokenSpread) -> Dispatch:
        found: Dispatch
        if ranks.model.size == 1:
            found = Local(reduce_dtype)
        elif ranks.strategy == "all_to_all":
            found = AllToAll(ranks, spread, num_physical // ranks.ep.size, reduce_dtype)
        else:
            found = Replicate(ranks, spread, reduce_dtype)
        return found if shuffle is None else Shuffled(found, shuffle)

    part = build(groups["prefill"], TokenSpread.sequence(groups["prefill"].model))
    whole = {
        phase: build(ranks, TokenSpread(ranks.data, ranks.attention))
        for phase, ranks in groups.items()
    }
    return {"part": part, **whole}


def _check_shared(shared: SharedExperts | None, model: Collectives, phase: str) -> None:
    """Raise ValueError unless the group of shared experts fits the ranks that are summed."""
    if shared is not None and model.size % shared.group.size:
        raise ValueError(
            f"shared experts split over {shared.group.size} ranks: must divide the"
            f" {model.size} ranks that are summed in {phase}. Use"
            " sequence_parallel_enabled=True, which keeps them whole on each rank."
        )
    has_copies = shared is not None and 1 < shared.group.size < model.size
    if has_copies and model.is_traced:
        raise ValueError(
            f"shared experts split over some of the {model.size} ranks that are"
            f" summed in {phase}: one graph for all ranks cannot say which tokens each"
            " takes. Split them over all of them."
        )
