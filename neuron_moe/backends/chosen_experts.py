"""The experts that were chosen at all, each once: what the torch backend runs outside of graphs.

Axes: T tokens, K choices, P = T * K pairs with an expert of this rank, E experts of this rank, H
hidden, I intermediate.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe.activations import activate, at_least_float32, sum_dtype
from neuron_moe.backends import compiled_products
from neuron_moe.backends.expert_threads import run_side_by_side
from neuron_moe.blocks import sort_pairs
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting, Packed
from neuron_moe.weights.huge_pages import request_huge_pages
from neuron_moe.weights.packed import FEWEST_ROWS, PackedMatrices
from neuron_moe.weights.product_forms import (
    AT_ONCE_FORMS,
    COMPILED,
    FORMS,
    PACKED_FORMS,
    PARALLEL,
)

grouped_mm: Callable[..., Tensor] = getattr(functional, "grouped_mm", torch._grouped_mm)
_ROWS_PER_RUN = 256  # rows whose activations are computed in one call; keeps them in the cache
_PARTS_PER_THREAD = 4  # of experts side by side, so that all threads end at about the same time
_FEW_ROWS = 4  # of an expert on average, whose biases are gathered


class Run(NamedTuple):
    """Rows of some experts, one expert after the other.

    Attributes:
        experts: their numbers.
        counts: rows of each, at least one.
    """

    experts: list[int]
    counts: list[int]

    @property
    def num_rows(self) -> int:
        """Rows of all."""
        return sum(self.counts)

    @property
    def has_single_rows(self) -> bool:
        """Whether each expert has one row."""
        return len(self.counts) == self.num_rows


class Matrices(NamedTuple):
    """One projection of all experts.

    Attributes:
        plain_Ekn: [E, in, out], on the meta device where only packed ones are kept.
        plain: the same, expert by expert, without a gradient.
        packed: the same in the layout to multiply with; None: take the plain ones.
        bias_En: [E, out] or None.
    """

    plain_Ekn: Tensor
    plain: tuple[Tensor, ...]
    packed: Packed | None
    bias_En: Tensor | None


def chosen_experts(
    hidden_TH: Tensor, routing: LocalRouting, weights: ExpertWeights, form: str | None = None
) -> Tensor:
    """Return [T, H] float32 of any path; an expert nobody chose is not computed.

    Eager only, the choices leave the device.

    Args:
        hidden_TH: [T, H].
        routing: in the numbering of this rank.
        weights: of this rank.
        form: one of `product_forms.FORMS`, or of a custom kernel; None: what was settled for T
            tokens.
    """
    form = form or weights.product_form(hidden_TH.shape[0])
    if weights.wants_gradient(hidden_TH, routing.expert_affinities_TK):
        form = weights.own_form  # the others record none
    if form not in FORMS:
        compute = weights.product_forms.compute if weights.product_forms else None
        if compute is not None and not routing.scales_input and _all_are_here(routing):
            return compute(hidden_TH, routing)
        form = weights.own_form
    run, order_P = _sort(routing, weights.num_experts)
    if not run.experts:
        return hidden_TH.new_zeros(hidden_TH.shape, dtype=sum_dtype(hidden_TH))
    is_parallel, base = form.startswith(PARALLEL), form.removeprefix(PARALLEL)
    step = _Step(hidden_TH, routing, order_P, weights, form)
    joined = JoinedRows(run.num_rows, hidden_TH)
    if is_parallel:
        parts = _split_for_threads(run, 1 if base == "grouped" else _PARTS_PER_THREAD)
    else:
        parts = [run] if base in AT_ONCE_FORMS else _split(run, len(run.experts))
    tasks, start = [], 0
    for part in parts:
        tasks.append(partial(_compute_part, step, part, start, joined))
        start += part.num_rows
    if is_parallel and not torch.is_grad_enabled():
        run_side_by_side(tasks)
    else:
        for task in tasks:
            task()
    return combine(joined, order_P, routing)


def _all_are_here(routing: LocalRouting) -> bool:
    """Say whether every choice is an expert of this rank."""
    return int(routing.expert_index_TK.min()) >= 0


class _Step:
    """What all parts of a step have in common."""

    def __init__(
        self,
        hidden_TH: Tensor,
        routing: LocalRouting,
        order_P: Tensor | None,
        weights: ExpertWeights,
        form: str,
    ) -> None:
        self.hidden_TH, self.routing, self.order_P = hidden_TH, routing, order_P
        self.form, self.formula = form.removeprefix(PARALLEL), weights.formula
        self.first, self.down = _projections(weights, is_packed=form in PACKED_FORMS)


def _compute_part(step: _Step, part: "Run", start: int, joined: "JoinedRows") -> None:
    """Compute some experts, whose rows begin at `start`."""
    end = start + part.num_rows
    order_n = None if step.order_P is None else step.order_P[start:end]
    rows_nH = take_rows(step.hidden_TH, step.routing, order_n, slice(start, end))
    projected = multiply(rows_nH, step.first, part, step.form)
    inner_nI = activate(projected, step.formula, in_place=not torch.is_grad_enabled())
    joined.put(start, multiply(inner_nI, step.down, part, step.form, joined.place(start, end)))


def _sort(routing: LocalRouting, num_experts: int) -> tuple[Run, Tensor | None]:
    """Put the pairs into the order of their experts.

    Returns:
        The experts, and the pair number (token * K + choice) of each row; None where one token has
        its experts in the order of its choices.
    """
    if routing.expert_index_TK.shape[0] == 1:
        experts = routing.expert_index_TK[0].tolist()
        if min(experts) >= 0:
            return Run(experts, [1] * len(experts)), None
    pairs = sort_pairs(routing.expert_index_TK, num_experts)
    chosen = [(e, n) for e, n in enumerate(pairs.tokens_per_expert_E.tolist()) if n]
    run = Run([e for e, _ in chosen], [n for _, n in chosen])
    return run, pairs.order_P[: run.num_rows]


def take_rows(
    hidden_TH: Tensor, routing: LocalRouting, order_n: Tensor | None, place: slice | None = None
) -> Tensor:
    """Return the input of some rows, [n, H].

    Args:
        hidden_TH: [T, H].
        routing: of the tokens.
        order_n: pair of each row; None: rows of one token, in the order of its choices.
        place: of these rows among all, where there is no order.
    """
    affinities_TK = routing.expert_affinities_TK
    top_k = affinities_TK.shape[1]
    if order_n is None:
        affinity_n1 = affinities_TK.t() if place is None else affinities_TK.t()[place]
        rows_nH = hidden_TH.expand(affinity_n1.shape[0], -1)
    else:
        rows_nH = hidden_TH[order_n // top_k]
        affinity_n1 = affinities_TK.reshape(-1, 1)[order_n]
    return (rows_nH * affinity_n1).to(hidden_TH.dtype) if routing.scales_input else rows_nH


class JoinedRows:
    """The rows of all experts one after the other, in float32, and a row of zeros behind them.

    They are written to one piece of memory, in any order; where a gradient is recorded, they come
    in order and are joined at the end.
    """

    def __init__(self, num_rows: int, like_TH: Tensor) -> None:
        shape = (num_rows + 1, like_TH.shape[1])
        self._rows = request_huge_pages(like_TH.new_empty(shape, dtype=sum_dtype(like_TH)))
        self._recorded: list[Tensor] = []

    def place(self, start: int, end: int) -> Tensor:
        """Return the memory of some rows, to be written and then `put`."""
        return self._rows[start:end]

    def put(self, start: int, output_nH: Tensor) -> None:
        """Write rows to their place, from row `start` on, if they are not there yet."""
        if output_nH.data_ptr() == self._rows[start:].data_ptr():
            return
        if torch.is_grad_enabled() and output_nH.requires_grad:
            self._recorded.append(at_least_float32(output_nH))
            return
        self._rows[start : start + output_nH.shape[0]] = output_nH

    def rows(self) -> Tensor:
        """Return all rows but the one of zeros."""
        return torch.cat(self._recorded) if self._recorded else self._rows[:-1]

    def rows_and_zeros(self) -> Tensor:
        """Return all rows."""
        zeros_1H = self._rows[-1:].zero_()
        return torch.cat([*self._recorded, zeros_1H]) if self._recorded else self._rows


def combine(joined: JoinedRows, order_P: Tensor | None, routing: LocalRouting) -> Tensor:
    """Weigh and add the K rows of each token in float32.

    A bag of rows is gathered, weighed and added in one pass, several times as fast as in separate
    steps (measured).
    """
    affinities_TK = routing.expert_affinities_TK
    num_tokens, top_k = affinities_TK.shape
    weights_TK = torch.ones_like(affinities_TK) if routing.scales_input else affinities_TK
    if order_P is None:
        return weights_TK @ joined.rows()
    num_rows = order_P.shape[0]
    row_of_pair = order_P.new_full((num_tokens * top_k,), num_rows)
    row_of_pair[order_P] = torch.arange(num_rows, device=order_P.device)
    # Pairs without an expert read the row of zeros.
    return functional.embedding_bag(
        row_of_pair.view(num_tokens, top_k),
        joined.rows_and_zeros(),
        mode="sum",
        per_sample_weights=weights_TK,
    )


def _projections(weights: ExpertWeights, *, is_packed: bool) -> tuple[Matrices, Matrices]:
    down_bias_EH = weights.down_bias_EH
    if down_bias_EH is not None and weights.down_bias_scale != 1.0:
        down_bias_EH = down_bias_EH * weights.down_bias_scale
    packed = weights.packed_matrices(is_wanted=is_packed)
    first, down = weights.each_expert
    return (
        Matrices(weights.gate_up_proj_EHI, first, packed[0], weights.gate_up_bias_EI),
        Matrices(weights.down_proj_EIH, down, packed[1], down_bias_EH),
    )


def _split_for_threads(whole: Run, parts_per_thread: int) -> list[Run]:
    """Return parts that are computed side by side; grouped products want one for each thread."""
    count = -(-len(whole.experts) // (parts_per_thread * torch.get_num_threads()))
    if parts_per_thread > 1:
        return _split(whole, count)
    starts = range(0, len(whole.experts), count)
    return [Run(whole.experts[n : n + count], whole.counts[n : n + count]) for n in starts]


def _split(whole: Run, most_experts: int) -> list[Run]:
    """Return parts with few rows: one activation call serves many experts with few rows each."""
    parts, first, rows = [], 0, 0
    for number, count in enumerate(whole.counts):
        if number > first and (rows + count > _ROWS_PER_RUN or number - first == most_experts):
            parts.append(Run(whole.experts[first:number], whole.counts[first:number]))
            first, rows = number, 0
        rows += count
    return [*parts, Run(whole.experts[first:], whole.counts[first:])]


def multiply(
    rows_nk: Tensor, matrices: Matrices, run: Run, form: str, place_nk: Tensor | None = None
) -> Tensor:
    """Return rows [n, in] times the matrices of their experts, [n, out], in one of the forms.

    Matrices that are kept packed alone are multiplied packed whatever the form. Compiled products
    are float32, and are in `place_nk` if there is one; others have the dtype of the rows.
    """
    if form == COMPILED and _is_compiled(rows_nk, matrices):
        operands = (rows_nk, matrices.plain_Ekn, matrices.bias_En, *run)
        return compiled_products.multiply(*operands, place_nk)
    if matrices.packed is not None:
        product = _packed(rows_nk, matrices.packed, run, pads=form != "packed")
    elif form == "grouped":
        first = min(run.experts)
        within = Run([expert - first for expert in run.experts], run.counts)
        product = _grouped(rows_nk, matrices.plain_Ekn[first : max(run.experts) + 1], within)
    elif form == "batched" and run.has_single_rows:
        gathered_nNk = matrices.plain_Ekn.transpose(1, 2)[run.experts]
        product = torch.bmm(gathered_nNk, rows_nk.unsqueeze(2)).squeeze(2)
    elif form == "transposed":
        parts = zip(torch.split(rows_nk, run.counts), run.experts, strict=True)
        product = torch.cat([(matrices.plain_Ekn[e].t() @ rows.t()).t() for rows, e in parts])
    else:
        product = _plain(rows_nk, matrices, run)
    return product if matrices.bias_En is None else _add_bias(product, matrices.bias_En, run)


def _is_compiled(rows_nk: Tensor, matrices: Matrices) -> bool:
    """Say whether compiled products can be taken: matrices as they need them."""
    return matrices.packed is None and compiled_products.can_multiply(rows_nk, matrices.plain_Ekn)


def _add_bias(product_nk: Tensor, bias_En: Tensor, run: Run) -> Tensor:
    if torch.is_grad_enabled() or run.num_rows <= _FEW_ROWS * len(run.experts):
        expert_n = [e for e, n in zip(run.experts, run.counts, strict=True) for _ in range(n)]
        return product_nk + bias_En[expert_n]
    parts = torch.split(product_nk, run.counts)
    for part, expert in zip(parts, run.experts, strict=True):
        part.add_(bias_En[expert])
    return product_nk


def _plain(rows_nk: Tensor, matrices: Matrices, run: Run) -> Tensor:
    plain_Ekn = matrices.plain_Ekn
    rows = torch.split(rows_nk, run.counts)
    if torch.is_grad_enabled() and (rows_nk.requires_grad or plain_Ekn.requires_grad):
        parts = zip(rows, run.experts, strict=True)
        return torch.cat([each @ plain_Ekn[expert] for each, expert in parts])
    product = rows_nk.new_empty((rows_nk.shape[0], plain_Ekn.shape[2]))
    places = torch.split(product, run.counts)
    for each, place, expert in zip(rows, places, run.experts, strict=True):
        torch.mm(each, matrices.plain[expert], out=place)
    return product


def _packed(rows_nk: Tensor, packed: Packed, run: Run, *, pads: bool) -> Tensor:
    multiply = _multiply_packed
    if isinstance(packed, PackedMatrices):
        multiply = partial(_multiply_packed, pads=pads)
        if pads and run.has_single_rows:  # pad all rows in one call, not each in its own
            padded = functional.pad(rows_nk.unsqueeze(1), (0, 0, 0, FEWEST_ROWS - 1)).unbind()
            parts = zip(padded, run.experts, strict=True)
            return torch.cat([multiply(rows, packed, expert)[:1] for rows, expert in parts])
    parts = zip(torch.split(rows_nk, run.counts), run.experts, strict=True)
    return torch.cat([multiply(rows, packed, expert) for rows, expert in parts])


def _multiply_packed(rows_nk: Tensor, packed: Packed, expert: int, **options: bool) -> Tensor:
    if torch.is_grad_enabled() and rows_nk.requires_grad:
        product: Tensor = _PackedProduct.apply(rows_nk, packed, expert, options)  # type: ignore[no-untyped-call]
        return product
    return packed.multiply(rows_nk, expert, **options)


class _PackedProduct(torch.autograd.Function):
    """Rows times a packed matrix; the gradient of the rows takes the matrix unpacked."""

    @staticmethod
    def forward(
        ctx: Any, rows_nk: Tensor, packed: Packed, expert: int, options: dict[str, bool]
    ) -> Tensor:
        ctx.matrix = packed, expert
        return packed.multiply(rows_nk, expert, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        packed, expert = ctx.matrix
        (gradient_nk,) = gradients
        return gradient_nk @ packed[expert].t(), None, None, None


def _grouped(rows_nk: Tensor, plain_Ekn: Tensor, run: Run) -> Tensor:
    counts = [0] * plain_Ekn.shape[0]
    for expert, count in zip(run.experts, run.counts, strict=True):
        counts[expert] = count
    ends_E = torch.tensor(counts, device=rows_nk.device).cumsum(0, dtype=torch.int32)
    if run.experts == sorted(run.experts):
        return grouped_mm(rows_nk.contiguous(), plain_Ekn, offs=ends_E)
    order_n = torch.tensor(run.experts, device=rows_nk.device).argsort()  # of one row each
    product = grouped_mm(rows_nk[order_n], plain_Ekn, offs=ends_E)
    return torch.empty_like(product).index_copy_(0, order_n, product)
