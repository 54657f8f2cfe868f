"""Random requests get the configurations, and the refusals, that they got: settings.json."""

import pytest

from tests.golden import digests, settings

WRITTEN = digests.read(settings.FILE) if settings.FILE.exists() else {}
SHORT = 30  # of each kernel, in the default run
COMMAND = "python -m tests.golden.settings"


def check(kernel: str, count: int) -> None:
    changed = digests.others(settings.outcomes(kernel, count), WRITTEN[kernel], 0)
    assert changed == [], f"{COMMAND} --show {changed[0]}; if that is meant, {COMMAND} --write"


@pytest.mark.parametrize("kernel", settings.KERNELS)
def test_requests_are_settled_as_they_were(kernel: str) -> None:
    check(kernel, SHORT)


@pytest.mark.long
@pytest.mark.parametrize("kernel", settings.KERNELS)
def test_more_requests_are_settled_as_they_were(kernel: str) -> None:
    check(kernel, settings.COUNT)
