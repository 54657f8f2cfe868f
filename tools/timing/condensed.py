"""Results as the repository keeps them: columns named once, repeated values stored once.

A long list of records becomes `{"columns": ..., "rows": ...}`, a line a row. A column is named
with the list of its values, and cells are places in it, or with null, and cells are values. Where
the values are lists of records themselves, `"of"` is the table of those records and the cells are
lists of places in it. `read_result` of `neuron_moe.tools.timing.sources` reads both forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

DIGITS = 7  # significant ones that a float keeps
LONG = 12  # records from which on a list becomes a table
PRINTED_ONLY = ("bottleneck",)  # what only whoever runs the benchmark reads


def condense(result: dict[str, Any]) -> str:
    """Return a result, condensed or not, as the text of its condensed file."""
    parts = []
    for name, value in expand(result).items():
        kept = _rounded(value)
        text = _table_text(_table(kept)) if _is_long(kept) else _dumps(kept)
        parts.append(f"{_dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def expand(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with its tables as lists of records again.

    All records of a list get the same columns; None stands for one that a record did not have.
    """
    return {name: _records(v) if _is_table(v) else v for name, v in result.items()}


def _rounded(value: Any) -> Any:
    """Return a JSON value whose floats keep `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(r, dict) for r in value)


def _is_long(value: Any) -> bool:
    return _is_records(value) and len(value) >= LONG


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"columns", "rows"}


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _table(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for record in records for name in record)
    columns, cells = {}, []
    for name in names:
        if name not in PRINTED_ONLY:
            columns[name], places = _column([record.get(name) for record in records])
            cells.append(places)
    return {"columns": columns, "rows": [list(row) for row in zip(*cells, strict=True)]}


def _column(values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return how a column is named, and its cells."""
    if any(map(_is_records, values)):
        known = _places(record for value in values for record in value or ())
        values = [[known[_dumps(record)] for record in value or ()] for value in values]
        of = _table([json.loads(record) for record in known])
        column, cells = _column(values)
        return {"of": of, "lists": column}, cells
    known = _places(values)
    cells = [known[_dumps(value)] for value in values]
    if len(_dumps([*map(json.loads, known)])) + len(_dumps(cells)) < len(_dumps(values)):
        return [json.loads(value) for value in known], cells
    return None, list(values)


def _places(values: Iterable[Any]) -> dict[str, int]:
    """Return the place of each value, by its JSON, in the order in which they come."""
    return {text: place for place, text in enumerate(dict.fromkeys(map(_dumps, values)))}


def _records(table: dict[str, Any]) -> list[dict[str, Any]]:
    columns = [
        _values(column, [row[place] for row in table["rows"]])
        for place, column in enumerate(table["columns"].values())
    ]
    return [dict(zip(table["columns"], row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: Any, cells: Sequence[Any]) -> list[Any]:
    if isinstance(column, dict):
        of = _records(column["of"])
        return [[of[place] for place in one] for one in _values(column["lists"], cells)]
    return list(cells) if column is None else [column[place] for place in cells]


def _table_text(table: dict[str, Any]) -> str:
    columns = ",\n".join(f"{_dumps(name)}: {_dumps(c)}" for name, c in table["columns"].items())
    rows = ",\n".join(map(_dumps, table["rows"]))
    return f'{{"columns": {{\n{columns}}},\n"rows": [\n{rows}]}}'
