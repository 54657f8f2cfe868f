"""Pages of reports: self-contained, sorted by a click, drawn in the page's colours."""

import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lab.bench.printed import page_of_text
from neuron_moe.tools.pages import (
    Bar,
    Details,
    Items,
    Listing,
    Page,
    Row,
    Section,
    Table,
    Text,
    picture_of,
    render,
    write_page,
)
from neuron_moe.tools.pages.page import sort_value
from tests.tools.pages.asks import check_page

TABLE = Table(
    [
        ("name", "size", "us"),
        ("b", "900 KiB", "1,200"),
        ("a", "1.5 GiB", "-"),
        ("c", "2 MiB", "35.5 ± 2"),
    ]
)


def figure() -> Figure:
    found = Figure(figsize=(4, 3))
    axes = found.add_subplot(title="times")
    axes.plot([1, 2], [3, 4], color="#2a6fb0", label="a < b")
    axes.legend()
    return found


def page_of_all() -> Page:
    pictures = Row([picture_of(figure(), "one"), picture_of(figure(), "another")])
    blocks = [
        Text("fits", "good"),
        Items(["x", "y"]),
        Listing("a  b"),
        TABLE,
        pictures,
        Bar([("weights: 30 %", 0.3), ("cache: 10 %", 0.1)], "memory"),
        Details("more", [TABLE]),
    ]
    return Page(
        "<script>alert(1)</script>", "It is 2 & 3.", [Section("All", blocks)], ["simulated"]
    )


def test_a_page_asks_nobody_for_anything_and_is_well_formed() -> None:
    html = render(page_of_all())
    check_page(html)
    assert "<script>alert" not in html
    assert "2 &amp; 3" in html


def test_a_request_would_be_found() -> None:
    html = render(page_of_all())
    for planted in ('<img src="x.png">', '<link href="https://a.b/c">', '<p id="x"></p><p id="x">'):
        with pytest.raises(AssertionError):
            check_page(html.replace("</main>", f"{planted}</main>"))


def test_a_picture_scales_and_has_the_colours_of_the_page() -> None:
    svg = picture_of(figure(), "times").svg
    assert svg.startswith("<svg viewBox=")
    assert "var(--c0)" in svg
    assert "#ffffff" not in svg
    assert ">times</text>" in svg  # as text, not as outlines


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1,234.5", 1234.5), ("73 %", 73), ("-2 us", -2), ("2 MiB", 2**21), ("1.2e3 ± 1", 1200)],
)
def test_a_cell_is_sorted_by_its_number(cell: str, value: float) -> None:
    assert float(sort_value(cell)) == value


@pytest.mark.parametrize("cell", ["", "-", "none", "TP 8"])
def test_a_cell_without_a_number_has_none(cell: str) -> None:
    assert sort_value(cell) == ""


def test_sections_of_a_long_print_have_titles_and_long_tables_unfold() -> None:
    rows = "\n".join(f"row{number}  1  2" for number in range(60))
    page = page_of_text("All", f"a line\n\n== first\nname  a  b\n{rows}\n\n== moved\nnothing\n")
    assert page.answer == "moved: nothing"
    assert [section.title for section in page.sections] == ["", "first", "moved"]
    (table,) = page.sections[1].blocks
    assert isinstance(table, Details)
    assert table.summary == "60 rows"


# Clicks on each heading twice; the title then tells the first column's orders and what went wrong.
_CLICKS = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.blockedURI));
const found = [];
for (const button of document.querySelectorAll("table")[0].querySelectorAll("button")) {
  for (let n = 0; n < 2; n++) {
    button.click();
    found.push([...document.querySelectorAll("table")[0].tBodies[0].rows].map(
      (row) => row.cells[0].textContent).join(""));
  }
}
const wide = document.documentElement.scrollWidth > innerWidth;
document.title = [found.join(" "), wrong.join(), wide].join("|");
</script></body>"""


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_sorts_the_tables_without_an_error(tmp_path: Path, width: int) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium")
    path = write_page(page_of_all(), tmp_path / "page.html")
    path.write_text(path.read_text().replace("</body>", _CLICKS))
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},900",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    orders, wrong, is_wide = title.split("|")
    # by name up and down, by size and by time down and up; no number stands last
    assert orders.split() == ["abc", "cba", "acb", "bca", "bca", "cba"]
    assert wrong == ""
    assert is_wide == "false"
