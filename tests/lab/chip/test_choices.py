"""Choices of plan, block size and mode: made for the chip in force, whoever asks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lab.chip import choices
from neuron_moe.backends.nki.decode import _decode_config
from neuron_moe.tools.timing.layers import MODELS
from nki_kernels.common.chip import core
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.decode import DecodeRequest, DecodeSizes, WeightForm
from nki_kernels.prefill import Candidate, Expected, ExpertSizes, best_candidate
from nki_sim.hardware import CHIPS, TRN2
from nki_sim.hardware_file import use_hardware, using

SLOW_LISTS = dataclasses.replace(TRN2, dma_first_byte_ns=50_000.0)
SLOW_RUNS = dataclasses.replace(TRN2, dma_run_ns=20 * TRN2.dma_run_ns)
SLOW_STORES = dataclasses.replace(TRN2, swdge_ns=20 * TRN2.swdge_ns)
STEP = DecodeSizes(T=4, H=2048, I=96, E=16, K=2, num_experts=16)


def _mode() -> str:
    config = _decode_config(STEP, ExpertFormula(), WeightForm(), DecodeRequest())
    return str(config.mode)


def _scout() -> Candidate:
    expected = Expected(num_tokens=640, top_k=1, scaling="pre")
    return best_candidate(ExpertFormula(), ExpertSizes(5120, 512, 16), expected)


def test_our_coefficients_are_in_force_by_default() -> None:
    assert (core().steps, core().transfers, core().exchanges) == (1.0, 1.0, 1.0)
    with using(SLOW_RUNS):
        assert core().dma_run_ns == 20 * TRN2.dma_run_ns
    assert core().dma_run_ns == TRN2.dma_run_ns


def test_the_decode_mode_of_the_backend_is_that_of_the_chip_in_force() -> None:
    assert _mode() == "selective"
    with using(SLOW_LISTS):
        assert _mode() == "all"
    assert _mode() == "selective"


@pytest.mark.long
def test_the_prefill_plan_is_that_of_the_chip_in_force() -> None:
    usual = _scout()
    with using(SLOW_RUNS):
        here = _scout()
    assert (usual.block_size, here.block_size) == (128, 64)
    assert here.estimated_us > usual.estimated_us


@pytest.mark.long
def test_the_estimate_follows_every_coefficient_of_the_chip_in_force() -> None:
    usual = _scout()
    with using(SLOW_STORES):
        assert _scout().estimated_us > usual.estimated_us
    assert _scout().times_us == usual.times_us


def test_a_file_of_measured_coefficients_changes_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hardware_measured.json"
    estimate = {"dma_first_byte_ns": {"estimate": SLOW_LISTS.dma_first_byte_ns}}
    path.write_text(json.dumps({"chip": "trn2", "coefficients": estimate}))
    monkeypatch.setitem(CHIPS, "trn2", TRN2)
    use_hardware(path)
    assert _mode() == "all"


@pytest.mark.long
def test_what_turns_is_told_with_both_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = next(model for model in MODELS if model.name == "gpt-oss-20b")
    monkeypatch.setattr(choices, "MODELS", (model,))
    monkeypatch.setattr(choices, "PREFILL_TOKENS", (256,))
    choices._ours.cache_clear()
    assert choices.flipped(TRN2) == []
    (found,) = choices.flipped(SLOW_RUNS)
    assert found["choice"] == "prefill, gpt-oss-20b TP8, 256 tokens"
    assert "blocks of 128" in found["ours"]
    assert "blocks of 32" in found["here"]
    choices._ours.cache_clear()
