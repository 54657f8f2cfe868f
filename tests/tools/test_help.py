"""The help of every command: one screen of 80 columns, an example that is right, exit statuses."""

import contextlib
import io
import re
import shlex

import pytest

from lab.bench import menu as bench
from lab.check import menu as check
from neuron_moe.tools.cli import main
from neuron_moe.tools.commands import chip
from neuron_moe.tools.subcommands import OTHERS, SUBCOMMANDS

MENUS = {"bench": bench.MENU, "check": check.MENU, "chip": chip.MENU}
ALIASES = {"explain": "inspect --explain", "place": "plan --place"}
COMMANDS = [ALIASES.get(name, name) for name in (*SUBCOMMANDS, *OTHERS) if name not in MENUS]
TARGETS = {menu: [*found.entries, *found.others] for menu, found in MENUS.items()}
COMMANDS += [f"{menu} {name}" for menu, names in TARGETS.items() for name in names]
SCREEN, COLUMNS = 30, 80


def shown(words: list[str], monkeypatch: pytest.MonkeyPatch, option: str = "--help") -> str:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            status = main([*words, option])
        except SystemExit as end:
            status = int(end.code or 0)
    assert status == 0
    return printed.getvalue()


@pytest.mark.parametrize("command", ["", *MENUS, *COMMANDS])
def test_help_fits_a_screen_without_colour_and_documents_exit_statuses(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(command.split(), monkeypatch)
    lines = text.splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= COLUMNS, max(lines, key=len)
    assert "\x1b" not in text
    assert lines[0].startswith(f"usage: neuron-moe {command}".rstrip())
    if command not in ("compile", "chip check", "chip calibrate", "chip bench"):  # have their own
        assert "exit status: 0 " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_all_options_tells_those_of_the_short_one_and_has_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, whole = (shown(command.split(), monkeypatch, name) for name in ("--help", "--help-all"))
    assert max(map(len, whole.splitlines())) <= COLUMNS
    options = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", whole, flags=re.MULTILINE))
    assert options >= {"--help", "--help-all"}
    assert options - {"--help-all"} <= set(re.findall(r"--[a-z-]+", text))
    examples = re.findall(rf"^    neuron-moe {command}\b.*", whole, flags=re.MULTILINE)
    assert examples
    listed = whole[whole.index("options:") :]
    for example in examples:
        words = shlex.split(example.removeprefix(f"    neuron-moe {command}"), comments=True)
        assert [each for each in words if each.startswith("--") and each not in listed] == []


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["compile", "--outt", "x"], "--out"),  # and one that is missing
        (["bench", "cpu", "--token", "1", "--dtipes", "bf16"], "--dtypes"),  # one is only short
    ],
)
def test_a_wrong_option_is_answered_with_the_nearest(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    shown = capsys.readouterr().err
    assert words[-2] in shown
    assert shown.endswith(f". Did you mean {option!r}?\n")


def test_the_help_of_compile_says_what_three_means(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "3 all is done but what needs the Neuron SDK" in " ".join(
        shown(["compile"], monkeypatch).split()
    )


@pytest.mark.parametrize("alias", ALIASES)
def test_an_old_spelling_is_the_new_command(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown([alias], monkeypatch) == shown(ALIASES[alias].split(), monkeypatch)
