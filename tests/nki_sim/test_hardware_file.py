"""Measured coefficients: read, refused, and used by every timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nki_sim import hardware
from nki_sim.hardware import TRN2
from nki_sim.hardware_file import read_hardware, use_hardware


def _file(tmp_path: Path, **estimates: Any) -> Path:
    path = tmp_path / "hardware_measured.json"
    coefficients = {name: {"estimate": value} for name, value in estimates.items()}
    path.write_text(json.dumps({"chip": "trn2", "coefficients": coefficients}))
    return path


def test_what_was_measured_takes_the_place_of_what_was_not(tmp_path: Path) -> None:
    path = _file(tmp_path, hwdge_ns=321.5, stationary_reuse_skips_load=0, launch_ns=9e3)
    chip = read_hardware(path)
    assert (chip.hwdge_ns, chip.stationary_reuse_skips_load) == (321.5, 0)
    assert chip.varied("hwdge_ns", TRN2.hwdge_ns / 321.5).hwdge_ns == pytest.approx(TRN2.hwdge_ns)
    assert chip.provenance("hwdge_ns") == TRN2.provenance("hwdge_ns")


@pytest.mark.parametrize("value", [0, -1.0, "fast", None, True])
def test_an_estimate_that_is_no_positive_number_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"hwdge_ns=.* must be a positive number"):
        read_hardware(_file(tmp_path, hwdge_ns=value))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"chip": "trn9", "coefficients": {}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not measured coefficients"):
        read_hardware(path)


def test_a_process_can_use_it_for_every_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "CHIPS", dict(hardware.CHIPS))
    assert use_hardware(_file(tmp_path, swdge_ns=4321.0)).swdge_ns == 4321.0
    assert hardware.find("trn2").swdge_ns == hardware.find("gen3").swdge_ns == 4321.0
    assert hardware.find("trn3").swdge_ns == 1000.0
