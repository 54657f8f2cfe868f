"""neuron-moe generate, called as the command does."""

import contextlib
import io
import json
import multiprocessing
import os
import pty
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.backends import form_times
from neuron_moe.models.sample_checkpoint import make_checkpoint
from neuron_moe.tools import cli
from neuron_moe.tools.commands import generate

PROMPTS = ["Once upon a time there was a router", "Tokens"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("generate"))


def run(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, Any]:
    """Return what was printed for people, and the object of the last line."""
    fixed = ["--max-new-tokens", "6", "--product-form", "plain", "--json"]
    status = generate.main(["--model", str(folder), *fixed, *options])
    assert status == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def test_one_prompt_is_continued_at_a_speed_that_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, result = run(folder, capsys, "--prompt", PROMPTS[0], "--dtype", "float32")
    (answer,) = result["answers"]
    assert len(answer["token_ids"]) == 6
    assert answer["finish_reason"] == "length"
    assert text.startswith(PROMPTS[0])
    assert "[measured]" in text
    times = result["times"]
    assert times["kind"] == "measured"
    assert times["decode_tokens"] == 5
    for phase in ("prefill", "decode"):
        speed = times[f"{phase}_tokens"] / times[f"{phase}_s"]
        assert times[f"{phase}_tokens_per_s"] == pytest.approx(speed)
        assert f"{speed:.1f} tokens/s" in text
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


def test_explain_tells_path_and_reasons_of_both_phases_and_changes_no_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, result = run(folder, capsys, "--prompt", PROMPTS[0] * 60, "--explain")
    assert result["answers"] == run(folder, capsys, "--prompt", PROMPTS[0] * 60)[1]["answers"]
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


def test_the_form_of_expert_products_is_measured_and_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_times, "MOST_SECONDS", 0.0)
    text, result = run(
        folder, capsys, "--prompt", PROMPTS[0], "--explain", "--product-form", "measured"
    )
    for explanation in result["explain"]:
        assert any(note.startswith("expert products are ") for note in explanation["notes"])
    assert "[measured on " in text


def test_a_seed_repeats_a_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", PROMPTS[0], "--temperature", "1.5", "--top-p", "0.9", "--seed"]
    _, first = run(folder, capsys, *options, "1")
    _, again = run(folder, capsys, *options, "1")
    _, other = run(folder, capsys, *options, "2")
    assert first["answers"] == again["answers"] != other["answers"]


def test_token_ids_need_no_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, noted = run(folder, capsys, "--prompt", PROMPTS[0], "--dtype", "float32")
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    for path in bare.glob("tokenizer*"):
        path.unlink()
    (answer,) = noted["answers"]
    ids = ",".join(map(str, answer["prompt_ids"]))
    text, result = run(bare, capsys, "--prompt-ids", ids, "--dtype", "float32")
    assert result["answers"][0]["token_ids"] == answer["token_ids"]
    assert result["answers"][0]["prompt_ids"] == answer["prompt_ids"]
    assert text.startswith(f"[{ids}] {','.join(map(str, answer['token_ids']))}\n")
    both = ["--prompt-ids", ids, "--prompt-ids", "1,2"]
    text, result = run(bare, capsys, *both, "--dtype", "float32")
    assert result["answers"][0]["token_ids"] == answer["token_ids"]
    assert "[2] [1,2] " in text


def test_prompts_come_from_files_and_standard_input(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPTS[0] + "\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPTS[1] + "\n\n"))
    _, result = run(folder, capsys, "--prompt-file", str(path), "--prompt", "-", "--prompt", "a")
    texts = [answer["prompt"] for answer in result["answers"]]
    assert texts == [PROMPTS[0], PROMPTS[1] + "\n", "a"]


def test_a_chat_asks_in_the_words_of_the_template(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chatty = Path(shutil.copytree(folder, tmp_path / "chatty"))
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}. {% endfor %}"
    )
    (chatty / "chat_template.jinja").write_text(template)
    options = ["--chat", "--system", "Be brief", "--prompt", "Hello"]
    text, chat = run(chatty, capsys, *options)
    _, plain = run(folder, capsys, "--prompt", "system: Be brief. user: Hello. ")
    assert chat["answers"][0]["token_ids"] == plain["answers"][0]["token_ids"]
    assert chat["answers"][0]["prompt"] == "Hello"
    assert text.startswith("Hello\n\n")


def test_the_prompt_stays_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with terminal(monkeypatch) as written:
        generate.main(["--model", str(folder), "--max-new-tokens", "3", "--prompt", PROMPTS[0]])
    shown = b"".join(written).decode()
    assert "computing" in shown
    assert "\x1b[2K" in shown  # the bar was there, and went
    after = shown.rsplit(PROMPTS[0], 1)[1]
    assert not any(code in after for code in ("\x1b[2K", "\x1b[1A"))


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Let both output streams be one terminal; fill a list with what was written there."""
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody has the other end open any more
            while part := os.read(ours, 4096):
                written.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        yield written
        stream.flush()
    reader.join()
    os.close(ours)


BAD = {
    "no-such-folder": (["--model", "nowhere", "--prompt", "x"], "nowhere"),
    "empty-prompt": (["--prompt", ""], "prompt=''"),
    "no-prompt": ([], "--prompt and --prompt-ids: give one of them"),
    "two-kinds": (["--prompt", "x", "--prompt-ids", "1"], "give one of them"),
    "no-number": (["--prompt-ids", "1,x"], "--prompt-ids '1,x': must be token ids"),
    "no-such-token": (["--prompt-ids", "1,-1"], "prompts[0] holds token -1"),
    "no-such-file": (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    "binary-file": (["--prompt-file", sys.executable], "must be UTF-8 text"),
    "input-twice": (["--prompt", "-", "--prompt", "-"], "standard input can be read once"),
    "ids-in-a-chat": (["--prompt-ids", "1", "--chat"], "--chat: a chat template takes text"),
    "system-alone": (["--prompt", "x", "--system", "y"], "--system: belongs to a chat"),
    "no-template": (["--prompt", "x", "--chat"], "this checkpoint has no chat template"),
    "no-tokens": (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
    "negative-temperature": (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
    "a-million-ranks": (["--prompt", "x", "--tp", "1000000"], "1000000 processes, must be at most"),
    "backend-without-gpu": (["--prompt", "x", "--backend", "cuda"], "backend='cuda'"),
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
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.main(["generate", "--model", str(folder), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("neuron-moe generate: ")
    assert message in error
    assert error.count("\n") == 1
