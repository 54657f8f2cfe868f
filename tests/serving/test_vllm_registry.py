"""vLLM's registry takes both of our classes, and its parser the lines of docs/serving.md."""

import json
import pickle
import re
import shlex
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_moe.models.loader import build_model, parse_config, read_config
from neuron_moe.models.shipped import TINY_NAME
from neuron_moe.serving.options import (
    ARCHITECTURE,
    HYBRID_ARCHITECTURE,
    NATIVE_ARCHITECTURE,
    NATIVE_HYBRID_ARCHITECTURE,
    architecture_of,
    hf_overrides,
)
from neuron_moe.serving.plugin import register
from tests.models.families import FAMILIES
from tests.serving.conftest import Folders


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name",
    [ARCHITECTURE, HYBRID_ARCHITECTURE, NATIVE_ARCHITECTURE, NATIVE_HYBRID_ARCHITECTURE],
)
def test_the_registry_takes_the_class(name: str, folder_of: Folders) -> None:
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    register()
    is_hybrid = name in (HYBRID_ARCHITECTURE, NATIVE_HYBRID_ARCHITECTURE)
    config = EngineArgs(
        model=str(folder_of("qwen3_5_moe" if is_hybrid else TINY_NAME)),
        hf_overrides={"architectures": [name], "quantization_config": {}},
        enforce_eager=True,
    ).create_model_config()
    assert config.runner_type == "generate"
    found, _ = ModelRegistry.resolve_model_cls(name, model_config=config)
    assert found.__name__ == name
    assert config.is_hybrid == is_hybrid
    if name == NATIVE_HYBRID_ARCHITECTURE:  # pages are sized by what the class says
        ranks = SimpleNamespace(tensor_parallel_size=2)
        settings = SimpleNamespace(model_config=config, parallel_config=ranks)
        text = config.hf_text_config
        theirs = MambaStateShapeCalculator.gated_delta_net_state_shape(
            2,
            text.linear_num_key_heads,
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
            text.linear_conv_kernel_dim,
        )
        ours = found.get_mamba_state_shape_from_config(settings)
        assert [*map(prod, ours)] == [*map(prod, theirs)]


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["bailing_hybrid", "deepseek_v4", "step3p5-biases"])
def test_our_reader_answers_where_there_is_no_usable_class(name: str, folder_of: Folders) -> None:
    from neuron_moe.serving.own_configs import OwnConfig

    found, facts = _config_of(folder_of(name)), parse_config(read_config(folder_of(name)), name)[1]
    for config in (found, pickle.loads(pickle.dumps(found))):
        assert isinstance(config, OwnConfig)
        assert config.get_text_config() is config
        assert config.num_attention_heads == facts.num_attention_heads
        assert config.layer_types == list(facts.layer_types)


@pytest.mark.vllm
def test_vllms_own_class_reads_what_it_can(tmp_path: Path) -> None:
    from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config

    values = {"rms_norm_eps": 1e-6, **FAMILIES["deepseek_v4-published-keys"].config()}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert isinstance(_config_of(tmp_path), DeepseekV4Config)


def _config_of(folder: Path) -> Any:
    """Return what vLLM reads of a checkpoint for our class."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    overrides = hf_overrides(architecture_of(build_model(folder)))
    return EngineArgs(model=str(folder), hf_overrides=overrides).create_model_config().hf_config


def _documented() -> list[list[str]]:
    """Return what the page about serving passes to vLLM: behind `vllm serve`, and ` -- `."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().replace("\\\n", " ")
    line = r"^    vllm serve (.+)$|`-- (--[^`]+)`"
    found = re.findall(line, text, flags=re.MULTILINE)
    return [shlex.split(served or passed) for served, passed in found]


def test_the_page_about_serving_has_lines_for_vllm() -> None:
    assert len(_documented()) == 2


@pytest.mark.vllm
def test_documented_lines_are_taken_by_the_parser_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from neuron_moe.serving.vllm_server import vllm_parser

    parser = vllm_parser()
    parsed = [AsyncEngineArgs.from_cli_args(parser.parse_args(words)) for words in _documented()]
    native, tuned = sorted(parsed, key=lambda each: not each.hf_overrides)
    assert native.hf_overrides["architectures"] == [NATIVE_ARCHITECTURE]
    assert native.additional_config == {"neuron_config": {"ep_degree": 2}}
    assert native.enable_expert_parallel
    assert tuned.max_num_batched_tokens == 64
