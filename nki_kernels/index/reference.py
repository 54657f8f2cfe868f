"""Reference of index_blocks: the counting sort, pair by pair."""

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Mapping(NamedTuple):
    """The outputs of the kernel, int32; -1 is padding, or no expert."""

    token_position_to_id: Array
    pair_of_slot: Array
    block_to_expert: Array
    num_valid_blocks: Array
    tokens_per_expert: Array
    slot_of_pair_TK: Array


def index_blocks_ref(
    index_TK: Array, num_experts: int, block_size: int, num_blocks: int
) -> Mapping:
    """Place each pair of [T, K] choices in the next slot of its expert's blocks.

    A number that is no expert's, as -1, is no choice.
    """
    counts_E = np.array([(index_TK == expert).sum() for expert in range(num_experts)])
    last_block_E = np.cumsum(-(-counts_E // block_size))
    next_slot_E = np.concatenate(([0], last_block_E[:-1])) * block_size
    slot_of_pair = np.full(index_TK.size, -1)
    pair_of_slot = np.full(num_blocks * block_size, -1)
    for pair, expert in enumerate(index_TK.reshape(-1)):
        if 0 <= expert < num_experts:
            slot_of_pair[pair] = next_slot_E[expert]
            pair_of_slot[next_slot_E[expert]] = pair
            next_slot_E[expert] += 1
    token = np.where(pair_of_slot < 0, -1, pair_of_slot // index_TK.shape[1])
    block = np.arange(num_blocks)[:, None]
    arrays = (
        token,
        pair_of_slot,
        (block >= last_block_E[:-1]).sum(1),
        last_block_E[-1:],
        counts_E,
        slot_of_pair.reshape(index_TK.shape),
    )
    return Mapping(*(array.astype(np.int32) for array in arrays))
