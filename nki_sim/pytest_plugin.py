"""A pytest fixture for tests of kernels. pytest finds it by itself where nki-sim is installed;
elsewhere ``pytest -p nki_sim.pytest_plugin``, or ``pytest_plugins = ["nki_sim.pytest_plugin"]`` in
a conftest.py.

While pytest loads it, `import nki` finds the simulator, so that files with kernels can be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from nki_sim.launch import Run, run
from nki_sim.options import SimOptions
from nki_sim.provide import provide

provide()


@pytest.fixture
def nki_run() -> Callable[..., Run]:
    """Run a kernel with every check, and fail the test on any finding that it does not allow.

    The fixture is a function: ``nki_run(kernel, *arrays, lnc=2, options=SimOptions(...),
    allow={"output"}, **keywords)`` returns a `Run`; `allow` holds kinds of findings.
    """

    def checked_run(
        kernel: Any,
        /,
        *args: Any,
        lnc: int | None = None,
        options: SimOptions | None = None,
        allow: Collection[str] = (),
        **kwargs: Any,
    ) -> Run:
        found = run(kernel, *args, lnc=lnc, options=options, **kwargs)
        wrong = [finding for finding in found.findings if finding.kind not in allow]
        if wrong:
            lines = [f"{each.location}: {each.kind}: {each.text}" for each in wrong]
            pytest.fail("findings: " + "\n".join(lines), pytrace=False)
        return found

    return checked_run
