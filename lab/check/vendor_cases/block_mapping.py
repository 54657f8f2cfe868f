"""Routing tables of the vendor's blockwise prefill kernels."""

import dataclasses
import math

import numpy as np

from lab.check.vendor_cases.inputs import Draw


@dataclasses.dataclass(frozen=True, slots=True)
class BlockMapping:
    """Who computes what.

    Attributes:
        mask_TE: [T, E] 1.0 where the token goes to the expert.
        token_position_to_id: [N*B] int32, token of each slot; padding is T, or -1 when tokens are
            skipped.
        block_to_expert: [N] int32; padding blocks belong to the last expert.
        num_padding_blocks: blocks without a token.
    """

    mask_TE: np.ndarray
    token_position_to_id: np.ndarray
    block_to_expert: np.ndarray
    num_padding_blocks: int

    @property
    def num_blocks(self) -> int:
        """Return N."""
        return int(self.block_to_expert.size)

    def conditions(self, extra: int) -> np.ndarray:
        """Return [N + extra] int32: 1 for a block with tokens, 0 for padding blocks and the
        trailing entries.
        """
        live = self.num_blocks - self.num_padding_blocks
        return (np.arange(self.num_blocks + extra) < live).astype(np.int32)


def num_blocks(tokens: int, top_k: int, experts: int, block_size: int, multiple: int = 1) -> int:
    """Return the static block count: enough for every routing, rounded up to a multiple."""
    count = math.ceil((tokens * top_k - (experts - 1)) / block_size) + experts - 1
    return math.ceil(count / multiple) * multiple


def map_blocks(
    draw: Draw,
    tokens: int,
    top_k: int,
    experts: int,
    block_size: int,
    blocks: int,
    skip_token: bool,
) -> BlockMapping:
    """Route every token to distinct experts drawn uniformly (to all of them when E < K), and pack
    them in blocks.
    """
    chosen_TK = draw.choices(tokens, experts, min(top_k, experts))
    mask_TE = np.zeros((tokens, experts), dtype=np.float32)
    np.put_along_axis(mask_TE, chosen_TK, 1.0, axis=1)
    pad = -1 if skip_token else tokens
    ids = np.full(blocks * block_size, pad, dtype=np.int32)
    block_to_expert = np.full(blocks, experts - 1, dtype=np.int32)
    first = 0
    for expert in range(experts):
        members = np.flatnonzero(mask_TE[:, expert])
        used = math.ceil(members.size / block_size)
        ids[first * block_size : first * block_size + members.size] = members
        block_to_expert[first : first + used] = expert
        first += used
    return BlockMapping(mask_TE, ids, block_to_expert, blocks - first)


def map_dropping(
    draw: Draw, tokens: int, top_k: int, experts: int, block_size: int
) -> BlockMapping:
    """Give each expert one full block of tokens; no token is used more than top_k times."""
    uses = np.zeros(tokens, dtype=np.int32)
    ids = np.full((experts, block_size), tokens, dtype=np.int32)
    for expert in range(experts):
        free = np.flatnonzero(uses < top_k)
        members = draw.rng.permutation(free)[:block_size]
        uses[members] += 1
        ids[expert, : members.size] = members
    mask_TE = np.ones((tokens, experts), dtype=np.float32)
    return BlockMapping(mask_TE, ids.reshape(-1), np.arange(experts, dtype=np.int32), 0)
