"""Thousands of random programs end as they did: programs.json."""

import pytest

from tests.golden import digests, programs

WRITTEN = digests.read(programs.FILE)


@pytest.mark.parametrize("kind", programs.KINDS)
def test_programs_end_as_they_did(kind: str) -> None:
    check(kind, range(programs.EACH[kind]))


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, programs.LONGER))
@pytest.mark.parametrize("kind", programs.KINDS)
def test_more_programs_end_as_they_did(kind: str, part: int) -> None:
    each = programs.EACH[kind]
    check(kind, range(part * each, (part + 1) * each))


def check(kind: str, numbers: range) -> None:
    """Compare what comes of programs with what is written down."""
    other = digests.others(programs.short(kind, numbers), WRITTEN[kind], numbers.start)
    told = [programs.outcome(kind, number) for number in other[:2]]
    command = "python -m tests.golden.programs --write"
    assert not other, f"{kind} {other}: {told}. If that is meant: {command}"
