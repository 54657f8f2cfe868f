"""The table of import lines in docs/nxdi.md holds, and each field of the configuration is named."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_moe import BlockwiseMatmulConfig

ROOT = Path(__file__).parents[2]
LINES = [
    (theirs, ours, re.findall(r"`(\w+)`", names))
    for theirs, ours, names in re.findall(
        r"^\| `(neuronx_\S+)` \| `(\S+)` \| (.*) \|$",
        (ROOT / "docs" / "nxdi.md").read_text(),
        flags=re.MULTILINE,
    )
]


@pytest.mark.parametrize(("theirs", "ours", "names"), LINES, ids=[line[0] for line in LINES])
def test_a_line_of_the_table_can_be_imported(theirs: str, ours: str, names: list[str]) -> None:
    module = importlib.import_module(ours)
    assert [name for name in names if not hasattr(module, name)] == []
    if theirs.startswith("neuronx_distributed."):
        assert ours == theirs.replace("neuronx_distributed.", "neuron_moe.")


def test_the_modules_of_the_table_are_nxds() -> None:
    known = json.loads((ROOT / "tests" / "neuron_moe" / "nxd_api.json").read_text())
    text = json.dumps(known)
    for theirs, _, names in LINES:
        assert any(name in text for name in names), theirs


def test_import_lines_of_a_snippet_run_with_one_word_changed() -> None:
    found: dict[str, object] = {}
    snippet = """
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe import routing
import neuronx_distributed.modules.moe.moe_configs as moe_configs
from neuronx_distributed.parallel_layers import parallel_state
"""
    exec(snippet.replace("neuronx_distributed", "neuron_moe"), found)
    assert {"MoE", "routing", "moe_configs", "parallel_state"} <= found.keys()


def test_every_field_of_the_blockwise_configuration_has_a_documented_line() -> None:
    text = BlockwiseMatmulConfig.__doc__ or ""
    shown = re.findall(r"^        (\w+): \S", text, flags=re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(BlockwiseMatmulConfig)]
    assert [name for name in shown if name in fields] == fields


def test_nothing_answers_to_nki_until_a_kernel_is_asked_for() -> None:
    code = """
import sys
import torch
from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK

config = RoutedExpertsMLPOpsConfig(4, 16, 8, 1, "silu", True)
MoE(RouterTopK(4, 1, 16), ExpertMLPsV2(config))(torch.ones(1, 2, 16))
print(any(name.partition(".")[0] == "nki" for name in sys.modules))
ExpertMLPsV2(config, backend="nki")
print(any(name.partition(".")[0] == "nki" for name in sys.modules))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.split() == ["False", "True"]
