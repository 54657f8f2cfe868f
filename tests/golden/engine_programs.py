"""Random programs of one subject each: DMA, products in PSUM, registers, shared memory, ranks."""

import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import nki_sim
from nki_sim import SimOptions, collectives, isa
from nki_sim.errors import NkiValidationError
from nki_sim.language import api as nl
from nki_sim.testing import Result, Tile, execute
from tests.golden.traces import digest, plain, told

REPORTS = SimOptions(
    uninitialized="report",
    capacity="report",
    overlap="report",
    races="report",
    accumulate="report",
    scatter="report",
)
WIDE = (nl.float32, nl.float32, nl.bfloat16, nl.int32, nl.uint8)


def end_of(run: Callable[[], nki_sim.Run]) -> list[str]:
    """Return what a run ends with: its instructions and findings, or why it did not."""
    try:
        done = run()
    except NkiValidationError as error:
        return [told(error)]
    findings = sorted(f"{found.kind} {found.text}" for found in done.findings)
    outputs = "" if done.outputs is None else bits_of(done.outputs)
    return [digest([done.trace]), f"{done.sbuf_peak_bytes}", outputs, *map(plain, findings)]


def bits_of(outputs: Any) -> str:
    """Return arrays as text, every NaN as -1."""
    if isinstance(outputs, list | tuple):
        return f"[{', '.join(map(bits_of, outputs))}]"
    if outputs is None:
        return "None"
    values = np.asarray(outputs)
    values = values.astype(np.float64) if values.dtype.kind not in "iub" else values
    return f"{np.nan_to_num(values, nan=-1).tolist()}"


def left_by(run: Callable[[], Result]) -> list[str]:
    """Return what a run on tiles ends with, and what it leaves in them."""
    found: list[Result] = []

    def keep() -> nki_sim.Run:
        found.append(run())
        return found[0].run

    end = end_of(keep)
    del end[1:2]  # the peak: what an error still holds counts until it is collected
    for result in found:
        for name in sorted(result.tiles):
            kept = np.where(result.unwritten[name], 0, result.tiles[name])
            end.append(hashlib.sha256(kept.tobytes()).hexdigest()[:8])
            end.append(f"{int(result.unwritten[name].sum())}")
    return end


def transfers(rng: random.Random) -> list[str]:
    """Copy, add and transpose what lies at indices, in registers' places, and partly unwritten."""
    steps: list[str] = []
    rows, columns = rng.choice((4, 8, 16, 32)), rng.choice((4, 8, 16, 64))
    dtype, count = rng.choice((*WIDE, nl.bfloat16)), rng.choice((1, 3, 4, 8, 16))
    options = replace(
        REPORTS,
        out_of_bounds=rng.choice(("error", "error", "clamp")),
        mode=rng.choice(("full", "full", "full", "indices")),
        small_elements=rng.choice((64, 1 << 14)),
        target=rng.choice(("trn1", "trn2", "trn2", "trn2", "trn3")),
        uninitialized=rng.choice(("report", "report", "read", "off")),
    )

    def filled(shape: tuple[int, ...], space: str, dtype: Any = dtype) -> Tile:
        values = np.arange(np.prod(shape)).reshape(shape) * 7 % 113
        written = None
        if rng.random() < 0.4:
            written = np.array([rng.random() < 0.8 for _ in range(shape[0])]).reshape(
                -1, *[1] * (len(shape) - 1)
            )
        return Tile(values, dtype, space=space, written=written)

    indices = [[rng.choice((0, 1, 1, 2, 3, rows - 1, rng.randrange(rows)))] for _ in range(count)]
    if rng.random() < 0.4:
        indices[rng.randrange(count)] = [rng.choice((-1, rows, rows + 3, -7))]
    if rng.random() < 0.5:
        indices = [[number] for number in rng.sample(range(rows), min(count, rows))]
    tiles = {
        "x": filled((rows, columns), "hbm"),
        "y": filled((rows, columns), "hbm", rng.choice(WIDE)),
        "tile": filled((rows, columns), "sbuf"),
        "few": filled((len(indices), columns), "sbuf"),
        "deep": filled((rows, 2, 2, columns), "hbm"),
        "index": Tile(
            np.array(indices),
            rng.choice((nl.int32, nl.int32, nl.uint32, nl.int16)),
            written=rng.choice((None, None, None, rng.random() < 0.5)),
        ),
    }

    def body(**tensors: Any) -> None:
        register = isa.register_alloc(rng.choice((0, 1, 2, rows - 1, rows, -1)))
        for _ in range(rng.randint(2, 6)):
            try:
                transfer(tensors, register, rng)
            except NkiValidationError as error:
                steps.append(told(error))
                if options.uninitialized == "read":
                    raise

    return steps + left_by(lambda: execute(body, options=options, **tiles))


def transfer(tensors: dict[str, Any], register: Any, rng: random.Random) -> None:
    """Move something once."""
    x, y, tile, few, deep, index = tensors.values()
    rows, columns = x.shape
    width, begin = rng.choice((columns, columns // 2, 1)), rng.choice((0, 0, 1, columns // 2))
    chosen = rng.choice((len(few.array()), len(few.array()), 2))
    base = rng.choice((x, x, y))
    parts: list[Callable[[], Any]] = [
        lambda: base.ap([[columns, chosen], [1, width]], offset=begin, vector_offset=index),
        lambda: base.ap([[columns, chosen], [1, width]], vector_offset=index[0:chosen]),
        lambda: base.ap([[2 * columns, chosen], [1, width]], vector_offset=index[0:chosen]),
        lambda: base.ap([[columns, chosen], [2, columns // 2]], vector_offset=index[0:chosen]),
        lambda: base.ap([[columns, 4], [1, width]], offset=begin, scalar_offset=register),
        lambda: base.ap([[columns, rows], [1, 2]], scalar_offset=index[0:1], indirect_dim=1),
        lambda: deep.ap([[4 * columns, 2], [columns, 2], [1, width]], scalar_offset=register),
        lambda: deep.ap(
            [[4 * columns, chosen], [columns, 2], [1, columns]], vector_offset=index[0:chosen]
        ),
        lambda: deep[0:chosen, 0, 0, 0:width],
        lambda: base[0:chosen, begin : begin + width],
        lambda: base[rng.randrange(rows) :, begin::2],
        lambda: tile[0:chosen, begin : begin + width],
        lambda: tile.ap([[columns, rows], [1, 2]], scalar_offset=register, indirect_dim=1),
        lambda: few[0:chosen, 0:width],
        lambda: few,
        lambda: base[register, 0:width],
    ]
    src, modes = rng.choice(parts)(), {"oob_mode": rng.choice(tuple(isa.oob_mode))}
    dst = like(src, tensors, rng) if rng.random() < 0.8 else rng.choice(parts)()
    if rng.random() < 0.5:
        dst, src = src, dst
    kind = rng.choice(("copy", "copy", "copy", "copy", "add", "add", "transpose", "gathered"))
    if kind == "copy":
        dge = rng.choice((*[isa.dge_mode.unknown] * 6, *isa.dge_mode))
        isa.dma_copy(dst, src, dge_mode=dge, **modes)
    elif kind == "add":
        rest = like(dst, tensors, rng)
        sources = rng.choice(([dst, src], [src, dst], [src, rest], [src], [src, src, rest]))
        isa.dma_compute(
            dst,
            sources,
            rng.choice((*[nl.add] * 9, nl.multiply)),
            unique_indices=rng.random() < 0.5,
            **modes,
        )
    elif kind == "transpose":
        order = {1: (0,), 2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[src.ndim]
        to = nl.ndarray(tuple(src.shape[axis] for axis in order), src.dtype)
        isa.dma_transpose(to, src, dge_mode=rng.choice(tuple(isa.dge_mode)), **modes)
    else:
        count = rng.choice((16, 16, 32, 8))
        numbers = nl.ndarray((count, 1), nl.int32)
        isa.iota(numbers, [[0, 1]], rng.randint(-1, 2), rng.choice((0, 1)))
        seen = base.ap([[columns, count], [1, width]], vector_offset=numbers)
        isa.dma_transpose(nl.ndarray((width, count), base.dtype), seen, **modes)


def like(seen: Any, tensors: dict[str, Any], rng: random.Random) -> Any:
    """Return a part or a new tensor of the shape of another one."""
    rows, *columns = seen.shape
    if len(columns) == 1 and rng.random() < 0.7:
        base = rng.choice((tensors["few"], tensors["tile"], tensors["y"]))
        if rows <= base.shape[0] and columns[0] <= base.shape[1]:
            return base[0:rows, 0 : columns[0]]
    made = nl.ndarray(
        seen.shape,
        rng.choice((seen.dtype, seen.dtype, nl.float32)),
        buffer=rng.choice((nl.sbuf, nl.sbuf, nl.private_hbm)),
    )
    if rng.random() < 0.6:
        isa.dma_copy(made, tensors["x"].ap([[0, count] for count in seen.shape]))
    return made


def products(rng: random.Random) -> list[str]:
    """Multiply into PSUM, in parts of the array and of banks, over and onto what lies there."""
    steps: list[str] = []
    dtype = rng.choice((nl.float32, nl.bfloat16, nl.bfloat16, nl.float16, nl.float8_e4m3))
    k, m, n = (
        rng.choice((32, 64, 128, 128, 7)),
        rng.choice((1, 32, 64, 128)),
        rng.choice((8, 64, 512)),
    )
    same = rng.choice((None, None, nl.float32)) or dtype

    def body(held: Any, moving: Any) -> None:
        banks = [nl.ndarray((128, 512), nl.float32, buffer=nl.psum) for _ in range(2)]
        wide = nl.ndarray((128, 1024), rng.choice((nl.float32, nl.bfloat16)), buffer=nl.psum)
        turned = nl.ndarray((128, 128), dtype, buffer=rng.choice((nl.psum, nl.sbuf)))
        kept = nl.ndarray((128, 512), nl.float32)
        for _ in range(rng.randint(3, 8)):
            bank = rng.choice((*banks, wide))
            begin = min(rng.choice((0, 0, 0, 8, 480, 512)), bank.shape[1] - n)
            first, rows = rng.choice((0, 0, 0, 32, 64)), rng.choice((m, m, m, 32))
            try:
                part = bank[first : min(128, first + rows), begin : begin + n]
                what = rng.choice(("product", "product", "product", "read", "transpose", "fill"))
                if what == "product":
                    product(part, held, moving, rng)
                elif what == "read":
                    isa.tensor_copy(kept[first : first + part.shape[0], 0:n], part)
                elif what == "transpose":
                    data = rng.choice((held, held, moving))
                    dst = turned[0 : min(128, data.size // k), 0:k]
                    engine = rng.choice((isa.engine.unknown, isa.engine.unknown, *isa.engine))
                    isa.nc_transpose(dst, data, engine=engine)
                else:
                    isa.memset(part, 1.0)
            except NkiValidationError as error:
                steps.append(told(error))
        isa.tensor_copy(kept, banks[0])

    pair = dtype is nl.float8_e4m3 and rng.random() < 0.7
    shapes = ((k, 2, m), (k, 2, n)) if pair else ((k, m), (k, n))
    start = rng.choice((0, 0, 32, 64)) if k <= 32 else 0
    other = rng.choice((start, start, start, 0))
    tiles = [
        Tile(np.arange(np.prod(shape)).reshape(shape) % 5, kind, start=begin)
        for shape, kind, begin in zip(shapes, (dtype, same), (start, other), strict=True)
    ]
    options = replace(REPORTS, target=rng.choice(("trn1", "trn2", "trn2", "trn2", "trn3")))
    return steps + left_by(lambda: execute(body, options=options, held=tiles[0], moving=tiles[1]))


def product(part: Any, held: Any, moving: Any, rng: random.Random) -> None:
    """Multiply once."""
    size = (rng.choice((32, 64, 128)), rng.choice((32, 64, 128)))
    place = (rng.choice((0, 0, 32, 64, 96, 16)), rng.choice((0, 0, 32, 64, 96, 16)))
    tile = {"tile_position": place, "tile_size": size} if rng.random() < 0.4 else {}
    mode = isa.matmul_perf_mode.double_row if held.ndim == 3 else isa.matmul_perf_mode.none
    isa.nc_matmul(
        part,
        held,
        moving,
        accumulate=rng.choice((None, None, True, False)),
        perf_mode=mode,
        is_transpose=rng.random() < 0.1,
        is_stationary_onezero=rng.random() < 0.1,
        **tile,
    )


def registers(rng: random.Random) -> list[str]:
    """Load, move and store registers, loop over them, and use them as offsets."""
    steps: list[str] = []
    dtype = rng.choice((nl.int32, nl.uint32, nl.uint8, nl.int16, nl.float32, nl.bfloat16))
    numbers = Tile(
        np.array([[rng.choice((0, 1, 2, 3, 5, 200, -1)) for _ in range(4)]]),
        dtype,
        space=rng.choice(("sbuf", "hbm")),
        written=None if rng.random() < 0.8 else np.arange(4)[None] != 2,
    )
    x = Tile(np.arange(64).reshape(8, 8), nl.float32)

    def body(numbers: Any, x: Any) -> None:
        held = [isa.register_alloc(rng.choice((None, 0, 2, 3, -5))) for _ in range(3)]
        out = nl.ndarray((8, 8), nl.float32)

        def step(deep: int) -> None:
            dst, src = rng.choice(held), rng.choice(held)
            place = rng.randrange(4)
            calls: list[Callable[[], Any]] = [
                lambda: isa.register_load(dst, numbers[0:1, place : place + 1]),
                lambda: isa.register_move(dst, rng.choice((src, 1, 3, 1 << 31, (1 << 32) - 1))),
                lambda: isa.register_move(dst, rng.choice((1 << 32, -(1 << 31), -(1 << 31) - 1))),
                lambda: isa.register_store(numbers[0:1, place : place + 1], src),
                lambda: held.append(isa.register_alloc(rng.choice((src, numbers[0:1, 0:1])))),
                lambda: isa.tensor_copy(out[0:8, 0:2], x[0:8, nl.ds(src, 2)]),
                lambda: isa.tensor_copy(out[0:8, 0:1], x[0:8, src]),
                lambda: isa.register_load(dst, numbers[0:1, 0 : place + 1]),
                lambda: loop(src, rng.choice((src, 2, 3)), deep),
            ]
            rng.choice(calls)()

        def loop(first: Any, last: Any, deep: int) -> None:
            if deep < 2:
                plan = rng.getrandbits(32)

                def iteration(number: Any) -> None:
                    same = random.Random(plan)
                    isa.tensor_copy(out[0:8, 0:1], x[0:8, number])
                    if same.random() < 0.5:
                        isa.register_move(held[0], number)

                nl.fori_loop(rng.choice((0, first)), last, iteration, step=rng.choice((1, 1, 2, 0)))

        for _ in range(rng.randint(4, 10)):
            try:
                step(0)
            except NkiValidationError as error:
                steps.append(told(error))
        steps.extend(f"{register.state}" for register in held)

    return steps + left_by(lambda: execute(body, options=REPORTS, numbers=numbers, x=x))


def shared(rng: random.Random) -> list[str]:
    """Let two cores gather, scatter and change parts of shared memory, and meet now and then."""
    plan = [
        (
            what := rng.choice(
                (*("write", "read", "gather", "scatter", "same", "meet") * 3, "load")
            ),
            rng.randrange(3),
            rng.choice((0, 0, 8)),
            rng.choice((4, 8, 16)),
            rng.choice((2, 2, 2, 2, 1)) if what == "meet" else rng.choice((0, 1, 2, 2)),
        )
        for _ in range(rng.randint(3, 10))
    ]
    columns, numbers = 16, [rng.randrange(5) for _ in range(2)]
    lnc = rng.choice((1, 2, 2, 2, 2))

    def kernel() -> Any:
        core = nl.program_id(0)
        rows = nl.ndarray((5, columns), rng_free, buffer=nl.shared_hbm)
        own, got = nl.ndarray((2, columns), rng_free), nl.ndarray((2, columns), rng_free)
        index, register = nl.ndarray((2, 1), nl.int32), isa.register_alloc(0)
        isa.iota(index, [[0, 1]], numbers[0], numbers[1])
        isa.memset(own, 1.0 + core)
        for what, row, begin, width, who in plan:
            if who not in (2, core):
                continue
            part = rows[row : row + 2, begin : begin + width]
            picked = rows.ap([[columns, 2], [1, width]], vector_offset=index)
            here = own[0:2, 0 : part.shape[1]]
            if what == "write":
                isa.dma_copy(part, here)
            elif what == "same":
                isa.memset(own, 1.0)
                isa.dma_copy(part, own[0:2, 0 : part.shape[1]])
            elif what == "read":
                isa.dma_copy(got[0:2, 0 : part.shape[1]], part)
            elif what == "gather":
                isa.dma_copy(got[0:2, 0:width], picked, oob_mode=isa.oob_mode.skip)
            elif what == "scatter":
                isa.dma_copy(picked, own[0:2, 0:width], oob_mode=isa.oob_mode.skip)
            elif what == "load":
                isa.register_load(register, rows[row, begin : begin + 1])
            else:
                isa.core_barrier(rows, tuple(range(lnc)))
        return rows

    rng_free = rng.choice((nl.int32, nl.float32, nl.bfloat16))
    options = SimOptions(
        uninitialized="report",
        scatter="report",
        races=rng.choice(("report", "report", "error")),
        start_core=rng.randrange(lnc),
        preempt=rng.choice((0.0, 0.3)),
        seed=rng.randrange(9),
        mode=rng.choice(("full", "full", "indices")),
        callers=rng.random() < 0.2,
    )
    return end_of(lambda: nki_sim.run(kernel, lnc=lnc, options=options))


def ranks(rng: random.Random) -> list[str]:
    """Let ranks of one or two cores exchange tensors, right ones and wrong ones."""
    lnc, count = rng.choice((1, 1, 2)), rng.choice((2, 2, 4))
    group = rng.choice(([list(range(count))], [list(range(count))[::-1]], [[0], [1]]))
    groups = collectives.ReplicaGroup(group)
    size, dim, op = (
        rng.choice((1, 2, 4)),
        rng.choice((0, 0, 0, 1)),
        rng.choice((nl.add, nl.maximum)),
    )
    what = rng.choice(
        ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "ring", "parts")
    )
    written, region = rng.choice((1.0, 0.7)), rng.choice((nl.shared_hbm, nl.private_hbm, nl.sbuf))
    dtype, slack = rng.choice((nl.float32, nl.bfloat16, nl.int32)), rng.choice((0, 0, 0, 1))
    rows, columns = len(group[0]) * size, len(group[0]) * rng.choice((1, 3))

    # Counts and places of what is sent, then of what is received.
    numbers = [
        [rng.choice((0, 1, 2, columns)) for _ in group[0]] for _ in range(rng.choice((3, 4)))
    ]

    def kernel(x: Any, counts: Any) -> Any:
        part = nl.ndarray((rows, columns), dtype, buffer=region)
        filled = max(1, int(rows * written))
        isa.dma_copy(part[0:filled], x[0:filled])
        shape = [rows, columns]
        if what == "all_gather":
            shape[dim] *= len(group[0])
        elif what == "reduce_scatter":
            shape[dim] //= len(group[0])
        shape[1] += slack
        result = nl.ndarray(tuple(shape), dtype, buffer=region)
        lists = [part], [result]
        if what == "parts":
            table = nl.ndarray(counts.shape, nl.uint32, buffer=region)
            isa.dma_copy(table, counts)
            collectives.all_to_all_v(*lists, groups, table, has_rdispls=len(numbers) == 4)
        elif what == "permute":
            pairs = list(itertools.pairwise(group[0]))
            collectives.collective_permute(*lists, pairs)
        elif what == "all_reduce":
            collectives.all_reduce(*lists, groups, op)
        elif what == "reduce_scatter":
            collectives.reduce_scatter(*lists, groups, dim, op)
        elif what == "ring":
            collectives.collective_permute_implicit([lists[0]], [lists[1]], groups)
        else:
            getattr(collectives, what)(*lists, groups, dim)
        out = nl.ndarray(result.shape, dtype, buffer=nl.shared_hbm)
        isa.dma_copy(out, result)
        return out

    values = np.arange(rows * columns).reshape(rows, columns).astype(np.int32)
    data = [(values + 9 * rank, np.array(numbers, np.uint32)) for rank in range(count)]
    options = replace(
        REPORTS, mode=rng.choice(("full", "full", "indices")), start_core=rng.randrange(lnc)
    )
    return end_of(lambda: nki_sim.run_ranks(kernel, data, lnc=lnc, options=options))
