"""Tables, sizes and the JSON line of the command line."""

import json

import pytest

from neuron_moe import __version__
from neuron_moe.tools.console import format_bytes, format_table, print_json_line, progress_bar


def test_columns_line_up() -> None:
    table = format_table([("name", "n", "m"), ("a", "1", "22"), ("bcdefg", "333", "4")])
    assert table.splitlines() == ["name      n   m", "a         1  22", "bcdefg  333   4"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (13.77e9, "12.82 GiB"), (5e12, "4.547 TiB")],
)
def test_bytes_have_a_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_the_json_line_is_one_line_and_strict(capsys: pytest.CaptureFixture[str]) -> None:
    print_json_line("demo", value=1.5)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"command": "demo", "version": __version__, "value": 1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json_line("demo", value=float("nan"))


def test_a_bar_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("working") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
