"""`neuron-moe train`: the shipped model goes on training over ranks, and after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.train import train as recipe
from neuron_moe.tools.cli import main


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line["loss"] for line in lines}  # of a step done twice the last
    assert sorted(by_step) == list(range(len(by_step)))
    return [by_step[step] for step in sorted(by_step)]


def run(out: Path, *options: str) -> list[float]:
    assert main(["train", "--out", str(out), "--rate", "3e-4", *options]) == 0
    return losses_of(out)


def test_texts_that_are_missing_or_too_short_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "a few words"}\n')
    for texts, said in ((tmp_path / "none.jsonl", "no such file"), (short, "Add texts")):
        assert main(["train", "--out", str(tmp_path / "out"), "--texts", str(texts)]) == 2
        assert said in capsys.readouterr().err


def test_a_run_without_a_state_cannot_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--out", str(tmp_path), "--steps", "1", "--resume"]) == 2
    assert "no state to resume from" in capsys.readouterr().err


@pytest.mark.long
def test_ranks_train_as_one_process_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    text = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}) + "\n")
    texts = ["--texts", str(tmp_path / "texts.jsonl")]
    alone = run(tmp_path / "alone", "--steps", "6", "--balance", "0.01", *texts)
    assert alone[-1] < alone[0] - 1
    killed = tmp_path / "killed"
    options = ["--out", str(killed), "--rate", "3e-4", "--balance", "0.01", "--save-every", "2"]
    options += texts
    command = [sys.executable, "-m", "neuron_moe.tools.cli", "train", "--ep", "2", *options]
    with subprocess.Popen([*command, "--steps", "400"], start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 300
            while not (killed / "step-00004").is_dir() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    for later in sorted(killed.glob("step-*"))[2:]:  # the kill may have come late
        later.rename(tmp_path / later.name)
    subprocess.run([*command, "--steps", "6", "--resume"], check=True, timeout=300)
    resumed = losses_of(killed)[:6]
    # Ranks add up in another order each time; where two experts nearly tie, a token changes over.
    assert resumed == pytest.approx(alone, rel=5e-4)


def test_batches_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    tokens = recipe.read_tokens(
        recipe.checkpoint_folder("tiny_gpt_oss"),
        recipe.checkpoint_folder("tiny_gpt_oss") / "heldout.jsonl",
    )
    settings = recipe.Run(folder=tmp_path, texts=tmp_path, out=tmp_path)
    first, again = (recipe.draw_batch(settings, tokens, 3) for _ in range(2))
    assert first.tolist() == again.tolist() != recipe.draw_batch(settings, tokens, 4).tolist()
    assert first.shape == (settings.batch, 97)
