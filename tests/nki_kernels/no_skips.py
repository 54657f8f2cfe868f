"""A machine whose transfers cannot leave anything out."""

from __future__ import annotations

from typing import Any

import pytest

from nki_sim.constants import oob_mode
from nki_sim.isa import dma


class SkipUsedError(AssertionError):
    """A transfer was set to leave out what is out of range."""


def forbid_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every transfer fail that leaves out what is out of range, until the test is over."""

    def refusing(resolve: Any) -> Any:
        def checked(*arguments: Any) -> Any:
            if arguments[-1] is oob_mode.skip:
                raise SkipUsedError(arguments[1])
            return resolve(*arguments)

        return checked

    for name in ("resolve", "rows_at"):
        monkeypatch.setattr(dma, name, refusing(getattr(dma, name)))
