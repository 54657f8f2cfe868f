"""Tables, sizes and the JSON line of the command line."""

import json
from pathlib import Path

import pytest
import torch

from neuron_moe import __version__
from neuron_moe.tools import console
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


@pytest.mark.parametrize(("nbytes", "threads"), [(100, 1), (300, 2)], ids=["small", "large"])
def test_a_small_checkpoint_gets_one_thread_for_a_while(
    nbytes: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SMALL_CHECKPOINT_BYTES", 200)
    (tmp_path / "model.safetensors").write_bytes(bytes(nbytes))
    torch.set_num_threads(2)
    with console.fitting_threads(tmp_path):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


def test_a_bar_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("working") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
