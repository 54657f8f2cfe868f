"""Token-to-block mapping: which token sits in which slot of which expert's block.

A pair is one (token, choice); a block is `block_size` slots that share one expert. All shapes are
static: the number of
blocks is the worst case over every routing, and what the data decides is values, never sizes.

Axes: T tokens, K choices per token, P = T * K pairs, E experts, N blocks, B slots per block.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from neuron_moe.errors import check_positive_int

NO_EXPERT = -1  # expert index of a padding token, and of a choice that belongs to another rank
_ROUNDING = 1e-9  # keeps a product of floats from starting a block of its own
PADDING_SLOT = -1  # token id of a slot that holds no token


class SortedPairs(NamedTuple):
    """Pairs in expert order, tokens in order within an expert, pairs without an expert last.

    Attributes:
        order_P: [T*K] int64, pair number (token * K + choice) at each sorted position.
        expert_P: [T*K] int64, its expert; num_experts where there is none.
        tokens_per_expert_E: [E] int64.
    """

    order_P: Tensor
    expert_P: Tensor
    tokens_per_expert_E: Tensor


class BlockMapping(NamedTuple):
    """The blocks of one routing.

    Attributes:
        token_position_to_id: [N*B] int32, token in each slot, -1 for padding.
        pair_of_slot: [N*B] int32, pair (token * K + choice) in each slot, -1 for padding.
        block_to_expert: [N] int32; blocks past num_valid_blocks name the last expert.
        num_valid_blocks: [] int32, blocks that hold a token.
        tokens_per_expert_E: [E] int64.
    """

    token_position_to_id: Tensor
    pair_of_slot: Tensor
    block_to_expert: Tensor
    num_valid_blocks: Tensor
    tokens_per_expert_E: Tensor


def num_blocks(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    block_size: int,
    *,
    pad_to_even: bool = False,
) -> int:
    """Return N, the most blocks any routing of `num_tokens` tokens can need.

    An expert's first block takes one pair, each further one `block_size` more, and an expert has at
    most one pair of a
    token. With P = T * min(K, E) and q = min(E, P):

        N = q + min((P - q) // B, q * (ceil(T / B) - 1))

    which is ceil((P - (E - 1)) / B) + E - 1, capped at P and at q * ceil(T / B).

    Args:
        num_tokens: T.
        top_k: K.
        num_experts: experts of this rank (E).
        block_size: B.
        pad_to_even: round N up to an even number (kernels that give each core every second block).
    """
    for name, value in (("top_k", top_k), ("num_experts", num_experts), ("block_size", block_size)):
        check_positive_int(name, value)
    if num_tokens == 0:
        return 0
    if not isinstance(num_tokens, torch.SymInt):  # a number of a graph that is captured
        check_positive_int("num_tokens", num_tokens)
    pairs = num_tokens * min(top_k, num_experts)
    hit = min(num_experts, pairs)
    per_expert = -(-num_tokens // block_size)
    blocks = hit + min((pairs - hit) // block_size, hit * (per_expert - 1))
    return blocks + blocks % 2 if pad_to_even else blocks


def sort_pairs(expert_index_TK: Tensor, num_experts: int) -> SortedPairs:
    """Sort the pairs of a routing by expert; a negative index is a pair without an expert.

    Args:
        expert_index_TK: [T, K] integer expert of this rank, or NO_EXPERT.
        num_experts: E.
    """
    flat_P = expert_index_TK.reshape(-1).to(torch.int64)
    key_P = torch.where(flat_P < 0, num_experts, flat_P)
    expert_P, order_P = torch.sort(key_P, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat_P.device)
    counts = counts.scatter_add(0, key_P, torch.ones_like(key_P))
    return SortedPairs(order_P, expert_P, counts[:num_experts])


def build_block_mapping(
    expert_index_TK: Tensor,
    num_experts: int,
    block_size: int,
    *,
    min_blocks: int = 0,
    pad_to_even: bool = False,
) -> BlockMapping:
    """Place every pair in a slot.

    Args:
        expert_index_TK: [T, K] integer expert of this rank, or NO_EXPERT; no expert twice for one
            token.
        num_experts: experts of this rank (E).
        block_size: B.
        min_blocks: N is at least this many.
        pad_to_even: round N up to an even number.

    Returns:
        The mapping, on the device of the index.
    """
    if expert_index_TK.ndim != 2 or expert_index_TK.is_floating_point():
        raise ValueError(
            f"expert_index: shape {list(expert_index_TK.shape)} {expert_index_TK.dtype} must be"
            " [T, K] integers. Pass Routing.expert_index_TK."
        )
    num_tokens, top_k = expert_index_TK.shape
    blocks = num_blocks(num_tokens, top_k, num_experts, block_size, pad_to_even=pad_to_even)
    blocks = max(blocks, min_blocks)
    device = expert_index_TK.device
    pairs = sort_pairs(expert_index_TK, num_experts)
    blocks_per_expert_E = (pairs.tokens_per_expert_E + (block_size - 1)) // block_size
    last_block_E = blocks_per_expert_E.cumsum(0)
    first_slot_E = (last_block_E - blocks_per_expert_E) * block_size
    first_position_E = pairs.tokens_per_expert_E.cumsum(0) - pairs.tokens_per_expert_E

    position_P = torch.arange(pairs.order_P.shape[0], device=device)
    shift_E1 = torch.nn.functional.pad(first_slot_E - first_position_E, (0, 1))
    slot_P = position_P + shift_E1[pairs.expert_P]
    num_slots = blocks * block_size
    slot_P = torch.where(
        pairs.expert_P < num_experts, slot_P, num_slots
    )  # the extra slot is cut off
    pair_of_slot = torch.full((num_slots + 1,), PADDING_SLOT, dtype=torch.int32, device=device)
    pair_of_slot = pair_of_slot.scatter(0, slot_P, pairs.order_P.to(torch.int32))[:num_slots]
    token_position_to_id = torch.where(pair_of_slot < 0, PADDING_SLOT, pair_of_slot // top_k)

    block_N = torch.arange(blocks, device=device)
    block_to_expert = (block_N.unsqueeze(1) >= last_block_E[:-1].unsqueeze(0)).sum(1)
    return BlockMapping(
        token_position_to_id.to(torch.int32),
        pair_of_slot,
        block_to_expert.to(torch.int32),
        last_block_E[-1].to(torch.int32),
        pairs.tokens_per_expert_E,
    )


@dataclass(frozen=True)
class PaddingOverhead:
    """Slots spent for nothing, as a share of the pairs that need one (1.0 = as many again).

    Attributes:
        pairs: (token, expert) pairs to compute.
        worst: with the static number of blocks, which covers every routing.
        expected: with the blocks that hold a token, experts drawn uniformly (computed, exact).
        actual: with the blocks of a given or recorded load; None without one.
    """

    pairs: float
    worst: float
    expected: float
    actual: float | None


def expected_valid_blocks(
    num_tokens: int, top_k: int, num_experts: int, block_size: int, num_routed: int | None = None
) -> float:
    """Return the mean number of blocks that hold a token, if each token draws K experts uniformly.

    Args:
        num_tokens: T.
        top_k: K.
        num_experts: experts of this rank.
        block_size: B.
        num_routed: experts of the whole model, if more than this rank holds.
    """
    share = min(1.0, top_k / (num_routed or num_experts))
    if share >= 1.0:
        return float(num_experts * -(-num_tokens // block_size))
    log_share, log_rest = math.log(share), math.log1p(-share)
    mean = 0.0
    for hits in range(1, num_tokens + 1):
        log_ways = (
            math.lgamma(num_tokens + 1) - math.lgamma(hits + 1) - math.lgamma(num_tokens - hits + 1)
        )
        chance = math.exp(log_ways + hits * log_share + (num_tokens - hits) * log_rest)
        mean += chance * -(-hits // block_size)
    return num_experts * mean


def padding_overhead(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    block_size: int,
    *,
    num_routed: int | None = None,
    tokens_per_expert: list[int] | None = None,
) -> PaddingOverhead:
    """Return the padding of the blockwise path at one block size.

    Args:
        num_tokens: T.
        top_k: K.
        num_experts: experts of this rank.
        block_size: B.
        num_routed: experts of the whole model, if more than this rank holds.
        tokens_per_expert: a load of any number of tokens, for the actual overhead: it is scaled to
            `num_tokens`.
    """
    pairs = num_tokens * top_k * num_experts / (num_routed or num_experts)
    blocks = num_blocks(num_tokens, top_k, num_experts, block_size)
    expected = expected_valid_blocks(num_tokens, top_k, num_experts, block_size, num_routed)
    actual = None
    if tokens_per_expert is not None and sum(tokens_per_expert) > 0:
        scale = pairs / sum(tokens_per_expert)
        used = sum(math.ceil(count * scale / block_size - _ROUNDING) for count in tokens_per_expert)
        actual = used * block_size / pairs - 1.0
    return PaddingOverhead(
        pairs, blocks * block_size / pairs - 1.0, expected * block_size / pairs - 1.0, actual
    )
