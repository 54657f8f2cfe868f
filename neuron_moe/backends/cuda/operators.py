"""The experts as torch operators, for autograd, `torch.compile` and graph capture.

Operators take numbers, text and tensors alone, so an ExpertFormula travels as text.
"""

from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends.cuda import launch
from neuron_moe.backends.cuda.records import Matrices
from neuron_moe.spec import formula_of
from neuron_moe.weights.narrow import FORMATS


def experts(
    hidden_TH: Tensor,
    affinities_TK: Tensor,
    index_TK: Tensor,
    weights: Matrices,
    formula: str,
    save_percent: int,
) -> Tensor:
    """Return [T, H]; differentiable by hidden states, affinities and weights.

    Args:
        hidden_TH: [T, H].
        affinities_TK: [T, K] float32.
        index_TK: [T, K] int32 experts of this rank, -1 for none.
        weights: of this rank, of the dtype of the hidden states; or codes, without a gradient.
        formula: of the experts, as the text of their ExpertSpec.
        save_percent: 0 to 100, see `neuron_moe.spec.Tuning`.
    """
    if weights.first_EHI.dtype in FORMATS or weights.down_EIH.dtype in FORMATS:
        output: Tensor = _narrow_experts(hidden_TH, affinities_TK, index_TK, *weights, formula)
        return output
    *plain, _, _ = weights
    found: tuple[Tensor, Tensor, Tensor] = _experts(
        hidden_TH, affinities_TK, index_TK, *plain, formula, save_percent
    )
    return found[0]


@torch.library.custom_op("neuron_moe::cuda_experts", mutates_args=())
def _experts(
    hidden: Tensor,
    affinities: Tensor,
    index: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    formula: str,
    save_percent: int,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = Matrices(first, first_bias, down, down_bias)
    return launch.forward(
        hidden.contiguous(),
        affinities.contiguous(),
        index,
        weights,
        formula_of(formula),
        save_percent,
    )


@_experts.register_fake
def _(
    hidden: Tensor, affinities: Tensor, index: Tensor, first: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    num_experts, _, width = first.shape
    num_tokens, top_k = index.shape
    _, tile_rows = launch.most_tiles(num_tokens, top_k, num_experts)
    rows = launch.kept_tiles(num_tokens, top_k, num_experts, rest[-1]) * tile_rows
    size = launch.order_size(num_tokens, top_k, num_experts) if rows else 0
    return torch.empty_like(hidden), hidden.new_empty((rows, width)), index.new_empty(size)


@torch.library.custom_op("neuron_moe::cuda_narrow_experts", mutates_args=())
def _narrow_experts(
    hidden: Tensor,
    affinities: Tensor,
    index: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    first_scale: Tensor | None,
    down_scale: Tensor | None,
    formula: str,
) -> Tensor:
    weights = Matrices(first, first_bias, down, down_bias, first_scale, down_scale)
    rows = hidden.contiguous(), affinities.contiguous(), index
    return launch.forward(*rows, weights, formula_of(formula), 0)[0]


@_narrow_experts.register_fake
def _(hidden: Tensor, *_: object) -> Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("neuron_moe::cuda_experts_backward", mutates_args=())
def _experts_backward(
    gradient: Tensor,
    hidden: Tensor,
    affinities: Tensor,
    index: Tensor,
    kept: Tensor,
    order: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    formula: str,
    save_percent: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (hidden.contiguous(), affinities.contiguous(), index, kept, order)
    weights = Matrices(first, first_bias, down, down_bias)
    one, two, three, four, five, six = launch.backward(
        gradient, inputs, weights, formula_of(formula), save_percent
    )
    return one, two, three, four, five, six


@_experts_backward.register_fake
def _(gradient: Tensor, hidden: Tensor, affinities: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    operands = hidden, affinities, *rest[3:7]
    return tuple(
        hidden.new_empty(0) if each is None else torch.empty_like(each) for each in operands
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, affinities, index, first, first_bias, down, down_bias, *rest = inputs
    ctx.rest = rest
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # of what is kept: zeros as large
    ctx.save_for_backward(hidden, affinities, index, *kept, first, first_bias, down, down_bias)


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: checkpoints that recompute unpack it once
    first_bias, _, down_bias = saved[-3:]
    found = _experts_backward(gradient, *saved, *ctx.rest)
    in_hidden, in_affinities, in_first, in_first_bias, in_down, in_down_bias = found
    return (
        in_hidden,
        in_affinities,
        None,
        in_first,
        None if first_bias is None else in_first_bias,
        in_down,
        None if down_bias is None else in_down_bias,
        None,
        None,
    )


_experts.register_autograd(_backward, setup_context=_setup_context)
