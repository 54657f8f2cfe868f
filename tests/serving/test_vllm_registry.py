"""vLLM's registry takes both of our classes, and its parser the lines of docs/serving.md."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.serving.options import ARCHITECTURE, NATIVE_ARCHITECTURE
from neuron_moe.serving.plugin import register


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize("name", [ARCHITECTURE, NATIVE_ARCHITECTURE])
def test_the_registry_takes_the_class(name: str) -> None:
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    register()
    config = EngineArgs(
        model=str(checkpoint_folder(TINY_NAME)),
        hf_overrides={"architectures": [name], "quantization_config": {}},
        enforce_eager=True,
    ).create_model_config()
    assert config.runner_type == "generate"
    found, _ = ModelRegistry.resolve_model_cls(name, model_config=config)
    assert found.__name__ == name


def _documented() -> list[list[str]]:
    """Return what the page about serving passes to vLLM: behind `vllm serve`, and ` -- `."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().replace("\\\n", " ")
    line = r"^    vllm serve (.+)$|`-- (--[^`]+)`"
    found = re.findall(line, text, flags=re.MULTILINE)
    return [shlex.split(served or passed) for served, passed in found]


def test_the_page_about_serving_has_lines_for_vllm() -> None:
    assert len(_documented()) == 2


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_documented_lines_are_taken_by_the_parser_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from neuron_moe.serving.vllm_server import vllm_parser

    parser = vllm_parser()
    parsed = [AsyncEngineArgs.from_cli_args(parser.parse_args(words)) for words in _documented()]
    native = next(each for each in parsed if each.additional_config)
    assert native.hf_overrides["architectures"] == [NATIVE_ARCHITECTURE]
    assert native.additional_config == {"neuron_config": {"on_device_sampling_config": None}}
    assert native.async_scheduling is False
    tuned = next(each for each in parsed if not each.additional_config)
    assert tuned.max_num_batched_tokens == 64
