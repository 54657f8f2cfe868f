"""The record of a run keeps what was emitted, small."""

import sys
from typing import Any

import numpy as np
import pytest

from nki_sim import trace as tr
from nki_sim.trace import ComputeFacts, MemoryRange


def test_records_come_back_as_they_were_emitted(builder: Any) -> None:
    a, b = builder.tile(512), builder.tile(512)
    builder.compute("tensor_copy", b, a, line=7)
    index = builder.compute("tensor_tensor", b, a, b, function="add", line=9)
    builder.trace.after[index] = (0,)
    builder.trace.names[index] = "sum"
    record = builder.trace[index]
    assert (record.op, record.engine, record.line, record.file) == (
        "tensor_tensor",
        tr.VECTOR,
        9,
        "kernel.py",
    )
    assert [part.storage for part in record.reads] == [a.storage, b.storage]
    assert [part.storage for part in record.writes] == [b.storage]
    assert isinstance(record.facts, ComputeFacts)
    assert record.facts.function == "add"
    assert (record.after, record.name) == ((0,), "sum")
    assert list(builder.trace)[index] == record


def test_an_index_outside_the_trace_is_refused(builder: Any) -> None:
    builder.compute("memset", builder.tile(8))
    with pytest.raises(IndexError, match="index=1: the trace has 1 instructions"):
        builder.trace[1]


def test_equal_ranges_lines_and_facts_are_kept_once(builder: Any) -> None:
    a, b = builder.tile(512), builder.tile(512)
    for _ in range(10):
        builder.compute("tensor_copy", b, a)
    trace = builder.trace
    assert (len(trace), len(trace.ranges), len(trace.lines), len(trace.facts)) == (10, 2, 1, 1)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (MemoryRange(0, 0, 1, 64, 128), [64]),
        (MemoryRange(0, 0, 1, 8, 0, 4, ((100, 3),)), [8, 108, 208]),
        (MemoryRange(0, 0, 1, 0, 0, 4, ((100, 2), (10, 2))), [0, 10, 100, 110]),
        (
            MemoryRange(0, 0, 1, 0, 0, 4, ((10, 2),), np.array([500, 70], np.int64).tobytes()),
            [500, 510, 70, 80],
        ),
    ],
    ids=["dense", "rows", "two-strides", "gather"],
)
def test_a_range_lists_its_runs(memory: MemoryRange, expected: list[int]) -> None:
    assert memory.starts().tolist() == expected


def test_a_million_records_fit_in_a_gibibyte(builder: Any) -> None:
    tiles = [builder.tile(512) for _ in range(3)]
    ids = [builder.id_of(tile) for tile in tiles]
    facts = ComputeFacts(512, 128, ("bfloat16",) * 3, (0, 0, 0), (True,) * 3, "add")
    line = builder.trace.line_id("kernel.py", 1)
    for _ in range(10_000):
        builder.trace.emit("tensor_tensor", tr.VECTOR, facts, (ids[0], ids[1]), (ids[2],), line)
    trace = builder.trace
    size = sum(sys.getsizeof(part) for part in (trace._rows, trace._operands))
    assert size / 10_000 * 1_000_000 < 2**30 / 8
