"""neuron-moe completion: what bash offers where a key is pressed, asked of bash itself."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from lab.bench import menu as bench
from neuron_moe.configs import config_names
from neuron_moe.tools.completion import script
from neuron_moe.tools.subcommands import MENU

pytestmark = pytest.mark.long  # every command is imported


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "neuron-moe"
    path.write_text(script("bash"))
    return path


def offered(file: Path, line: str) -> set[str]:
    """Return what bash offers at the end of a line; an empty last word is one."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    shown = (
        f"source {shlex.quote(str(file))}; COMP_WORDS=({shlex.join(words)}); "
        f"COMP_CWORD={len(words) - 1}; _shtab_neuron_moe neuron-moe {shlex.quote(words[-1])};"
        ' printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "-c", shown], capture_output=True, text=True, check=True, cwd=file.parent
    )
    return set(done.stdout.split())


def test_commands_targets_options_values_and_models_are_offered(file: Path) -> None:
    assert offered(file, "neuron-moe ") >= {*MENU.entries, *MENU.others}
    assert offered(file, "neuron-moe tu") == {"tune"}
    assert offered(file, "neuron-moe bench ") >= set(bench.MENU.entries)
    assert offered(file, "neuron-moe completion ") >= {"bash", "zsh"}
    assert offered(file, "neuron-moe tune --wei") == {"--weights"}
    assert offered(file, "neuron-moe bench prefill --layout ") == {"plain", "packed"}
    assert offered(file, "neuron-moe inspect --model ") >= set(config_names())
    assert offered(file, "neuron-moe tune --out n") == {"neuron-moe"}
