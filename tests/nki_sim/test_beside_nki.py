"""The same kernels under `nki.simulate` of the vendor's wheel and under ours, in two processes.

    NKI_PYTHON=/opt/neuron/bin/python pytest tests/nki_sim/test_beside_nki.py

NKI_PYTHON is a Python with the vendor's `nki`; without it ours alone is held against formulas.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

VENDOR = os.environ.get("NKI_PYTHON")
KERNELS = """\
import nki
import nki.isa as nisa
import nki.language as nl


def loaded(x, dtype):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    narrow = nl.ndarray(x.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=narrow, src=tile)
    return narrow


def stored(tile):
    wide = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide, src=tile)
    out = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=wide)
    return out


@nki.jit
def narrowed(x):
    return stored(loaded(x, nl.bfloat16))


@nki.jit
def rounded(x):
    return stored(loaded(x, nl.int32))


@nki.jit
def largest(x):
    out = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=out, op=nl.maximum, data=loaded(x, nl.float32), axis=1)
    return stored(out)


@nki.jit
def product(x):
    tile = loaded(x, nl.bfloat16)
    psum = nl.ndarray((x.shape[1], x.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=psum, stationary=tile, moving=tile)
    return stored(psum)


@nki.jit
def exponent(x):
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=out, op=nl.exp, data=loaded(x, nl.float32))
    return stored(out)
"""
RUNNER = """\
import sys

if sys.argv[1] == "ours":
    import nki_sim

    nki_sim.provide(force=True)
import kernels
import nki
import numpy as np

x = np.load("x.npy")
for name in sys.argv[2:]:
    np.save(f"{sys.argv[1]}_{name}.npy", nki.simulate(getattr(kernels, name))(x))
"""


def narrow(x: Any) -> Any:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


# By kernel: what it computes, and how far it may be off, as a part of the largest element.
CASES: dict[str, tuple[Callable[[Any], Any], float]] = {
    "narrowed": (narrow, 0.0),
    "rounded": (lambda x: np.rint(x), 0.0),
    "largest": (lambda x: x.max(axis=1, keepdims=True), 0.0),
    "product": (lambda x: narrow(x).T @ narrow(x), 1e-6),
    "exponent": (np.exp, 1e-5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the input and what each side makes of it."""
    folder = tmp_path_factory.mktemp("beside")
    np.save(folder / "x.npy", np.random.default_rng(0).normal(0, 4, (128, 64)).astype(np.float32))
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "runner.py").write_text(RUNNER)
    # Storage of the vendor's simulator in the types that the kernel names.
    environment = os.environ | {"NKI_PRECISE_FP": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    for side, python in (("ours", sys.executable), ("vendor", VENDOR)):
        if python is not None:
            words = [python, "runner.py", side, *CASES]
            subprocess.run(words, cwd=folder, env=environment, check=True)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ours_is_what_the_formula_gives(folder: Path, name: str) -> None:
    formula, part = CASES[name]
    want = formula(np.load(folder / "x.npy"))
    got = np.load(folder / f"ours_{name}.npy")
    assert np.abs(got - want).max() <= part * np.abs(want).max()


@pytest.mark.skipif(VENDOR is None, reason="NKI_PYTHON names no Python with the vendor's nki")
@pytest.mark.parametrize("name", CASES)
def test_ours_is_what_the_vendor_gives(folder: Path, name: str) -> None:
    want, got = (np.load(folder / f"{side}_{name}.npy") for side in ("vendor", "ours"))
    assert np.abs(got - want).max() <= CASES[name][1] * np.abs(want).max()
