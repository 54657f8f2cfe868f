"""A planted SDK: packages of the names that `compile` looks for, which record what is called."""

from pathlib import Path

_FILES = {
    "torch_neuronx/__init__.py": "",
    "neuronx_distributed/__init__.py": "",
    "neuronx_distributed_inference/__init__.py": "",
    "neuronx_distributed_inference/calls.py": "CALLS = []\n",
    "neuronx_distributed_inference/modules/__init__.py": "",
    "neuronx_distributed_inference/modules/moe_v2.py": """
def initialize_moe_module(config):
    raise AssertionError("NxDI's own layer is built")
""",
    "neuronx_distributed_inference/utils/__init__.py": "",
    "neuronx_distributed_inference/utils/hf_adapter.py": """
from neuronx_distributed_inference.calls import CALLS


def load_pretrained_config(folder):
    CALLS.append(("load_pretrained_config", folder))
    return ("reads", folder)
""",
    "neuronx_distributed_inference/models/__init__.py": "",
    "neuronx_distributed_inference/models/modeling.py": """
from neuronx_distributed_inference.calls import CALLS
from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_module


class NeuronConfig:
    def __init__(self, **settings):
        CALLS.append(("neuron_config", settings))


class InferenceConfig:
    def __init__(self, neuron_config, load_config=None):
        CALLS.append(("config", type(neuron_config).__name__, load_config))

    @staticmethod
    def get_neuron_config_cls():
        return NeuronConfig


class NeuronGptOssForCausalLM:
    def __init__(self, model_path, config):
        CALLS.append(("application", model_path, type(config).__name__))

    @staticmethod
    def get_config_cls():
        return InferenceConfig

    def compile(self, path):
        CALLS.append(("compile", path, initialize_moe_module.__module__))

    def load(self, path):
        CALLS.append(("load", path))
""",
    "neuronx_distributed_inference/utils/constants.py": """
from neuronx_distributed_inference.models.modeling import NeuronGptOssForCausalLM

MODEL_TYPES = {"gpt_oss": {"causal-lm": NeuronGptOssForCausalLM}}
""",
}


def plant(folder: Path) -> None:
    """Write the packages, and a compiler, below a folder."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    compiler = folder / "bin" / "neuronx-cc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
