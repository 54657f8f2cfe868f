"""Configurations that transformers runs and few people publish, of every family.

An expert of any width, an odd number of heads, another activation, a rotary embedding of any kind,
as the configurations of transformers' own model tests have them.
"""

import copy
from collections.abc import Iterator
from typing import Any

from tests.models.families import FAMILIES, GPT_OSS

BASES: dict[str, dict[str, Any]] = {"gpt_oss": GPT_OSS.config()} | {
    name: FAMILIES[name].config()
    for name in (
        *("qwen3_moe", "mixtral", "llama4-scout", "glm4_moe", "deepseek_v3", "minimax_m2"),
        *("ernie4_5_moe", "dbrx", "qwen3_5_moe", "olmoe", "qwen2_moe", "solar_open", "hy_v3"),
        *("dots1", "exaone_moe", "deepseek_v32", "glm_moe_dsa", "qwen3_next"),
        *("glm4_moe_lite", "hunyuan_v1_moe", "granitemoe", "granitemoeshared", "granitemoehybrid"),
        *("flex_olmo", "afmoe", "mistral4", "lfm2_moe", "laguna", "mimo_v2_flash", "gemma4_text"),
        *("kimi_linear", "deepseek_v4", "hy_v4", "kimi_k3", "step3p5", "bailing_hybrid", "phimoe"),
    )
}
BASES["laguna"].pop("num_attention_heads_per_layer")  # of three layers
BASES["deepseek_v4"].pop("mlp_layer_types")
for _key in ("mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"):  # of four
    BASES["step3p5"].pop(_key)
BASES["step3p5"].pop("num_sliding_attention_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = (
    "num_experts_per_tok",
    "moe_k",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
    "num_experts_per_token",
)
WIDTHS = ("moe_intermediate_size", "intermediate_size")


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHANGES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "no-head-dim": {"head_dim": None},
    "gelu": {"hidden_act": "gelu"},
    "gelu-tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
    "relu2": {"hidden_act": "relu2"},
    "linear": _rope("linear", factor=3.0),
    "dynamic": _rope("dynamic", factor=3.0),
    "llama3": _rope("llama3", **_LLAMA3, original_max_position_embeddings=16),
    "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn-of-the-context": _rope("yarn", factor=None, original_max_position_embeddings=128),
    "yarn-mscales": _rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.9, mscale_all_dim=0.7
    ),
    "theta": _rope("default"),
    "one-kv-head": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24},
    "all-kv-heads": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "one-layer": {"num_hidden_layers": 1},
    "five-layers": {"num_hidden_layers": 5},
    "few-words": {"vocab_size": 7},
    "large-eps": {"rms_norm_eps": 0.1},
    "one-expert": {"experts": (1, 1)},
    "all-experts": {"experts": (5, 5)},
    "many-experts": {"experts": (33, 6)},
    "narrow-experts": {"width": 1},
    "odd-width": {"width": 37},
    "biases": {"attention_bias": True},
    "no-biases": {"attention_bias": False},
}


LATENT = (
    *("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "mistral4", "kimi_linear"),
    *("hy_v4", "kimi_k3"),
)
GRANITE = ("granitemoe", "granitemoeshared", "granitemoehybrid")
OLMO = ("olmoe", "flex_olmo")
NO_HEAD_DIM = ("dbrx", *LATENT, *GRANITE, *OLMO, "qwen2_moe", "lfm2_moe")
ROPES = (
    *("linear", "dynamic", "llama3", "theta"),
    *("yarn", "yarn-of-the-context", "yarn-mscales"),
)
# What transformers does not run, or has no such key for.
NOT_THEIRS: dict[str, tuple[str, ...]] = {
    "mixtral": ("biases", "no-biases"),
    "minimax_m2": ("biases", "no-biases"),
    "ernie4_5_moe": ("biases", "no-biases"),
    "dbrx": ("tied", "biases", "no-biases", "large-eps", "one-kv-head", "all-kv-heads"),
    "glm4_moe": ("one-expert",),
    **dict.fromkeys(LATENT, ("one-expert", "one-kv-head")),
    "kimi_k3": ("one-expert", "one-kv-head", "one-layer", "five-layers"),
    **dict.fromkeys(("dots1", "exaone_moe"), ("one-expert",)),
    **dict.fromkeys((*OLMO, *GRANITE), ("one-kv-head",)),
    "bailing_hybrid": ("one-expert", "one-kv-head", "no-head-dim"),
    "hunyuan_v1_moe": ("no-head-dim",),
    "phimoe": (*(each for each in ROPES if each != "theta"), "one-expert"),
    "qwen2_moe": ("one-kv-head", "biases", "no-biases"),
    "solar_open": ("one-expert",),
    "mistral4": (*("one-expert", "one-kv-head", "few-words", *ROPES),),
    "lfm2_moe": (
        *("one-layer", "five-layers", "one-kv-head", "biases", "no-biases", "large-eps"),
        *("gelu", "gelu-tanh", "relu", "relu2"),
    ),
    # With a rotary section for each kind of layer, and the activation under another key.
    "gemma4_text": (*(*ROPES, "no-head-dim", "gelu", "gelu-tanh", "relu", "relu2"),),
    "laguna": (*ROPES, "no-head-dim"),  # a section for each kind of layer
    "step3p5": (*ROPES, "no-head-dim"),
    "mimo_v2_flash": (*ROPES, "no-head-dim", "one-expert", "one-kv-head", "all-kv-heads"),
    "deepseek_v4": ("no-head-dim", "one-kv-head"),
}


def configs(base: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each change, and the whole configuration, where transformers runs it."""
    for name, changes in CHANGES.items():
        if name in NOT_THEIRS.get(base, ()):
            continue
        values = copy.deepcopy(BASES[base])
        sizes = values if base != "dbrx" else dict(values["ffn_config"])
        if "experts" in changes:
            for keys, value in zip((EXPERTS, CHOSEN), changes["experts"], strict=True):
                sizes |= {key: value for key in keys if key in sizes}
            sizes |= {key: 1 for key in ("n_group", "topk_group") if key in sizes}
        elif "width" in changes:
            known = [key for key in (*WIDTHS, "ffn_hidden_size") if key in sizes]
            sizes |= {known[0]: changes["width"]}
        elif base == "dbrx" and "hidden_act" in changes:
            sizes |= {"ffn_act_fn": {"name": changes["hidden_act"]}}
        else:
            values |= copy.deepcopy(changes)  # transformers writes into rotary sections
        if base == "dbrx":
            values["ffn_config"] = sizes
        if base in NO_HEAD_DIM or name == "no-head-dim":
            values.pop("head_dim", None)
        if name.endswith("layers") or name == "one-layer":
            values.pop("layer_types", None)
            for key in ("first_k_dense_replace", "moe_layer_start_index"):
                values |= {key: 0} if key in values else {}
        yield name, values
