"""The attacks with a few fixed seeds; with many fresh ones under `-m slow`."""

import random
from pathlib import Path

import pytest

from tests.lab.fuzz.attacks import ATTACKS
from tests.rows import thinned

FEW = {
    "torch": range(20),
    "nki": range(2),
    "edits": range(40),
    "edits_nki": range(10),
    "checkpoints": range(8),
    "configs": range(2),
    "commands": range(10),
    "ranks": (2, 7, 20),  # without a time out
}
PARTS = 5  # of the long run
MORE = {
    "torch": range(20, 220),
    "nki": range(2, 62),
    "edits": range(40, 440),
    "edits_nki": range(10, 60),
    "checkpoints": range(8, 58),
    "configs": range(2, 12),
    "commands": range(10, 20),
    "ranks": (4, 12, 24),
}
MANY = {
    "torch": 10_000,
    "nki": 150,
    "edits": 5_000,
    "edits_nki": 500,
    "checkpoints": 500,
    "configs": 300,
    "commands": 300,
    "ranks": 40,
}


def problems(name: str, seeds: range | tuple[int, ...], scratch: Path) -> list[str]:
    return [problem for seed in seeds if (problem := ATTACKS[name](seed, scratch))]


@pytest.mark.parametrize("name", thinned(FEW, 2))
def test_known_seeds_find_nothing(name: str, tmp_path: Path) -> None:
    assert problems(name, FEW[name], tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("part", thinned(range(PARTS), PARTS, pytest.mark.slow))
@pytest.mark.parametrize("name", MORE)
def test_more_known_seeds_find_nothing(name: str, part: int, tmp_path: Path) -> None:
    assert problems(name, MORE[name][part::PARTS], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_fresh_seeds_find_nothing(name: str, tmp_path: Path) -> None:
    first = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {first}")  # noqa: T201  pytest shows it if the test fails
    assert problems(name, range(first, first + MANY[name]), tmp_path) == []
