"""Names of models: one spelling of ours, any other is understood everywhere."""

import json
from pathlib import Path

import pytest

from lab.check.kernel_cases.models import LAYERS
from neuron_moe.configs import config_names, find_config, load_config
from neuron_moe.tools import cli
from neuron_moe.tools.commands.plan import read_sizes
from neuron_moe.tools.models import model_among, read_model
from neuron_moe.tools.timing.layers import MODELS

IDS = {
    "baidu/ERNIE-4.5-21B-A3B-PT": "ernie_4_5_21b_a3b",
    "databricks/dbrx-instruct": "dbrx",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek_v3",
    "deepseek-ai/DeepSeek-R1": "deepseek_v3",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek_v4_flash",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": "llama4_maverick",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4_scout",
    "MiniMaxAI/MiniMax-M2": "minimax_m2",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral_8x7b",
    "moonshotai/Kimi-K2-Instruct-0905": "kimi_k2",
    "openai/gpt-oss-120b": "gpt_oss_120b",
    "openai/gpt-oss-20b": "gpt_oss_20b",
    "Qwen/Qwen3-235B-A22B-Thinking-2507": "qwen3_235b_a22b",
    "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "Qwen/Qwen3.5-35B-A3B": "qwen3_5_35b_a3b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3_5_397b_a17b",
    "zai-org/GLM-4.5": "glm_4_5",
    "zai-org/GLM-4.5-Air": "glm_4_5_air",
}


@pytest.mark.parametrize("name", IDS)
def test_hugging_face_ids_are_known(name: str) -> None:
    assert find_config(name) == IDS[name]
    assert find_config(name.partition("/")[2].lower()) == IDS[name]


def test_every_shipped_configuration_has_an_id_here() -> None:
    assert set(IDS.values()) == set(config_names())


@pytest.mark.parametrize("name", ["glm-4.5-large", "gpt_oss", "tiny_gpt_oss", "qwen3", ""])
def test_other_names_are_none_of_them(name: str) -> None:
    assert find_config(name) is None


@pytest.mark.parametrize("name", config_names())
def test_plan_and_inspect_know_every_shipped_configuration(name: str) -> None:
    other = name.replace("_", "-").upper()
    assert read_model(other)[0] == read_sizes(other) == load_config(name)


@pytest.mark.parametrize("known", [tuple(LAYERS), tuple(model.name for model in MODELS)])
def test_benchmarks_and_checks_take_any_spelling(known: tuple[str, ...]) -> None:
    choose = model_among(known)
    for name in known:
        assert choose(name) == name
        config = find_config(name)
        assert config is not None
        assert choose(config) == name
    assert choose("openai/gpt-oss-120b") == "gpt-oss-120b"
    assert choose("gpt-5") == "gpt-5"


def test_a_folder_of_that_name_is_meant_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gpt_oss_20b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_config("mixtral_8x7b")))
    monkeypatch.chdir(tmp_path)
    assert read_model("gpt_oss_20b")[0]["model_type"] == "mixtral"


def test_what_is_shipped_is_told_for_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--model", "gpt_oss_12b", "--tokens", "8"]) == 2
    error = capsys.readouterr().err
    assert "there is no such folder" in error
    assert "gpt_oss_120b" in error
