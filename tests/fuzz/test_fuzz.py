"""The attacks with a few fixed seeds; with many fresh ones under `-m slow`."""

import random
from pathlib import Path

import pytest

from tests.fuzz import own_kernels
from tests.fuzz.attacks import ATTACKS
from tests.fuzz.kernels import FAULTS

FEW = {
    "torch": range(60),
    "nki": range(3),
    "checkpoints": range(20),
    "configs": range(12),
    "commands": range(20),
    "ranks": (2, 4, 7, 12, 20, 24),  # without a time out
    "kernels": range(0, len(FAULTS), 5),
    "own_kernels": range(0, len(own_kernels.FAULTS), 4),
}
MANY = {"torch": 10_000, "nki": 150, "checkpoints": 500, "configs": 300, "commands": 300,
        "ranks": 40, "kernels": len(FAULTS), "own_kernels": 110}  # fmt: skip


def problems(name: str, seeds: range | tuple[int, ...], scratch: Path) -> list[str]:
    return [problem for seed in seeds if (problem := ATTACKS[name](seed, scratch))]


@pytest.mark.parametrize("name", FEW)
def test_known_seeds_find_nothing(name: str, tmp_path: Path) -> None:
    assert problems(name, FEW[name], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_fresh_seeds_find_nothing(name: str, tmp_path: Path) -> None:
    first = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {first}")  # noqa: T201  pytest shows it if the test fails
    assert problems(name, range(first, first + MANY[name]), tmp_path) == []
