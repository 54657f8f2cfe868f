"""What a caller chose for each token: experts and affinities, checked and put into one form.

Axes: T tokens, K choices, E experts of the model.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe.activations import at_least_float32
from neuron_moe.blocks import NO_EXPERT, sort_pairs
from neuron_moe.device import can_look


def check_choices(expert_index: Tensor, num_tokens: int, num_experts: int) -> None:
    """Refuse choices that are not experts, or of another number of tokens."""
    if expert_index.shape[0] != num_tokens:
        raise ValueError(
            f"expert_index: shape {tuple(expert_index.shape)} must have one row for each of the"
            f" {num_tokens} tokens of hidden_states. Route the same tokens."
        )
    if expert_index.numel() == 0:
        return
    if expert_index.is_floating_point() or expert_index.is_complex():
        raise ValueError(
            f"expert_index: dtype {expert_index.dtype} must be an integer one. Pass the choices,"
            " not the affinities."
        )
    if not can_look(expert_index):
        return
    largest = int(expert_index.max())
    if largest >= num_experts:
        raise ValueError(
            f"expert_index: expert {largest} must be below num_experts={num_experts}. Number"
            " experts from 0; -1 is none."
        )


def check_no_repeats(expert_index: Tensor, padding_mask: Tensor | None) -> None:
    """Refuse real tokens that choose an expert twice: blocks hold a token once."""
    if not can_look(expert_index) or expert_index.numel() == 0:
        return
    sorted_TK = expert_index.sort(-1).values
    twice_T = ((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any(-1)
    twice_T = _among_real_tokens(twice_T, padding_mask)
    if bool(twice_T.any()):
        token = int(twice_T.int().argmax())
        raise ValueError(
            f"expert_index: token {token} chooses {expert_index[token].tolist()}, but must choose"
            " an expert once at most. Add up its affinities, and fill up with -1."
        )


def _among_real_tokens(found_T: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return what was found of real tokens; a mask of another size is refused later."""
    if padding_mask is None or padding_mask.numel() != found_T.numel():
        return found_T
    return found_T & (padding_mask.reshape(-1) != 0)


def check_mask_values(padding_mask: Tensor) -> None:
    """Refuse float masks that are not zeros and positive numbers, such as those to be added."""
    if not can_look(padding_mask) or not padding_mask.is_floating_point():
        return
    if bool((~(padding_mask >= 0)).any()):  # catches NaN too
        worst = padding_mask.min()
        raise ValueError(
            f"padding_mask: holds {float(worst)}, but must be nonzero for real tokens and 0 for"
            " padding. Pass (mask == 0) for a mask that is added to scores, 0 and -inf."
        )


def choice_affinities(affinities: Tensor, index_TK: Tensor, num_experts: int) -> Tensor:
    """Return float32 [T, K] affinities from [T, K], or from NxD's dense [T, E] where E > K.

    Where E == K both have one shape: `check_one_reading` finds which.
    """
    num_tokens, top_k = index_TK.shape
    if tuple(affinities.shape) == (num_tokens, top_k):
        is_float32 = affinities.dtype == torch.float32
        return affinities if is_float32 else at_least_float32(affinities)
    if tuple(affinities.shape) == (num_tokens, num_experts):
        return from_dense(affinities, index_TK, num_experts)
    raise ValueError(
        f"expert_affinities: shape {tuple(affinities.shape)} must be [T, top_k] ="
        f" {[num_tokens, top_k]}"
        f" or dense [T, num_experts] = {[num_tokens, num_experts]}."
    )


def check_one_reading(
    affinities: Tensor, expert_index: Tensor, num_experts: int, padding_mask: Tensor | None
) -> None:
    """Refuse affinities that would mean another thing as dense ones: where E == K, both are [T, E].

    Where every real token has its choices in the order of the experts, both mean the same.
    """
    top_k = expert_index.shape[-1]
    if not can_look(expert_index) or top_k < 2 or top_k != num_experts:
        return
    in_order_K = torch.arange(top_k, device=expert_index.device)
    is_elsewhere_T = ((expert_index >= 0) & (expert_index != in_order_K)).any(-1)
    is_elsewhere_T = _among_real_tokens(is_elsewhere_T, padding_mask)
    if affinities.shape == expert_index.shape and bool(is_elsewhere_T.any()):
        raise ValueError(
            f"expert_affinities: {list(affinities.shape)} may be [T, top_k] in the order of the"
            f" choices or NxD's dense [T, num_experts]: both are {top_k} wide. Pass dense ones as"
            f" expert_affinities_masked_full, or choices in the order 0 to {top_k - 1}."
        )


def from_dense(affinities: Tensor, index_TK: Tensor, num_experts: int) -> Tensor:
    """Return float32 [T, K] affinities of the choices from dense [T, E]."""
    expected = (index_TK.shape[0], num_experts)
    if tuple(affinities.shape) != expected:
        raise ValueError(
            f"expert_affinities_masked_full: shape {tuple(affinities.shape)} must be {expected},"
            " [T, num_experts]. Pass affinities of the choices alone as expert_affinities."
        )
    return at_least_float32(affinities).gather(1, index_TK.to(torch.int64).clamp(min=0))


def drop_padding(
    index_TK: Tensor, affinities_TK: Tensor, padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Take the experts away from padding tokens; make the affinity of no expert zero."""
    is_real_TK = index_TK >= 0
    if padding_mask is not None:
        if padding_mask.numel() != index_TK.shape[0]:
            raise ValueError(
                f"padding_mask: shape {tuple(padding_mask.shape)} must have one entry for each of"
                f" the"
                f" {index_TK.shape[0]} tokens."
            )
        is_real_TK = is_real_TK & (padding_mask.reshape(-1, 1) != 0)
    return (
        torch.where(is_real_TK, index_TK, NO_EXPERT),
        torch.where(is_real_TK, affinities_TK, 0.0),
    )


def fits_capacity(index_TK: Tensor, num_experts: int, factor: float) -> Tensor:
    """Return [T, K] bool: within the first ceil(T * K * factor / E) choices of its expert."""
    num_tokens, top_k = index_TK.shape
    room = math.ceil(num_tokens * top_k * factor / num_experts)
    pairs = sort_pairs(index_TK, num_experts)
    counts_E1 = functional.pad(pairs.tokens_per_expert_E, (0, 1))
    first_E1 = counts_E1.cumsum(0) - counts_E1
    position_P = torch.arange(pairs.order_P.shape[0], device=index_TK.device)
    rank_P = position_P - first_E1[pairs.expert_P]
    fits_P = torch.zeros_like(rank_P, dtype=torch.bool).scatter(0, pairs.order_P, rank_P < room)
    return fits_P.view(num_tokens, top_k)
