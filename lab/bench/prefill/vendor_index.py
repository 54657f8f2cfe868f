"""The vendor's launches that list the tokens of each block: find_nonzero_indices, indexed_flatten.

What a graph computes between them (offsets of blocks, experts of blocks) is left out, which favours
them; their times do not depend on the choices.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nki_sim
from lab.check.vendor_cases.block_mapping import num_blocks
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.moe_prefill import CORES
from neuron_moe.backends.nki.times import TIMES_ONLY
from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.layers import Model
from neuron_moe.tools.timing.timelines import time_of
from nki_sim.time.estimate import NOTHING, Estimate

PARTITIONS = 128
FIND, FLATTEN = "find_nonzero_indices", "indexed_flatten"
BLOCK_SIZES = (128, 256, 512, 1024)
INDEX_TOKENS = 4096  # of a piece of find_nonzero_indices, by which its tiles fit SBUF
_FLATTEN_PIECES = 16  # indexed_flatten wants a multiple of so many pieces of a row
FULL = replace(TIMES_ONLY, nki="0.6", mode="full")  # these kernels go by what they compute
# What a kernel raises that does not run with some sizes; some divide by the number of blocks.
UNFIT = (nki_sim.NkiValidationError, AssertionError, NotImplementedError, ZeroDivisionError)
Times = dict[str, Estimate]


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without the folders of a file."""
    return (str(error).strip().splitlines() or [""])[0].rsplit("/", 1)[-1]


def lists_time(variant: str, index: Mapping[str, Estimate]) -> Estimate | None:
    """Return the time of the lists in front of a variant: none where it has no blocks, and None
    where they cannot be made.
    """
    size = next((word for word in variant.split() if word.startswith("B=")), None)
    if size is not None and FIND not in index:
        return None
    return NOTHING if size is None else sum(parts_of(size, index).values(), NOTHING)


def parts_of(size: str, index: Mapping[str, Estimate]) -> Times:
    """Return the time of each of the launches for a block size, "B=128"."""
    return {FIND: index[FIND], FLATTEN: index[f"{FLATTEN} {size}"]}


def index_times(
    library: VendorLibrary,
    model: Model,
    expert_index_TK: NDArray[np.int32],
    all_experts: int,
) -> Times:
    """Return the time of listing the tokens of each local expert, and of putting these lists into
    blocks of each size; where that does not run, why instead, with no time.

    Args:
        library: the user's checkout.
        model: the layer on a rank.
        expert_index_TK: [T, K] choices, those of this rank first.
        all_experts: of all ranks.
    """
    try:
        launches = index_runs(library, model, expert_index_TK, all_experts)
        return {name: time_of(run.timeline) for name, run in launches}
    except UNFIT as error:
        return {f"{type(error).__name__}: {first_line(error)}": NOTHING}


def index_runs(
    library: VendorLibrary, model: Model, expert_index_TK: NDArray[np.int32], all_experts: int
) -> Iterator[tuple[str, nki_sim.Run]]:
    """Simulate the launches that list tokens, the second for each block size.

    Args:
        library, model, expert_index_TK, all_experts: as of `index_times`.
    """
    launches = [(FIND, FIND, _mask(model, expert_index_TK, all_experts))]
    launches += [
        (f"{FLATTEN} B={size}", FLATTEN, _lists(model, expert_index_TK, size))
        for size in BLOCK_SIZES
    ]
    for name, kernel, arguments in launches:
        found = library.get(f"core.subkernels.{kernel}", kernel)
        with contextlib.redirect_stdout(io.StringIO()):  # the library prints advice
            run = runs.run(found, lnc=CORES, options=FULL, **arguments)
        yield name, run


def _mask(model: Model, expert_index_TK: NDArray[np.int32], all_experts: int) -> dict[str, Any]:
    T = _padded(len(expert_index_TK))
    mask_TE = np.zeros((T, all_experts), np.float32)
    np.put_along_axis(mask_TE[: len(expert_index_TK)], expert_index_TK, 1.0, axis=1)
    return {
        "input_tensor": mask_TE,
        "col_start_id": np.zeros(1, np.int32),
        "n_cols": max(CORES, model.E),
        "chunk_size": min(T, INDEX_TOKENS),
    }


def _padded(num_tokens: int) -> int:
    """Return the tokens that the kernels are given, behind the real ones padding."""
    multiple = PARTITIONS if num_tokens <= INDEX_TOKENS else INDEX_TOKENS
    return -(-num_tokens // multiple) * multiple


def _lists(model: Model, expert_index_TK: NDArray[np.int32], block_size: int) -> dict[str, Any]:
    T, K, E = _padded(len(expert_index_TK)), expert_index_TK.shape[1], model.E
    used = -(-np.bincount(expert_index_TK.reshape(-1), minlength=E)[:E] // block_size)
    first = np.cumsum(used) - used
    length = max(1, min(block_size, T // _FLATTEN_PIECES))
    blocks = num_blocks(T, min(K, E), E, block_size, CORES)
    multiple = max(128, length)
    slots = -(-(blocks * block_size + T) // multiple) * multiple
    return {
        "input_tensor": np.full((E, T), -1, np.int32),
        "f_len": length,
        "output_len": slots,
        "row_offsets": (first * (block_size // length)).astype(np.int32),
    }
