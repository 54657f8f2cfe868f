"""The README's Python runs, and the commands it names exist."""

import re
from pathlib import Path

from neuron_moe.tools.subcommands import SUBCOMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_python_example_runs(capsys) -> None:  # type: ignore[no-untyped-def]
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert "because" in capsys.readouterr().out


def test_the_import_lines_of_the_guide_run() -> None:
    page = (ROOT / "docs" / "nxdi.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(block, "nxdi.md", "exec"), {"__name__": "guide"})


def test_commands_exist() -> None:
    named = set(re.findall(r"neuron-moe ([a-z]+)", README))
    assert named
    assert named <= set(SUBCOMMANDS) | {"is"}, named - set(SUBCOMMANDS)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z]+)`", README):
        assert f"\n{target}:" in makefile, target


def test_links_point_at_files() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
