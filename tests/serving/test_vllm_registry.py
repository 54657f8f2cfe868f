"""vLLM's own registry takes both of our classes for models that generate text."""

import importlib.util

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
