"""docs/architecture.md shows the walk that a call takes, and every room; the glossary, places."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nki_sim
from neuron_moe.tools.bench.host import probe as host_probe
from tests.repo import source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
MOST_SWITCHES = 40
ROOMS = ("nki_sim", "nki_kernels", "neuron_moe", "tools")  # models has none
STEP = re.compile(
    r"(?P<indent> +)(?P<file>[\w/]+\.py): (?P<function>[\w.<>]+)(?:  x(?P<times>\d))?"
)
Switch = tuple[str, str, str]  # from file, to file, the function entered
Lines = list[tuple[int, str, str, int]]  # depth, file, function, how often


def _written(case: str) -> list[Switch]:
    """Return the walk that the page shows under a heading."""
    block = PAGE.split(f"### {case}\n")[1].split("```")[1]
    lines: Lines = []
    for line in block.splitlines()[2:]:  # the rest of the fence, and MoE.forward
        found = STEP.match(line)
        assert found, line
        depth = len(found["indent"]) // 2
        lines.append((depth, found["file"], found["function"], int(found["times"] or 1)))
    return _expand(lines, "moe.py")


def _expand(lines: Lines, caller: str) -> list[Switch]:
    """Return the switches of an indented list; `xN` repeats a line and what is deeper below it."""
    found: list[Switch] = []
    while lines:
        (depth, file, function, times), *rest = lines
        below = next((n for n, line in enumerate(rest) if line[0] <= depth), len(rest))
        inner, lines = rest[:below], rest[below:]
        found += [(caller, file, function), *_expand(inner, file)] * times
    return found


def _decode_of(prefill: list[Switch]) -> list[Switch]:
    """Return the walk of decode in two launches, as the page tells it."""
    return [
        (
            caller.replace("nki/prefill.py", "nki/decode.py"),
            file.replace("nki/prefill.py", "nki/decode.py"),
            function.replace("PrefillPlan", "DecodePlan"),
        )
        for caller, file, function in prefill
    ]


def _as_page(walk: list[Switch]) -> str:
    """Return a walk as the page writes it, but for remarks and `xN`."""
    path, lines = ["moe.py"], ["moe.py: MoE.forward"]
    for caller, file, function in walk:
        while path[-1] != caller:
            path.pop()
        lines.append(f"{'  ' * len(path)}{file}: {function}")
        path.append(file)
    return "\n".join(lines)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> host_probe.Stub:
    for name, size in {"HIDDEN": 128, "INTERMEDIATE": 64, "EXPERTS": 4, "TOP_K": 2}.items():
        monkeypatch.setattr(host_probe, name, size)
    monkeypatch.setattr(host_probe, "PREFILL_TOKENS", 160)
    stub = host_probe.Stub(nki_sim.run)
    monkeypatch.setattr(nki_sim, "run", stub)
    return stub


@pytest.mark.parametrize("case", ["prefill", "fused prefill", "fused decode", "decode"])
def test_the_page_shows_the_walk_of_a_call(case: str, stub: host_probe.Stub) -> None:
    walk = host_probe.Probe(case, stub).walk()
    written = _decode_of(_written("prefill")) if case == "decode" else _written(case)
    assert written == walk, f"the page must say:\n{_as_page(walk)}"
    assert len(walk) <= MOST_SWITCHES
    assert f"Switches of {case}: {len(walk)}." in PAGE


def test_files_on_the_page_exist() -> None:
    named = re.findall(r"[\w/]+\.py\b", PAGE)
    known = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")]
    gone = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in known)]
    assert len(named) > 60
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
    assert len(places) > 60
    assert not gone, gone
    assert all(words.count(word) == 1 for word in words if word != "word" and set(word) != {"-"})
