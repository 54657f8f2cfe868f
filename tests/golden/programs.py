"""Short random programs, and what the simulator makes of each: views, memory, cores and loops.

python -m tests.golden.programs --write              after a change that is meant to change one
python -m tests.golden.programs --show KIND NUMBER   what comes of a program, step by step
"""

import argparse
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import nki_sim
from nki_sim import SimOptions, isa
from nki_sim.errors import NkiValidationError
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute
from tests.golden import digests, engine_programs
from tests.golden.engine_programs import REPORTS, end_of
from tests.golden.traces import told

FILE = Path(__file__).with_suffix(".json")
# How many of each kind; the long run has LONGER times as many.
EACH = {
    "views": 1500,
    "memory": 400,
    "cores": 400,
    "loops": 600,
    "transfers": 500,
    "products": 200,
    "registers": 300,
    "shared": 150,
    "ranks": 100,
}
LONGER = 5
SIZES = (1, 2, 3, 4, 6, 8, 12)
DTYPES = (nl.float32, nl.bfloat16, nl.uint8, nl.int32)


def views(rng: random.Random) -> list[str]:
    """Look at a tensor in several ways, right ones and wrong ones, and copy what is seen."""
    shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((2, 3, 3, 4))))
    space = rng.choice(("sbuf", "hbm", "hbm"))
    tile = Tile(np.arange(np.prod(shape)).reshape(shape) % 120, rng.choice(DTYPES), space=space)
    index = Tile(np.array([[rng.randint(0, 3)] for _ in range(4)], np.int32))
    steps = []

    def body(x: Any, index: Any) -> None:
        register = isa.register_alloc(rng.randint(0, 3))
        seen = x
        for _ in range(rng.randint(1, 5)):
            try:
                seen = another_view(seen, rng, index, register) if seen.ndim else x
                steps.append(f"{seen.shape} {seen.strides} {seen.offset} {seen.is_contiguous()}")
            except NkiValidationError as error:
                steps.append(told(error))
        steps.append(f"{seen.get_pattern()} {seen.is_indirect()} {seen.ndim} {seen.size}")
        rows, *columns = seen.shape if len(seen.shape) > 1 else (1, *seen.shape)
        copy = nl.ndarray((rows, int(np.prod(columns))), seen.dtype, buffer=nl.private_hbm)
        isa.dma_copy(copy.reshape(seen.shape), seen)
        steps.append(hashlib.sha256(copy.array().tobytes()).hexdigest()[:8])
        kept = nl.ndarray(seen.shape, seen.dtype)
        isa.tensor_copy(kept, seen)
        geometry = seen.geometry
        steps.append(f"{geometry.box} {geometry.run} {geometry.free_dims} {geometry.profile}")

    return steps + end_of(lambda: execute(body, x=tile, index=index, options=REPORTS).run)


def another_view(seen: Any, rng: random.Random, index: Any, register: Any) -> Any:
    """Return a view of a view."""
    axes, rank = list(range(seen.ndim)), seen.ndim
    axis, other = rng.randint(-rank, rank - 1), rng.randrange(rank)
    size = seen.shape[axis]
    split = rng.choice(([2, -1], [-1, 2], [size, 1], [3, -1], [2, 2], [-1, -1]))
    pattern = [[stride, count] for stride, count in zip(seen.strides, seen.shape, strict=True)]
    first, names = rng.randint(0, size), [f"axis{number}" for number in axes]
    calls: list[Callable[[], Any]] = [
        lambda: seen[
            tuple(
                rng.choice(
                    (
                        slice(None),
                        slice(0, count, 2),
                        slice(1, None),
                        slice(-2, None),
                        rng.randrange(-1, count + 1),
                        slice(0, count + 1),
                    )
                )
                for count in seen.shape[: rng.randint(1, rank)]
            )
        ],
        lambda: seen[..., rng.choice((0, -1, slice(0, 2), register))],
        lambda: seen.permute(rng.sample(axes, rank)),
        lambda: seen.permute([0, *rng.sample(axes[1:], rank - 1)]),
        lambda: seen.broadcast(axis, rng.choice((1, 3))),
        lambda: seen.expand_dim(axis).broadcast(other, 2),
        lambda: seen.expand_dim(rng.randint(1, rank)),
        lambda: seen.squeeze_dim(axis),
        lambda: seen.reshape_dim(axis, split),
        lambda: seen.flatten_dims(min(axis, other), max(axis, other)),
        lambda: seen.flatten_dims(other, rank - 1),
        lambda: seen.reshape((seen.shape[0], -1)),
        lambda: seen.reshape((*seen.shape[:-1], -1, rng.choice((1, 2)))),
        lambda: seen.rearrange(names, [names[0], tuple(names[1:])]),
        lambda: seen.rearrange([*names[:-1], ("a", "b")], [*names[:-1], "b", "a"], {"a": 2}),
        lambda: seen.slice(axis, first, rng.randint(0, size + 1), rng.choice((1, 2))),
        lambda: seen.select(axis, rng.choice((0, size - 1, size, -1, register))),
        lambda: seen.vector_select(rng.choice((0, 0, 1)), index),
        lambda: seen.ap(pattern, offset=rng.choice((None, 0, 1))),
        lambda: seen.ap([[pattern[0][0], 4], *pattern[1:]], vector_offset=index),
        lambda: seen.ap(
            pattern,
            scalar_offset=rng.choice((register, index[0:1])),
            indirect_dim=rng.randrange(rank),
        ),
        lambda: seen.ap(pattern, dtype=rng.choice(DTYPES)),
        lambda: seen.view(rng.choice(DTYPES)),
    ]
    return rng.choice(calls)()


def memory(rng: random.Random) -> list[str]:
    """Write and read parts of tensors, some of them at one place, some of them never written."""
    steps = []
    spaces = (nl.sbuf, nl.sbuf, nl.psum, nl.private_hbm)

    def body() -> None:
        tensors = [new_tensor(rng, space) for space in spaces]
        for _ in range(rng.randint(6, 20)):
            try:
                if rng.random() < 0.2:
                    place = rng.randrange(len(tensors))
                    tensors[place] = new_tensor(rng, spaces[place])
                use(part_of(rng.choice(tensors), rng), part_of(rng.choice(tensors), rng), rng)
            except NkiValidationError as error:
                steps.append(told(error))

    return steps + end_of(lambda: execute(body, options=REPORTS).run)


def use(part: Any, other: Any, rng: random.Random) -> None:
    """Fill, read or copy parts of tensors."""
    rows, columns = min(part.shape[0], other.shape[0]), min(part.shape[1], other.shape[1])
    what = rng.choice(("fill", "read", "copy", "move"))
    if what == "fill":
        isa.memset(part, 1.0)
    elif what == "read":
        isa.dma_copy(nl.ndarray(part.shape, part.dtype), part)
    elif what == "copy":
        isa.tensor_copy(part[0:rows, 0:columns], other[0:rows, 0:columns])
    else:
        isa.dma_copy(part[0:rows, 0:columns], other[0:rows, 0:columns])


def new_tensor(rng: random.Random, buffer: Any) -> Any:
    """Return a tensor, on chip sometimes at an address, sometimes too large."""
    rows, columns = rng.choice((8, 32, 64, 128)), rng.choice((4, 8, 128))
    if buffer is nl.private_hbm:
        return nl.ndarray((rows, columns), nl.float32, buffer=buffer)
    if rng.random() < 0.05:
        columns = rng.choice((30_000, 4_096, 4_097, 49_152, 49_153, 60_000))
    step = 2048 if buffer is nl.psum else rng.choice((4, 16, 512))
    address = rng.choice((None, None, (0, 0), (0, step), (32, step), (0, 2 * step), (96, 0)))
    return nl.ndarray((rows, columns), nl.float32, buffer=buffer, address=address)


def part_of(tensor: Any, rng: random.Random) -> Any:
    """Return some rows and columns."""
    rows, columns = tensor.shape
    first = rng.choice((0, 0, 32)) if rows > 32 else 0
    begin = rng.randrange(columns)
    last = rng.randint(begin + 1, columns)
    return tensor[first : rng.choice((first + 8, rows)), begin : last : rng.choice((1, 1, 2))]


def cores(rng: random.Random) -> list[str]:
    """Let two cores write and read rows of shared memory, with and without meetings."""
    plan = [
        (
            rng.choice(("write", "read", "barrier", "barrier", "send")),
            rng.randrange(4),
            rng.choice((0, 1, 2, 2, 2)),
        )
        for _ in range(rng.randint(3, 9))
    ]

    def kernel() -> Any:
        core = nl.program_id(0)
        rows = nl.ndarray((4, 8), nl.float32, buffer=nl.shared_hbm)
        own, got = nl.ndarray((1, 8), nl.float32), nl.ndarray((1, 8), nl.float32)
        isa.memset(own, float(core + 1))
        isa.memset(got, 0.0)
        for what, row, who in plan:
            if who != 2 and who != core:
                continue
            if what == "write":
                isa.dma_copy(rows[row : row + 1], own)
            elif what == "read":
                isa.dma_copy(got, rows[row : row + 1])
            elif what == "barrier":
                isa.core_barrier(rows, (0, 1))
            else:
                isa.sendrecv(own, got, 1 - core, 1 - core, row % 2)
        return rows

    options = SimOptions(
        uninitialized="report",
        races="report",
        start_core=rng.randrange(2),
        preempt=rng.choice((0.0, 0.3)),
        seed=rng.randrange(9),
    )
    return end_of(lambda: nki_sim.run(kernel, lnc=2, options=options))


def loops(rng: random.Random) -> list[str]:
    """Run a loop whose bodies may depend on Python's state, inner loops included."""
    plan = [
        rng.choice(("add", "copy", "inner", "new", "load", "set")) for _ in range(rng.randint(1, 5))
    ]
    flaw = rng.choice(("none", "none", "flag", "other", "grows", "length"))
    iterations, inner = rng.randint(1, 4), rng.randint(0, 3)

    def body(x: Any, count: Any) -> None:
        end = isa.register_alloc(0)
        isa.register_load(end, count)
        place = isa.register_alloc(0)
        buffers = [nl.ndarray(x.shape, nl.float32) for _ in range(2)]
        for buffer in buffers:
            isa.memset(buffer, 1.0)
        seen: list[int] = []

        def step(iteration: Any) -> None:
            slot = len(seen) % 2 if flaw == "other" else 0
            if flaw in ("flag", "other", "grows"):
                seen.append(1)
            for what in plan[: len(seen) + 1] if flaw == "length" else plan:
                take(what, iteration, buffers[slot])
            if flaw == "flag" and len(seen) == 2:
                isa.memset(buffers[1], 2.0)
            if flaw == "length":
                seen.append(1)

        def take(what: str, iteration: Any, buffer: Any) -> None:
            if what == "add":
                isa.tensor_tensor(buffer, buffer, x, nl.add)
            elif what == "copy":
                isa.tensor_copy(buffer, x[:, 0:8].broadcast(1, 8) if x.shape[1] == 1 else x)
            elif what == "new":
                isa.tensor_copy(nl.ndarray(x.shape, nl.float32), buffer)
            elif what == "load":
                isa.register_move(place, iteration)
            elif what == "set":
                isa.tensor_scalar(buffer, buffer, nl.multiply, float(1 + len(seen)))
            else:
                nl.fori_loop(0, inner, lambda _: isa.tensor_tensor(buffer, buffer, x, nl.maximum))

        nl.fori_loop(0, end, step)
        isa.tensor_copy(buffers[1], buffers[0])

    x, count = Tile(np.ones((32, 8), np.float32)), Tile(np.array([[iterations]], np.int32))
    return end_of(lambda: execute(body, x=x, count=count, options=REPORTS).run)


KINDS = {
    "views": views,
    "memory": memory,
    "cores": cores,
    "loops": loops,
    "transfers": engine_programs.transfers,
    "products": engine_programs.products,
    "registers": engine_programs.registers,
    "shared": engine_programs.shared,
    "ranks": engine_programs.ranks,
}


def outcome(kind: str, number: int) -> list[str]:
    """Run a program; return what comes of it, step by step."""
    with np.errstate(all="ignore"):
        return KINDS[kind](random.Random(f"{kind} {number}"))


def short(kind: str, numbers: range) -> list[str]:
    """Return some digits of the outcome of each program of a kind."""
    return [digests.digits("\n".join(outcome(kind, number))) for number in numbers]


def main(argv: list[str] | None = None) -> int:
    """Write all outcomes, or show one."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.programs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write all outcomes")
    parser.add_argument("--show", nargs=2, metavar=("KIND", "NUMBER"), help="tell of one program")
    options = parser.parse_args(argv)
    if options.show:
        print(*outcome(options.show[0], int(options.show[1])), sep="\n")  # noqa: T201  a tool
    if options.write:
        digests.write(FILE, {kind: short(kind, range(EACH[kind] * LONGER)) for kind in KINDS})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
