"""neuron-moe as a user calls it: exit status and where messages go."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CalledProcessError

import numpy as np
import pytest

from neuron_moe.models.routing_trace import RoutingTrace
from neuron_moe.parallel import CollectiveError
from neuron_moe.tools import cli
from neuron_moe.tools.menu import Menu
from neuron_moe.tools.ranks import RankError

SIZES = "H=64,I=64,E=4,K=2,L=1"
GENERATE = ["generate", "--model", "tiny_gpt_oss", "--prompt", "a"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generat"], "Did you mean 'generate'"),
        (["bench", "tpu"], "no target 'tpu'"),
        (["bench", "cpu", "--tokens", "0"], "--tokens=0"),
        (["inspect", "--model", "gpt_oss_20b", "--tp", "3"], "tp=3"),
        (["generate", "--model", "nowhere", "--prompt", "a"], "model=nowhere"),
        (["plan", "--model", "H=64,I=64,E=4,K=8,L=1"], "top_k=8"),
        (["plan", "--model", "H=64,I=64,E=4,K=2,L=1" + "0" * 30], "num_hidden_layers=1000"),
        (["plan", "--model", SIZES, "--prefill-tokens", "999999999999"], "--prefill-tokens=9999"),
        (["bench", "sim", "--count", "0"], "--count=0"),
        (["bench", "sim", "--repeats", "0"], "--repeats=0"),
        (["bench", "host", "--repeats", "0"], "--repeats=0"),
        (["evaluate", "--samples", "-1"], "--samples=-1"),
        (["evaluate", "--samples", "0"], "--samples=0"),
        (["routing", "--longest", "-5"], "--longest=-5"),
        (["routing", "--texts", "/dev/null"], "/dev/null: holds no text"),
        (["generate", "--model", "tiny_gpt_oss", "--prompt", "\udcff"], "is a loose byte"),
        ([*GENERATE, "--temperature", "1e-320"], "must be 0 or at least 1e-06"),
        ([*GENERATE, "--seed", "1" + "0" * 23], "seed=1000"),
        (["prepare_corpus", "--vocab-size", "-1"], "--vocab-size=-1: must be at least 259"),
        (["prepare_corpus", "--max-length", "0"], "--max-length=0"),
    ],
    ids=lambda value: (
        "_".join(value)[:40].encode("ascii", "replace").decode() if isinstance(value, list) else ""
    ),
)
def test_a_wrong_call_ends_with_two_and_a_message(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("neuron-moe")


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    assert cli.main(["demo", "--out", str(tmp_path / "taken")]) == 2
    assert "taken" in capsys.readouterr().err


def cut_trace(path: Path) -> None:
    whole = path.with_name("whole.npz")
    index = np.zeros((1, 40, 2), np.uint8)
    RoutingTrace(expert_index_LTK=index, sequence_starts=np.zeros(1, np.int32), num_experts=4).save(
        whole
    )
    path.write_bytes(whole.read_bytes()[:200])


@pytest.mark.parametrize("content", ["cut", "empty", "text", "array"])
def test_a_damaged_trace_is_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.npz"
    if content == "cut":
        cut_trace(path)
    elif content == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        path.write_bytes(b"" if content == "empty" else b"not a trace")
    assert cli.main(["place", "--trace", str(path), "--ranks", "2"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert error.count("\n") == 1


def test_more_replicas_than_places_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_trace(tmp_path / "cut.npz")
    options = ["--trace", str(tmp_path / "whole.npz"), "--ranks", "2"]
    assert cli.main(["place", *options, "--extra-experts", "800000"]) == 2
    assert "--extra-experts=800000: must be at least 0 and at most 4" in capsys.readouterr().err


def raising(error: BaseException) -> Callable[[object, list[str]], int]:
    def main(self: object, args: list[str]) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("two\nlines"), 2, "two lines\n"),
        (ModuleNotFoundError("no transformers"), 2, "no transformers"),
        (FileNotFoundError("model=m: our own sentence"), 2, "model=m: our own sentence"),
        (FileNotFoundError(2, "No such file", "t.yaml"), 2, "t.yaml: there is no such file."),
        (MemoryError("3 GiB"), 2, "not enough memory: 3 GiB"),
        (CollectiveError("rank 2 is gone", 0, "all_reduce", "model", (2,)), 1, "rank 2 is gone"),
        (RankError("rank 1 of 2: no luck"), 1, "rank 1 of 2: no luck"),
        (CalledProcessError(100, ["apt-get"]), 1, "returned non-zero exit status 100"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_end_is_one_sentence(
    error: BaseException,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Menu, "main", raising(error))
    assert cli.main(["demo"]) == status
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.strip().count("\n") == 0


def test_a_bug_of_ours_leaves_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Menu, "main", raising(ZeroDivisionError("by zero")))
    assert cli.main(["demo", "--out", "\udcff"]) == 1
    printed = capsys.readouterr().err
    (report,) = tmp_path.iterdir()
    assert f"bug of neuron-moe. Report: {report}\n" in printed
    text = report.read_text()
    assert "ZeroDivisionError: by zero" in text
    assert "'--out'" in text


def start_listing_imports(*args: str) -> subprocess.Popen[str]:
    """Start neuron-moe so that standard error names each module once it is imported."""
    command = [sys.executable, "-X", "importtime", "-m", "neuron_moe.tools.cli", *args]
    # A job in the background of a shell ignores Ctrl-C, and what it starts does too.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("asked", ["--help", "--version"])
def test_help_and_version_are_told_without_torch_or_numpy(asked: str) -> None:
    printed, imports = start_listing_imports(asked).communicate()
    modules = {line.rpartition("|")[2].strip() for line in imports.splitlines()}
    assert "neuron-moe" in printed
    assert "neuron_moe.tools" in modules
    assert not modules & {"torch", "numpy", "nki_sim"}


def test_an_interrupt_while_torch_is_imported_is_one_sentence() -> None:
    with start_listing_imports("inspect", "nowhere") as process:
        assert process.stderr is not None
        while "torch._C" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.stderr.readlines()
    assert [line for line in rest if not line.startswith("import time:")] == [
        "\n",
        "neuron-moe: interrupted before it began\n",
    ]
    assert process.returncode == 130
