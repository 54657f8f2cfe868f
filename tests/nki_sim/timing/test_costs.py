"""Prices of single instructions, worked out by hand from the documented rules."""

import dataclasses
from typing import Any

import pytest

from nki_sim.dtypes import ALL, DType
from nki_sim.hardware import TRN1, TRN2, TRN3
from nki_sim.time.costs import (
    gpsimd_cycles,
    itemsize,
    price_compute,
    price_control,
    price_dma,
    price_matmul,
    price_meeting,
    vector_rate,
)
from nki_sim.trace import (
    GPSIMD,
    HBM,
    PSUM,
    SBUF,
    SCALAR,
    TENSOR,
    VECTOR,
    ComputeFacts,
    ControlFacts,
    DmaFacts,
    MatmulFacts,
    SyncFacts,
)

BF, FP = "bfloat16", "float32"


def matmul(dtype: str = BF, m: int = 128, n: int = 512, **more: Any) -> MatmulFacts:
    return MatmulFacts(128, m, n, dtype, dtype, FP, **more)


@pytest.mark.parametrize(
    ("facts", "cycles"),
    [
        (matmul(), 512),
        (matmul(n=64), TRN2.matmul_floor_cycles),
        (matmul(n=1), TRN2.matmul_floor_cycles),
        (matmul(FP), 4 * 512),
        (matmul(FP, onezero=1), 2 * 512),
        (matmul(FP, n=128, is_transpose=True), 2 * 128),
        (matmul("float8_e4m3", perf_mode="double_row"), 512),
    ],
    ids=["bf16", "floor", "matvec", "fp32", "fp32-onezero", "fp32-transpose", "double-row"],
)
def test_streaming_takes_the_documented_cycles(facts: MatmulFacts, cycles: float) -> None:
    assert price_matmul(facts, TRN2).stream_ns == pytest.approx(cycles / 2.4 * 1.019)


def test_loading_128_stationary_columns_takes_32_cycles() -> None:
    assert price_matmul(matmul(), TRN2).load_ns == pytest.approx(32 / 2.4)


def test_double_row_does_twice_the_work() -> None:
    double = price_matmul(matmul("float8_e4m3", perf_mode="double_row"), TRN2)
    assert double.flops == 2 * price_matmul(matmul(), TRN2).flops


def test_half_an_array_is_half_useful() -> None:
    assert price_matmul(matmul(m=64), TRN2).useful_ns == pytest.approx(0.5 * 512 / 2.4)


def test_a_tile_occupies_its_quarter_of_the_array() -> None:
    assert price_matmul(matmul(tile=(64, 32, 64, 32)), TRN2).cells == (9, 13)


def compute(op: str, dtypes: tuple[str, ...], spaces: tuple[int, ...], **more: Any) -> ComputeFacts:
    more.setdefault("contiguous", (True,) * len(dtypes))
    return ComputeFacts(512, 128, dtypes, spaces, **more)


@pytest.mark.parametrize(
    ("op", "dtypes", "spaces", "more", "rate"),
    [
        ("tensor_copy", (FP, FP), (SBUF, SBUF), {}, 1),
        ("tensor_copy", (BF, BF), (SBUF, SBUF), {}, 4),
        ("tensor_copy", (BF, BF), (SBUF, SBUF), {"contiguous": (True, False)}, 2),
        ("tensor_copy", (BF, BF), (SBUF, PSUM), {}, 2),
        ("tensor_copy", (BF, FP), (SBUF, PSUM), {}, 1),
        ("tensor_tensor", (FP, FP, FP), (SBUF, SBUF, SBUF), {"function": "add"}, 0.5),
        ("tensor_tensor", (FP, FP, FP), (SBUF, SBUF, PSUM), {"function": "add"}, 1),
        ("tensor_tensor", (BF, BF, BF), (SBUF, SBUF, SBUF), {"function": "add"}, 1),
        ("tensor_tensor", (BF, BF, BF), (SBUF, SBUF, SBUF), {"function": "maximum"}, 0.5),
        ("tensor_scalar", ("float8_e4m3", BF), (SBUF, SBUF), {}, 2),
        ("scalar_tensor_tensor", (FP, FP, FP), (SBUF, SBUF, SBUF), {}, 0.5),
        ("scalar_tensor_tensor", (BF, BF, FP), (SBUF, SBUF, PSUM), {}, 1),
        ("tensor_tensor_scan", (FP, FP, FP), (SBUF, SBUF, SBUF), {}, 0.5),
        ("tensor_reduce", (BF, BF), (SBUF, SBUF), {"function": "add"}, 2),
        ("tensor_reduce", (FP, FP), (SBUF, SBUF), {"function": "add"}, 1),
        ("memset", (BF,), (SBUF,), {"function": "zero"}, 2),
        ("memset", (BF,), (SBUF,), {}, 1),
        ("reciprocal", (FP, FP), (SBUF, SBUF), {}, 0.125),
        ("max8", (FP, FP), (SBUF, SBUF), {}, 1),
    ],
)
def test_vector_rates_follow_the_performance_modes(
    op: str, dtypes: tuple[str, ...], spaces: tuple[int, ...], more: dict[str, Any], rate: float
) -> None:
    assert vector_rate(op, compute(op, dtypes, spaces, **more), TRN2) == rate


def test_trn1_has_no_performance_modes() -> None:
    facts = compute("tensor_copy", (BF, BF), (SBUF, SBUF))
    assert vector_rate("tensor_copy", facts, TRN1) == 1


def test_an_accumulator_read_and_a_register_cost_extra() -> None:
    plain = price_compute("max8", VECTOR, compute("max8", (FP, FP), (0, 0)), TRN2)
    more = compute("max8", (FP, FP), (0, 0), reads_accumulator=True, is_dynamic=True)
    slow = dataclasses.replace(TRN2, register_offset_factor=4.0)
    extra = price_compute("max8", VECTOR, more, slow).latency_ns - plain.latency_ns
    assert extra == pytest.approx((64 + 3 * 144) / 0.96)


def test_elements_far_apart_halve_the_rate_of_trn1() -> None:
    facts = compute("tensor_copy", (FP, FP), (SBUF, SBUF), wide_stride=True)
    assert vector_rate("tensor_copy", facts, TRN1) == 0.5
    assert vector_rate("tensor_copy", facts, TRN2) == 1.0


def test_the_scalar_engine_takes_the_next_before_the_first_is_visible() -> None:
    price = price_compute(
        "activation", SCALAR, compute("activation", (BF, FP), (0, 1), function="exp"), TRN2
    )
    assert price.occupancy_ns == pytest.approx((512 + 100) / 1.2)
    assert price.latency_ns == pytest.approx((512 + 353) / 1.2)
    assert price.table == "exp"


@pytest.mark.parametrize("function", ["copy", "identity", "square"])
def test_simple_functions_need_no_table(function: str) -> None:
    facts = compute("activation", (BF, FP), (0, 1), function=function)
    assert not price_compute("activation", SCALAR, facts, TRN2).table


def test_trn3_scalar_copies_bf16_at_twice_the_rate() -> None:
    facts = compute("tensor_copy", (BF, BF), (0, 0))
    slow, fast = (price_compute("tensor_copy", SCALAR, facts, chip) for chip in (TRN2, TRN3))
    assert slow.latency_ns - fast.latency_ns == pytest.approx(256 / 1.2)


@pytest.mark.parametrize(
    ("op", "more", "cycles"),
    [
        ("iota", {}, 150 + 512),
        ("affine_select", {}, 150 + 512),
        ("memset", {}, 100 + 512),
        ("topk", {"extent": 8}, 150 + 4 * 512 + 8),
        ("local_gather", {"extent": 1}, 150 + 512 * 1 / 8),
        ("nc_n_gather", {}, 150 + 2 * 512),
        ("nonzero_with_count", {}, 150 + 8 * 512),
        ("tensor_tensor", {"function": "add"}, 150 + 2 * 512),
        ("tensor_tensor", {"function": "power"}, 150 + 8 * 512),
    ],
)
def test_gpsimd_cycles(op: str, more: dict[str, Any], cycles: float) -> None:
    assert gpsimd_cycles(op, compute(op, (FP,), (0,), **more), TRN2) == pytest.approx(cycles)


def test_the_tensor_engine_runs_no_vector_work() -> None:
    with pytest.raises(ValueError, match="engine=0: does not compute"):
        price_compute("memset", TENSOR, compute("memset", (FP,), (0,)), TRN2)


def copy(rows: int, row_bytes: int, **more: Any) -> DmaFacts:
    size = rows * row_bytes
    more.setdefault("runs", rows)
    return DmaFacts(
        moved_bytes=size,
        rows=rows,
        hbm_runs=rows,
        src_space=more.pop("src", HBM),
        dst_space=more.pop("dst", SBUF),
        hbm_read_bytes=size,
        hbm_write_bytes=0,
        **more,
    )


def test_a_full_tile_spreads_over_all_dma_engines() -> None:
    price = price_dma(copy(128, 2048), TRN2)
    assert price.engines == 16
    assert price.engine_ns == pytest.approx(8 * 32 + 8 * 2048 / 27.2)


def test_eight_rows_share_one_engine() -> None:
    assert price_dma(copy(8, 512), TRN2).engines == 1
    assert price_dma(copy(9, 512), TRN2).engines == 2


def test_a_long_row_between_hbm_tensors_is_cut() -> None:
    assert price_dma(copy(1, 1 << 20, dst=HBM), TRN2).engines == 16


def test_strided_elements_are_runs_of_their_own() -> None:
    whole, strided = (
        price_dma(copy(128, 512), TRN2),
        price_dma(copy(128, 512, runs=128 * 256), TRN2),
    )
    assert strided.engine_ns - whole.engine_ns == pytest.approx(8 * 255 * 32)


@pytest.mark.parametrize(
    ("more", "share"),
    [
        ({"transpose": "2-byte"}, 0.9),
        ({"transpose": "2-byte", "src": SBUF}, 0.5),
        ({"transpose": "4-byte"}, 0.25),
        ({"sources": 2}, 0.5),
    ],
    ids=["hbm", "sbuf", "4-byte", "sum"],
)
def test_transposes_and_sums_run_at_a_share_of_the_rate(more: dict[str, Any], share: float) -> None:
    plain, changed = price_dma(copy(128, 512), TRN2), price_dma(copy(128, 512, **more), TRN2)
    by_row_ns = 0.0 if "2-byte" not in more.values() else 8 * TRN2.dma_run_ns
    assert changed.engine_ns == pytest.approx((plain.engine_ns - by_row_ns) / share)


def test_a_transpose_of_2_byte_elements_moves_blocks() -> None:
    walked = price_dma(copy(128, 512, runs=128 * 256, transpose="2-byte"), TRN2)
    assert walked.engine_ns == pytest.approx(8 * 512 / 27.2 / 0.9)


def test_a_gather_is_generated_by_gpsimd_row_by_row() -> None:
    price = price_dma(copy(128, 512, indirect_rows=128), TRN2)
    assert price.dge == "swdge"
    assert price.generator_ns == pytest.approx(1000 + 128 * 8)


def test_skipped_rows_cost_half_a_run() -> None:
    all_rows = price_dma(copy(128, 512, indirect_rows=128), TRN2)
    half = copy(128, 512, indirect_rows=128, skipped_rows=64)
    half = half._replace(moved_bytes=64 * 512, runs=64)
    expected = (4 * 32 + 4 * 16) + 4 * 512 / 27.2
    assert price_dma(half, TRN2).engine_ns == pytest.approx(expected)
    assert price_dma(half, TRN2).engine_ns < all_rows.engine_ns


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (ControlFacts("register_load", SBUF), 200),
        (ControlFacts("register_load", HBM), 1500),
        (ControlFacts("register_store", SBUF), 200),
        (ControlFacts("loop_iteration"), 300),
        (ControlFacts("loop_end"), 0),
    ],
    ids=lambda value: value.kind if isinstance(value, ControlFacts) else "",
)
def test_registers_and_loops(facts: ControlFacts, expected: float) -> None:
    assert price_control(facts, TRN2).occupancy_ns == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (SyncFacts("core_barrier", (1,), 2), 1500),
        (SyncFacts("core_barrier", (1,), 1), 0),
        (SyncFacts("sendrecv", (1,), 2, 128 * 1024, 128, "dma"), 2000 + 8 * 32 + 8192 / 27.2),
        (SyncFacts("sendrecv", (1,), 2, 15300, 128, "gpsimd_dma"), 1000 + 100),
        (SyncFacts("all_gather", (1,), 8, 1024, ranks=8), 6000 + 1500 + 7 * 1024 / 128),
        (SyncFacts("all_reduce", (1,), 8, 2 << 20, ranks=8), 6000 + 3 * 1500 + 1.75 * 16384),
        (SyncFacts("reduce_scatter", (1,), 8, 64 << 20, ranks=8), 6000 + 6 * 1500 + 458752),
        (SyncFacts("all_to_all", (1,), 4, 4096, ranks=4), 6000 + 1500 + 24),
        (SyncFacts("collective_permute", (1,), 4, 4096, ranks=4), 6000 + 1500 + 32),
    ],
    ids=lambda value: value.kind if isinstance(value, SyncFacts) else "",
)
def test_meetings(facts: SyncFacts, expected: float) -> None:
    assert price_meeting(facts, TRN2).duration_ns == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_sizes_of_stored_elements(dtype: DType) -> None:
    assert itemsize(str(dtype)) == dtype.itemsize


def test_gpsimd_price_counts_its_own_clock() -> None:
    facts = compute("iota", (FP,), (0,))
    assert price_compute("iota", GPSIMD, facts, TRN2).occupancy_ns == pytest.approx(662 / 1.2)
