"""Rows of a parametrised test that the default run takes, and those that wait for a longer one."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(rows: Iterable[Any], every: int, mark: Any = pytest.mark.long) -> list[Any]:
    """Return all rows, all but the first of each `every` with a mark more."""
    every_row = [row if hasattr(row, "marks") else pytest.param(row) for row in rows]
    return [
        row
        if number % every == 0
        else pytest.param(*row.values, marks=[*row.marks, mark], id=row.id)
        for number, row in enumerate(every_row)
    ]
