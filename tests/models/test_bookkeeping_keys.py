"""Keys that tools add to config.json and that change nothing leave every family readable."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from neuron_moe.models.loader import parse_config
from tests.models.families import FAMILIES

ADDED = {
    "unsloth_fixed": True,
    "unsloth_version": "2026.4.5",
    "_attn_implementation_autoset": True,
    "attn_implementation": "sdpa",
    "output_hidden_states": False,
    "output_attentions": False,
    "return_dict": True,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "auto_map": {},
    "pad_token_id": None,
    "use_cache": False,
    "transformers_version": "5.3.0",
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_tools_add_changes_nothing(name: str, tmp_path: Path) -> None:
    AutoConfig.for_model(**FAMILIES[name].config()).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    _, plain = parse_config(values, tmp_path)
    _, found = parse_config(ADDED | values, tmp_path)
    assert found == plain
