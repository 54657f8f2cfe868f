"""The timeline against every public profile and figure of Trn2 that states what was run.

Published numbers come from public AWS documents, named per point: BND and INV are the worked
profile examples of aws-neuron/neuron-agentic-development
(skills/neuron-nki-profile-querying/references), OPT is the kernel-optimization tutorial of
aws-neuron/aws-neuron-sdk with the profiler pictures in nki/img/how-to, DMAOV is nki-dma-overview
there, PERF is nki_perf_guide, RMSQ is nki/library/specs/design-rmsnorm-quant with its profile
pictures. Each point must be met within 15 %; those with a reason to differ, within 40 %.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from nki_sim.hardware import TRN1, TRN2, Hardware
from nki_sim.time.timeline import Timeline, TimelineOptions, schedule
from nki_sim.trace import DMA, GPSIMD, HBM, SBUF, SCALAR, VECTOR, ComputeFacts, DmaFacts

Make = Callable[..., Any]
TIGHT, LOOSE = 0.15, 0.40


class Point(NamedTuple):
    name: str
    source: str
    unit: str
    published: float
    simulated: float
    flag: str = ""

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1.0


def block(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)


def finish(b: Any, result: Any, m: int, n: int, psum: Any) -> None:
    """Copy a PSUM tile out and store it."""
    out = b.tile(512, result.dtype)
    b.compute("tensor_copy", out, psum, line=5)
    b.store(result, block(m, 128), block(n, 512), out, line=6)


def tiled_matmul(make: Make, m: int, k: int, n: int, dtype: str, lhs_loads: int) -> Timeline:
    """Load both tiles for each matmul; the stationary one only `lhs_loads` times per row."""
    b = make()
    lhs, rhs, result = b.hbm(k, m, dtype), b.hbm(k, n, dtype), b.hbm(m, n, dtype)
    every = (n // 512) / lhs_loads
    for i in range(m // 128):
        kept: dict[int, Any] = {}
        for j in range(n // 512):
            psum = b.psum()
            for step in range(k // 128):
                if int(j / every) != int((j - 1) / every) or j == 0:
                    kept[step] = b.tile(128, dtype)
                    b.load(kept[step], lhs, block(step, 128), block(i, 128), line=1)
                moving = b.tile(512, dtype)
                b.load(moving, rhs, block(step, 128), block(j, 512), line=2)
                b.matmul(psum, kept[step], moving, line=3)
            finish(b, result, i, j, psum)
    return schedule(b.trace)


def blocked_matmul(
    make: Make, m: int, k: int, n: int, dtype: str, m_tiles: int, n_tiles: int, in_rows: bool
) -> Timeline:
    """Keep blocks of both operands in SBUF; load them tile by tile or in rows of the block."""
    b = make()
    lhs, rhs, result = b.hbm(k, m, dtype), b.hbm(k, n, dtype), b.hbm(m, n, dtype)

    def fetch(source: Any, first: int, tiles: int, width: int, line: int) -> dict[Any, Any]:
        found = {}
        for piece in range(1 if in_rows else tiles):
            for step in range(k // 128):
                columns = tiles * width if in_rows else width
                start = first * width + piece * width
                tile = b.tile(columns, dtype)
                b.load(tile, source, block(step, 128), slice(start, start + columns), line=line)
                for part in range(tiles) if in_rows else (0,):
                    found[piece + part, step] = tile[part * width : (part + 1) * width]
        return found

    for i in range(0, m // 128, m_tiles):
        stationary = fetch(lhs, i, m_tiles, 128, 1)
        for j in range(0, n // 512, n_tiles):
            moving = fetch(rhs, j, n_tiles, 512, 2)
            for bm in range(m_tiles):
                for bn in range(n_tiles):
                    psum = b.psum()
                    for step in range(k // 128):
                        b.matmul(psum, stationary[bm, step], moving[bn, step], line=3)
                    finish(b, result, i + bm, j + bn, psum)
    return schedule(b.trace)


def fully_blocked_matmul(make: Make, m: int, k: int, n: int, dtype: str) -> Timeline:
    """Block all three axes, 16 x 2 x 8 tiles, adding the blocks along K in SBUF."""
    b = make()
    lhs, rhs, result = b.hbm(k, m, dtype), b.hbm(k, n, dtype), b.hbm(m, n, dtype)
    for j in range(n // 1024):
        sums = {(i, bn): b.tile(512, dtype) for i in range(m // 128) for bn in range(2)}
        for tile in sums.values():
            b.compute("memset", tile, engine=GPSIMD, function="zero", line=1)
        for step in range(k // 1024):
            moving = [b.tile(1024, dtype) for _ in range(8)]
            for bk, tile in enumerate(moving):
                b.load(tile, rhs, block(8 * step + bk, 128), block(j, 1024), line=2)
            for i in range(m // 2048):
                stationary = [b.tile(2048, dtype) for _ in range(8)]
                for bk, tile in enumerate(stationary):
                    b.load(tile, lhs, block(8 * step + bk, 128), block(i, 2048), line=3)
                for bn in range(2):
                    for bm in range(16):
                        psum = b.psum()
                        for bk in range(8):
                            parts = stationary[bk][block(bm, 128)], moving[bk][block(bn, 512)]
                            b.matmul(psum, *parts, line=4)
                        total = sums[16 * i + bm, bn]
                        b.compute("tensor_tensor", total, total, psum, function="add", line=5)
        for i in range(m // 128):
            packed = b.tile(1024, dtype)
            for bn in range(2):
                b.compute("tensor_copy", packed[block(bn, 512)], sums[i, bn], line=6)
            b.store(result, block(i, 128), block(j, 1024), packed, line=7)
    return schedule(b.trace)


def matmul_train(
    make: Make, count: int, dtype: str = "bfloat16", n: int = 512, chip: Hardware = TRN2
) -> float:
    """Tensor engine time of `count` matmuls on resident tiles, in ns."""
    b = make()
    stationary, moving, psum = b.tile(128, dtype), b.tile(n, dtype), b.psum(n)
    for _ in range(count):
        b.matmul(psum, stationary, moving)
    return float(schedule(b.trace, chip).busy_ns("tensor"))


def mixed_tiles(make: Make) -> float:
    """512 matmuls each with few columns, few moving rows, few partitions, and full; in ns."""
    b = make()
    stationary, moving = b.tile(128), b.tile(512)
    for m, n, k in ((32, 512, 128), (128, 64, 128), (128, 512, 32), (128, 512, 128)):
        psum = b.psum(n)
        for _ in range(512):
            b.matmul(psum, stationary[0:m], moving[0:n], k=k)
    return float(schedule(b.trace).busy_ns("tensor"))


def transposes(make: Make, count: int) -> float:
    """Tensor engine time of one 128 x 128 bf16 transpose in a train, in ns."""
    b = make()
    data, psum = b.tile(128), b.psum(128, "bfloat16")
    for _ in range(count):
        b.matmul(psum, data, data, is_transpose=True)
    return float(schedule(b.trace).busy_ns("tensor")) / count


def single_instruction(make: Make, op: str, columns: int, **facts: Any) -> float:
    """Duration of one Vector or Scalar instruction without a table load, in ns."""
    b = make()
    source = b.psum(columns) if op == "tensor_copy" else b.tile(columns, "float32")
    b.compute(op, b.tile(columns), source, **facts)
    timeline = schedule(b.trace)
    result = timeline.result
    return float(result.visible[0] - result.start[0])


def vector_train_ns(make: Make, count: int) -> float:
    """Distance of scalar_tensor_tensor instructions that read a fresh PSUM tile each, in ns."""
    b = make()
    data, factor = b.tile(512 * count), b.psum()
    for index in range(count):
        part = data[block(index, 512)]
        b.compute("scalar_tensor_tensor", part, part, factor, function="multiply,multiply")
    return float(schedule(b.trace).busy_ns("vector")) / count


def quantise_ns(make: Make) -> float:
    """Duration of a tensor_scalar from bf16 to fp8 over 16,384 columns, in ns."""
    b = make()
    facts = ComputeFacts(16384, 80, ("float8_e4m3", "bfloat16"), (0, 0), (True, True), "multiply")
    tile = b.tile(16384)
    b.emit("tensor_scalar", VECTOR, facts, [b.id_of(tile)], [b.id_of(b.tile(8192))])
    return float(schedule(b.trace).total_ns)


def dependent_scalar_ns(make: Make) -> float:
    """Distance of two dependent one-element Scalar operations on Trn1, in ns."""
    b = make()
    value = b.tile(1, "float32")
    for _ in range(3):
        b.compute("activation", value, value, engine=SCALAR, function="copy")
    result = schedule(b.trace, TRN1).result
    return float(result.start[2] - result.start[1])


def transfer(make: Make, rows: int, row_bytes: int, dma_rule: str, **facts: Any) -> Timeline:
    """One load of `rows` rows."""
    b = make()
    columns = row_bytes // 2
    source = b.hbm(rows, columns)
    b.load(b.tile(columns, partitions=rows), source, slice(0, rows), slice(0, columns), **facts)
    return schedule(b.trace, TRN2, TimelineOptions(dma_rule=dma_rule))


def data_ns(timeline: Timeline) -> float:
    return timeline.result.data_end[0] - timeline.result.data_start[0]


def mixed_dge(make: Make, columns: int) -> float:
    """16 tiles of 128 rows in and out in four trigger modes, and 8 small transposes; in ns."""
    b = make()
    source, target = b.hbm(128, 16 * columns), b.hbm(128, 16 * columns)
    small, turned = b.hbm(16, 512), b.hbm(64, 128)
    for index in range(16):
        mode = ("none", "swdge", "hwdge", "unknown")[index // 4]
        tile = b.tile(columns)
        columns_of = slice(index * columns, (index + 1) * columns)
        b.load(tile, source, slice(0, 128), columns_of, dge=mode)
        b.store(target, slice(0, 128), columns_of, tile, dge=mode)
    for index in range(4):
        part = b.tile(16)
        known = DmaFacts(4096, 128, 128, 16, HBM, SBUF, 4096, 0, dge="none", transpose="2-byte")
        reads = [b.part_id(small, slice(0, 16), block(index, 128))]
        b.emit("dma_transpose", DMA, known, reads, [b.id_of(part)])
        other = b.tile(128, partitions=16)
        known = DmaFacts(4096, 16, 16, 16, SBUF, SBUF, 0, 0, dge="none", transpose="2-byte")
        b.emit("dma_transpose", DMA, known, [b.id_of(part)], [b.id_of(other)])
        b.store(turned, block(index, 16), slice(0, 128), other, dge="none")
    return float(schedule(b.trace).busy_ns("dma"))


def instruction_points(make: Make) -> list[Point]:
    throttled = "throttled kernel; the model prices the full clock"
    low = "throttling at low array occupancy is not modelled"
    one, train = partial(single_instruction, make), partial(matmul_train, make)
    scalar, summed = {"engine": SCALAR}, {"reads_accumulator": True}
    exp = {**scalar, "function": "exp"}
    square = {**scalar, **summed, "function": "square"}
    copied, absolute = one("tensor_copy", 512), one("tensor_scalar_reduce", 16384, **summed)
    squares = one("activation_reduce", 16384, **square)
    return [
        Point("bf16 matmul 128x128x512", "BND V2", "ns", 217.4, train(4000) / 4000),
        Point("fp32 matmul N=512", "OPT", "ns", 859, train(1000, "float32") / 1000),
        Point("2,048 full tiles", "INV-TE", "us", 445, train(2048) / 1e3),
        Point("2,048 mixed tiles", "INV-TE", "us", 453, mixed_tiles(make) / 1e3, low),
        Point("matmul N=1, trn1", "PERF", "ns", 64 / 2.8, train(4000, n=1, chip=TRN1) / 4000),
        Point("bf16 transpose 128x128", "INV-TP", "ns", 81, transposes(make, 1024), throttled),
        Point("Vector copy, PSUM fp32, 512", "BND", "ns", 680, copied),
        Point("Scalar exp, 128", "DMAOV", "ns", 401, one("activation", 128, **exp)),
        Point("Scalar exp, 4,096", "DMAOV", "ns", 3708, one("activation", 4096, **exp)),
        Point("scalar_tensor_tensor, 512", "RMSQ", "ns", 644, vector_train_ns(make, 32)),
        Point("abs-max of 16,384 bf16", "RMSQ", "us", 17.2, absolute / 1e3),
        Point("16,384 bf16 to fp8", "RMSQ", "us", 8.7, quantise_ns(make) / 1e3),
        Point("Scalar square-sum, 16,384", "RMSQ", "us", 15.3, squares / 1e3),
        Point("dependent Scalar op, Trn1", "PERF", "ns", 189, dependent_scalar_ns(make)),
    ]


def transfer_points(make: Make) -> list[Point]:
    merged = "the block is contiguous; merging of its rows is not settled and not modelled"
    rates = (4.9, 9.3, 18.5, 38, 76, 155, 299, 356, 362, 364, 368)
    curve = {32 << step: rate for step, rate in enumerate(rates)}
    points = [
        Point(
            f"one queue, 128 x {size} B",
            "DMAOV",
            "GB/s",
            rate,
            128 * size / data_ns(transfer(make, 128, size, "single_queue")),
        )
        for size, rate in curve.items()
    ]
    small = transfer(make, 128, 256, "runs", dge="hwdge")
    four = data_ns(transfer(make, 4, 8192, "runs", dge="none"))
    return [
        *points,
        Point("4 rows x 8 KiB, one engine", "DMAOV", "ns", 1416, four),
        Point(
            "80 rows x 32 KiB, data",
            "RMSQ",
            "us",
            10.5,
            data_ns(transfer(make, 80, 32768, "runs", dge="hwdge")) / 1e3,
        ),
        Point("[128,128] bf16 load, data", "DMAOV", "ns", 468, data_ns(small), merged),
        Point("[128,128] bf16 load, all", "DMAOV", "ns", 1480, small.total_ns),
        Point("mixed DGE, 128 x 1 KiB", "INV-DMA", "us", 16, mixed_dge(make, 512) / 1e3),
        Point("mixed DGE, 128 x 4 KiB", "INV-DMA", "us", 47, mixed_dge(make, 2048) / 1e3),
    ]


def bounds_points(make: Make) -> list[Point]:
    """4096^3 in bf16, three versions (BND)."""
    packets = "profiles count a transfer from its first packet on any engine, idle engines included"
    size = (4096, 4096, 4096, "bfloat16")
    runs = {
        "V0": (tiled_matmul(make, *size, 3), 8602, 4806, 7906, 176),
        "V1": (blocked_matmul(make, *size, 8, 2, False), 2451, 2163, 1325, 174),
        "V2": (blocked_matmul(make, *size, 8, 2, True), 1801, 1781, 819, 172),
    }
    points = []
    for name, (timeline, total, tensor, dma, vector) in runs.items():
        points += [
            Point(f"{name} total", "BND", "us", total, timeline.total_us),
            Point(f"{name} tensor busy", "BND", "us", tensor, timeline.busy_ns("tensor") / 1e3),
            Point(f"{name} dma busy", "BND", "us", dma, timeline.busy_ns("dma") / 1e3, packets),
            Point(f"{name} vector busy", "BND", "us", vector, timeline.busy_ns("vector") / 1e3),
        ]
    return points


def tutorial_points(make: Make) -> list[Point]:
    """4096 x 8192 x 8192 in fp32, naive, hoisted and fully blocked (OPT)."""
    size = (4096, 8192, 8192, "float32")
    lighter = "the profiled kernel moved 1.8 GB (8.96 % of 716 GB/s), the source requests 1.5 GB"
    naive = tiled_matmul(make, *size, 16)
    hoisted = blocked_matmul(make, *size, 1, 1, False)
    blocked = fully_blocked_matmul(make, *size)
    return [
        Point("naive total", "OPT", "ms", 39.89, naive.total_us / 1e3),
        Point("naive tensor busy", "OPT", "ms", 34.82, naive.busy_ns("tensor") / 1e6),
        Point("naive dma busy", "OPT", "ms", 39.87, naive.busy_ns("dma") / 1e6),
        Point("hoisted total", "OPT", "ms", 28.20, hoisted.total_us / 1e3),
        Point("hoisted tensor busy", "OPT", "ms", 28.16, hoisted.busy_ns("tensor") / 1e6),
        Point("hoisted dma busy", "OPT", "ms", 28.12, hoisted.busy_ns("dma") / 1e6),
        Point("fully blocked total", "OPT", "ms", 28.30, blocked.total_us / 1e3),
        Point("fully blocked tensor busy", "OPT", "ms", 28.16, blocked.busy_ns("tensor") / 1e6),
        Point("fully blocked dma busy", "OPT", "ms", 6.10, blocked.busy_ns("dma") / 1e6, lighter),
        Point("fully blocked vector busy", "OPT", "ms", 2.99, blocked.busy_ns("vector") / 1e6),
    ]


GROUPS = {
    "instructions": instruction_points,
    "transfers": transfer_points,
    "bf16-4096": bounds_points,
    "fp32-tutorial": tutorial_points,
}


@pytest.mark.parametrize(
    "group",
    [pytest.param(g, marks=[pytest.mark.long] if g == "fp32-tutorial" else []) for g in GROUPS],
)
def test_published_times_are_met(
    group: str, make_builder: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    points = GROUPS[group](make_builder)
    table = [f"{group:<28} {'source':<8} {'published':>10} {'simulated':>10} {'error':>7}"]
    for point in points:
        values = f"{point.published:>10,.1f} {point.simulated:>10,.1f} {point.error:>+7.1%}"
        table.append(f"{point.name:<28} {point.source:<8} {values} {point.unit:<5} {point.flag}")
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(table) + "\n")
    wrong = [p for p in points if abs(p.error) > (LOOSE if p.flag else TIGHT)]
    assert not wrong


def test_few_points_need_a_wider_tolerance(make_builder: Make) -> None:
    points = [*instruction_points(make_builder), *transfer_points(make_builder)]
    needless = [p.name for p in points if p.flag and abs(p.error) <= TIGHT]
    assert not needless
    assert sum(bool(p.flag) for p in points) <= len(points) // 5
