"""neuron-moe generate, called as the command does."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.models.sample_checkpoint import make_checkpoint
from neuron_moe.tools import cli
from neuron_moe.tools.commands import generate

PROMPTS = ["Once upon a time there was a router", "Tokens"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("generate"))


def run(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, Any]:
    """Return what was printed for people, and the object of the last line."""
    status = generate.main(["--model", str(folder), "--max-new-tokens", "6", "--json", *options])
    assert status == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def test_one_prompt_is_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, result = run(folder, capsys, "--prompt", PROMPTS[0], "--dtype", "float32")
    (answer,) = result["answers"]
    assert len(answer["token_ids"]) == 6
    assert answer["finish_reason"] == "length"
    assert text.startswith(PROMPTS[0])
    assert "[measured]" in text
    assert result["times"]["kind"] == "measured"
    assert result["times"]["decode_tokens"] == 5
    assert result["config"]["dtype"] == "float32"


def test_prompts_of_a_batch_get_what_they_get_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--dtype", "float32"]
    text, together = run(folder, capsys, *both)
    assert all(prompt in text for prompt in PROMPTS)
    for prompt, answer in zip(PROMPTS, together["answers"], strict=True):
        _, alone = run(folder, capsys, "--prompt", prompt, "--dtype", "float32")
        assert alone["answers"][0]["token_ids"] == answer["token_ids"]


def test_explain_tells_path_and_reasons_of_both_phases(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, result = run(folder, capsys, "--prompt", PROMPTS[0] * 60, "--explain")
    prefill, decode = result["explain"]
    assert (prefill["phase"], prefill["path"]) == ("prefill", "blockwise")
    assert (decode["phase"], decode["path"]) == ("decode", "selective")
    assert prefill["padding_overhead"]["actual"] is not None
    for explanation in (prefill, decode):
        assert all(reason in text for reason in explanation["reasons"])
        assert set(explanation["rejected"]) | {explanation["path"]} == {
            "blockwise",
            "selective",
            "all_experts",
            "capacity",
        }


def test_explaining_does_not_change_the_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, plain = run(folder, capsys, "--prompt", PROMPTS[0])
    _, explained = run(folder, capsys, "--prompt", PROMPTS[0], "--explain")
    assert plain["answers"] == explained["answers"]


def test_a_seed_repeats_a_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", PROMPTS[0], "--temperature", "1.5", "--top-p", "0.9", "--seed"]
    _, first = run(folder, capsys, *options, "1")
    _, again = run(folder, capsys, *options, "1")
    _, other = run(folder, capsys, *options, "2")
    assert first["answers"] == again["answers"] != other["answers"]


BAD = {
    "no-such-folder": (["--model", "nowhere", "--prompt", "x"], "nowhere"),
    "empty-prompt": (["--prompt", ""], "prompt=''"),
    "no-tokens": (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
    "negative-temperature": (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
    "a-million-ranks": (["--prompt", "x", "--tp", "1000000"], "1000000 processes, must be at most"),
    "more-ranks-than-experts": (["--prompt", "x", "--ep", "9"], "expert-parallel size 9"),
    "uneven-slices": (["--prompt", "x", "--tp", "7"], "tensor-parallel size 7"),
    "unknown-backend": (["--prompt", "x", "--backend", "cuda"], "backend='cuda'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_status_two_and_one_line(
    case: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options, message = BAD[case]

    def start(self: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.get_context("fork").Process, "start", start)
    assert cli.main(["generate", "--model", str(folder), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("neuron-moe generate: ")
    assert message in error
    assert error.count("\n") == 1
