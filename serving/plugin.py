"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""

from neuron_moe.serving.options import ARCHITECTURE, NATIVE_ARCHITECTURE

CLASSES = {
    ARCHITECTURE: f"neuron_moe.serving.vllm_model:{ARCHITECTURE}",
    NATIVE_ARCHITECTURE: f"neuron_moe.serving.neuron_model:{NATIVE_ARCHITECTURE}",
}


def register() -> None:
    """Tell vLLM where our model classes are; a second call changes nothing."""
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for architecture, place in CLASSES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, place)
