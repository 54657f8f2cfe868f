"""docs/architecture.md shows every room; the glossary, places."""

from __future__ import annotations

import re
from pathlib import Path

from tests.repo import source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ROOMS = ("nki_sim", "nki_kernels", "neuron_moe", "tools", "lab")  # models has none


def test_files_on_the_page_exist() -> None:
    named = re.findall(r"[\w/]+\.py\b", PAGE)
    known = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")]
    gone = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in known)]
    assert not gone, gone


def test_every_room_stands_in_the_table() -> None:
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("| "))
    rooms = {(each.package, each.room) for package in ROOMS for each in source.modules(package)}
    rooms = {(package, room) for package, room in rooms if room}
    missing = [f"{package}: {room}" for package, room in sorted(rooms) if f"`{room}`" not in table]
    assert not missing, missing


def test_places_in_the_glossary_exist() -> None:
    rows = [line.split("|") for line in GLOSSARY.splitlines() if line.startswith("| ")]
    places = [place.strip() for row in rows for place in row[3].split(",") if "/" in place]
    words = [row[1].strip() for row in rows]
    gone = [place for place in places if "](" not in place and not (ROOT / place).exists()]
    assert places
    assert not gone, gone
    assert all(words.count(word) == 1 for word in words if word != "word" and set(word) != {"-"})
