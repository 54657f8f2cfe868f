"""neuron-moe explain: what runs, without weights, and how to change it."""

import json
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.tools.commands import explain
from neuron_moe.tuned import TunedDecode, TunedModel, TunedPlans


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, dict[str, Any]]:
    assert explain.main([*args, "--json"]) == 0
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def test_prefill_of_a_published_model(capsys: pytest.CaptureFixture[str]) -> None:
    text, shown = run(capsys, "--model", "qwen3_30b_a3b", "--tp", "8", "--tokens", "1024")
    assert (shown["path"], shown["kernel"]) == ("blockwise", "nki.prefill_layer")
    assert shown["plan"]["block_size"] == shown["block_size"] in (64, 128)
    assert "change   block size" in text
    # Reasons are those of the path that runs.
    assert not any("fewer experts" in reason for reason in shown["reasons"])
    assert f"block_size={shown['block_size']} would" not in text


def test_decode_names_its_mode_and_the_other_one(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", "gpt_oss_120b", "--tp", "8", "--phase", "decode", "--tokens", "64")
    text, shown = run(capsys, *args)
    mode = shown["plan"]["mode"]
    other = {"selective": "all_experts", "all_experts": "selective"}[mode]
    assert f"--decode-mode {other}" in text
    assert not any(line.startswith("  padding") for line in text.splitlines())
    _, changed = run(capsys, *args, "--decode-mode", other)
    assert changed["path"] == changed["plan"]["mode"] == other
    assert any("was requested" in reason for reason in changed["reasons"])


def test_torch_has_no_kernels_to_plan(capsys: pytest.CaptureFixture[str]) -> None:
    text, shown = run(capsys, "--model", "mixtral_8x7b", "--tokens", "1024", "--backend", "torch")
    assert shown["kernel"] == "torch.blockwise"
    assert shown["plan"] == {}
    assert "backend torch" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "mixtral_8x7b", "--tokens", "0"], "--tokens=0"),
        (["--model", "mixtral_8x7b", "--tokens", "8", "--tp", "3"], "must divide"),
        (["--model", "no_such_model", "--tokens", "8"], "there is no such folder"),
    ],
)
def test_bad_input_ends_with_a_message(args: list[str], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        explain.main(args)


def test_a_file_tuned_for_other_ranks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, decode = tmp_path / "tuned.yaml", TunedDecode(tokens=64, mode="all_experts")
    TunedModel(model="mixtral_8x7b", tp=8, ep=1, lnc=2, plans=TunedPlans(decode=(decode,))).write(
        path, ""
    )
    args = ("--model", "mixtral_8x7b", "--phase", "decode", "--tokens", "8", "--tuned", str(path))
    text, shown = run(capsys, *args, "--tp", "8")
    assert "tuned as mixtral_8x7b" in text
    assert shown["path"] == "all_experts"
    with pytest.raises(ValueError, match="tuned for tp=8, not for tp=4"):
        explain.main([*args, "--tp", "4"])
