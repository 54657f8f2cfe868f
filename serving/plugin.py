"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""

from typing import Any

from neuron_moe.serving.options import ARCHITECTURE, NATIVE_ARCHITECTURE
from neuron_moe.serving.switches import check_switches

CLASSES = {
    ARCHITECTURE: f"neuron_moe.serving.vllm_model:{ARCHITECTURE}",
    NATIVE_ARCHITECTURE: f"neuron_moe.serving.neuron_model:{NATIVE_ARCHITECTURE}",
}


class OwnSettings:
    """What vLLM calls with its settings for our class, before it starts anything."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Let vLLM plan plain keys and values for latent attention, too: those our model keeps."""
        facts, text = model_config.model_arch_config, model_config.hf_text_config
        if facts.is_deepseek_mla:
            facts.is_deepseek_mla = False
            facts.head_size = text.qk_nope_head_dim + text.qk_rope_head_dim

    @staticmethod
    def verify_and_update_config(config: Any) -> None:
        """Raise ValueError where a switch asks for what our model cannot."""
        check_switches(config)


def register() -> None:
    """Tell vLLM where our model classes are; a second call changes nothing."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    known = ModelRegistry.get_supported_archs()
    for architecture, place in CLASSES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, place)
    MODELS_CONFIG_MAP[ARCHITECTURE] = OwnSettings
