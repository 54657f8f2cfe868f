"""Which of vLLM's switches our model does not take.

vLLM accepts them for any model; ours would leave some without effect, and die of others. They are
refused by name when vLLM has read its settings, before it starts anything: from `neuron-moe serve`,
`vllm serve` and `LLM(...)` alike (`serving.plugin`).
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from neuron_moe.serving.options import ARCHITECTURE, HYBRID_ARCHITECTURE, hf_overrides


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch of which our model takes some values only.

    Attributes:
        name: as vLLM's arguments have it.
        place: where its value stands in vLLM's configuration.
        taken: the values.
        reason: why no others.
    """

    name: str
    place: str
    taken: Sequence[Any]
    reason: str

    @property
    def flag(self) -> str:
        """The switch as a command line has it."""
        return flag(self.name)


_READS = "our own reader reads the checkpoint, vLLM's stays unread"
_RANKS = "our model knows tensor and expert parallel ranks alone"
_STAYS = "our model keeps its weights where they are"
_PRODUCTS = "our own layers multiply, as `product_form` in additional_config says"


def _plain(section: str, default: Any, reason: str, *names: str) -> list[Switch]:
    """Return switches that must stay at their default."""
    return [Switch(name, f"{section}.{name}", (default,), reason) for name in names]


SWITCHES = (
    *_plain("model_config", False, "our model reads token ids", "enable_prompt_embeds"),
    *_plain("model_config", None, "our own reader decodes the checkpoint", "quantization_config"),
    *_plain("model_config", None, "config.json beside the weights is read", "hf_config_path"),
    Switch("convert", "model_config.convert", ("auto", "none", "embed"), "no head classifies"),
    Switch("load_format", "load_config.load_format", ("auto", "hf", "safetensors"), _READS),
    *_plain("load_config", None, _READS, "safetensors_load_strategy"),
    *_plain("load_config", {}, _READS, "model_loader_extra_config"),
    *_plain("load_config", "cpu", _READS, "pt_load_map_location"),
    *_plain(
        "parallel_config",
        1,
        _RANKS,
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ),
    *_plain(
        "parallel_config",
        "linear",
        "experts stand on ranks in their order",
        "expert_placement_strategy",
    ),
    *_plain("parallel_config", False, "our experts stay on their ranks", "enable_eplb"),
    *_plain("parallel_config", False, "a step of our model is one batch", "enable_dbo"),
    *_plain("parallel_config", 0, "a step of our model is one batch", "ubatch_size"),
    *_plain("parallel_config", False, _READS, "enable_ep_weight_filter"),
    *_plain(
        "parallel_config",
        "allgather_reducescatter",
        "our own collectives move tokens",
        "all2all_backend",
    ),
    *_plain("cache_config", False, "no two layers share a cache", "kv_sharing_fast_prefill"),
    *_plain("cache_config", "auto", "our layers say what they keep", "mamba_cache_dtype"),
    *_plain("cache_config", False, "our layers keep one state", "use_replayssm"),
    *_plain("offload_config.uva", 0, _STAYS, "cpu_offload_gb"),
    *_plain("offload_config.prefetch", 0, _STAYS, "offload_group_size"),
    *_plain("kernel_config", "auto", _PRODUCTS, "moe_backend", "linear_backend"),
    Switch(
        "compilation_config",
        "compilation_config.mode",
        (None, 0, 2, 3),
        "a graph around our model would freeze its phase; `neuron-moe serve --compile` compiles",
    ),
    *_plain(
        "aux_output_config",
        False,
        "our router reports load at /metrics",
        "enable_return_routed_experts",
    ),
    Switch("enable_lora", "lora_config", (None,), "our model has no adapters"),
    Switch("diffusion_config", "diffusion_config", (None,), "our model answers token by token"),
    Switch("engram_config", "engram_config", (None,), "our model has no such memory"),
    Switch("weight_transfer_config", "weight_transfer_config", (None,), _READS),
)
_DRAFTS = ("ngram",)  # what a speculation may read: tokens alone
# Keys of vLLM's generation config by which its own classes change a model.
_MODEL_KEYS = ("attn_temperature_tuning",)
# What `neuron-moe serve` settles itself: the switch of vLLM's, and what to do instead.
SETTLED: Mapping[str, str] = {
    "model": "give --model",
    "model_tag": "give --model",
    "served_model_name": "give --name",
    "host": "give --host",
    "port": "give --port",
    "dtype": "give --dtype",
    "tensor_parallel_size": "give --tp and --ep",
    "enable_expert_parallel": "give --ep",
    "max_model_len": "give --max-model-len",
    "kv_cache_memory_bytes": "give --cache-mib",
    "shutdown_timeout": "give --shutdown-timeout",
    "hf_overrides": "write it into config.json, which our model reads",
    "model_class_overrides": "leave it out: it is our class that serves",
    "model_impl": "leave it out: it is our class that serves",
    "additional_config": "give serve's own options",
    **dict.fromkeys(
        (
            "uds",
            "ssl_keyfile",
            "ssl_certfile",
            "headless",
            "grpc",
            "grpc_port",
            "api_server_count",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            "data_parallel_multi_port_external_lb",
        ),
        "start `vllm serve` yourself, see docs/serving.md",
    ),
}


def flag(name: str) -> str:
    """Return the switch of a setting as a command line has it."""
    return f"--{name.replace('_', '-')}"


def check_settled(given: argparse.Namespace, own: argparse.Namespace) -> None:
    """Raise ValueError where the words behind `--` change what `neuron-moe serve` settles.

    Args:
        given: what vLLM read of all words.
        own: what it reads of those of `serve` alone.
    """
    for name, way_out in SETTLED.items():
        value, settled = getattr(given, name, None), getattr(own, name, None)
        if value != settled:
            raise ValueError(
                f"{flag(name)} behind --: {value!r}, must be {settled!r}, as `neuron-moe serve`"
                f" starts vLLM. Instead {way_out}."
            )


def check_switches(config: Any) -> None:
    """Raise ValueError where a server is to do what our model cannot.

    Args:
        config: vLLM's configuration, as read.
    """
    for switch in SWITCHES:
        value = attrgetter(switch.place)(config)
        if value not in switch.taken:
            raise _refusal(switch.flag, value, switch.taken, switch.reason)
    speculation = config.speculative_config
    is_hybrid = getattr(config.model_config, "architecture", "") == HYBRID_ARCHITECTURE
    if speculation is not None and is_hybrid:
        reason = "a recurrent layer's state cannot go back behind refused drafts"
        raise _refusal("--speculative-config", speculation.method, (None,), reason)
    if speculation is not None and speculation.method not in _DRAFTS:
        reason = "drafts cannot read the states of our model"
        raise _refusal("--speculative-config, method", speculation.method, _DRAFTS, reason)
    _check_overrides(config.model_config)


def _check_overrides(model_config: Any) -> None:
    """Raise ValueError where keys would change vLLM's idea of the model and not ours."""
    overrides = model_config.hf_overrides  # a function, too, offline
    given = {
        "hf_overrides": [] if callable(overrides) else sorted({*overrides} - {*hf_overrides()}),
        "override_generation_config": [
            key for key in _MODEL_KEYS if key in model_config.override_generation_config
        ],
    }
    for name, keys in given.items():
        if keys:
            raise ValueError(
                f"{flag(name)}: {keys[0]} must stay out with {ARCHITECTURE}, which reads the"
                " checkpoint's config.json itself. Change it there."
            )


def _refusal(switch: str, value: Any, taken: Sequence[Any], reason: str) -> ValueError:
    allowed = " or ".join(map(repr, taken))
    shown = repr(value) if isinstance(value, str | int | float | None) else "given"
    return ValueError(
        f"{switch}: {shown}, must be {allowed} for {ARCHITECTURE}: {reason}. Leave it out."
    )
