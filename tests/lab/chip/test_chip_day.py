"""docs/chip_day.md, typed from top to bottom where stubs stand for the SDK and a chip."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_moe.models.sample_checkpoint import make_checkpoint
from tests.repo.test_documents import commands_of
from tests.tools.commands import sdk_stub

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = (ROOT / "docs" / "chip_day.md").read_text()
# Smaller work for the same command; the last of an option counts.
_LESS = {
    "chip compile": "--model tiny_gpt_oss --tp 1 --tokens --decode 4",
    "chip check": "--only small --match small/index",
    "chip calibrate": "--rounds 20",
    "chip bench": "--batches 1 --kernels decode_moe --formats bf16 --routings uniform",
    "compile": "--model checkpoint --set tp=2 --set ep=2 --set batch=2 --set max_length=256 --set"
    """ 'buckets=[{"tokens": 160, "block_size": 64}]'""",
}
_START = """
import pathlib, sys
import nki
from neuron_moe.tools import cli
from lab.chip import check
read = check.read_environment
check.read_environment = lambda root: read(pathlib.Path("machine"))
raise SystemExit(cli.main(sys.argv[1:]))
"""


def plant(folder: Path) -> dict[str, str]:
    """Put up a machine with a chip and its packages; return the environment to type in."""
    (folder / "machine" / "dev").mkdir(parents=True)
    (folder / "machine" / "dev" / "neuron0").touch()
    version = folder / "machine" / "sys" / "module" / "neuron" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("2.33\n")
    sdk_stub.plant(folder / "sdk")
    installed = folder / "sdk" / "nki-0.7.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: nki\nVersion: 0.7.0\n")
    (installed / "RECORD").write_text("nki/isa.py,,\n")
    (folder / "sdk" / "nki").mkdir(exist_ok=True)
    (folder / "sdk" / "nki" / "isa.py").touch()  # a recorded file that is not there does not count
    make_checkpoint(folder / "checkpoint")
    return {
        **os.environ,
        "PATH": f"{folder / 'sdk' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "sdk_stub", folder / "sdk", ROOT))),
        "SDK_STUB_LOG": str(folder / "log"),
        "SDK_STUB_DUMP": str(ROOT / "tests" / "tools" / "chip" / "dump_of_a_sum.json"),
        "NKI_ARTIFACTS_DIR": str(folder / "artifacts"),
    }


def lines() -> list[list[str]]:
    """Return the lines of the page that need the SDK, in order."""
    blocks = "".join(f"```sh\n{part.split('```')[0]}```\n" for part in PAGE.split("```sh\n")[1:])
    rehearsed = {"--against", "rehearse"}
    return [words for words in commands_of(blocks) if not rehearsed & set(words)]


def type_in(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Type a line with less work; return the status and what was said."""
    name = " ".join(words[:2]) if words[0] == "chip" else words[0]
    command = [sys.executable, "-c", _START, *words, *shlex.split(_LESS[name])]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_page_names_a_line_for_each_step() -> None:
    names = [" ".join(words[:2]) if words[0] == "chip" else words[0] for words in lines()]
    assert names == [*_LESS]


@pytest.mark.slow
def test_the_page_can_be_walked(tmp_path: Path) -> None:
    environment = plant(tmp_path)
    for words in lines():
        status, said = type_in(words, tmp_path, environment)
        assert status == 0, f"{words}: {said[-3000:]}"
    (compiled,) = json.loads((tmp_path / "compiled.json").read_text())["rows"]
    assert (compiled["compiled"], compiled["dump"]["unknown"]) == (True, {})
    assert compiled["us"] > 0
    assert set(compiled["estimate"]) == {"low_us", "us", "high_us"}
    assert (tmp_path / "compiled" / "decode-4" / "0-decode_layer" / "timeline.json").is_file()
    (checked,) = json.loads((tmp_path / "chip_check.json").read_text())["rows"]
    assert checked["outcome"] == "works"
    for name in ("hardware_measured", "decode_measured"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["kind"] == "measured"


@pytest.mark.long
def test_a_kernel_that_does_not_compile_keeps_the_compilers_words(tmp_path: Path) -> None:
    environment = {**plant(tmp_path), "SDK_STUB_FAILS": "neff"}
    status, said = type_in(lines()[0], tmp_path, environment)
    assert status == 1, said
    (row,) = json.loads((tmp_path / "compiled.json").read_text())["rows"]
    assert (row["compiled"], row["us"]) == (False, None)
    assert row["why"].startswith("RuntimeError: NCC_STUB001: planted while neff")
    assert "NCC_STUB001" in (Path(tmp_path / row["folder"]) / "compiler.log").read_text()
    assert row["estimate"]["us"] > 0
