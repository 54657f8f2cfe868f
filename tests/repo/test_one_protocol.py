"""Backends have one protocol, worlds one file: nobody else asks which of them it is."""

import re

import pytest

from tests.repo import source
from tests.repo.source import PACKAGES

ASKS = re.compile(r"isinstance\(\s*(\w+\.)*_?backend\b")
CAPTURES = re.compile(r"\bis_(dynamo_)?compiling\b|\b_is_exporting")


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_asks_which_backend_it_is(package: str) -> None:
    wrong = [
        f"{module.path.relative_to(source.ROOT)}:{number}: {line.strip()}"
        for module in source.modules(package)
        for number, line in enumerate(module.path.read_text().splitlines(), 1)
        if ASKS.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_asking_is_found() -> None:
    assert ASKS.search("if isinstance(self.layer.backend, NkiBackend):")
    assert not ASKS.search("if isinstance(backends, list):")


def test_one_file_asks_torch_whether_it_captures() -> None:
    asking = {
        str(module.path.relative_to(source.ROOT))
        for package in PACKAGES
        for module in source.modules(package)
        if CAPTURES.search(module.path.read_text())
    }
    assert asking == {"neuron_moe/device.py"}
