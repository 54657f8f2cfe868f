"""Some 35,000 calls of instructions, right and nearly right, end as they did: calls.json."""

import pytest

from nki_sim import isa
from tests.golden import calls, digests

WRITTEN = digests.read(calls.FILE)


@pytest.mark.parametrize("name", calls.RIGHT)
def test_calls_end_as_they_did(name: str) -> None:
    check(name, range(calls.CALLS_EACH))


@pytest.mark.long
@pytest.mark.parametrize("name", calls.RIGHT)
def test_more_calls_end_as_they_did(name: str) -> None:
    check(name, range(calls.CALLS_EACH, calls.CALLS_EACH * calls.LONGER))


def check(name: str, numbers: range) -> None:
    """Compare what comes of calls with what is written down."""
    other = digests.others(calls.short(name, numbers), WRITTEN[name], numbers.start)
    shown = [f"{calls.drawn(name, n)[0]}: {calls.outcome(name, n)}" for n in other[:3]]
    assert not other, (
        f"{name} {other}: {shown}. If that is meant: python -m tests.golden.calls --write"
    )


def test_every_instruction_but_registers_and_meetings_is_called() -> None:
    instructions = {name for name in isa.__all__ if hasattr(getattr(isa, name), "__wrapped__")}
    left_out = {"core_barrier", "sendrecv", "dropout"} | {
        name for name in instructions if name.startswith(("register_", "scalar_l", "scalar_s"))
    }
    assert instructions - left_out == set(calls.RIGHT)
