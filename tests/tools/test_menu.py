"""What neuron-moe lists is what it can run, and a wrong name is a usage error with a hint."""

import importlib

import pytest

from neuron_moe.tools import subcommands
from neuron_moe.tools.commands import bench, check

MENUS = {"neuron-moe": subcommands.MENU, "bench": bench.MENU, "check": check.MENU}


@pytest.mark.parametrize("name", MENUS)
def test_every_listed_name_is_a_module_with_main(name: str) -> None:
    for listed, (module, text) in MENUS[name].entries.items():
        found = importlib.import_module(f"neuron_moe.tools.{module}")
        assert callable(found.main), listed
        assert listed in MENUS[name].usage()
        assert text in " ".join(MENUS[name].usage().split())


@pytest.mark.parametrize("name", MENUS)
def test_help_is_printed_and_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    menu = MENUS[name]
    assert [menu.main([word]) for word in ("-h", "--help", "help")] == [0, 0, 0]
    assert menu.main([]) == 2
    assert capsys.readouterr().out == f"{menu.usage()}\n" * 4


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("neuron-moe", "generat", "generate"),
        ("bench", "prefil", "prefill"),
        ("check", "kernel", "kernels"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(
    name: str, given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert MENUS[name].main([given]) == 2
    told = capsys.readouterr().err
    assert f"no {MENUS[name].noun} {given!r}. Did you mean {meant!r}?" in told
    assert MENUS[name].usage() in told
