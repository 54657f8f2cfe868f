"""Every damage of a checkpoint is refused: status 2, one sentence with file, key and rule."""

import os
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from neuron_moe.tools import cli
from tests.lab.fuzz.damages import DAMAGES, FIRST, INDEX, NORM, SECOND, Damage
from tests.models.families import FAMILIES, write_checkpoint


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two files."""
    folder = tmp_path_factory.mktemp("intact")
    write_checkpoint(FAMILIES["deepseek_v3"].config(), folder, seed=1)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {key: FIRST if key == NORM or "layers.0" in key else SECOND for key in tensors}
    for file in (FIRST, SECOND):
        save_file({key: tensors[key] for key in place if place[key] == file}, folder / file)
    text = ", ".join(f'"{key}": "{file}"' for key, file in place.items())
    (folder / INDEX).write_text(f'{{"metadata": {{}}, "weight_map": {{{text}}}}}')
    return folder


def status_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main(["inspect", "--model", str(folder)])
    return status, capsys.readouterr().err


def test_without_a_damage_it_loads(intact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(intact, capsys) == (0, "")


WAY_OUT = re.compile("[Dd]ownload|[Cc]onvert|rebuild")  # of a damaged file
# Every second one in the default run, the rest with -m slow.
CASES = [
    pytest.param(damage, id=damage.name, marks=pytest.mark.slow if number % 2 else ())
    for number, damage in enumerate(DAMAGES)
]


@pytest.mark.parametrize("damage", CASES)
def test_a_damage_is_refused_by_file_key_and_rule(
    damage: Damage, intact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(intact, folder, copy_function=os.link)
    for file in folder.iterdir():  # a link is as good until it is written to
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
    damage.apply(folder)
    status, error = status_of(folder, capsys)
    assert status == 2, error
    assert len(error.splitlines()) == 1
    assert "Traceback" not in error
    assert WAY_OUT.search(error) or not {FIRST, SECOND, INDEX} & set(damage.said), error
    for text in damage.said:
        assert text in error, f"{text!r} is not in {error!r}"
