"""Some 4,000 calls of instructions, right and nearly right, end as they did: calls.json."""

import json

import pytest

from nki_sim import isa
from tests.golden import calls

WRITTEN = json.loads(calls.FILE.read_text())


@pytest.mark.parametrize("name", calls.RIGHT)
def test_calls_end_as_they_did(name: str) -> None:
    found = calls.short(name)
    other = [n for n, pair in enumerate(zip(found, WRITTEN[name], strict=True)) if len({*pair}) > 1]
    told = [f"{calls.drawn(name, n)[0]}: {calls.outcome(name, n)}" for n in other[:3]]
    assert not other, (
        f"{name} {other}: {told}. If that is meant: python -m tests.golden.calls --write"
    )


def test_every_instruction_but_registers_and_meetings_is_called() -> None:
    instructions = {name for name in isa.__all__ if hasattr(getattr(isa, name), "__wrapped__")}
    left_out = {"core_barrier", "sendrecv", "dropout"} | {
        name for name in instructions if name.startswith("register_")
    }
    assert instructions - left_out == set(calls.RIGHT)
