"""Plant one fault in a correct kernel: the simulator or the linter must name its line.

The kernel without the fault, run on the same input, is the twin: it must give no finding.
"""

import importlib.util
import inspect
import random
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import nki_kernels.provided  # noqa: F401  answers to `import nki`
import nki_sim
from nki_sim.lint.linter import lint_source
from tests.lab.fuzz import correct_kernels


@dataclass(frozen=True)
class Fault:
    """One edit of a kernel.

    Attributes:
        kernel: in correct_kernels.py.
        old: text of it, once there.
        new: what takes its place.
        at: text of the line to be named; '' for the first changed one.
        finds: the classes of error, or kinds of finding, one of which must be told.
    """

    kernel: str
    old: str
    new: str
    at: str
    finds: str


E = "UninitializedRead"
OPERAND = "IllegalOperand"
LANGUAGE = "LanguageError"
RACE = "RaceError"
OVERLAP = "OverlapError"
FAULTS = {
    # Memory nobody wrote.
    "tail-not-masked": Fault(
        "project", "sum_ps, x_sb[0:rows], w_sb[0:rows]", "sum_ps, x_sb, w_sb", "", E
    ),
    "load-missing": Fault(
        "project",
        "        nisa.dma_copy(w_sb[0:rows], w_HN[128 * tile : 128 * tile + rows])\n",
        "",
        "nisa.nc_matmul",
        E,
    ),
    "load-too-short": Fault(
        "project",
        "nisa.dma_copy(x_sb[0:rows], x_HT[128 * tile : 128 * tile + rows])",
        "nisa.dma_copy(x_sb[0:rows, 1:T], x_HT[128 * tile : 128 * tile + rows, 1:T])",
        "nisa.nc_matmul",
        E,
    ),
    "mask-missing": Fault(
        "project", "    nisa.memset(mask_sb, 0)\n", "", "tensor_copy_predicated", E
    ),
    "fill-missing": Fault(
        "project", "    nisa.memset(kept_sb, 0.0)\n", "", "tensor_copy_predicated", E
    ),
    "skipped-rows-not-filled": Fault(
        "move_rows", "    nisa.memset(rows_sb, 0.0)\n", "", "nisa.activation", E
    ),
    "index-not-loaded": Fault(
        "move_rows", "    nisa.dma_copy(index_sb, index_T1)\n", "", "oob_mode.skip", E
    ),
    "iterations-not-loaded": Fault(
        "repeat", "    nisa.dma_copy(count_sb, count_11)\n", "", "register_load", E
    ),
    "register-without-value": Fault(
        "repeat",
        "    iterations = nisa.register_alloc(0)\n    nisa.register_load(iterations, count_sb)\n",
        "    iterations = nisa.register_alloc(None)\n",
        "dynamic_range",
        E,
    ),
    "sum-not-zeroed": Fault("repeat", "    nisa.memset(sum_sb, 0.0)\n", "", "sums[turn]", E),
    "accumulator-not-zeroed": Fault("place", "    nisa.memset(sum_sb, 0.0)\n", "", "nl.add", E),
    "first-load-missing": Fault("place", "    nisa.dma_copy(buffers[0], x_TH)\n", "", "nl.add", E),
    "output-row-missing": Fault(
        "repeat", "    nisa.dma_copy(out_2H[1:2], other_sb)\n", "", "out_2H = ", "output"
    ),
    "output-columns-missing": Fault(
        "place",
        "nisa.dma_copy(out_TH, last_sb)",
        "nisa.dma_copy(out_TH[:, 1:H], last_sb[:, 1:H])",
        "out_TH = ",
        "output",
    ),
    "row-of-the-other-core-missing": Fault(
        "share",
        "    nisa.dma_copy(shared_2H[core : core + 1], own_sb)\n    nisa.core_barrier(shared_2H, (0, 1))\n    nisa.dma_copy(other_sb",
        "    if core == 0:\n        nisa.dma_copy(shared_2H[0:1], own_sb)\n    nisa.core_barrier(shared_2H, (0, 1))\n    nisa.dma_copy(other_sb",
        "nisa.dma_copy(other_sb",
        E,
    ),
    # Out of bounds.
    "rows-past-the-end": Fault(
        "project",
        "rows = min(128, H - 128 * tile)",
        "rows = 128",
        "x_HT[128 * tile",
        "OutOfBounds IllegalOperand",
    ),
    "index-never-skipped": Fault(
        "move_rows", ", oob_mode=nisa.oob_mode.skip", "", "", "OutOfBounds"
    ),
    "scatter-past-the-end": Fault(
        "move_rows", "offset=T - 1,", "offset=T,", "vector_offset=order_sb", "OutOfBounds"
    ),
    "pattern-past-the-end": Fault(
        "move_rows",
        "x_TH.ap([[H, T], [1, H]], vector",
        "x_TH.ap([[H, T], [1, H + 1]], vector",
        "H + 1|oob_mode.skip",
        "OutOfBounds IllegalOperand",
    ),
    "one-iteration-too-many": Fault(
        "repeat",
        "scalar_offset=iteration",
        "offset=H * (T - 1), scalar_offset=iteration",
        "",
        "OutOfBounds",
    ),
    "slice-past-the-tile": Fault(
        "project", "mask_sb[:, 0:8], 1", "mask_sb[:, 0 : N + 8], 1", "", "OutOfBounds slice"
    ),
    "row-past-the-tensor": Fault(
        "share",
        "out_2H[core : core + 1]",
        "out_2H[core + 1 : core + 2]",
        "",
        "OutOfBounds IllegalOperand",
    ),
    # Memory that is too small or used twice.
    "sbuf-full": Fault(
        "project",
        "kept_sb = nl.ndarray((T, N)",
        "big_sb = nl.ndarray((128, 60_000), nl.float32)\n    kept_sb = nl.ndarray((T, N)",
        "",
        "CapacityError",
    ),
    "psum-full": Fault(
        "project",
        "sum_ps = nl.ndarray((T, N), nl.float32, buffer=nl.psum)",
        "sum_ps = nl.ndarray((T, 5000), nl.float32, buffer=nl.psum)",
        "",
        "CapacityError",
    ),
    "too-many-partitions": Fault(
        "place", "last_sb = nl.ndarray((T, H)", "last_sb = nl.ndarray((129, H)", "", "CapacityError"
    ),
    "outside-of-sbuf": Fault(
        "place", "address=(0, bytes_H)", "address=(0, 212_900)", "", "CapacityError"
    ),
    "inside-of-a-bank": Fault(
        "place", "address=(0, 2048)", "address=(0, 1024)", "", "CapacityError"
    ),
    "partitions-past-the-end": Fault(
        "place", "address=(0, 4 * bytes_H)", "address=(100, 4 * bytes_H)", "", "CapacityError"
    ),
    "two-buffers-at-one-address": Fault(
        "place", "address=(0, bytes_H)", "address=(0, 0)", "nl.add", OVERLAP
    ),
    "buffers-overlap-by-a-number": Fault(
        "place", "address=(0, bytes_H)", "address=(0, bytes_H - 4)", "nl.add", OVERLAP
    ),
    "one-buffer-for-two": Fault(
        "place",
        "buffers = [first_sb, second_sb]",
        "buffers = [first_sb, nl.ndarray((T, H), nl.float32, address=(0, 0))]",
        "nl.add",
        OVERLAP,
    ),
    "sum-below-a-buffer": Fault(
        "place", "address=(0, 4 * bytes_H)", "address=(0, bytes_H // 2)", "nl.add", OVERLAP
    ),
    "shifted-onto-itself": Fault(
        "project",
        "scaled_sb[:, 0:4], kept_sb[:, 4:8]",
        "scaled_sb[:, 0:8], scaled_sb[:, 2:10]",
        "",
        OVERLAP,
    ),
    "hbm-copied-onto-itself": Fault(
        "move_rows",
        "nisa.dma_copy(out_TH[0:1], first_sb)",
        "nisa.dma_copy(out_TH[0:8], out_TH[1:9])",
        "",
        OPERAND,
    ),
    # Rows that several indices choose.
    "scatter-to-one-row": Fault(
        "move_rows",
        "offset=T - 1, channel_multiplier=-1",
        "offset=3, channel_multiplier=0",
        "vector_offset=order_sb",
        OPERAND,
    ),
    "scatter-to-half-the-rows": Fault(
        "move_rows",
        "[[0, 1]], offset=T - 1, channel_multiplier=-1)",
        "[[0, 1]], offset=0, channel_multiplier=1)\n    nisa.tensor_scalar(order_sb, order_sb, nl.minimum, T // 2)",
        "vector_offset=order_sb",
        OPERAND,
    ),
    # Engines, types and partitions.
    "matmul-into-sbuf": Fault(
        "project", "buffer=nl.psum)", "buffer=nl.sbuf)", "nisa.nc_matmul", OPERAND
    ),
    "matmul-of-two-widths": Fault(
        "project",
        "w_sb = nl.ndarray((128, N), nl.float32)",
        "w_sb = nl.ndarray((128, N), nl.bfloat16)",
        "nisa.nc_matmul",
        OPERAND,
    ),
    "matmul-of-integers": Fault(
        "project",
        "x_sb = nl.ndarray((128, T), nl.float32)",
        "x_sb = nl.ndarray((128, T), nl.int32)",
        "nisa.nc_matmul",
        OPERAND,
    ),
    "sum-in-bfloat16": Fault(
        "project",
        "sum_ps = nl.ndarray((T, N), nl.float32",
        "sum_ps = nl.ndarray((T, N), nl.bfloat16",
        "nisa.nc_matmul",
        OPERAND,
    ),
    "both-inputs-in-psum": Fault(
        "project", "scaled_sb, kept_sb, sum_ps", "scaled_sb, sum_ps, sum_ps", "", OPERAND
    ),
    "gpsimd-reads-psum": Fault(
        "project",
        "kept_sb, sum_ps, nl.add)",
        "kept_sb, sum_ps, nl.add, engine=nisa.engine.gpsimd)",
        "",
        OPERAND,
    ),
    "psum-copied-to-hbm": Fault(
        "place", "nisa.dma_copy(out_TH, last_sb)", "nisa.dma_copy(out_TH, bank_ps)", "", OPERAND
    ),
    "vector-writes-hbm": Fault(
        "place",
        "nisa.tensor_copy(last_sb, bank_ps)",
        "nisa.tensor_copy(x_TH, bank_ps)",
        "",
        OPERAND,
    ),
    "start-partition-16": Fault(
        "project",
        "nisa.memset(kept_sb, 0.0)",
        "nisa.memset(kept_sb, 0.0)\n    nisa.memset(kept_sb[16:32], 0.0)",
        "kept_sb[16:32]",
        OPERAND,
    ),
    "partition-32-with-33": Fault(
        "project",
        "nisa.memset(kept_sb, 0.0)",
        "nisa.memset(kept_sb, 0.0)\n    nisa.memset(kept_sb[32:65], 0.0)",
        "kept_sb[32:65]",
        OPERAND,
    ),
    "partitions-differ": Fault(
        "project",
        "scaled_sb, kept_sb, sum_ps",
        "scaled_sb[0:32], kept_sb[0:31], sum_ps[0:32]",
        "",
        OPERAND,
    ),
    "columns-differ": Fault(
        "place",
        "sum_sb, sum_sb, buffers[turn % 2]",
        "sum_sb, sum_sb[:, 1:H], buffers[turn % 2]",
        "",
        OPERAND,
    ),
    "index-is-a-float": Fault(
        "move_rows",
        "index_sb = nl.ndarray((T, 1), nl.int32)",
        "index_sb = nl.ndarray((T, 1), nl.float32)",
        "oob_mode.skip",
        OPERAND,
    ),
    "mask-is-a-float": Fault(
        "project",
        "mask_sb = nl.ndarray((T, N), nl.uint8)",
        "mask_sb = nl.ndarray((T, N), nl.float32)",
        "tensor_copy_predicated",
        OPERAND,
    ),
    "value-too-large": Fault(
        "project", "nisa.memset(mask_sb, 0)", "nisa.memset(mask_sb, 256)", "", OPERAND
    ),
    "hardware-descriptors-cast": Fault(
        "place",
        "nisa.dma_copy(buffers[0], x_TH)",
        "half_sb = nl.ndarray((T, H), nl.bfloat16)\n    nisa.dma_copy(half_sb, x_TH, dge_mode=nisa.dge_mode.hwdge)\n    nisa.dma_copy(buffers[0], x_TH)",
        "hwdge",
        OPERAND,
    ),
    "returned-from-sbuf": Fault("place", "return out_TH", "return last_sb", "last_sb = ", OPERAND),
    "returned-from-private-memory": Fault(
        "place", "buffer=nl.shared_hbm", "buffer=nl.private_hbm", "", OPERAND
    ),
    # Sums in PSUM.
    "first-product-adds": Fault(
        "project", "accumulate=tile > 0", "accumulate=True", "", "AccumulateError"
    ),
    "every-product-starts": Fault(
        "project", "accumulate=tile > 0", "accumulate=False", "", "AccumulateError"
    ),
    "zeros-are-overwritten": Fault(
        "project",
        "        nisa.nc_matmul(sum_ps, x_sb[0:rows], w_sb[0:rows], accumulate=tile > 0)\n",
        "        if tile == 0:\n            nisa.memset(sum_ps, 0.0)\n        nisa.nc_matmul(sum_ps, x_sb[0:rows], w_sb[0:rows])\n",
        "nisa.nc_matmul",
        "AccumulateError",
    ),
    "sum-across-iterations": Fault(
        "repeat", "accumulate=False", "accumulate=None", "", "AccumulateError"
    ),
    # Two cores.
    "barrier-missing": Fault(
        "share",
        "    nisa.core_barrier(shared_2H, (0, 1))\n    nisa.dma_copy(other_sb",
        "    nisa.dma_copy(other_sb",
        "nisa.dma_copy(other_sb|nisa.dma_copy(shared_2H",
        RACE + " " + E,
    ),
    "barrier-too-early": Fault(
        "share",
        "    nisa.dma_copy(shared_2H[core : core + 1], own_sb)\n    nisa.core_barrier(shared_2H, (0, 1))\n    nisa.dma_copy(other_sb",
        "    nisa.core_barrier(shared_2H, (0, 1))\n    nisa.dma_copy(shared_2H[core : core + 1], own_sb)\n    nisa.dma_copy(other_sb",
        "nisa.dma_copy(other_sb|nisa.dma_copy(shared_2H",
        RACE + " " + E,
    ),
    "overwritten-too-early": Fault(
        "share",
        "    nisa.core_barrier(shared_2H, (0, 1))\n    nisa.tensor_scalar",
        "    nisa.tensor_scalar",
        "nisa.dma_copy(other_sb|nisa.dma_copy(shared_2H",
        RACE,
    ),
    "both-write-a-row": Fault("share", "out_2H[core : core + 1]", "out_2H[0:1]", "", RACE),
    "both-write-all-rows": Fault(
        "share",
        "    nisa.dma_copy(out_2H[core : core + 1], own_sb)",
        "    for row in range(2):\n        nisa.dma_copy(out_2H[row : row + 1], own_sb)",
        "out_2H[row",
        RACE,
    ),
    "both-write-the-input": Fault(
        "share",
        "    nisa.dma_copy(own_sb, x_2H[core : core + 1])\n",
        "    nisa.dma_copy(own_sb, x_2H[core : core + 1])\n    nisa.dma_copy(x_2H[0:1], own_sb)\n",
        "x_2H[",
        RACE,
    ),
    "barrier-on-one-core": Fault(
        "share",
        "    nisa.core_barrier(shared_2H, (0, 1))\n    nisa.tensor_scalar",
        "    if core == 0:\n        nisa.core_barrier(shared_2H, (0, 1))\n    nisa.tensor_scalar",
        "nisa.core_barrier|nisa.sendrecv",
        "DeadlockError DivergenceError",
    ),
    "send-on-one-core": Fault(
        "share",
        "    nisa.sendrecv(own_sb",
        "    if core == 1:\n        nisa.sendrecv(own_sb",
        "nisa.sendrecv",
        "DeadlockError DivergenceError",
    ),
    "pipes-differ": Fault(
        "share",
        "1 - core, 1 - core, 0)",
        "1 - core, 1 - core, core)",
        "",
        "DeadlockError DivergenceError",
    ),
    "sent-to-itself": Fault(
        "share",
        "sent_sb, 1 - core, 1 - core",
        "sent_sb, core, 1 - core",
        "",
        "DivergenceError DeadlockError",
    ),
    "received-where-it-is-sent": Fault(
        "share", "nisa.sendrecv(own_sb, sent_sb", "nisa.sendrecv(own_sb, own_sb", "", OPERAND
    ),
    "sent-types-differ": Fault(
        "share",
        "sent_sb = nl.ndarray((1, H), nl.float32)",
        "sent_sb = nl.ndarray((1, H), nl.bfloat16)",
        "nisa.sendrecv",
        OPERAND,
    ),
    "shared-memory-on-one-core": Fault(
        "share",
        "    out_2H = nl.ndarray",
        "    if core == 0:\n        more_2H = nl.ndarray((2, H), nl.float32, buffer=nl.shared_hbm)\n    out_2H = nl.ndarray",
        "shared_hbm",
        "DivergenceError",
    ),
    # Registers and dynamic loops.
    "register-compared": Fault(
        "repeat",
        "    turn = 0\n",
        "    turn = 0\n    if iterations == 2:\n        turn = 1\n",
        "iterations == 2",
        LANGUAGE,
    ),
    "register-in-a-list": Fault(
        "repeat",
        "    turn = 0\n",
        "    turn = 0\n    if iterations in [1, 2]:\n        turn = 1\n",
        "iterations in",
        LANGUAGE,
    ),
    "register-in-an-if": Fault(
        "repeat",
        "    turn = 0\n",
        "    turn = 0\n    if iterations:\n        turn = 1\n",
        "if iterations",
        LANGUAGE,
    ),
    "register-bounds-a-range": Fault(
        "repeat", "nl.dynamic_range(0, iterations)", "range(iterations)", "", LANGUAGE
    ),
    "register-is-an-index": Fault(
        "repeat", "sums[turn], sums[turn]", "sums[iteration], sums[iteration]", "", LANGUAGE
    ),
    "register-in-arithmetic": Fault(
        "repeat", "scalar_offset=iteration", "offset=iteration * H", "", LANGUAGE
    ),
    "counter-written": Fault(
        "repeat",
        "nisa.dma_copy(row_sb,",
        "nisa.register_move(iteration, 0)\n        nisa.dma_copy(row_sb,",
        "",
        LANGUAGE,
    ),
    "tensor-compared": Fault(
        "repeat",
        "    turn = 0\n",
        "    turn = 0\n    if count_sb == 0:\n        turn = 1\n",
        "count_sb == 0",
        LANGUAGE,
    ),
    "tensors-added-in-python": Fault(
        "place", "nisa.tensor_copy(last_sb, bank_ps)", "last_sb = last_sb + bank_ps", "", LANGUAGE
    ),
    "buffer-turns-in-python": Fault(
        "repeat",
        "row_sb, nl.add)\n",
        "row_sb, nl.add)\n        turn = 1 - turn\n",
        "sums[turn]|turn = 1|dynamic_range|row_sb",
        LANGUAGE,
    ),
    "number-grows-in-python": Fault(
        "repeat",
        "row_sb, nl.add)\n",
        "row_sb, nl.add)\n        nisa.tensor_scalar(other_sb, other_sb, nl.add, float(turn))\n        turn = turn + 1\n",
        "sums[turn]|float(turn)",
        LANGUAGE,
    ),
    "flag-of-the-first-iteration": Fault(
        "repeat",
        "sums[turn], sums[turn], row_sb, nl.add)\n",
        "sums[turn], sums[turn], row_sb, nl.add)\n        if turn == 0:\n            nisa.tensor_copy(sum_sb, row_sb)\n        turn = 1\n",
        "row_sb|dynamic_range",
        LANGUAGE,
    ),
    "iterations-counted-in-python": Fault(
        "repeat",
        "        nisa.nc_matmul(column_ps",
        "        turn += 1\n        nisa.nc_matmul(column_ps",
        "sums[turn]|dynamic_range|row_sb",
        LANGUAGE,
    ),
    "counted-and-used-later": Fault(
        "repeat",
        "row_sb, nl.add)\n",
        "row_sb, nl.add)\n        H = H + 1\n",
        "row_sb|dynamic_range",
        LANGUAGE,
    ),
    "tile-kept-across-iterations": Fault(
        "repeat",
        "row_sb, nl.add)\n",
        "row_sb, nl.add)\n        sums[0] = row_sb\n",
        "row_sb|sums[turn]",
        LANGUAGE,
    ),
    "list-grows-across-iterations": Fault(
        "repeat",
        "row_sb, nl.add)\n",
        "row_sb, nl.add)\n        sums.append(row_sb)\n",
        "row_sb|dynamic_range",
        LANGUAGE,
    ),
    "tile-used-after-its-loop": Fault(
        "repeat",
        "nisa.dma_copy(out_2H[0:1], sum_sb)",
        "nisa.dma_copy(out_2H[0:1], row_sb)",
        "",
        LANGUAGE,
    ),
    "loop-that-never-ends": Fault(
        "repeat",
        "    for iteration in nl.dynamic_range(0, iterations):\n",
        "    iteration = nisa.register_alloc(0)\n    while iterations:\n",
        "while iterations",
        LANGUAGE,
    ),
    "loop-left-early": Fault(
        "repeat",
        "        nisa.tensor_tensor(other_sb, other_sb, column_ps, nl.add)\n",
        "        nisa.tensor_tensor(other_sb, other_sb, column_ps, nl.add)\n        break\n",
        "dynamic_range|break",
        LANGUAGE + " NKI025",
    ),
    # Python that the compiler does not read.
    "comprehension": Fault(
        "place",
        "buffers = [first_sb, second_sb]",
        "buffers = [each for each in (first_sb, second_sb)]",
        "",
        "NKI007",
    ),
    "lambda": Fault("place", "bytes_H = 4 * H", "bytes_H = (lambda: 4 * H)()", "", "NKI006"),
    "identity": Fault("place", "if turn < 3:", "if turn is not 3:", "", "NKI016"),
    "membership": Fault("place", "if turn < 3:", "if turn in (0, 1, 2):", "", "NKI019"),
    "exception": Fault(
        "place",
        "    bytes_H = 4 * H\n",
        "    if H > 4096:\n        raise ValueError(H)\n    bytes_H = 4 * H\n",
        "raise ",
        "NKI002",
    ),
    "assignment-expression": Fault(
        "place", "if turn < 3:", "if (left := 3 - turn) > 0:", "", "NKI020"
    ),
    "numpy-while-compiling": Fault(
        "place", "bytes_H = 4 * H", "bytes_H = int(np.multiply(4, H))", "", "NKI036"
    ),
    "list-as-a-default": Fault(
        "place", "x_TH: nl.ndarray)", "x_TH: nl.ndarray, kept: list = [])", "", "NKI037"
    ),
    "unknown-function": Fault(
        "project",
        "rows = min(128, H - 128 * tile)",
        "rows = sorted([128, H - 128 * tile])[0]",
        "",
        "NKI023",
    ),
    "starred-arguments": Fault(
        "place",
        "nisa.dma_copy(buffers[0], x_TH)",
        "nisa.dma_copy(*[buffers[0], x_TH])",
        "",
        "NKI010",
    ),
    "inner-function": Fault(
        "place",
        "    bytes_H = 4 * H\n",
        "    def four(n):\n        return 4 * n\n    bytes_H = four(H)\n",
        "def four",
        "NKI024",
    ),
}
LAUNCHES = {"share": 2}


def inputs(kernel: str, rng: random.Random) -> tuple[np.ndarray[Any, Any], ...]:
    """Return inputs of random sizes."""
    values = np.random.default_rng(rng.randrange(1 << 30))
    T, H, N = rng.choice([65, 96, 128]), rng.choice([64, 96, 250]), rng.choice([32, 200, 512])
    deep = rng.choice([200, 300, 385])
    normal = lambda *shape: values.normal(size=shape).astype(np.float32)  # noqa: E731
    if kernel == "project":
        return normal(deep, T), normal(deep, N)
    if kernel == "move_rows":
        index = values.permutation(T).astype(np.int32)[:, None]
        index[rng.randrange(T)] = -1
        return normal(T, H), index
    if kernel == "share":
        return (normal(2, H),)
    if kernel == "repeat":
        return normal(T, H), np.array([[rng.randint(3, 9)]], np.int32)
    return (normal(T, H),)


def plant(fault: Fault, folder: Path, name: str) -> tuple[Path, set[int]]:
    """Write the kernel with the fault to a file; return it and the lines that may be named."""
    source = inspect.getsource(correct_kernels)
    body = inspect.getsource(getattr(correct_kernels, fault.kernel))
    assert body.count(fault.old) == 1, (name, body.count(fault.old))
    before, changed = source.index(body), body.replace(fault.old, fault.new)
    text = source.replace(body, changed).replace(
        "import nki.isa", "import numpy as np\nimport nki.isa"
    )
    path = folder / f"planted_{name.replace('-', '_')}.py"
    path.write_text(text, encoding="utf-8")
    start = text[: before + len("import numpy as np\n")].count("\n")
    lines = changed.splitlines()
    first = body[: body.index(fault.old)].count("\n")
    if fault.at:
        wanted = [n for n, line in enumerate(lines) if any(a in line for a in fault.at.split("|"))]
    else:
        wanted = [first]
    assert wanted, name
    return path, {start + n + 1 for n in wanted}


def load(path: Path) -> ModuleType:
    """Import a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found_by_simulator(kernel: Any, arrays: Any, lnc: int | None) -> list[tuple[str, str]]:
    """Run a kernel; return (kind, text) of what is wrong with it."""
    try:
        options = nki_sim.SimOptions(nki="0.6")  # its loops are the hardest to get right
        run = nki_sim.run(kernel, *[array.copy() for array in arrays], lnc=lnc, options=options)
    except nki_sim.NkiValidationError as error:
        return [(type(error).__name__, str(error))]
    return [(finding.kind, f"{finding.location}: {finding.text}") for finding in run.findings]


def found_by_linter(path: Path) -> list[tuple[str, str]]:
    """Read a file; return (rule, text) of what is wrong with it."""
    return [
        (finding.rule, str(finding))
        for finding in lint_source(path.read_text(), str(path), dialect="house")
    ]


def attack_kernel(seed: int, folder: Path) -> str:
    """Plant the fault of a seed; say what nobody noticed, or what the twin is blamed for."""
    rng = random.Random(f"kernel {seed}")
    name = list(FAULTS)[seed % len(FAULTS)]
    fault = FAULTS[name]
    arrays, lnc = inputs(fault.kernel, rng), LAUNCHES.get(fault.kernel)
    twin = getattr(correct_kernels, fault.kernel)
    if wrong := found_by_simulator(twin, arrays, lnc):
        return f"{name} (seed {seed}): the twin is blamed: {wrong}"
    path, lines = plant(fault, folder, name)
    found = found_by_linter(path)
    kinds = fault.finds.split()
    if not any(kind.startswith("NKI") for kind in kinds) or len(kinds) > 1:
        found += found_by_simulator(getattr(load(path), fault.kernel), arrays, lnc)
    for kind, text in found:
        named = re.findall(rf"{re.escape(str(path))}:(\d+)", text)
        if kind in kinds and lines & {int(line) for line in named}:
            return ""
    return f"{name} (seed {seed}): not named at {sorted(lines)}, but {found}"
