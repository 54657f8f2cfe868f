"""Verdicts of a chip: written whole, read back, anything else refused by name."""

from pathlib import Path

import pytest

from neuron_moe.verdicts import VERDICTS, verdicts, write_verdicts


def test_verdicts_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.json"
    found = {f"feature {one}": one for one in VERDICTS}
    write_verdicts(path, found, "neuron", ["nki 0.7.0"])
    assert verdicts(path) == found
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        verdicts(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no file of verdicts .JSONDecodeError"),
        ("[1]", "is no file of verdicts .TypeError"),
        (
            '{"rows": []}',
            "is no file of verdicts .KeyError: 'verdicts'.. Write one with neuron-moe",
        ),
        ('{"verdicts": {"loops": "work"}}', "loops='work': must be one of works.*mean 'works'"),
        ('{"verdicts": {"loops": true}}', "loops=True: must be one of works"),
    ],
)
def test_what_is_no_verdict_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "verdicts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        verdicts(path)
