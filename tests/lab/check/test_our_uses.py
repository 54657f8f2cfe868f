"""Launches of one class run once, where every loop was entered; a stopped record goes on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.check import our_uses
from lab.check.our_uses import UsesFile, class_of, record_ours
from neuron_moe.backends.nki.times import TIMES_ONLY
from neuron_moe.spec import Tuning
from nki_sim import TensorSpec, isa
from nki_sim.language import api as nl
from nki_sim.precedent import Use


@dataclass(frozen=True)
class Config:
    experts: int = 128
    top_k: int = 8
    scaling: str = "post"
    parts: tuple[int, ...] = (4, 2, 1)


def name(config: Config, tokens: int = 1024, dtype: str = "bfloat16") -> str:
    return class_of(looped, 2, {"config": config, "x": TensorSpec((tokens, 2880), dtype)})


def looped(numbers: Any, rows: Any) -> Any:
    """Copy a row as often as a number says."""
    out = nl.ndarray(rows.shape, dtype=rows.dtype, buffer=nl.shared_hbm)
    numbers_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    row_sb = nl.ndarray((1, rows.shape[1]), dtype=rows.dtype, buffer=nl.sbuf)
    isa.dma_copy(numbers_sb, numbers)
    isa.dma_copy(row_sb, rows[0:1])
    end = isa.register_alloc()
    isa.register_load(end, numbers_sb)

    def one(_number: Any) -> None:
        isa.tensor_scalar(row_sb, row_sb, nl.multiply, 2.0)

    nl.fori_loop(0, end, one)
    isa.dma_copy(out[0:1], row_sb)
    return out


def test_a_class_leaves_out_how_many_there_are_and_nothing_else() -> None:
    known = name(Config())
    assert name(Config(experts=1024)) == name(Config(experts=1536)), "both are whole tiles"
    assert known == name(Config(), tokens=8192)
    others = (
        name(Config(top_k=10)),
        name(Config(scaling="pre")),
        name(Config(parts=(4, 2))),
        name(Config(experts=100)),
        name(Config(), tokens=128),
        name(Config(), dtype="float32"),
    )
    assert known not in others
    assert len(set(others)) == len(others)


def test_a_launch_like_an_earlier_one_is_left_out_once_its_loop_was_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, options = np.zeros((200, 32), np.float32), replace(TIMES_ONLY, target="trn2")
    started: list[int] = []

    def runs(_tuning: Tuning, *, is_quick: bool) -> Any:
        assert is_quick
        for number, times in enumerate((0, 3, 5)):

            def start(run: Any, times: int = times) -> None:
                numbers = np.array([[times]], np.int32)
                started.append(times)
                run(looped, lnc=1, options=options, numbers=numbers, rows=rows)

            yield f"run {number}", start

    monkeypatch.setattr(our_uses, "our_runs", runs)
    monkeypatch.setattr(our_uses, "ProcessPoolExecutor", _Here)
    file = UsesFile(tmp_path / "uses.jsonl", Tuning())
    assert record_ours(file, 1, is_quick=True) == 3
    launches = [line["idle"] for line in file.lines() if "class" in line]
    assert launches == [[0], []], "the third is like the second, the first entered no loop"
    used = file.recorder()
    assert used.runs == 2
    assert Use("vector engine", "operator", "multiply of floats") in used.uses
    assert started == [0, 3, 5]
    with file.path.open("a") as handle:
        handle.write('{"of": "half a li')
    assert record_ours(file, 1, is_quick=True) == 3
    assert started == [0, 3, 5], "all are done"
    assert UsesFile(file.path, Tuning(features="open")).lines() == []


class _Here:
    """Runs in this process."""

    def __init__(self, *_of: Any) -> None: ...

    def __enter__(self) -> "_Here":
        return self

    def __exit__(self, *_of: object) -> None: ...

    map = staticmethod(map)


@pytest.mark.slow
def test_few_iterations_and_one_launch_of_a_class_find_what_all_find(tmp_path: Path) -> None:
    found = []
    for is_all in (False, True):
        file = UsesFile(tmp_path / f"{is_all}.jsonl", Tuning(), is_all=is_all)
        record_ours(file, 2, is_quick=True)
        uses = file.recorder().uses
        found.append({use: max(places.values()) for use, places in uses.items()})
    assert found[0] == found[1]
