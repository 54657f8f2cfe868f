"""Some 3,000 random programs end as they did: programs.json."""

import json

import pytest

from tests.golden import programs

WRITTEN = json.loads(programs.FILE.read_text())


@pytest.mark.parametrize("kind", programs.KINDS)
def test_programs_end_as_they_did(kind: str) -> None:
    found = programs.short(kind)
    other = [n for n, pair in enumerate(zip(found, WRITTEN[kind], strict=True)) if len({*pair}) > 1]
    told = [programs.outcome(kind, number) for number in other[:2]]
    command = "python -m tests.golden.programs --write"
    assert not other, f"{kind} {other}: {told}. If that is meant: {command}"
