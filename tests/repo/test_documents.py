"""What the documents name exists: commands with their options, files, make targets."""

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from neuron_moe.tools.cli import main

ROOT = Path(__file__).parents[2]
TOP = (
    "nki_sim",
    "nki_kernels",
    "neuron_moe",
    "models",
    "serving",
    "tools",
    "lab",
    "configs",
    "tests",
    "docs",
    ".ci",
)
ADR = ROOT / "docs" / "adr"
RECORDS = sorted(ADR.glob("[0-9]*.md"))
DOCUMENTS = [
    *sorted(ROOT.joinpath("docs").glob("*.md")),
    *sorted(ADR.glob("*.md")),
    ROOT / "docs" / "results" / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "README.md",
]
_MENUS = ("bench", "check", "chip")  # commands whose first word names another
_OTHERWISE = {"inspect": "--explain", "plan": "--place"}  # an option with options of its own


def _name(path: Path) -> str:
    return path.name


def _code(text: str) -> list[str]:
    """Return what stands in backticks, and the lines of code blocks, continued ones joined."""
    blocks = re.findall(r"```.*?\n(.*?)```", text, flags=re.DOTALL)
    blocks += re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text)


def commands_of(text: str) -> list[list[str]]:
    """Return the words behind each `neuron-moe` in code."""
    found = []
    for piece in _code(text):
        for call in re.findall(r"(?:^|[\s;&$(])neuron-moe\s+([^;&|#\n]*)", f" {piece}"):
            words = shlex.split(call.split("   ")[0], comments=True) if "'" not in call else []
            if words and re.fullmatch("[a-z_]+", words[0]):
                found.append(words)
    return found


@cache
def _help(words: tuple[str, ...]) -> str | None:
    """Return the help of a command; None if there is no such command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = main([*words, "--help" if words[-1] in _MENUS else "--help-all"])
        except SystemExit as end:
            status = int(end.code or 0)
    return printed.getvalue() if status == 0 else None


def test_documents_are_found() -> None:
    assert len(DOCUMENTS) > 5
    assert commands_of("`neuron-moe bench wire --json x`") == [["bench", "wire", "--json", "x"]]
    assert _help(("bench", "wires")) is None
    assert _help(("brew",)) is None


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_commands_exist(path: Path) -> None:
    wrong = []
    for words in commands_of(path.read_text()):
        has_target = len(words) > 1 and re.fullmatch("[a-z_]+", words[1]) is not None
        called = tuple(words[:2]) if has_target and words[0] in _MENUS else (words[0],)
        if (mode := _OTHERWISE.get(words[0])) in words:
            called = (words[0], str(mode))
        shown = _help(called)
        if shown is None:
            wrong.append(f"no command neuron-moe {' '.join(called)}")
            continue
        options = re.findall(r"--[a-z][\w-]*", " ".join(words))
        wrong += [f"{' '.join(called)} has no {each}" for each in options if each not in shown]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_files_exist(path: Path) -> None:
    text = path.read_text()
    named = {word.rstrip("/") for word in re.findall(r"[\w.<>*{},/-]+", " ".join(_code(text)))}
    wrong = [
        name
        for name in sorted(named)
        if name.split("/")[0] in TOP
        and "/" in name
        and not all(_exists(each) for each in _alternatives(name.rstrip(".,")))
    ]
    files = {each.name for top in TOP for each in (ROOT / top).rglob("*.py")}
    alone = set(re.findall(r"`(\w+\.py)`", text))  # in a block it may be a reader's own file
    wrong += [f"no file of ours is called {name}" for name in sorted(alone - files)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_point_at_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text())
    wrong = [link for link in links if not (path.parent / link).exists()]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_make_targets_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    pieces = [piece for piece in _code(path.read_text()) if piece.strip().startswith("make ")]
    wrong = [piece for piece in pieces if f"\n{piece.split()[1]}:" not in f"\n{makefile}"]
    assert not wrong, "\n".join(wrong)


def _alternatives(name: str) -> list[str]:
    """Return the paths that a name with one pair of braces means."""
    found = re.match(r"([^{]*)\{([^}]*)\}(.*)", name)
    if found is None:
        return [name]
    before, inner, after = found.groups()
    return [f"{before}{each}{after}" for each in inner.split(",")]


def _exists(name: str) -> bool:
    """Say whether a path, or any that a placeholder in it can mean, exists."""
    return any(ROOT.glob(re.sub(r"<[^>]*>", "*", name)))


@pytest.mark.parametrize("path", RECORDS, ids=_name)
def test_a_decision_has_context_decision_and_consequences(path: Path) -> None:
    text = path.read_text()
    assert re.findall("^## (.*)", text, flags=re.MULTILINE) == [
        "Context",
        "Decision",
        "Consequences",
    ]
    assert re.match(rf"# {int(path.name[:4])}\. \w.*\n\nAccepted \d{{4}}-\d\d-\d\d", text)
    assert 60 <= len(text.split()) <= 200


def test_the_decisions_are_few_and_listed_in_order() -> None:
    listed = re.findall(
        r"^- (\d+)\. \[(.*)\]\((.*)\)", (ADR / "README.md").read_text(), re.MULTILINE
    )
    assert [name for _, _, name in listed] == [path.name for path in RECORDS]
    for number, title, name in listed:
        assert (ADR / name).read_text().startswith(f"# {number}. {title}\n"), name
    assert len(RECORDS) <= 25
