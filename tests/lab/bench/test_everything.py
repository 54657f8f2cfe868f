"""neuron-moe bench all: what moved is shown, and every benchmark can be a page."""

import json
from pathlib import Path

import pytest

from lab.bench import everything
from lab.bench import menu as bench
from lab.bench.printed import blocks_of, page_of_text
from neuron_moe.tools.pages import Listing, Table
from tests.repo.published.results import result
from tests.tools.pages.asks import check_page


def test_only_rows_that_differ_have_moved() -> None:
    rows = result("prefill_trn2")["rows"]
    assert list(everything.simulated_changes("prefill", {"rows": rows})) == []
    slower = {"us": 1.1 * rows[0]["ours"]["us"]}
    turned = [{**rows[0], "ours": slower}, *rows[1:]]
    ((name, row, _, _, ratio),) = everything.simulated_changes("prefill", {"rows": turned})
    assert (name, ratio) == ("prefill", "1.100")
    assert rows[0]["model"] in row


def test_measured_rows_move_beyond_the_spread_of_both() -> None:
    row = {"model": "m", "dtype": "bf16", "tokens": 1, "ours_ms": 10.0, "ours_spread_ms": 0.4}
    before = {"rows": [row]}
    near, far = ({"rows": [row | {"ours_ms": ms}]} for ms in (11.5, 11.7))
    assert list(everything.measured_changes(before, near)) == []
    assert len(list(everything.measured_changes(before, far))) == 1


def test_printed_columns_become_tables() -> None:
    found = blocks_of(["median of 9", "name  us  share", "a     1   50 %", "b     2   9 %", "done"])
    assert [type(block) for block in found] == [Listing, Table, Listing]
    assert isinstance(found[1], Table)
    assert list(found[1].rows) == [["name", "us", "share"], ["a", "1", "50 %"], ["b", "2", "9 %"]]


def test_rows_with_a_bound_become_a_picture() -> None:
    rows = [{"roofline_us": us, "ours_us": 12.0, "vendor_us": None} for us in (8.0, 10.0)]
    page = page_of_text("bench", "a table\n" + json.dumps({"kind": "simulated", "rows": rows}))
    assert page.sections[0].title == "Times against their bound"


@pytest.mark.long
def test_all_ends_with_what_moved_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, result = tmp_path / "all.html", tmp_path / "all.json"
    words = ["all", "--quick", "--only", "prefill", "--jobs", "1"]
    assert bench.main([*words, "--json", str(result), "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ceilings")
    assert "== what moved\nnothing beyond noise" in shown
    assert json.loads(result.read_text())["prefill"]["rows"]
    check_page(page.read_text())
