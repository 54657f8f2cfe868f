"""Kimi-K3, of which transformers has no class, against parts of vLLM's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.families import FAMILIES, write_checkpoint

PARTS = Path(__file__).with_name("kimi_k3_parts.py")
LONGEST_S = 600


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["kimi_k3", "kimi_k3-groups"])
def test_parts_of_kimi_k3_are_those_of_vllm(name: str, tmp_path: Path) -> None:
    write_checkpoint(FAMILIES[name].config(), tmp_path, seed=3)
    command = [sys.executable, str(PARTS), str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST_S
    )
    assert done.returncode == 0, done.stderr[-6000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 3
    assert max(errors.values()) < 1e-5, errors
