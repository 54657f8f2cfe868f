"""The README fits two screens, and its examples print what it shows."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from neuron_moe.tools.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    assert len(examples) == README.count("```python") > 0
    for code, shown in examples:
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
        assert capsys.readouterr().out == shown


def test_the_command_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of a whole model: a command behind a dollar sign, its output below."""
    shown = re.findall(r"^    \$ neuron-moe (.*)\n((?:    .*\n)+)", README, flags=re.MULTILINE)
    assert shown
    for command, output in shown:
        assert main(shlex.split(command)) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(textwrap.dedent(output).rstrip("\n")), printed


def test_the_import_lines_of_the_guide_run() -> None:
    page = (ROOT / "docs" / "nxdi.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(block, "nxdi.md", "exec"), {"__name__": "guide"})
