"""Every test of a kernel launches what it launched before: tests/golden/traces.json."""

from collections.abc import Iterator

import pytest

from tests.golden import traces


@pytest.fixture(autouse=True)
def _issues_what_it_did(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    with traces.launches(monkeypatch) as launched:
        yield
    is_random = getattr(request.function, "is_hypothesis_test", False)
    failed = request.session.testsfailed
    if launched and not is_random and not failed:
        traces.check(request.node.nodeid.removeprefix("tests/nki_kernels/"), launched)
