"""Index cases through index_blocks.

The vendor's kernels list the tokens of each expert and lay the lists out at block starts; ours does
both at once. A case becomes the routing that means the same, and every expert's slots must hold
exactly its tokens, in order.
"""

import numpy as np

from lab.check.kernel_cases.verdict import Verdict, join
from lab.check.launcher import launch
from lab.check.vendor_cases.case import Case, Limits, Skipped, scaled_note, seed_of
from lab.check.vendor_cases.inputs import Draw
from neuron_moe.blocks import num_blocks
from nki_kernels.index import BlockDims, check_index_blocks, index_blocks, reference

BLOCK_SIZE = 128  # where the case has none


def run(case: Case, limits: Limits) -> Verdict:
    """Index the routing of a case."""
    if case.kernel == "indexed_flatten":
        if case.get("row_offsets_start") is not None:
            raise Skipped(
                "row_offsets_start: writes a part of another rank's blocks; ours number the blocks"
                " of one rank from 0"
            )
        index_TK, E, B, note = _rows_of_experts(case, limits)
    elif case.kernel == "find_nonzero_indices_with_count":
        index_TK, E, B, note = _one_expert(case)
    else:
        index_TK, E, B, note = _local_experts(case, limits)
    T, K = index_TK.shape
    dims = BlockDims(E, B, num_blocks(T, K, E, B))
    cores = case.cores()
    check_index_blocks(T, K, dims, cores)
    launched = launch(index_blocks, index_TK, dims, lnc=cores)
    wanted = reference.index_blocks_ref(index_TK, E, B, dims.num_blocks)
    failure = ""
    for name, got in zip(wanted._fields, launched.outputs, strict=True):
        wrong = int(np.count_nonzero(got != getattr(wanted, name)))
        if wrong and not failure:
            failure = f"{name}: {wrong} of {got.size} integers differ"
    if not failure:
        failure = _list_differs(index_TK, E, B, launched.outputs)
    return Verdict(failure=failure, note=note, simulated_us=launched.us)


def _list_differs(
    index_TK: np.ndarray, num_experts: int, block_size: int, outputs: tuple[np.ndarray, ...]
) -> str:
    """Say which expert's slots do not list its tokens, or ""."""
    token_of_slot, _, block_to_expert, num_valid = outputs[:4]
    expert_of_slot = np.repeat(block_to_expert[: num_valid[0]], block_size)
    listed = token_of_slot[: expert_of_slot.size]
    for expert in range(num_experts):
        got = listed[(expert_of_slot == expert) & (listed >= 0)]
        if not np.array_equal(got, np.flatnonzero((index_TK == expert).any(1))):
            return f"token_position_to_id: not the tokens of expert {expert}"
    return ""


def _local_experts(case: Case, limits: Limits) -> tuple[np.ndarray, int, int, str]:
    """Return K experts a token of which E_local from E_offset are here."""
    wanted, E, K = case.need("tokens"), case.need("experts"), case.need("top_k")
    first, here = case.get("E_offset", 0), case.get("E_local", E)
    B = case.get("block_size", BLOCK_SIZE)
    T = limits.tokens(wanted, lambda tokens: _work(tokens, K, here, B))
    index_TK = Draw(seed_of(case)).choices(T, E, K) - first
    index_TK = np.where((index_TK >= 0) & (index_TK < here), index_TK, -1).astype(np.int32)
    return index_TK, here, B, join(scaled_note("T", wanted, T))


def _one_expert(case: Case) -> tuple[np.ndarray, int, int, str]:
    """Return one expert that a share of the tokens chose."""
    T = case.need("tokens")
    index_T1 = np.full((T, 1), -1, np.int32)
    count = int(T * case.need("fraction_nonzero"))
    index_T1[Draw(seed_of(case)).rng.permutation(T)[:count]] = 0
    return index_T1, 1, BLOCK_SIZE, ""


def _rows_of_experts(case: Case, limits: Limits) -> tuple[np.ndarray, int, int, str]:
    """Return E experts of T tokens each, so that the slots are the rows put end to end."""
    wanted, E, B = case.need("tokens"), case.need("experts"), case.need("f_len")
    T = limits.tokens(wanted, lambda tokens: _work(E * tokens, 1, E, B), step=B, least=B)
    index_T1 = np.arange(E * T, dtype=np.int32)[:, None] // T
    return index_T1.astype(np.int32), E, B, join(scaled_note("T", wanted, T))


def _work(tokens: int, top_k: int, num_experts: int, block_size: int) -> float:
    """Return multiply-accumulates of the inverse: pairs times slots."""
    slots = num_blocks(tokens, top_k, num_experts, block_size) * block_size
    return float(tokens) * top_k * slots * 3
