"""The compiler's dump, read into a timeline; a hand-made one of the documented form."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.tools.chip.dump import read_dump
from nki_sim import trace as tr
from nki_sim.time.timeline import schedule

DUMP = Path(__file__).parent / "dump_of_a_sum.json"


def planted(folder: Path, change: Any = None) -> Path:
    """Put the dump where the compiler leaves that of core 0, changed."""
    program = json.loads(DUMP.read_text())
    if change is not None:
        change(program["functions"][0]["blocks"][0]["instructions"])
    place = folder / "nc00" / "sg00"
    place.mkdir(parents=True)
    (place / "bir_debug.1.after-lower_sync.json").write_text(json.dumps(program))
    return folder


def test_order_addresses_semaphores_and_queues_are_the_compilers(tmp_path: Path) -> None:
    dump = read_dump(planted(tmp_path))
    ops = [one.op for one in dump.trace]
    assert ops[2:] == ["dmacopy", "tensor_scalar", "iota", "dmacopy"]
    assert [one.after for one in dump.trace] == [(), (0,), (1,), (1, 2), (1, 3), (1, 3)]
    assert dump.queues == {"qSpIo0": 1, "qSpIo1": 1}
    assert (dump.semaphores, dump.waits, dump.sbuf_bytes) == (2, 3, 4096)
    assert not dump.unknown
    load = dump.trace[2].facts
    assert isinstance(load, tr.DmaFacts)
    assert (load.moved_bytes, load.rows, load.runs, load.hbm_runs) == (128 * 2048, 128, 128, 1)
    scale = dump.trace[3].facts
    assert isinstance(scale, tr.ComputeFacts)
    assert (scale.elements, scale.partitions) == (512, 128)
    assert dump.trace.storages[3].address == (0, 2048)


def test_a_timeline_waits_where_the_compiler_does(tmp_path: Path) -> None:
    timeline = schedule(read_dump(planted(tmp_path)).trace)
    spans = {one.op: one for one in timeline.intervals() if one.op != "dmacopy"}
    assert spans["tensor_scalar"].end_ns <= spans["iota"].start_ns

    def frees(instructions: list[dict[str, Any]]) -> None:
        instructions[4]["outs"][0]["memref"] = "y"
        instructions[4]["sync_info"]["on_wait"] = []

    shutil.rmtree(tmp_path)
    free = schedule(read_dump(planted(tmp_path, frees)).trace)
    spans = {one.op: one for one in free.intervals() if one.op != "dmacopy"}
    assert spans["iota"].start_ns < spans["tensor_scalar"].start_ns


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    def wants_more(instructions: list[dict[str, Any]]) -> None:
        instructions[3]["sync_info"]["on_wait"][0]["wait_value"] = 32

    with pytest.raises(ValueError, match="I-3: waits for semaphore 7 to be 32"):
        read_dump(planted(tmp_path / "a", wants_more))
    with pytest.raises(ValueError, match="is not of the form"):
        read_dump(planted(tmp_path / "b", lambda instructions: instructions[2].pop("name")))
    with pytest.raises(FileNotFoundError, match="left no dump"):
        read_dump(tmp_path / "c")

    def is_new(instructions: list[dict[str, Any]]) -> None:
        instructions[4]["engine"] = "TPB9"

    assert read_dump(planted(tmp_path / "d", is_new)).unknown == {"engine TPB9": 1}
