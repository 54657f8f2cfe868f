"""Experts that keep for the backward pass as much as is set, and compute the rest again.

A forward pass keeps its inputs, which the caller has anyway, and of the first projections' results
h those of the first `save_percent` of all rows. The backward pass goes over the experts once: with
dO the gradient of the output, w the affinity and a = act(h) of a row,

    dA = dO W2^T    dw = <dA, a> + <dO, b2>    dh = act'(h) (w dA)    dx = dh W1^T
    dW2 = (w a)^T dO    dW1 = x^T dh

Neither a nor the experts' outputs are ever kept. Where affinities scale the input, x is w times the
token, and dw = <dx, token>.

Axes: T tokens, K choices, n rows (pairs with an expert of this rank), E experts, H hidden, I
intermediate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuron_moe.activations import activate, at_least_float32, sum_dtype
from neuron_moe.backends.chosen_experts import JoinedRows, combine, take_rows
from neuron_moe.blocks import sort_pairs
from neuron_moe.device import is_captured
from neuron_moe.spec import ExpertSpec, formula_of
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from nki_kernels.common.formula import ExpertFormula

_Settings = tuple[ExpertFormula, bool, int]  # formula, scales_input, save_percent


class _Matrices(NamedTuple):
    """Weights of all experts, biases as they are added; also their gradients."""

    first_EHI: Tensor | None
    first_bias_EI: Tensor | None
    down_EIH: Tensor | None
    down_bias_EH: Tensor | None


@dataclass(frozen=True)
class _Run:
    """Rows of one expert, all of which have a kept result, or none.

    Attributes:
        expert: its number.
        rows: where they are among all.
        is_kept: their first projections' results were kept.
    """

    expert: int
    rows: slice
    is_kept: bool


def saving_experts(
    hidden_TH: Tensor,
    routing: LocalRouting,
    weights: ExpertWeights,
    spec: ExpertSpec,
    save_percent: int,
) -> Tensor:
    """Return [T, H] float32, the same numbers as `chosen_experts`.

    Under autocast products are of its dtype, on the way back too.

    Args:
        hidden_TH: [T, H].
        routing: in the numbering of this rank.
        weights: of this rank, plain.
        spec: of the experts.
        save_percent: 0 to 100.
    """
    down_bias_EH = weights.down_bias_EH
    if down_bias_EH is not None and weights.down_bias_scale != 1.0:
        down_bias_EH = down_bias_EH * weights.down_bias_scale
    operands: tuple[Tensor | None, ...] = (
        hidden_TH,
        weights.gate_up_proj_EHI,
        weights.gate_up_bias_EI,
        weights.down_proj_EIH,
        down_bias_EH,
    )
    device = hidden_TH.device.type
    dtype = torch.get_autocast_dtype(device)
    if not torch.is_autocast_enabled(device) or hidden_TH.dtype == torch.float64:
        return _experts(routing, operands, spec, save_percent)
    operands = tuple(None if each is None else each.to(dtype) for each in operands)
    with torch.autocast(device, enabled=False):
        return _experts(routing, operands, spec, save_percent)


def _experts(
    routing: LocalRouting, operands: tuple[Tensor | None, ...], spec: ExpertSpec, save_percent: int
) -> Tensor:
    """Call the function of autograd, or in a graph the operator that does the same."""
    index_TK, affinities_TK = routing.expert_index_TK, routing.expert_affinities_TK
    hidden_TH, *weights = operands
    if is_captured():
        found: tuple[Tensor, Tensor] = torch.ops.neuron_moe.saving_experts(
            index_TK,
            hidden_TH,
            affinities_TK,
            *weights,
            spec.formula_text,
            routing.scales_input,
            save_percent,
        )
        return found[0]
    settings = (spec.formula, routing.scales_input, save_percent)
    output: Tensor = _SavingExperts.apply(  # type: ignore[no-untyped-call]
        settings, index_TK, hidden_TH, affinities_TK, *weights
    )
    return output


class _SavingExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: _Settings,
        index_TK: Tensor,
        hidden_TH: Tensor,
        affinities_TK: Tensor,
        *weights: Tensor | None,
    ) -> Tensor:
        output_TH, kept = _forward(settings, index_TK, hidden_TH, affinities_TK, weights)
        ctx.settings = settings
        ctx.save_for_backward(index_TK, hidden_TH, affinities_TK, *weights, *kept)
        return output_TH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        return None, None, *_backward(ctx.settings, gradients[0], saved[:7], saved[7:], needed)


def _forward(
    settings: _Settings,
    index_TK: Tensor,
    hidden_TH: Tensor,
    affinities_TK: Tensor,
    weights: Sequence[Tensor | None],
) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the kept results of the first projections, run by run."""
    formula, scales_input, save_percent = settings
    matrices = _Matrices(*weights)
    routing = LocalRouting(index_TK, affinities_TK, scales_input)
    order_n, runs = _runs(index_TK, _given(matrices.down_EIH).shape[0], save_percent)
    joined = JoinedRows(order_n.shape[0], hidden_TH)
    kept = []
    for run in runs:
        input_nH = take_rows(hidden_TH, routing, order_n[run.rows])
        projected_nI = _project(input_nH, matrices.first_EHI, matrices.first_bias_EI, run)
        if run.is_kept:
            kept.append(projected_nI)
        activated_nI = activate(projected_nI, formula)
        output_nH = _project(activated_nI, matrices.down_EIH, matrices.down_bias_EH, run)
        joined.put(run.rows.start, output_nH)
    return combine(joined, order_n, routing), kept


def _backward(
    settings: _Settings,
    gradient_TH: Tensor,
    inputs: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, affinities and weights; None where not needed."""
    formula, scales_input, save_percent = settings
    index_TK, hidden_TH, affinities_TK, *weights = inputs
    matrices = _Matrices(*weights)
    routing = LocalRouting(_given(index_TK), _given(affinities_TK), scales_input)
    order_n, runs = _runs(routing.expert_index_TK, _given(weights[2]).shape[0], save_percent)
    way_back = _WayBack(_given(hidden_TH), routing, matrices, gradient_TH, tuple(needed))
    for number, run in enumerate(runs):
        way_back.go(order_n[run.rows], run, kept[number] if run.is_kept else None, formula)
    return way_back.gradients()


@torch.library.custom_op("neuron_moe::saving_experts", mutates_args=())
def _saving_operator(
    index: Tensor,
    hidden: Tensor,
    affinities: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    formula: str,
    scales_input: bool,
    save_percent: int,
) -> tuple[Tensor, Tensor]:
    settings = formula_of(formula), scales_input, save_percent
    weights = first, first_bias, down, down_bias
    output, kept = _forward(settings, index, hidden, affinities, weights)
    # A graph's shapes are settled before it runs: as many rows as if every choice had an expert.
    rows = hidden.new_zeros(_kept_shape(index, first, save_percent))
    torch.cat([rows[:0], *kept], out=rows[: sum(each.shape[0] for each in kept)])
    return output, rows


@_saving_operator.register_fake
def _(
    index: Tensor, hidden: Tensor, affinities: Tensor, first: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    output = torch.empty_like(hidden, dtype=sum_dtype(hidden))
    return output, hidden.new_empty(_kept_shape(index, first, rest[-1]))


@torch.library.custom_op("neuron_moe::saving_experts_backward", mutates_args=())
def _saving_backward(
    gradient: Tensor,
    kept: Tensor,
    index: Tensor,
    hidden: Tensor,
    affinities: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    formula: str,
    scales_input: bool,
    save_percent: int,
    needed: list[bool],
) -> list[Tensor]:
    inputs = index, hidden, affinities, first, first_bias, down, down_bias
    _, runs = _runs(index, down.shape[0], save_percent)
    parts = [kept[run.rows] for run in runs if run.is_kept]
    settings = formula_of(formula), scales_input, save_percent
    # Autograd is shut out of operators, but the activation's gradient is taken by it.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        found = _backward(settings, gradient, inputs, parts, needed)
    return [hidden.new_empty(0) if each is None else each for each in found]


@_saving_backward.register_fake
def _(gradient: Tensor, kept: Tensor, index: Tensor, *rest: Any) -> list[Tensor]:
    operands, needed = rest[:6], rest[-1]
    return [
        torch.empty_like(each) if is_needed and each is not None else index.new_empty(0)
        for each, is_needed in zip(operands, needed, strict=True)
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.settings = inputs[7:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *inputs[:7])


def _of_operator(ctx: Any, gradient: Tensor, _kept: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    needed = [bool(each) for each in ctx.needs_input_grad[1:7]]
    found = torch.ops.neuron_moe.saving_experts_backward(gradient, *saved, *ctx.settings, needed)
    gradients = [each if is_needed else None for each, is_needed in zip(found, needed, strict=True)]
    return None, *gradients, None, None, None


_saving_operator.register_autograd(_of_operator, setup_context=_keep)


def _kept_shape(index_TK: Tensor, first_EHI: Tensor, save_percent: int) -> tuple[int, int]:
    return index_TK.numel() * save_percent // 100, first_EHI.shape[2]


class _WayBack:
    """The gradients, as they are gathered expert by expert."""

    def __init__(
        self,
        hidden_TH: Tensor,
        routing: LocalRouting,
        matrices: _Matrices,
        gradient_TH: Tensor,
        needed: tuple[bool, ...],
    ) -> None:
        self._hidden_TH, self._routing, self._matrices = hidden_TH, routing, matrices
        self._gradient_TH = gradient_TH.to(hidden_TH.dtype)
        self._hidden = (
            torch.zeros_like(hidden_TH, dtype=sum_dtype(hidden_TH)) if needed[0] else None
        )
        affinities_TK = routing.expert_affinities_TK
        self._affinities = torch.zeros_like(affinities_TK) if needed[1] else None
        self._weights = _Matrices(
            *(
                torch.zeros_like(each) if is_needed and each is not None else None
                for each, is_needed in zip(matrices, needed[2:], strict=True)
            )
        )

    def go(
        self, order_n: Tensor, run: _Run, projected_nI: Tensor | None, formula: ExpertFormula
    ) -> None:
        """Add what the rows of one expert give.

        Args:
            order_n: pair of each row.
            run: which rows they are.
            projected_nI: the kept result of the first projections.
            formula: of the experts.
        """
        matrices, scales_input = self._matrices, self._routing.scales_input
        token_n = order_n // self._routing.expert_affinities_TK.shape[1]
        input_nH = take_rows(self._hidden_TH, self._routing, order_n)
        output_nH = self._gradient_TH[token_n]
        affinity_n1 = self._routing.expert_affinities_TK.reshape(-1, 1)[order_n]
        if projected_nI is None:
            projected_nI = _project(input_nH, matrices.first_EHI, matrices.first_bias_EI, run)
        with torch.enable_grad():
            leaf_nI = projected_nI.detach().requires_grad_()
            activated_nI = activate(leaf_nI, formula)
        back_nI = output_nH @ _given(matrices.down_EIH)[run.expert].t()
        middle_nI = activated_nI.detach()
        if not scales_input:
            self._add_affinity(order_n, _dot(back_nI, middle_nI) + self._of_bias(output_nH, run))
            back_nI = (back_nI * affinity_n1).to(back_nI.dtype)
            output_nH = (output_nH * affinity_n1).to(output_nH.dtype)
        (back_nI,) = torch.autograd.grad(activated_nI, leaf_nI, back_nI)
        self._add_weights(run.expert, (input_nH, back_nI), (middle_nI, output_nH))
        if self._hidden is None and (self._affinities is None or not scales_input):
            return
        back_nH = back_nI @ _given(matrices.first_EHI)[run.expert].t()
        if scales_input:
            self._add_affinity(order_n, _dot(back_nH, self._hidden_TH[token_n]))
            back_nH = back_nH * affinity_n1
        if self._hidden is not None:
            self._hidden.index_add_(0, token_n, back_nH.to(self._hidden.dtype))

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return those of hidden states, affinities, and weights; None where nobody asked."""
        hidden = None if self._hidden is None else self._hidden.to(self._hidden_TH.dtype)
        return hidden, self._affinities, *self._weights

    def _of_bias(self, output_nH: Tensor, run: _Run) -> Tensor | float:
        bias_EH = self._matrices.down_bias_EH
        return 0.0 if bias_EH is None else _dot(output_nH, bias_EH[run.expert].expand_as(output_nH))

    def _add_affinity(self, order_n: Tensor, gradient_n: Tensor) -> None:
        if self._affinities is not None:
            flat = self._affinities.view(-1)
            flat[order_n] = gradient_n.to(flat.dtype)

    def _add_weights(
        self, expert: int, first: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]
    ) -> None:
        """Add the products of what went in, transposed, with what came back."""
        pairs = zip((first, down), (self._weights[:2], self._weights[2:]), strict=True)
        for (rows, back), (matrix, bias) in pairs:
            if matrix is not None:
                matrix[expert] += rows.t() @ back
            if bias is not None:
                bias[expert] += at_least_float32(back).sum(0).to(bias.dtype)


def _runs(index_TK: Tensor, num_experts: int, save_percent: int) -> tuple[Tensor, list[_Run]]:
    """Return the pairs in the order of their experts, and what is done in one go."""
    pairs = sort_pairs(index_TK, num_experts)
    counts = pairs.tokens_per_expert_E.tolist()
    num_rows = sum(counts)
    order_n = pairs.order_P[:num_rows]
    return order_n, list(_split(counts, num_rows * save_percent // 100))


def _split(counts: list[int], num_kept: int) -> Iterator[_Run]:
    """Yield the rows of each expert, parted where the kept ones end."""
    start = 0
    for expert, count in enumerate(counts):
        end = start + count
        middle = min(max(num_kept, start), end)
        if start < middle:
            yield _Run(expert, slice(start, middle), is_kept=True)
        if middle < end:
            yield _Run(expert, slice(middle, end), is_kept=False)
        start = end


def _project(
    rows_nk: Tensor, plain_Ekn: Tensor | None, bias_En: Tensor | None, run: _Run
) -> Tensor:
    product = rows_nk @ _given(plain_Ekn)[run.expert]
    return product if bias_En is None else product + bias_En[run.expert]


def _dot(one_nk: Tensor, other_nk: Tensor) -> Tensor:
    """Return the scalar products of rows, [n]."""
    return (at_least_float32(one_nk) * at_least_float32(other_nk)).sum(-1)


def _given(matrix: Tensor | None) -> Tensor:
    assert matrix is not None
    return matrix
