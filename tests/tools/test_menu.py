"""What neuron-moe lists is what it can run, and a wrong name is a usage error with a hint."""

from pathlib import Path

import pytest

import neuron_moe
from lab.bench import menu as bench
from lab.check import menu as check
from neuron_moe.tools import subcommands
from neuron_moe.tools.menu import load

MENUS = {"neuron-moe": subcommands.MENU, "bench": bench.MENU, "check": check.MENU}


@pytest.mark.parametrize("name", MENUS)
def test_every_listed_name_is_a_module_with_main(name: str) -> None:
    usage = " ".join(MENUS[name].usage().split())
    for listed, (module, text) in {**MENUS[name].entries, **MENUS[name].others}.items():
        assert callable(load(module).main), listed
        assert listed in usage
        assert text in usage or listed in MENUS[name].others


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
    shown = capsys.readouterr().err
    assert f"no {MENUS[name].noun} {given!r}. Did you mean {meant!r}?" in shown
    assert MENUS[name].usage() in shown


def test_what_lies_beside_the_package_is_refused_in_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neuron_moe, "__file__", str(tmp_path / "neuron_moe" / "__init__.py"))
    with pytest.raises(ValueError, match="not in the wheel: it needs the checkout"):
        load("lab.bench.cpu")
