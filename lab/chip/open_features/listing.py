"""The open features: which kernel settles each, and what our kernels do without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from lab.chip.open_features import kernels

BF16: Final = ml_dtypes.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A switch of our kernels, and a case of `check kernels` that has it on.

    Attributes:
        switch: as a caller writes it.
        case: one of `cases.CASES` without it.
        changes: to the parameters of that case.
        full: the case that tells the cost on the shapes of a model.
    """

    switch: str
    case: str
    changes: dict[str, Any]
    full: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFeature:
    """Something that no public document settles.

    Attributes:
        name: of the feature.
        question: in words.
        kernel: settles it.
        problem: draws its tensors and says what it must return.
        cores: physical cores of the launch.
        fallbacks: what to switch on if it fails.
    """

    name: str
    question: str
    kernel: Any
    problem: Callable[[np.random.Generator], tuple[tuple[np.ndarray, ...], np.ndarray]]
    fallbacks: tuple[Fallback, ...]
    cores: int = 1


def _number(value: int) -> np.ndarray:
    return np.array([[value]], np.int32)


def _trips(random: np.random.Generator) -> Any:
    x = random.integers(-2, 3, (128, 128)).astype(BF16)
    wide = x.astype(np.float32)
    return (x, _number(3)), 4.0 * (wide.T @ wide)


def _column(random: np.random.Generator) -> Any:
    x = random.normal(size=(128, 64)).astype(np.float32)
    return (x, _number(37)), x[:, 37:38]


def _float8(random: np.random.Generator) -> Any:
    weight = random.integers(-4, 5, (128, 128)).astype(ml_dtypes.float8_e5m2)
    x = random.integers(-4, 5, (128, 64)).astype(BF16)
    return (weight, x), weight.astype(np.float32).T @ x.astype(np.float32)


def _turned(random: np.random.Generator) -> Any:
    x = random.normal(size=(256, 128)).astype(BF16)
    rows = random.permutation(256)[:128].astype(np.int32)
    return (x, rows[:, None]), x[rows].T


def _swapped(random: np.random.Generator) -> Any:
    x = random.normal(size=(2, 128, 64)).astype(np.float32)
    return (x, _number(3)), x[::-1]


def _skipped(random: np.random.Generator) -> Any:
    x = random.normal(size=(256, 64)).astype(np.float32)
    rows = random.permutation(256)[:128].astype(np.int32)
    rows[::5] = -1
    return (x, rows[:, None]), np.where(rows[:, None] >= 0, x[rows], np.float32(0))


def _stored(random: np.random.Generator) -> Any:
    x = random.normal(size=(128, 64)).astype(np.float32)
    rows = random.permutation(128).astype(np.int32)
    rows[::5] = -1
    wanted = np.zeros_like(x)
    wanted[rows[rows >= 0]] = x[rows >= 0]
    return (x, rows[:, None]), wanted


def _entries(random: np.random.Generator) -> Any:
    x = random.normal(size=(4, 128, 64)).astype(np.float32)
    return (x, np.array([[4, 2]], np.int32)), np.stack([np.zeros_like(x[0]), x[2]])


_SPARE_ROWS: Final = Fallback(
    switch='PlanRequest(missing="spare")',
    case="small/prefill",
    full="full/prefill-qwen3-30b",
    changes={"missing": "spare"},
)

OPEN_FEATURES: Final = (
    OpenFeature(
        name="PSUM sums over dynamic trips",
        question="does accumulate=True add to what an earlier trip of a dynamic loop left in PSUM?",
        kernel=kernels.sums_over_trips,
        problem=_trips,
        fallbacks=(
            Fallback(
                switch='DecodeRequest(sums="sbuf")',
                case="small/decode",
                full="full/decode-gpt-oss-120b",
                changes={"sums": "sbuf"},
            ),
        ),
    ),
    OpenFeature(
        name="copies by a register",
        question="may an engine copy from a column that a register names?",
        kernel=kernels.copy_by_register,
        problem=_column,
        fallbacks=(
            Fallback(
                switch='DecodeRequest(loops="unrolled")',
                case="small/decode",
                full="full/decode-gpt-oss-120b",
                changes={"loops": "unrolled"},
            ),
        ),
    ),
    OpenFeature(
        name="copies by a number in SBUF",
        question="may GpSimd copy from a column that a number in SBUF names?",
        kernel=kernels.copy_by_number,
        problem=_column,
        fallbacks=(
            Fallback(
                switch='PlanRequest(fetches="dma")',
                case="small/prefill",
                full="full/prefill-qwen3-30b",
                changes={"fetches": "dma"},
            ),
        ),
    ),
    OpenFeature(
        name="loops of a loaded length",
        question="may fori_loop run to a register, with loads and matmuls of all engines inside?",
        kernel=kernels.sums_over_trips,
        problem=_trips,
        fallbacks=(
            Fallback(
                switch='PlanRequest(loop_plan="static")',
                case="small/prefill",
                full="full/prefill-qwen3-30b",
                changes={"loop_plan": "static"},
            ),
            Fallback(
                switch='DecodeRequest(loops="unrolled")',
                case="small/decode-gpt-oss",
                full="full/decode-gpt-oss-120b",
                changes={"loops": "unrolled"},
            ),
        ),
    ),
    OpenFeature(
        name="float8 beside bfloat16",
        question="may the stationary operand of a matmul be float8 where the moving one is not?",
        kernel=kernels.float8_beside_bfloat16,
        problem=_float8,
        fallbacks=(
            Fallback(
                switch='WeightForm(format="bfloat16")',
                case="small/decode-fp8",
                full="full/decode-fp8",
                changes={"weight_dtype": "bfloat16"},
            ),
        ),
    ),
    OpenFeature(
        name="gathers that transpose",
        question="does dma_transpose take rows by a vector_offset?",
        kernel=kernels.gathered_transpose,
        problem=_turned,
        fallbacks=(
            Fallback(
                switch='PlanRequest(turns="tensor")',
                case="small/prefill-turned-by-dma",
                full="full/prefill-turned-by-dma",
                changes={"turns": "tensor"},
            ),
        ),
    ),
    OpenFeature(
        name="exchanges in dynamic loops",
        question="may the cores exchange tiles in each trip of a dynamic loop?",
        kernel=kernels.exchange_in_a_loop,
        problem=_swapped,
        cores=2,
        fallbacks=(
            Fallback(
                switch='PlanRequest(shard_plan="balanced")',
                case="small/prefill-split-on-H",
                full="full/prefill-split-on-H",
                changes={"shard_plan": "balanced"},
            ),
        ),
    ),
    OpenFeature(
        name="skipped rows",
        question="does a gather leave the row of an index of -1 as it is?",
        kernel=kernels.skipped_rows,
        problem=_skipped,
        fallbacks=(_SPARE_ROWS,),
    ),
    OpenFeature(
        name="skipped stores",
        question="does a scatter store nothing of a row whose index is -1?",
        kernel=kernels.skipped_stores,
        problem=_stored,
        fallbacks=(_SPARE_ROWS,),
    ),
    OpenFeature(
        name="skipped entries",
        question="does a load from an entry that there is not leave its target as it is?",
        kernel=kernels.skipped_entries,
        problem=_entries,
        fallbacks=(
            _SPARE_ROWS,
            Fallback(
                switch='DecodeRequest(loops="unrolled", missing="spare")',
                case="small/decode",
                full="full/decode-gpt-oss-120b",
                changes={"loops": "unrolled", "missing": "spare"},
            ),
        ),
    ),
)
