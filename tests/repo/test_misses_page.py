"""docs/misses.md lists what the published results say."""

from tests.repo.misses_page import tables, written


def test_the_tables_are_those_of_the_results() -> None:
    assert written() == tables(), "python -m tests.repo.misses_page writes them anew"
