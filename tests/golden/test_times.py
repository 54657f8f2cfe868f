"""Simulated times are those that docs/results publishes; see tests/golden/times."""

import pytest

from tests.golden import times


@pytest.mark.parametrize("row", times.SHORT, ids=str)
def test_a_short_row_takes_as_long_as_it_took(row: times.Row) -> None:
    assert list(times.differences([row])) == []


@pytest.mark.slow
@pytest.mark.parametrize("row", times.ROWS, ids=str)
def test_every_row_takes_as_long_as_it_took(row: times.Row) -> None:
    assert list(times.differences([row])) == []
