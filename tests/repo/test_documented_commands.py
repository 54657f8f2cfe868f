"""What the documents tell one to type ends with 0, where it needs no files of the reader."""

import re
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.tools import cli
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.subcommands import MENU
from tests.repo.test_documents import DOCUMENTS, commands_of

_RUN = ("inspect", "plan", "routing", "generate")
# Files of the reader, pieces of a call, and what takes minutes.
_LEFT_OUT = re.compile(
    r"[A-Z]{3,}|<|\.\.\.|\||nowhere|tuned\.yaml|\.corpus|trn2u|backend nki|^generate(?!.*--prompt)"
)


def documented() -> list[tuple[str, ...]]:
    found = dict.fromkeys(
        tuple(words)
        for path in DOCUMENTS
        for words in commands_of(path.read_text())
        if words[0] in _RUN and len(words) > 1 and not _LEFT_OUT.search(" ".join(words))
    )
    return list(found)


class _Parsed(Exception):
    """A command's own parser has taken its arguments."""


@pytest.mark.parametrize("name", ["serve", "compile"])
def test_documented_commands_are_taken_by_their_parser(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = Parser.parse_args

    def parse_only(self: Parser, *given: Any) -> None:
        parse(self, *given)
        raise _Parsed

    monkeypatch.setattr(Parser, "parse_args", parse_only)
    pages = [commands_of(path.read_text()) for path in DOCUMENTS]
    asked = [words for page in pages for words in page if words[0] == name and len(words) > 2]
    assert asked
    for words in asked:
        with pytest.raises(_Parsed):
            MENU.main(words)


def test_commands_are_found() -> None:
    assert {words[0] for words in documented()} >= {"inspect", "plan", "routing"}


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=pytest.mark.slow if "--out" in words else ())
        for words in documented()
    ],
    ids=" ".join,
)
def test_a_documented_command_runs(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(root / "models")
    (tmp_path / "traces").mkdir()
    recorded = root / "models" / "tiny_gpt_oss" / "traces" / "code.npz"
    (tmp_path / "traces" / "all.npz").symlink_to(recorded)
    assert cli.main([*words]) == 0


@pytest.mark.slow
def test_the_page_about_tuning_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = next(path for path in DOCUMENTS if path.name == "tuning.md").read_text()
    monkeypatch.chdir(tmp_path)
    asked = [words for words in commands_of(page) if words[0] in ("tune", "inspect")]
    assert asked[0][0] == "tune"
    for words in asked:
        if len(words) > 1 and "..." not in words:
            assert cli.main(words) == 0
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    capsys.readouterr()
    exec(code, {})
    assert "tuned for up to 1024 tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_about_kernels_splits_experts_over_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = next(path for path in DOCUMENTS if path.name == "kernels.md").read_text()
    (words,) = (words for words in commands_of(page) if "--tp" in words and "nki" in words)
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert "def main(argv):" in shown.out
    assert "[simulated]" in shown.out + shown.err


@pytest.mark.long
def test_the_page_about_tuning_tells_why_a_mode_runs_and_how_to_have_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = next(path for path in DOCUMENTS if path.name == "tuning.md").read_text()
    first, second = (words for words in commands_of(page) if "--phase" in words)
    assert cli.main(first) == 0
    assert "because  cost model" in capsys.readouterr().out
    assert cli.main(second) == 0
    assert "decode_mode='all_experts' was requested" in capsys.readouterr().out
