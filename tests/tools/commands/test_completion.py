"""neuron-moe completion: what bash offers where a key is pressed, asked of bash itself."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from neuron_moe.configs import config_names
from neuron_moe.tools.commands import bench
from neuron_moe.tools.commands.completion import main, script
from neuron_moe.tools.subcommands import SUBCOMMANDS

pytestmark = pytest.mark.long  # every command is imported


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "neuron-moe"
    path.write_text(script("bash"))
    return path


def offered(file: Path, line: str) -> list[str]:
    """Return what bash offers at the end of a line; an empty last word is one."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    told = (
        f"source {shlex.quote(str(file))}; COMP_WORDS=({shlex.join(words)}); "
        f'COMP_CWORD={len(words) - 1}; _neuron_moe; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        [bash, "-c", told], capture_output=True, text=True, check=True, cwd=file.parent
    )
    assert done.stderr == ""
    return done.stdout.splitlines() if done.stdout.strip() else []


def test_commands_and_targets_are_offered(file: Path) -> None:
    assert offered(file, "neuron-moe ") == list(SUBCOMMANDS)
    assert offered(file, "neuron-moe tu") == ["tune"]
    assert offered(file, "neuron-moe bench ") == list(bench.MENU.entries)
    assert offered(file, "neuron-moe completion ")[-2:] == ["bash", "zsh"]


def test_options_and_their_values_are_offered(file: Path) -> None:
    assert {"--model", "--buckets", "--simulate"} <= set(offered(file, "neuron-moe tune --"))
    assert offered(file, "neuron-moe tune --wei") == ["--weights"]
    assert set(offered(file, "neuron-moe tune --weights ")) == {"auto", "plain", "by\\ parts"}
    assert offered(file, "neuron-moe tune --tp ") == []
    assert set(offered(file, "neuron-moe bench prefill --corner vendor ")) == {"vendor", "in-order"}
    assert "--model" in offered(file, "neuron-moe tune --tp 8 ")


def test_models_and_files_are_offered(file: Path) -> None:
    (file.parent / "my model.json").write_text("")
    assert offered(file, "neuron-moe plan --model qwen3_30") == ["qwen3_30b_a3b"]
    assert set(config_names()) <= set(offered(file, "neuron-moe explain --model "))
    assert offered(file, "neuron-moe tune --out ") == ["my model.json", "neuron-moe"]


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bash"]) == 0
    assert capsys.readouterr().out == script("bash")
