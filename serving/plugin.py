"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""

from neuron_moe.serving.options import ARCHITECTURE

MODEL_CLASS = f"neuron_moe.serving.vllm_model:{ARCHITECTURE}"


def register() -> None:
    """Tell vLLM where our model class is; a second call changes nothing."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)
