"""Loss by weight format: ours is transformers', e5m2 is MXFP4, and the tools report it."""

import json

import numpy as np
import pytest
import torch

from lab import evaluate
from lab.evaluate import expert_values, losses_of, summarise
from neuron_moe.models.shipped import shipped_checkpoint
from neuron_moe.quantize import decode_mxfp4, encode_mxfp4


@pytest.mark.long
def test_formats_agree_with_transformers_within_a_thousandth(tmp_path, capsys):
    status = evaluate.main(["--samples", "1", "--check", "--out", str(tmp_path), "--json"])
    final = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0
    assert final["kind"] == "measured"
    assert set(final["formats"]) == {"mxfp4", "e5m2", "e4m3"}
    for row in final["formats"].values():
        assert row["relative_difference"] < 1e-3
        assert 0.8 < row["ours"] < 1.6  # bits per byte: between a good and a poor small model
    assert final["e5m2_identical_to_mxfp4"] is True
    assert final["formats"]["e5m2"] == final["formats"]["mxfp4"]
    assert final["formats"]["e4m3"]["ours"] != final["formats"]["mxfp4"]["ours"]
    assert (tmp_path / "loss_differences.png").stat().st_size > 1000
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["formats"] == final["formats"]


def test_the_loss_of_the_unshipped_bf16_weights_is_on_record():
    recorded = evaluate.read_recorded_bf16(shipped_checkpoint())
    assert recorded["kind"] == "recorded"
    assert recorded["samples"] == 200
    assert recorded["ours"] == pytest.approx(recorded["transformers"], rel=1e-3)
    assert recorded["ours"] == pytest.approx(recorded["mxfp4"], rel=0.01)


def test_a_folder_without_a_record_has_none(tmp_path):
    assert evaluate.read_recorded_bf16(tmp_path) is None


def test_e5m2_holds_the_very_values_and_e4m3_holds_close_ones():
    torch.manual_seed(0)
    blocks, scales = encode_mxfp4(torch.randn(2, 48, 64))
    exact = decode_mxfp4(blocks, scales, dtype=torch.float32).mT
    assert torch.equal(expert_values(blocks, scales, "e5m2"), exact)
    error = (expert_values(blocks, scales, "e4m3") - exact).abs().max()
    assert 0 < error < 0.05 * exact.abs().max()


def test_the_loss_of_a_uniform_model_is_its_entropy():
    samples = [[0, 1, 2], [0, 3], [0, 1, 2, 3, 4]]
    bits = losses_of(lambda ids: torch.zeros(*ids.shape, 8), samples)
    np.testing.assert_allclose(bits, [6, 3, 12])


def test_a_summary_weighs_samples_by_their_bytes():
    bits = {("mxfp4", "ours"): np.array([10.0, 40.0])}
    row = summarise(bits, ["a", "b"], np.array([10, 20]))["mxfp4"]
    assert row["ours"] == pytest.approx(50 / 30)
    assert row["by_domain"] == {"a": 1.0, "b": 2.0}
