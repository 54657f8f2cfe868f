"""What a kernel uses is found among what other kernels used, whatever their sizes, or reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import isa
from nki_sim.language import api as nl
from nki_sim.precedent import Recorder, Table, Use, recording
from nki_sim.testing import Tile, execute


def record(body: Callable[..., Any], **tiles: Tile) -> Recorder:
    with recording() as recorder:
        execute(body, **tiles)
    return recorder


def shown(known: Recorder, asked: Recorder) -> list[str]:
    """Return what a table of one recording says of another."""
    table = Table()
    table.add("vendor", known)
    return [one.what for one in table.without(asked)]


def tile(*shape: int, dtype: str = "float32", **more: Any) -> Tile:
    return Tile(np.zeros(shape), dtype, **more)


def scaled(rows: int, columns: int) -> Recorder:
    return record(
        lambda dst, x: isa.tensor_scalar(dst, x, nl.multiply, 2.0),
        dst=tile(rows, columns),
        x=tile(rows, columns),
    )


def test_a_use_of_other_sizes_has_a_precedent() -> None:
    assert shown(scaled(128, 64), scaled(32, 7)) == []


def test_an_operator_without_precedent_is_told_with_its_line_and_the_nearest() -> None:
    def body(dst: Any, x: Any) -> None:
        isa.tensor_scalar(dst, x, nl.logical_xor, 2.0)

    asked = record(body, dst=tile(128, 64), x=tile(128, 64))
    table = Table()
    table.add("vendor", scaled(128, 64))
    (missing,) = table.without(asked)
    assert missing.what == (
        "vector engine: operator logical_xor of floats: no public precedent; nearest is multiply of"
        " floats"
    )
    assert (missing.kernel, missing.file) == ("kernel", __file__)
    assert missing.line == body.__code__.co_firstlineno + 1
    report = table.counts(asked)
    assert report["uses"] == report["sources"]["vendor"] + 1


def test_what_the_documentation_says_is_a_precedent() -> None:
    asked = record(
        lambda dst, x: isa.tensor_scalar(dst, x, nl.maximum, 2.0), dst=tile(8, 4), x=tile(8, 4)
    )
    assert shown(scaled(8, 4), asked) == []


def test_of_an_unknown_instruction_nothing_else_is_told() -> None:
    asked = record(lambda dst, x: isa.reciprocal(dst, x), dst=tile(8, 4), x=tile(8, 4))
    assert shown(scaled(8, 4), asked) == ["reciprocal: instruction on vector: no public precedent"]


def turned(indices: list[int]) -> Recorder:
    """Gather rows and turn them on the way."""
    return record(
        lambda dst, x, i: isa.dma_transpose(
            dst,
            x.ap([[64, 16], [1, 64]], vector_offset=i),
            oob_mode=isa.oob_mode.skip,
        ),
        dst=tile(64, 16, dtype="bfloat16"),
        x=tile(32, 64, dtype="bfloat16", space="hbm"),
        i=Tile(np.array(indices, np.uint32).reshape(-1, 1)),
    )


def test_skipped_indices_of_a_transposing_gather_are_told_with_the_vendors_issue() -> None:
    known, asked = turned([*range(16)]), turned([*range(15), 99])
    (what,) = shown(known, asked)
    assert "some indices out of range" in what
    assert "issue 1390" in what
    assert shown(asked, known) == []


def moved(pattern: list[list[int]], count: int) -> Recorder:
    """Copy from where a number says, by a pattern."""
    shape = tuple(size for _, size in pattern)
    return record(
        lambda dst, x, i: isa.dma_copy(
            dst.reshape(shape), x.ap(pattern, scalar_offset=i, indirect_dim=0)
        ),
        dst=tile(shape[0], count // shape[0]),
        x=tile(16, 512, space="hbm"),
        i=Tile(np.array([[1]], np.int32)),
    )


def test_more_levels_than_any_precedent_are_told() -> None:
    two = moved([[512, 8], [1, 32]], 256)
    three = moved([[512, 8], [128, 2], [1, 32]], 512)
    assert shown(three, two) == []
    (what,) = shown(two, three)
    assert what.startswith(
        "dma_copy: offset src in hbm, scalar_offset of int32 in sbuf, 3 levels: no public precedent"
        " of more than 2"
    )
    assert "issue 1253" in what


def looped(loads_ahead: bool) -> Recorder:
    """Load rows and double them in a dynamic loop, in the same iteration or an iteration ahead."""

    def body(dst: Any, x: Any, row: Any) -> None:
        def load() -> None:
            isa.dma_copy(row, x)

        def iteration(_number: Any) -> None:
            if not loads_ahead:
                load()
            isa.tensor_scalar(dst, row, nl.multiply, 2.0)
            if loads_ahead:
                load()

        load()
        nl.fori_loop(0, 3, iteration)

    return record(body, dst=tile(8, 4), x=tile(8, 4, space="hbm"), row=tile(8, 4))


def test_a_load_that_crosses_the_back_edge_of_a_loop_is_told() -> None:
    known, asked = looped(loads_ahead=False), looped(loads_ahead=True)
    (what,) = shown(known, asked)
    assert "from iteration to iteration left by dma in sbuf, read by vector" in what
    assert "NKI 0.4" in what
    assert shown(asked, known) == []


def test_what_two_loops_leave_to_each_other_is_a_use() -> None:
    def body(dst: Any, x: Any) -> None:
        def there(_number: Any) -> None:
            isa.tensor_copy(dst, x)

        def back(_number: Any) -> None:
            isa.tensor_copy(x, dst)

        nl.fori_loop(0, 2, there)
        nl.fori_loop(0, 2, back)

    found = record(body, dst=tile(8, 4), x=tile(8, 4))
    words = "left by vector in sbuf, read by vector"
    assert Use("dynamic loop", "from loop to loop", words) in found.uses


def test_a_loop_whose_cores_differ_is_told() -> None:
    def kernel(alike: bool) -> Any:
        out = nl.ndarray((2, 8, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        row = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.sbuf)
        isa.memset(row, 0.0)

        def iteration(_number: Any) -> None:
            isa.tensor_scalar(row, row, nl.add, 1.0)
            if alike or nl.program_id(0) == 0:
                isa.tensor_scalar(row, row, nl.multiply, 2.0)

        nl.fori_loop(0, 2, iteration)
        isa.dma_copy(out[nl.program_id(0)], row)
        return out

    runs = []
    for alike in (True, False):
        with recording() as recorder:
            nki_sim.run(kernel, alike, lnc=2)
        runs.append(recorder)
    (what,) = shown(*runs)
    assert "cores instructions that one of the cores does not have" in what


def test_memories_and_types_are_uses() -> None:
    def largest(space: str, dtype: str) -> Recorder:
        return record(
            lambda dst, x: isa.max8(dst, x),
            dst=tile(8, 8, dtype=dtype),
            x=tile(8, 16, dtype=dtype, space=space),
        )

    known = largest("sbuf", "float32")
    from_psum = shown(known, largest("psum", "float32"))
    assert any("operand src in psum" in what and "names no memory" in what for what in from_psum)
    (what,) = shown(known, largest("sbuf", "bfloat16"))
    assert "types dst bfloat16, src bfloat16: no public precedent" in what


def test_nothing_is_recorded_outside_the_context() -> None:
    with recording() as recorder:
        pass
    scaled(8, 4)
    assert (recorder.runs, dict(recorder.uses)) == (0, {})


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = Table()
    table.add("vendor", looped(loads_ahead=True), of="library", version="1", runs=1)
    table.write(tmp_path / "t.json")
    assert Table.read(tmp_path / "t.json") == table
    (tmp_path / "broken.json").write_text("[]")
    with pytest.raises(ValueError, match="no table of precedents"):
        Table.read(tmp_path / "broken.json")


def test_the_shipped_table_names_its_sources() -> None:
    table = Table.read()
    vendor = table.sources["vendor"]
    assert vendor["of"] == "nki-library"
    assert vendor["version"]
    assert table.shown_by("vendor", Use("nc_matmul", "instruction", "on tensor"))
    assert not table.shown_by("vendor", Use("nc_matmul", "instruction", "on vector"))
