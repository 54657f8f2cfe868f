"""The vendor's collective kernels, unmodified, over simulated ranks: gathers and rings.

Needs a checkout of the vendor's library, named by NKI_LIBRARY_PATH; nothing of it is in this
repository. The expected results are NumPy formulas written here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from lab.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary
from nki_sim.collectives import ReplicaGroup

pytestmark = [
    pytest.mark.skipif(
        LIBRARY_VARIABLE not in os.environ,
        reason=f"{LIBRARY_VARIABLE} is not set: it names a checkout of the vendor's kernel library",
    ),
    pytest.mark.filterwarnings("ignore"),
]
COLLECTIVES = "experimental.collectives"


@pytest.fixture(scope="module")
def library() -> VendorLibrary:
    return VendorLibrary(Path(os.environ[LIBRARY_VARIABLE]))


def shards(ranks: int, shape: tuple[int, int], dtype: Any = ml_dtypes.bfloat16) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(dtype) for _ in range(ranks)]


@pytest.mark.parametrize(
    ("name", "rows", "lnc"), [("allgather_sb2sb", 128, 1), ("allgather_sb2sb_tiled", 512, 2)]
)
def test_a_gather_between_sbufs(library: VendorLibrary, name: str, rows: int, lnc: int) -> None:
    kernel = library.get(f"{COLLECTIVES}.sb2sb_allgather", name)
    parts = shards(4, (rows, 64))
    group = ReplicaGroup([[0, 1, 2, 3]])
    arguments = [{"inp": part, "replica_groups": group, "tp_degree": 4} for part in parts]
    for found in nki_sim.run_ranks(kernel, arguments, lnc=lnc).outputs:
        np.testing.assert_array_equal(found, np.concatenate(parts, axis=1))


RINGS = pytest.mark.parametrize(
    ("ranks", "lnc", "in_hbm"),
    [(4, 1, True), (4, 1, False), (4, 2, True), (8, 2, False)],
    ids=["4x1-hbm", "4x1-sbuf", "4x2-hbm", "8x2-sbuf"],
)


@RINGS
def test_a_ring_gathers(library: VendorLibrary, ranks: int, lnc: int, in_hbm: bool) -> None:
    kernel = library.get(f"{COLLECTIVES}.fg_allgather", "fine_grained_allgather")
    parts = shards(ranks, (512, 512))
    options = {"tp_degree": ranks, "num_groups": 1, "force_hbm_cc": in_hbm}
    arguments = [{"lhs": part, **options} for part in parts]
    whole = np.concatenate(parts)
    for found in nki_sim.run_ranks(kernel, arguments, lnc=lnc).outputs:
        np.testing.assert_array_equal(found.reshape(whole.shape), whole)


@RINGS
def test_a_ring_gathers_while_it_multiplies(
    library: VendorLibrary, ranks: int, lnc: int, in_hbm: bool
) -> None:
    kernel = library.get(f"{COLLECTIVES}.fgcc", "allgather_compute_matmul")
    parts, weights = shards(ranks, (512, 512)), shards(ranks, (512, 512))
    options = {"tp_degree": ranks, "num_groups": 1, "force_hbm_cc": in_hbm}
    arguments = [
        {"lhs": part, "rhs": weight, **options} for part, weight in zip(parts, weights, strict=True)
    ]
    whole = np.concatenate(parts).astype(np.float32)
    outputs = nki_sim.run_ranks(kernel, arguments, lnc=lnc).outputs
    for found, weight in zip(outputs, weights, strict=True):
        expected = whole @ weight.astype(np.float32)
        error = np.abs(found.astype(np.float32).reshape(expected.shape) - expected)
        assert error.max() < 0.005 * np.abs(expected).max()  # bfloat16 results
