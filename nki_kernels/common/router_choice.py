"""The choice of a router: from the logits of a tile of tokens to experts and affinities.

The stages that every router kernel ends with, on tiles in SBUF with tokens on the partitions.
`pick` finds the experts, `weigh` their affinities: whoever needs the experts at once calls the one,
starts what waits for it, and calls the other. Of many tiles, `begin_weights` does what is one
tile's, and `finish_weights` the rest for all of them: short instructions cost as much as long ones.

    scores = act(logits); ranked = scores + selection_bias, groups outside the chosen ones filled
    index = the K largest of ranked, or of the logits where nothing changes the ranks; the lower
        expert wins a tie
    affinities = act(chosen logits) or scores[index]; / (sum + renormalize_eps); * scaling

Sources: neuron_moe.router has the family and its models; top-8 instructions: nki.isa.max8.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import apply_two
from nki_kernels.common.chip import BANK_FLOATS
from nki_kernels.common.formula import ROUTER_ACTIVATIONS, RouterFormula

MAX_TOP_K = 32
MAX_EXPERTS = 2 * BANK_FLOATS  # logits of a token take two banks
AT_ONCE = 8  # values per max8 (nki.isa.max8), and the fewest it takes
LOWEST = -3.4028234663852886e38  # below every score
_HIGHEST = 3.4028234663852886e38  # equal to no score


def check_router_formula(formula: RouterFormula, num_experts: int) -> None:
    """Raise ValueError unless the stages take this router over E experts."""
    if not 2 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts={num_experts}: must be 2 to {MAX_EXPERTS}.")
    if not 1 <= formula.top_k <= min(MAX_TOP_K, num_experts):
        raise ValueError(
            f"top_k={formula.top_k}: must be 1 to {MAX_TOP_K}, and at most"
            f" num_experts={num_experts}."
        )
    if formula.act_fn not in ROUTER_ACTIVATIONS:
        raise ValueError(
            f"act_fn={formula.act_fn!r}: must be one of {', '.join(ROUTER_ACTIVATIONS)}."
        )
    grouped = formula.n_group > 1
    if formula.act_over_topk and (formula.has_selection_bias or grouped):
        raise ValueError(
            "act_over_topk=True: the choice is made on logits, so a selection bias and groups"
            " (which rank scores) do not apply. Drop one of them."
        )
    if not grouped:
        return
    size, rest = divmod(num_experts, formula.n_group)
    if rest or size < 2:
        raise ValueError(
            f"n_group={formula.n_group}: num_experts={num_experts} must split into equal groups of"
            " at least 2 experts."
        )
    if not 1 <= formula.topk_group <= formula.n_group:
        raise ValueError(
            f"topk_group={formula.topk_group}: must be 1 to n_group={formula.n_group}."
        )
    if formula.top_k > formula.topk_group * size:
        raise ValueError(
            f"top_k={formula.top_k}: topk_group={formula.topk_group} groups of {size} experts"
            f" offer only {formula.topk_group * size}. Raise topk_group or lower top_k."
        )
    if formula.out_of_group_fill not in (0.0, LOWEST, float("-inf")):
        raise ValueError(
            f"out_of_group_fill={formula.out_of_group_fill!r}: must be 0.0 or float('-inf')."
        )


@dataclass
class Picked(nl.NKIObject):
    """The experts of a tile of tokens; the first K columns are theirs, best first."""

    values_sb: nl.ndarray  # [rows, K filled up to eights] float32, what they were chosen by
    position_sb: nl.ndarray  # [rows, K filled up to eights] uint32, the experts
    scores_sb: nl.ndarray  # [rows, E] float32, act(logits), if they were chosen by scores


def finish_logits(logits_ps: nl.ndarray, bias_sb: nl.ndarray, formula: RouterFormula) -> nl.ndarray:
    """Return logits [rows, max(E, 8)] float32 in SBUF, biased; columns past E hold LOWEST.

    Args:
        logits_ps: [rows, E] float32 in PSUM.
        bias_sb: [128, E] float32, read if the formula has a bias.
        formula: the router.
    """
    rows, num_experts = logits_ps.shape
    logits_sb = nl.ndarray((rows, max(AT_ONCE, num_experts)), nl.float32, buffer=nl.sbuf)
    # max8 reads eight columns at least.
    if num_experts < AT_ONCE:
        nisa.memset(dst=logits_sb[:, num_experts:AT_ONCE], value=LOWEST)
    real = logits_sb[:, 0:num_experts]
    if formula.has_bias:
        bias = bias_sb[0:rows, :]
        nisa.tensor_tensor(dst=real, data1=logits_ps, data2=bias, op=nl.add)
    else:
        nisa.tensor_copy(dst=real, src=logits_ps)
    return logits_sb


def ranks_scores(formula: RouterFormula) -> bool:
    """Whether experts are chosen by their scores, which something changes before they are ranked.

    Otherwise the logits choose: activations are monotone, so they rank alike, and logits never
    saturate into ties.
    """
    return formula.has_selection_bias or formula.n_group > 1


def num_best(formula: RouterFormula) -> int:
    """Return how many experts are found at once: K, filled up to eights."""
    return (formula.top_k + AT_ONCE - 1) // AT_ONCE * AT_ONCE


def pick(
    logits_sb: nl.ndarray, selection_bias_sb: nl.ndarray, num_experts: int, formula: RouterFormula
) -> Picked:
    """Return the experts of a tile's tokens.

    Args:
        logits_sb: [rows, max(E, 8)] float32 of `finish_logits`.
        selection_bias_sb: [128, E] float32, read if the formula has a selection bias.
        num_experts: E.
        formula: the router.
    """
    rows, count = logits_sb.shape[0], num_best(formula)
    scores_sb, ranked_sb = _score_all(logits_sb, selection_bias_sb, num_experts, formula)
    best_sb = nl.ndarray((rows, count), nl.float32, buffer=nl.sbuf)
    position_sb = nl.ndarray((rows, count), nl.uint32, buffer=nl.sbuf)
    _find_largest(best_sb, position_sb, ranked_sb)
    return Picked(best_sb, position_sb, scores_sb)


def pick_into(
    best: nl.ndarray,
    positions: nl.ndarray,
    logits: nl.ndarray,
    selection_bias_sb: nl.ndarray,
    num_experts: int,
    formula: RouterFormula,
) -> Picked:
    """Do what `pick` does, and write to views of float32 and uint32, K filled up to eights."""
    scores_sb, ranked_sb = _score_all(logits, selection_bias_sb, num_experts, formula)
    _find_largest(best, positions, ranked_sb)
    return Picked(best, positions, scores_sb)


def _score_all(
    logits: nl.ndarray, selection_bias_sb: nl.ndarray, num_experts: int, formula: RouterFormula
) -> tuple[nl.ndarray, nl.ndarray]:
    """Return scores [rows, E] and what is ranked [rows, max(E, 8)]: the logits if they are."""
    if not ranks_scores(formula):
        return logits, logits
    rows, width = logits.shape
    scores_sb = nl.ndarray((rows, num_experts), nl.float32, buffer=nl.sbuf)
    _activate_all(scores_sb, logits[:, 0:num_experts], formula)
    return scores_sb, _rank(scores_sb, width, selection_bias_sb, formula)


def write_index(chosen: nl.ndarray, positions: nl.ndarray, num_experts: int) -> None:
    """Write the experts at the K largest positions, views of as many 32-bit integers.

    A token of NaNs finds none of its values again; it gets the last expert, so that nobody reads
    past the experts because of it.
    """
    nisa.tensor_scalar(dst=chosen, data=positions, op0=nl.minimum, operand0=float(num_experts - 1))


def weigh(
    weights: nl.ndarray,
    picked: Picked,
    logits_sb: nl.ndarray,
    num_experts: int,
    formula: RouterFormula,
) -> None:
    """Write the K affinities (float32) of a tile's tokens, a view [rows, K]."""
    rows = logits_sb.shape[0]
    best = picked.values_sb[:, 0 : formula.top_k]
    if is_softmax_of_logits(formula):
        summed = best if formula.act_over_topk else logits_sb[:, 0:num_experts]
        _softmax_of(weights, best, summed, picked.values_sb[:, 0:1])
    else:
        _score(weights, picked, num_experts, formula)
    if formula.renormalize:
        sum_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=sum_sb, op=nl.add, data=weights, axis=1)
        nisa.tensor_scalar(dst=sum_sb, data=sum_sb, op0=nl.add, operand0=formula.renormalize_eps)
        nisa.reciprocal(dst=sum_sb, data=sum_sb)
        apply_two(weights, weights, nl.multiply, sum_sb, nl.multiply, formula.routed_scaling_factor)
    else:
        _scale(weights, formula)


def is_softmax_of_logits(formula: RouterFormula) -> bool:
    """Whether affinities are exponents of logits, to be divided by their sums."""
    return not ranks_scores(formula) and formula.act_fn == "softmax"


def begin_weights(
    weights: nl.ndarray,
    sums: nl.ndarray,
    shifts: nl.ndarray,
    picked: Picked,
    logits: nl.ndarray,
    num_experts: int,
    formula: RouterFormula,
) -> None:
    """Write what affinities need of the scores of all experts; `finish_weights` does the rest.

    Args:
        weights: scores of the K experts, written if `ranks_scores`; [rows, K] float32.
        sums: of all exponents, [rows, 1] float32, written if `sums_all`.
        shifts: minus the largest logit, likewise.
        picked: of the tile.
        logits: [rows, max(E, 8)] float32.
        num_experts: E.
        formula: the router.
    """
    if ranks_scores(formula):
        _score(weights, picked, num_experts, formula)
    elif sums_all(formula):
        _sum_exponents(sums, shifts, logits[:, 0:num_experts], picked.values_sb[:, 0:1])


def sums_all(formula: RouterFormula) -> bool:
    """Whether affinities are divided by a sum over all experts, not over the chosen ones."""
    return is_softmax_of_logits(formula) and not formula.act_over_topk


def finish_weights(
    weights: nl.ndarray,
    best: nl.ndarray,
    sums_sb: nl.ndarray,
    shifts_sb: nl.ndarray,
    formula: RouterFormula,
) -> None:
    """Write the affinities of many tiles at once, after `begin_weights` for each.

    Args:
        weights: [rows, tiles, K] float32.
        best: [rows, tiles, K] float32, what experts were chosen by.
        sums_sb: [rows, tiles] float32, overwritten.
        shifts_sb: likewise.
        formula: the router.
    """
    if is_softmax_of_logits(formula):
        if formula.act_over_topk:
            nisa.tensor_scalar(dst=shifts_sb, data=best[:, :, 0], op0=nl.multiply, operand0=-1.0)
        each = shifts_sb.expand_dim(2).broadcast(2, weights.shape[2])
        nisa.tensor_tensor(
            dst=weights, data1=best, data2=each, op=nl.add, engine=nisa.engine.gpsimd
        )
        nisa.activation(dst=weights, op=nl.exp, data=weights)
        if formula.act_over_topk:
            nisa.tensor_reduce(dst=sums_sb, op=nl.add, data=weights, axis=2)
        _divide(weights, sums_sb)
    elif not ranks_scores(formula):
        _activate_each(weights, best, formula)
    if formula.renormalize:
        nisa.tensor_reduce(dst=sums_sb, op=nl.add, data=weights, axis=2)
        nisa.tensor_scalar(dst=sums_sb, data=sums_sb, op0=nl.add, operand0=formula.renormalize_eps)
        _divide(weights, sums_sb)
    _scale(weights, formula)


def _divide(weights: nl.ndarray, sums_sb: nl.ndarray) -> None:
    """Divide the K weights of each token by its sum, which is overwritten."""
    nisa.reciprocal(dst=sums_sb, data=sums_sb)
    each = sums_sb.expand_dim(2).broadcast(2, weights.shape[2])
    # GpSimd, which has less to do.
    nisa.tensor_tensor(
        dst=weights, data1=weights, data2=each, op=nl.multiply, engine=nisa.engine.gpsimd
    )


def _scale(weights: nl.ndarray, formula: RouterFormula) -> None:
    """Multiply by the constant of the formula, if it has one."""
    if formula.routed_scaling_factor != 1.0:
        nisa.tensor_scalar(
            dst=weights, data=weights, op0=nl.multiply, operand0=formula.routed_scaling_factor
        )


def _score(weights: nl.ndarray, picked: Picked, num_experts: int, formula: RouterFormula) -> None:
    """Write the scores of the K experts, [rows, K]."""
    if not ranks_scores(formula):
        _activate_each(weights, picked.values_sb[:, 0 : formula.top_k], formula)
        return
    position_sb = nl.ndarray(weights.shape, nl.uint32, buffer=nl.sbuf)
    write_index(position_sb, picked.position_sb[:, 0 : formula.top_k], num_experts)
    nisa.nc_n_gather(dst=weights, data=picked.scores_sb, indices=position_sb)


def _softmax_of(
    weights: nl.ndarray, values: nl.ndarray, summed: nl.ndarray, largest_value: nl.ndarray
) -> None:
    """Write exp(values - largest) / sum(exp(summed - largest)), row by row."""
    rows = values.shape[0]
    shift_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    sum_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    _sum_exponents(sum_sb, shift_sb, summed, largest_value)
    nisa.reciprocal(dst=sum_sb, data=sum_sb)
    nisa.activation(dst=weights, op=nl.exp, data=values, bias=shift_sb)
    nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=sum_sb)


def _sum_exponents(
    sums: nl.ndarray, shift_sb: nl.ndarray, summed: nl.ndarray, largest_value: nl.ndarray
) -> None:
    """Write -largest and the sum of exp(summed - largest), [rows, 1] each."""
    nisa.tensor_scalar(dst=shift_sb, data=largest_value, op0=nl.multiply, operand0=-1.0)
    all_sb = nl.ndarray(summed.shape, nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(
        dst=all_sb, op=nl.exp, data=summed, reduce_op=nl.add, reduce_res=sums, bias=shift_sb
    )


def _activate_all(scores_sb: nl.ndarray, logits: nl.ndarray, formula: RouterFormula) -> None:
    """Write act(logits) over all experts, [rows, E]."""
    if formula.act_fn != "softmax":
        _activate_each(scores_sb, logits, formula)
        return
    largest_sb = nl.ndarray((logits.shape[0], 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest_sb, op=nl.maximum, data=logits, axis=1)
    _softmax_of(scores_sb, logits, logits, largest_sb)


def _activate_each(dst: nl.ndarray, data: nl.ndarray, formula: RouterFormula) -> None:
    """Write an activation that takes each logit by itself."""
    if formula.act_fn == "sigmoid":
        nisa.activation(dst=dst, op=nl.sigmoid, data=data)
        return
    nisa.activation(dst=dst, op=nl.softplus, data=data)
    # A root of the Scalar engine is not defined for the smallest numbers.
    nisa.tensor_scalar(dst=dst, data=dst, op0=nl.power, operand0=0.5, engine=nisa.engine.gpsimd)


def _rank(
    scores_sb: nl.ndarray, width: int, selection_bias_sb: nl.ndarray, formula: RouterFormula
) -> nl.ndarray:
    """Return what the choice is made on, [rows, width]: biased scores, other groups filled."""
    rows, num_experts = scores_sb.shape
    biased_sb = nl.ndarray((rows, width), nl.float32, buffer=nl.sbuf)
    if num_experts < width:
        nisa.memset(dst=biased_sb, value=LOWEST)
    biased = biased_sb[:, 0:num_experts]
    if formula.has_selection_bias:
        bias = selection_bias_sb[0:rows, :]
        nisa.tensor_tensor(dst=biased, data1=scores_sb, data2=bias, op=nl.add)
    else:
        nisa.tensor_copy(dst=biased, src=scores_sb)
    if formula.n_group == 1:
        return biased_sb
    size = num_experts // formula.n_group
    keep_sb = _choose_groups(biased, formula, size)
    keep = keep_sb[:, 0 : formula.n_group].expand_dim(2).broadcast(2, size)
    masked_sb = nl.ndarray((rows, width), nl.float32, buffer=nl.sbuf)
    if num_experts < width:
        nisa.memset(dst=masked_sb[:, num_experts:width], value=LOWEST)
    masked = masked_sb[:, 0:num_experts]
    # -inf as a finite number: no score is as low, and no arithmetic can make it NaN.
    nisa.memset(dst=masked, value=max(formula.out_of_group_fill, LOWEST))
    grouped = masked.reshape_dim(1, (formula.n_group, size))
    source = biased.reshape_dim(1, (formula.n_group, size))
    nisa.tensor_copy_predicated(dst=grouped, src=source, predicate=keep)
    return masked_sb


def _choose_groups(biased: nl.ndarray, formula: RouterFormula, size: int) -> nl.ndarray:
    """Return uint32 [rows, max(n_group, 8)], nonzero for the topk_group best groups."""
    rows = biased.shape[0]
    num_groups = formula.n_group
    groups = biased.reshape_dim(1, (num_groups, size))
    if size < AT_ONCE:
        group_sb = nl.ndarray((rows, num_groups, AT_ONCE), nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=group_sb, value=LOWEST)
        nisa.tensor_copy(dst=group_sb[:, :, 0:size], src=groups)
        groups = group_sb
    best_sb = nl.ndarray((rows, num_groups, AT_ONCE), nl.float32, buffer=nl.sbuf)
    for group in range(num_groups):
        nisa.max8(dst=best_sb[:, group, :], src=groups[:, group, :])
    width = max(AT_ONCE, num_groups)
    score_sb = nl.ndarray((rows, width), nl.float32, buffer=nl.sbuf)
    if num_groups < width:
        nisa.memset(dst=score_sb, value=LOWEST)
    # The score of a group is the sum of its two best experts.
    nisa.tensor_tensor(
        dst=score_sb[:, 0:num_groups], data1=best_sb[:, :, 0], data2=best_sb[:, :, 1], op=nl.add
    )
    marked_sb = score_sb
    for first in range(0, formula.topk_group, AT_ONCE):
        marked_sb = _remove_largest(marked_sb, min(AT_ONCE, formula.topk_group - first))
    keep_sb = nl.ndarray((rows, width), nl.uint32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=keep_sb, data1=marked_sb, data2=score_sb, op=nl.not_equal)
    return keep_sb


def _remove_largest(values_sb: nl.ndarray, count: int) -> nl.ndarray:
    """Return a copy in which the `count` largest (up to 8), lowest position first, are LOWEST."""
    rows, width = values_sb.shape
    best_sb = nl.ndarray((rows, AT_ONCE), nl.float32, buffer=nl.sbuf)
    nisa.max8(dst=best_sb, src=values_sb)
    # What is not to be removed is replaced by a value that matches nothing.
    if count < AT_ONCE:
        nisa.memset(dst=best_sb[:, count:AT_ONCE], value=_HIGHEST)
    rest_sb = nl.ndarray((rows, width), nl.float32, buffer=nl.sbuf)
    nisa.nc_match_replace8(dst=rest_sb, data=values_sb, vals=best_sb, imm=LOWEST)
    return rest_sb


def _find_largest(best: nl.ndarray, positions: nl.ndarray, values: nl.ndarray) -> None:
    """Write the largest values and their positions, the lower position first.

    Args:
        best: [rows, a multiple of 8], so many are written.
        positions: likewise, uint32.
        values: [rows, 8 or more].
    """
    rest = values
    for first in range(0, best.shape[1], AT_ONCE):
        if first > 0:
            rest = _remove_largest(rest, AT_ONCE)
        eight = best[:, first : first + AT_ONCE]
        nisa.max8(dst=eight, src=rest)
        nisa.nc_find_index8(dst=positions[:, first : first + AT_ONCE], data=rest, vals=eight)
