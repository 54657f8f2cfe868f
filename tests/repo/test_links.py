"""Git holds no symbolic links, which some systems cannot make; `.ci/wheel` installs each form."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_git_holds_no_symbolic_link() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    assert not [line for line in listed.stdout.splitlines() if line.startswith("120000")]
