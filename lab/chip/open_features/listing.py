"""The open features: which kernel settles each, and what our kernels do without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from lab.chip.open_features import kernels

BF16: Final = ml_dtypes.bfloat16
_TILES: Final = 13  # of 4,050 float32: 98.9 % of what a kernel may use of a partition


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
        problem: draws its arguments and says what each core must return, or both together.
        fallbacks: what to switch on if it fails.
        danger: why it runs last and only if requested; "" for what harms nothing.
        cores: physical cores of the launch.
        launches: of the kernel in one program, each on what the one before returned.
    """

    name: str
    question: str
    kernel: Any
    problem: Callable[[np.random.Generator], tuple[tuple[Any, ...], np.ndarray]]
    fallbacks: tuple[Fallback, ...] = ()
    danger: str = ""
    cores: int = 2
    launches: int = 1


def _number(value: int) -> np.ndarray:
    return np.array([[value]], np.int32)


def _column(random: np.random.Generator) -> Any:
    x = random.normal(size=(128, 64)).astype(np.float32)
    return (x, _number(37)), x[:, 37:38]


def _float8(random: np.random.Generator) -> Any:
    weight = random.integers(-4, 5, (128, 128)).astype(ml_dtypes.float8_e5m2)
    x = random.integers(-4, 5, (128, 64)).astype(BF16)
    return (weight, x), weight.astype(np.float32).T @ x.astype(np.float32)


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
    return (x, np.array([[4, 2]], np.int32)), np.concatenate([np.zeros_like(x[0]), x[2]], 1)


def _copied(random: np.random.Generator) -> Any:
    x = random.normal(size=(128, 64)).astype(np.float32)
    return (x,), x + np.float32(1)


def _products(random: np.random.Generator) -> Any:
    x = random.integers(-2, 3, (128, 64)).astype(BF16)
    weights = random.integers(-2, 3, (4, 128, 128)).astype(BF16)
    wide = weights[:3].astype(np.float32).sum(0)
    return (x, weights, _number(3)), wide.T @ x.astype(np.float32)


def _shared(random: np.random.Generator) -> Any:
    x = random.integers(-2, 3, (256, 64)).astype(BF16)
    weights = random.integers(-2, 3, (4, 256, 128)).astype(BF16)
    wide = weights[:3].astype(np.float32).sum(0)
    return (x, weights, _number(3)), wide.T @ x.astype(np.float32)


def _ahead(random: np.random.Generator) -> Any:
    x = random.integers(-99, 100, (5, 128, 64)).astype(np.float32)
    return (x, _number(4)), x[:4].sum(0)


def _row_of_loops(random: np.random.Generator) -> Any:
    x = random.integers(-2, 3, (128, 128)).astype(BF16)
    wide = x.astype(np.float32)
    return (x, np.array([[2, 0, 1]], np.int32)), 6.0 * (wide.T @ wide)


def _different(random: np.random.Generator) -> Any:
    x = random.integers(-99, 100, (128, 64)).astype(np.float32)
    return (x, _number(3)), np.stack([3 * x, 6 * x])


def _placed(random: np.random.Generator) -> Any:
    x = random.normal(size=(128, 64)).astype(np.float32)
    none = np.zeros_like(x)
    return (x, np.array([[4, 2]], np.int32)), np.concatenate([none, none, x, none], 1)


def _pieces(random: np.random.Generator) -> Any:
    x = random.normal(size=(3, 256, 128)).astype(BF16)
    even = x[2].reshape(2, 128, 4, 2, 16)[:, :, :, 0]
    return (x, _number(2)), even.transpose(1, 0, 2, 3).reshape(128, 128)


def _largest(random: np.random.Generator) -> Any:
    x = random.permuted(np.tile(np.arange(64), (128, 1)), axis=1)
    places = np.argsort(-x, axis=1)[:, :8].astype(np.uint32)
    return (x.astype(BF16), np.eye(128).astype(BF16)), places


def _replaced(random: np.random.Generator) -> Any:
    x = random.permuted(np.tile(np.arange(1, 65), (128, 1)), axis=1)
    return (x.astype(np.float32),), np.where(x > 56, 0, x).astype(BF16)


def _compared(random: np.random.Generator) -> Any:
    x, y = random.integers(-3, 4, (2, 128, 64)).astype(np.int32)
    # Neighbours that float32 cannot tell apart.
    x[:, 0], y[:, 0] = (1 << 30) + 1, 1 << 30
    return (x, y), 10 * (x == y).astype(np.int32) + (x >= y)


def _onto_partitions(random: np.random.Generator) -> Any:
    x = random.integers(-(1 << 30), 1 << 30, (1, 512)).astype(np.int32)
    return (x,), x[0, 128:256, None]


def _left_out(random: np.random.Generator) -> Any:
    x = random.integers(-99, 100, (4, 128, 64)).astype(np.float32)
    return (x, np.array([[2, 4, 1, 4]], np.int32), _number(4)), 2 * (x[2] + x[1])


def _met(random: np.random.Generator) -> Any:
    x = random.normal(size=(2, 128, 64)).astype(np.float32)
    return (x,), x[::-1] + np.float32(1)


def _met_twice(random: np.random.Generator) -> Any:
    (x,), once = _met(random)
    return (x,), once[::-1] + np.float32(1)


def _crowded(random: np.random.Generator) -> Any:
    x = random.integers(-99, 100, (128, 4050)).astype(np.float32)
    return (x, _TILES), _TILES * x[:, 0:1]


def _transposed(random: np.random.Generator) -> Any:
    x = random.normal(size=(256, 128)).astype(BF16)
    rows = random.permutation(256)[:128].astype(np.int32)
    rows[::5] = -1
    wanted = np.where(rows[:, None] >= 0, x[rows], BF16(0)).T
    return (x, rows[:, None].astype(np.uint32)), wanted


ALIVE: Final = OpenFeature(
    name="is the device alive",
    question="does a load, a sum and a store work, as on every machine in order?",
    kernel=kernels.plain_copy,
    problem=_copied,
)
"""Known to be good; what runs after each row of `chip check`."""

_ITERATIONS_ALONE: Final = Fallback(
    switch='PlanRequest(iterations="alone")',
    case="small/prefill",
    full="full/prefill-qwen3-30b",
    changes={"iterations": "alone"},
)
_SPARE_ROWS: Final = Fallback(
    switch='PlanRequest(missing="spare")',
    case="small/prefill",
    full="full/prefill-qwen3-30b",
    changes={"missing": "spare"},
)

OPEN_FEATURES: Final = (
    OpenFeature(
        name="copies by a register",
        question="may an engine copy from a column that a register names?",
        kernel=kernels.copy_by_register,
        problem=_column,
    ),
    OpenFeature(
        name="copies by a number in SBUF",
        question="may GpSimd copy from a column that a number in SBUF names?",
        kernel=kernels.copy_by_number,
        problem=_column,
        fallbacks=(_ITERATIONS_ALONE,),
    ),
    OpenFeature(
        name="loops of a loaded length",
        question="may fori_loop run to a register, with loads and matmuls of all engines inside?",
        kernel=kernels.products_in_a_loop,
        problem=_products,
        fallbacks=(
            Fallback(
                switch='PlanRequest(loop_plan="static")',
                case="small/prefill",
                full="full/prefill-qwen3-30b",
                changes={"loop_plan": "static"},
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
        name="exchanges in dynamic loops",
        question="may the cores exchange tiles in each iteration of a dynamic loop?",
        kernel=kernels.exchange_in_a_loop,
        problem=_swapped,
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
        fallbacks=(_SPARE_ROWS,),
    ),
    OpenFeature(
        name="loads for the next iteration",
        question="may an iteration of a dynamic loop load what the next one uses?",
        kernel=kernels.loads_for_the_next_iteration,
        problem=_ahead,
        fallbacks=(_ITERATIONS_ALONE,),
    ),
    OpenFeature(
        name="loops in a row",
        question="do several dynamic loops, one without iterations, add to one sum?",
        kernel=kernels.loops_in_a_row,
        problem=_row_of_loops,
    ),
    OpenFeature(
        name="loop bodies that differ",
        question="may the two cores have different instructions in the same dynamic loop?",
        kernel=kernels.bodies_that_differ,
        problem=_different,
    ),
    OpenFeature(
        name="skipped entries in a loop",
        question="does a load in a dynamic loop leave its target as it is where there is no entry?",
        kernel=kernels.skipped_in_a_loop,
        problem=_left_out,
        fallbacks=(_SPARE_ROWS,),
    ),
    OpenFeature(
        name="shared entries in a loop",
        question="may the cores exchange halves of a product in each iteration of a dynamic loop?",
        kernel=kernels.shared_matrices,
        problem=_shared,
    ),
    OpenFeature(
        name="stores to a loaded place",
        question="may a transfer to HBM, its descriptors by hardware, go where a number says?",
        kernel=kernels.stores_to_a_loaded_place,
        problem=_placed,
    ),
    OpenFeature(
        name="patterns of four levels",
        question="do the hardware's descriptors take four levels from an entry that is loaded?",
        kernel=kernels.patterns_of_four_levels,
        problem=_pieces,
    ),
    OpenFeature(
        name="a row onto partitions",
        question="does a transfer put 4-byte numbers of a row onto a partition each?",
        kernel=kernels.row_onto_partitions,
        problem=_onto_partitions,
    ),
    OpenFeature(
        name="the largest of PSUM",
        question="do max8 and nc_find_index8 read PSUM?",
        kernel=kernels.largest_of_psum,
        problem=_largest,
    ),
    OpenFeature(
        name="replaced in bfloat16",
        question="does nc_match_replace8 write bfloat16 from float32?",
        kernel=kernels.replaced_in_bfloat16,
        problem=_replaced,
    ),
    OpenFeature(
        name="integers compared",
        question="are int32 numbers compared as integers?",
        kernel=kernels.integers_compared,
        problem=_compared,
    ),
    OpenFeature(
        name="a full SBUF",
        question="is there a place for tiles that fill 98.9 % of SBUF?",
        kernel=kernels.full_sbuf,
        problem=_crowded,
    ),
    OpenFeature(
        name="cores that meet",
        question="do cores exchange tiles and wait for each other, in one launch?",
        kernel=kernels.meeting_cores,
        problem=_met,
    ),
    OpenFeature(
        name="two launches in a program",
        question="may a kernel whose cores meet be launched twice in one program?",
        kernel=kernels.meeting_cores,
        problem=_met_twice,
        launches=2,
    ),
    OpenFeature(
        name="launches on one core",
        question="does a kernel for LNC 1 run where the device starts with LNC 2?",
        kernel=kernels.plain_copy,
        problem=_copied,
        cores=1,
    ),
    OpenFeature(
        name="gathers that transpose and skip",
        question="does dma_transpose leave out rows whose index is out of range?",
        kernel=kernels.gathered_transpose,
        problem=_transposed,
        danger="aws-neuron-sdk #1390: a skipped index may leave the device without an answer",
    ),
)
