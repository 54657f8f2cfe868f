"""A pytest plugin: tell `coverage` which test runs, and write down how long each one took.

python -m coverage run -m pytest -p lab.mutants.contexts --outcomes FILE ...
"""

import json
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

_seconds: dict[str, float] = {}
_failed: set[str] = set()
_skipped: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the name of the file for what became of the tests."""
    parser.addoption("--outcomes", type=Path, required=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Put what a test runs, its fixtures included, under the name of the test."""
    current = coverage.Coverage.current()
    assert current is not None
    current.switch_context(item.nodeid)
    outcome = yield
    current.switch_context("")
    return outcome


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the phases of a test."""
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.failed:
        _failed.add(report.nodeid)
    if report.skipped:
        _skipped.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds of the tests that passed, and the names of those that failed."""
    passed = {test: s for test, s in _seconds.items() if test not in _failed | _skipped}
    outcomes = {"passed": passed, "failed": sorted(_failed)}
    session.config.getoption("--outcomes").write_text(json.dumps(outcomes))
