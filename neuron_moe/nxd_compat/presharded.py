"""Checkpoints that NxD's preshard hooks have rewritten: recognised, refused, or undone on request.

NxD's hook adds `hidden_act_bias` to the up half of the gate and up bias, divides the down bias by
the ranks that split I, and transposes shared experts' matrices for its decode kernel. Ours computes
the first two at run time, so such a state dict would load and be wrong.

What the numbers show is found: an offset of the up bias (its median is nearer to the
offset than to zero), a transposed shape. A divided down bias alone (`hidden_act_bias=0` and more
than one rank) looks like any other.

Axes: E experts, H hidden, I intermediate.
"""

from typing import Any

from torch import Tensor

from neuron_moe.experts import RoutedExperts
from neuron_moe.shared_experts import SharedExperts

State = dict[str, Any]
WAY_OUT = (
    "Set `presharded` of the layer (or of install()) to True to undo it, to False to load the"
    " numbers as they are, or convert the checkpoint again without NxD's hook."
)


def check_experts(mlps: RoutedExperts, state: State, prefix: str) -> str:
    """Return what shows that NxD's hook has rewritten these experts, or ''."""
    offset = mlps.spec.formula.up_offset
    bias_EI = state.get(f"{prefix}mlp_op.gate_up_proj.bias")
    if not offset or not isinstance(bias_EI, Tensor) or bias_EI.is_meta or not bias_EI.numel():
        return ""
    median = float(_up_half(mlps, bias_EI.detach()).float().median())
    if abs(median - offset) >= abs(median):
        return ""
    return (
        f"{prefix}mlp_op.gate_up_proj.bias: the median of its up half is {median:.3g}, so"
        f" hidden_act_bias={offset:g} was added to it before, which is added again at run time."
        f" {WAY_OUT}"
    )


def undo_experts(mlps: RoutedExperts, state: State, prefix: str) -> None:
    """Undo in place what NxD's hook did to the biases of experts, whole or cut for this rank.

    Exact but for the rounding of the sums, in the dtype of the checkpoint.
    """
    tp_sizes = {"mlp_op": mlps.groups["prefill"].tp.size}
    # The second copy was made from the first one's divided bias, and divided again.
    tp_sizes["mlp_op_tkg"] = tp_sizes["mlp_op"] * mlps.groups["decode"].tp.size
    for name, tp_size in tp_sizes.items():
        first, down = (f"{prefix}{name}.{each}_proj.bias" for each in ("gate_up", "down"))
        if isinstance(state.get(first), Tensor):
            bias_EI = state[first].detach().clone()
            _up_half(mlps, bias_EI).sub_(mlps.spec.formula.up_offset)
            state[first] = bias_EI
        if isinstance(state.get(down), Tensor):
            state[down] = state[down] * tp_size


def check_shared(shared: SharedExperts, state: State, prefix: str) -> str:
    """Return what shows that NxD's hook has transposed these matrices, or ''."""
    transposed = [name for name in _matrices(shared) if _is_transposed(shared, state, prefix, name)]
    if not transposed:
        return ""
    shape = list(state[prefix + transposed[0]].shape)
    return (
        f"{prefix}{transposed[0]}: shape {shape} must be {shape[::-1]}; NxD's hook transposes it."
        f" {WAY_OUT}"
    )


def undo_shared(shared: SharedExperts, state: State, prefix: str, *, was_requested: bool) -> None:
    """Turn back in place what NxD's hook has transposed.

    Args:
        shared: the module.
        state: of the model.
        prefix: of the module.
        was_requested: transpose_weights of the module; decides where H equals I.
    """
    for name in _matrices(shared):
        given = state.get(prefix + name)
        is_square = isinstance(given, Tensor) and given.shape == given.shape[::-1]
        if _is_transposed(shared, state, prefix, name) or (is_square and was_requested):
            state[prefix + name] = state[prefix + name].t().contiguous()


def _up_half(mlps: RoutedExperts, bias_EI: Tensor) -> Tensor:
    """Return a view of the up columns that hold real, not padded, experts."""
    width = bias_EI.shape[-1] // 2
    whole = mlps.spec.intermediate_size
    config = getattr(mlps, "routed_experts_mlp_config", None)
    actual = getattr(config, "intermediate_size_actual", None) or whole
    start = 0 if width == whole else width * mlps.shards.stored.tp_rank
    return bias_EI[:, width : width + max(0, min(width, actual - start))]


def _matrices(shared: SharedExperts) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in (*shared.first_names, "down_proj"))


def _is_transposed(shared: SharedExperts, state: State, prefix: str, name: str) -> bool:
    """Say whether the H axis stands where I should; the latter may be whole or cut."""
    given = state.get(prefix + name)
    axis, hidden = (0 if name.startswith("down") else 1), shared.spec.hidden_size
    return (
        isinstance(given, Tensor)
        and given.ndim == 2
        and given.shape[axis] != hidden
        and given.shape[1 - axis] == hidden
    )
