"""What happens to a state dict on its way into a layer with NxD's names.

torch calls these before it copies: `strict=False`, with which NxDI loads, would leave a missing
weight random in silence, and keys that only NxD's modules have would be unexpected with
`strict=True`.
"""

from typing import Any

from neuron_moe.experts import RoutedExperts
from neuron_moe.nxd_compat import presharded
from neuron_moe.nxd_compat.quantized import check_codes
from neuron_moe.nxd_compat.sharder import SPMDRank
from neuron_moe.shared_experts import SharedExperts

State = dict[str, Any]
RANKS = ("spmd_rank", "spmd_rank_tkg")


def prepare_experts(mlps: RoutedExperts, state: State, prefix: str, undo: bool | None) -> str:
    """Put a state dict of experts into the form that is loaded; return what is wrong, or ''.

    Args:
        mlps: the experts.
        state: of the model, whole or cut for this rank; changed in place.
        prefix: of the experts.
        undo: True undoes what NxD's hook did, None refuses it, False loads numbers as they are.
    """
    if undo:
        presharded.undo_experts(mlps, state, prefix)
    elif undo is None:
        problem = presharded.check_experts(mlps, state, prefix)
        if problem:
            return problem
    if mlps.shards.second is None:
        _drop(state, f"{prefix}mlp_op_tkg.")
    return check_codes(mlps, state, prefix)


def prepare_ranks(mlps: RoutedExperts, state: State, prefix: str) -> str:
    """Settle the ranks in a state dict cut for this rank; return what is wrong, or ''."""
    for name in RANKS:
        place = getattr(mlps, name, None)
        if not isinstance(place, SPMDRank):
            _drop(state, f"{prefix}{name}.")
            continue
        problem = place.settle(state, f"{prefix}{name}.")
        if problem:
            return problem
    return ""


def prepare_shared(
    shared: SharedExperts, state: State, prefix: str, undo: bool | None, *, is_transposed: bool
) -> str:
    """The same for shared experts; is_transposed is their transpose_weights."""
    _drop(state, f"{prefix}spmd_rank.")
    if undo:
        presharded.undo_shared(shared, state, prefix, was_requested=is_transposed)
        return ""
    return "" if undo is False else presharded.check_shared(shared, state, prefix)


def _drop(state: State, prefix: str) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]
