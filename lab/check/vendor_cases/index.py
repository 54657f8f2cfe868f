"""Index and metadata kernels: nonzero indices, flattening by offsets, cumulative sum, top-k
reduction.
"""

from typing import Any

import ml_dtypes
import numpy as np

from lab.check.vendor_cases.case import Case, Job, Limits, seed_of
from lab.check.vendor_cases.inputs import Draw, dtype_of
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.references import run_reference


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build a case of one of this module's kernels."""
    builders = {
        "find_nonzero_indices": _find_nonzero_indices,
        "find_nonzero_indices_with_count": _find_nonzero_indices_with_count,
        "indexed_flatten": _indexed_flatten,
        "cumsum": _cumsum,
        "topk_reduce": _topk_reduce,
    }
    return builders[case.kernel](case, library)


def _find_nonzero_indices(case: Case, library: VendorLibrary) -> Job:
    T, E, top_k = case.need("T"), case.need("E"), case.need("top_k")
    draw = Draw(seed_of(case))
    dtype = np.dtype(case.get("in_dtype", "int32"))
    ones = np.zeros(T * E, dtype=np.float32)
    ones[: T * top_k // E * E] = 0.1 if dtype == np.float32 else 1
    inputs: dict[str, Any] = {
        "input_tensor": draw.rng.permutation(ones).reshape(T, E).astype(dtype)
    }
    if case.get("E_local") is not None:
        inputs["col_start_id"] = np.array([case.get("E_offset", 0)], dtype=np.int32)
        inputs["n_cols"] = case.get("E_local")
    if case.get("chunk_size") is not None:
        inputs["chunk_size"] = case.get("chunk_size")
    reference = library.get(
        "core.subkernels.find_nonzero_indices_torch", "find_nonzero_indices_torch_ref"
    )
    return Job(
        kernel=library.get("core.subkernels.find_nonzero_indices", "find_nonzero_indices"),
        cores=case.cores(),
        inputs=inputs,
        reference=lambda: run_reference(reference, inputs),
    )


def _find_nonzero_indices_with_count(case: Case, library: VendorLibrary) -> Job:
    T = case.need("T")
    draw = Draw(seed_of(case))
    row = np.zeros((1, T), dtype=np.float32)
    count = int(T * case.need("fraction_nonzero"))
    row[0, draw.rng.permutation(T)[:count]] = draw.rng.uniform(0.01, 1.0, count)

    def reference() -> dict[str, np.ndarray]:
        # The vendor's own reference for this kernel is a few lines of its test class, not a
        # function.
        expected = np.full((1, T + 1), -1, dtype=np.int32)
        expected[0, :count] = np.flatnonzero(row[0])
        expected[0, T] = count
        return {"output": expected}

    return Job(
        kernel=library.get(
            "experimental.benchmark.find_nonzero_indices_with_count",
            "find_nonzero_indices_with_count",
        ),
        cores=case.cores(default=1),
        inputs={"input_tensor": row},
        reference=reference,
    )


def _indexed_flatten(case: Case, library: VendorLibrary) -> Job:
    T, E, f_len = case.need("T"), case.need("E"), case.need("f_len")
    rows = case.get("N", E)
    start = case.get("row_offsets_start")
    inputs: dict[str, Any] = {
        "input_tensor": np.arange(E * T, dtype=np.int32).reshape(E, T),
        "f_len": f_len,
        "output_len": -(-(rows * T + 1024) // 128) * 128,
        "row_offsets": np.arange(rows, dtype=np.int32) * (T // f_len),
        "padding_val": -1,
    }
    if start is not None:
        inputs["row_offsets_start"] = np.array([start], dtype=np.int32)
    reference = library.get("core.subkernels.indexed_flatten_torch", "indexed_flatten_torch_ref")
    return Job(
        kernel=library.get("core.subkernels.indexed_flatten", "indexed_flatten"),
        cores=case.cores(),
        inputs=inputs,
        reference=lambda: run_reference(reference, inputs),
    )


def _cumsum(case: Case, library: VendorLibrary) -> Job:
    batch, hidden = case.need("batch"), case.need("hidden")
    shape = (batch, case.get("seq_len", 1), hidden) if case.get("ndim", 2) == 3 else (batch, hidden)
    inputs = {"x": Draw(seed_of(case)).normal(shape, dtype_of(case.get("dtype", "float32")))}
    reference = library.get("core.cumsum.cumsum_torch", "cumsum_torch_ref")
    return Job(
        kernel=library.get("core.cumsum.cumsum", "cumsum"),
        cores=case.cores(default=1),
        inputs=inputs,
        reference=lambda: run_reference(reference, inputs),
        outputs=("output_0",),
    )


def _topk_reduce(case: Case, library: VendorLibrary) -> Job:
    T, K, H, ranks = case.need("T"), case.need("K"), case.need("H"), case.need("src_ranks")
    draw = Draw(seed_of(case))
    buffer = np.full((ranks * T, H + 2), -1, dtype=ml_dtypes.bfloat16)
    rows = draw.normal((T * K, H), ml_dtypes.bfloat16)
    tokens = np.arange(T, dtype=np.int32).repeat(K).reshape(-1, 1).view(ml_dtypes.bfloat16)
    buffer[draw.rng.permutation(ranks * T)[: T * K]] = np.concatenate([rows, tokens], axis=1)
    inputs = {"input": buffer, "T": T, "K": K}
    kernel_module, reference_module = _topk_reduce_modules(library)
    reference = library.get(reference_module, "topk_reduce_torch_ref")

    def expected() -> dict[str, np.ndarray]:
        import torch

        words = torch.from_numpy(buffer.view(np.int16)).view(torch.bfloat16)
        with torch.no_grad():
            return {"out": reference(words, T, K).float().numpy()}

    return Job(
        kernel=library.get(kernel_module, "topk_reduce"),
        cores=case.cores(),
        inputs=inputs,
        reference=expected,
    )


def _topk_reduce_modules(library: VendorLibrary) -> tuple[str, str]:
    """Return where this release of the library keeps the kernel and its reference."""
    folder = "experimental.collectives"
    if not (
        library.path / "src/nkilib_src/nkilib/experimental/collectives/topk_reduce.py"
    ).exists():
        folder = "experimental.subkernels"
    return f"{folder}.topk_reduce", f"{folder}.topk_reduce_torch"
