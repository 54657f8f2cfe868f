"""The tables in README and docs that show committed results (docs/results).

`python -m tests.repo.published` writes them anew between the marks of the pages, `<!-- NAME -->`
and `<!-- end -->`; a test compares.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from neuron_moe.tools.timing.condensed import condense
from tests.repo.published import kernels, layouts, overview
from tests.repo.published.results import RESULTS
from tests.repo.source import ROOT

PAGES = (ROOT / "README.md", *sorted(ROOT.joinpath("docs").glob("*.md")), RESULTS / "README.md")
_MARKED = re.compile(r"<!-- ([\w-]+) -->\n(.*?)\n?<!-- end -->", re.DOTALL)


def tables() -> dict[str, str]:
    """Return each table by the name in its mark."""
    return {**overview.tables(), **kernels.tables(), **layouts.tables()}


def written() -> Iterator[tuple[Path, str, str]]:
    """Yield the page, name and text of each table that is marked."""
    for page in PAGES:
        for name, text in _MARKED.findall(page.read_text()):
            yield page, name, text


def write() -> None:
    """Put the tables into the pages, after condensing the results."""
    for path in RESULTS.glob("*.json"):
        path.write_text(condense(json.loads(path.read_text())))
    made = tables()
    for page in PAGES:
        before = page.read_text()
        after = _MARKED.sub(lambda m: f"<!-- {m[1]} -->\n{made[m[1]]}\n<!-- end -->", before)
        if after != before:
            page.write_text(after)
