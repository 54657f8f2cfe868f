"""What the simulator's tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def nki_0_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels be read by the front end of NKI 0.6."""
    monkeypatch.setenv("NKI_COMPILER_FRONTEND", "custom")
