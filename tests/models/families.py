"""Tiny random checkpoints of every family, written by transformers."""

import contextlib
import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
)

with contextlib.suppress(ImportError):  # of parts that transformers has not yet
    import tests.models.kimi_k3_reference  # noqa: F401  registers it

# Classes that transformers has and does not look up.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
if hasattr(transformers, "Step3p7Config"):
    AutoModelForCausalLM.register(
        transformers.Step3p7Config, transformers.Step3p7ForConditionalGeneration, exist_ok=True
    )
# Of text models that it has beside a vision tower only: the whole model.
WHOLE: dict[str, dict[str, Any]] = {
    "step3p5": {
        "model_type": "step3p7",
        "vision_config": {"width": 32, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14},
    }
}

# Small weights would give logits that tie; 0.2 keeps greedy tokens apart.
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LEFT_OUT = object()


@dataclass(frozen=True)
class Family:
    """One configuration of a family.

    Args:
        model_type: as in config.json.
        changes: keys beside COMMON, or LEFT_OUT of it.
        pads_alike: transformers computes a left-padded prompt as it does the prompt alone.
        variant: storage form that transformers writes, None where the map knows one only.
        spellings: keys of COMMON that the family calls otherwise.
        is_saved_alike: transformers writes, and needs, what the map says; not so for LongCat, whose
            identities it gives first matrices, and for Gemma 4, whose scales are folded.
    """

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    pads_alike: bool = True
    variant: str | None = "separate"
    spellings: Mapping[str, str] = field(default_factory=dict)
    is_saved_alike: bool = True

    def config(self, **sizes: Any) -> dict[str, Any]:
        """Return the keys of a tiny config.json, with other sizes where it has them."""
        values = {**COMMON, **self.changes, **sizes, "model_type": self.model_type}
        return {
            self.spellings.get(key, key): value
            for key, value in values.items()
            if self.changes.get(key) is not LEFT_OUT
        }


GPT_OSS = Family(
    "gpt_oss",
    {
        "num_hidden_layers": 2,
        "max_position_embeddings": LEFT_OUT,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)

QWEN3: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}

FAMILIES = {
    "qwen3_moe": Family("qwen3_moe", QWEN3),
    "qwen3_moe-unnormalised-biases": Family(
        "qwen3_moe", {**QWEN3, "norm_topk_prob": False, "attention_bias": True}
    ),
    "qwen3_moe-sliding-dense-layers": Family(
        "qwen3_moe",
        {
            **QWEN3,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
}
MIXTRAL: dict[str, Any] = {
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
FAMILIES |= {
    "mixtral": Family("mixtral", MIXTRAL),
    "mixtral-sliding": Family("mixtral", {**MIXTRAL, "sliding_window": 8}),
}
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "attn_temperature_tuning": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
FAMILIES |= {
    "llama4-scout": Family(
        "llama4_text",
        {
            **LLAMA4,
            "rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
        variant="fused",
    ),
    # transformers counts padding when it scales queries by their place; vLLM and Meta do not.
    "llama4-temperature": Family(
        "llama4_text",
        {**LLAMA4, "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5},
        pads_alike=False,
        variant="fused",
    ),
    "llama4-maverick": Family(
        "llama4_text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
        },
        variant="fused",
    ),
}
GLM4: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "attention_bias": True,
}
FAMILIES |= {
    "glm4_moe": Family("glm4_moe", GLM4),
    "glm4_moe-air": Family(
        "glm4_moe",
        {
            **GLM4,
            "use_qk_norm": False,
            "attention_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "partial_rotary_factor": 0.25,
        },
    ),
    "glm4_moe-groups": Family(
        "glm4_moe", {**GLM4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
    ),
}
DEEPSEEK: dict[str, Any] = {
    "head_dim": LEFT_OUT,  # transformers would take it for the size of the rotated part
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FAMILIES |= {
    "deepseek_v3": Family("deepseek_v3", {**DEEPSEEK, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3-plain": Family(
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
    ),
    "deepseek_v3-kimi": Family(
        "deepseek_v3",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "rope_parameters": {**DEEPSEEK_YARN, "mscale": 0.7, "beta_fast": 1.0, "factor": 8.0},
        },
    ),
}
MINIMAX = {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
# The published spelling, rotary_dim, is not read by transformers before 5.23.
MINIMAX_ROPE = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
FAMILIES |= {
    "minimax_m2": Family("minimax_m2", {**MINIMAX, "rope_parameters": MINIMAX_ROPE}),
    "minimax_m2-rotated-whole": Family("minimax_m2", MINIMAX),
}
ERNIE: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
FAMILIES |= {
    "ernie4_5_moe": Family("ernie4_5_moe", ERNIE),
    "ernie4_5_moe-untied": Family(
        "ernie4_5_moe",
        {
            **ERNIE,
            "tie_word_embeddings": False,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
        },
    ),
}
DBRX: dict[str, Any] = {
    "head_dim": LEFT_OUT,
    "num_key_value_heads": LEFT_OUT,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
}
DBRX_SPELLINGS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
FAMILIES |= {"dbrx": Family("dbrx", DBRX, variant=None, spellings=DBRX_SPELLINGS)}
QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
FAMILIES |= {
    "qwen3_5_moe": Family("qwen3_5_moe_text", QWEN3_5),
    "qwen3_5_moe-alternating": Family(
        "qwen3_5_moe_text",
        {
            **QWEN3_5,
            "full_attention_interval": 2,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
    ),
}
OLMOE: dict[str, Any] = {"intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
FAMILIES |= {
    "olmoe": Family("olmoe", {**OLMOE, "head_dim": LEFT_OUT}),
    "olmoe-limited-normalised": Family(
        "olmoe",
        {
            **OLMOE,
            "head_dim": LEFT_OUT,
            "clip_qkv": 0.5,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
}
QWEN2: dict[str, Any] = {
    "head_dim": LEFT_OUT,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
FAMILIES |= {
    "qwen2_moe": Family("qwen2_moe", QWEN2),
    "qwen2_moe-sliding-dense-layers": Family(
        "qwen2_moe",
        {
            **QWEN2,
            "num_hidden_layers": 4,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
}
SOLAR: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
}
FAMILIES |= {
    "solar_open": Family("solar_open", SOLAR),
    "solar_open-biases": Family(
        "solar_open",
        {
            **SOLAR,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 2.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}
HY3: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
}
FAMILIES |= {
    "hy_v3": Family("hy_v3", HY3),
    "hy_v3-biases": Family(
        "hy_v3",
        {
            **HY3,
            "attention_bias": True,
            "router_scaling_factor": 1.0,
            "num_shared_experts": 2,
        },
    ),
}
DOTS: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "sliding_window": None,
}
EXAONE: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
}
FAMILIES |= {
    "dots1": Family("dots1", DOTS),
    "dots1-sliding-groups": Family(
        "dots1",
        {
            **DOTS,
            "sliding_window": 8,
            "max_window_layers": 1,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "exaone_moe": Family("exaone_moe", EXAONE),
    "exaone_moe-two-shared": Family(
        "exaone_moe",
        {
            **EXAONE,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_shared_experts": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        {
            **DEEPSEEK,
            "rope_parameters": DEEPSEEK_YARN,
            "index_topk": 512,
            "index_head_dim": 16,
            "index_n_heads": 2,
        },
    ),
    "glm_moe_dsa": Family(
        "glm_moe_dsa",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 512,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk_freq": 2,
        },
    ),
}
NEXT = {**QWEN3_5, "intermediate_size": 96}
FAMILIES |= {
    "qwen3_next": Family("qwen3_next", NEXT),
    "qwen3_next-dense-layers": Family(
        "qwen3_next",
        {
            **NEXT,
            "linear_num_value_heads": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "full_attention_interval": 2,
        },
    ),
}
MINIMAX_M3: dict[str, Any] = {
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
}
FAMILIES |= {
    "minimax_m3_vl_text": Family("minimax_m3_vl_text", MINIMAX_M3, variant="modules"),
}
NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
    "intermediate_size": 96,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
FAMILIES |= {
    "nemotron_h": Family("nemotron_h", {**NEMOTRON, "moe_latent_size": 32}),
    "nemotron_h-nano": Family(
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["mlp", "linear_attention", "moe", "full_attention", "moe"],
            "use_conv_bias": False,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
}
LONGCAT: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), LEFT_OUT),
    "num_layers": 2,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "moe_topk": 3,
    "routed_scaling_factor": 2.0,
}
FAMILIES |= {"longcat_flash": Family("longcat_flash", LONGCAT, is_saved_alike=False)}
FAMILIES |= {
    "glm4_moe_lite": Family(
        "glm4_moe_lite",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "first_k_dense_replace": LEFT_OUT},
    ),
    "glm4_moe_lite-groups": Family(
        "glm4_moe_lite",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_parameters": DEEPSEEK_YARN,
            "first_k_dense_replace": LEFT_OUT,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
}
HUNYUAN: dict[str, Any] = {"intermediate_size": 32, "num_experts": 8, "moe_topk": 3}
FAMILIES |= {
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", HUNYUAN),
    "hunyuan_v1_moe-biases": Family(
        "hunyuan_v1_moe",
        {
            **HUNYUAN,
            "moe_topk": [2, 2, 2],
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
    ),
}
GRANITE: dict[str, Any] = {
    "head_dim": LEFT_OUT,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
GRANITE_HYBRID = {
    **GRANITE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 48,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
}
FAMILIES |= {
    "granitemoe": Family("granitemoe", GRANITE, variant="published"),
    "granitemoeshared": Family(
        "granitemoeshared",
        {**GRANITE, "shared_intermediate_size": 48, "attention_bias": True},
        variant="published",
    ),
    "granitemoehybrid": Family("granitemoehybrid", GRANITE_HYBRID, variant="published"),
    "granitemoehybrid-rotated": Family(
        "granitemoehybrid",
        {
            **GRANITE_HYBRID,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
            "mamba_n_groups": 2,
            "tie_word_embeddings": True,
        },
        variant="published",
    ),
}
AFMOE: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "sliding_window": 8,
    "global_attn_every_n_layers": 2,
    "route_scale": 2.0,
}
FLEX = {**OLMOE, "num_experts_per_tok": 2, "head_dim": LEFT_OUT, "pad_token_id": None}
FAMILIES |= {
    "flex_olmo": Family("flex_olmo", FLEX),
    "flex_olmo-normalised": Family(
        "flex_olmo",
        {**FLEX, "norm_topk_prob": True, "attention_bias": True},
    ),
    "afmoe": Family("afmoe", AFMOE),
    "afmoe-scaled": Family(
        "afmoe",
        {
            **AFMOE,
            "attention_bias": True,
            "num_shared_experts": 2,
            "num_dense_layers": 0,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mup_enabled": True,
        },
    ),
}
MISTRAL4 = {**DEEPSEEK, "first_k_dense_replace": 0}
FAMILIES |= {
    # transformers counts padding when it scales queries by their place.
    "mistral4": Family(
        "mistral4",
        {
            **MISTRAL4,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {
                **DEEPSEEK_YARN,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 8,
            },
        },
        pads_alike=False,
        variant="fused",
    ),
    "mistral4-groups": Family(
        "mistral4",
        {
            **MISTRAL4,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "rope_interleave": False,
        },
        variant="fused",
    ),
}
LFM2: dict[str, Any] = {
    "head_dim": LEFT_OUT,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv"],
}
FAMILIES |= {
    "lfm2_moe": Family("lfm2_moe", LFM2),
    # transformers lets the bias of padding in front reach the first tokens.
    "lfm2_moe-biases": Family(
        "lfm2_moe",
        {
            **LFM2,
            "layer_types": ["full_attention", "conv", "conv"],
            "num_dense_layers": 0,
            "conv_bias": True,
            "conv_L_cache": 4,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "tie_word_embeddings": False,
        },
        pads_alike=False,
    ),
}
TWO_ROPES = {
    "sliding_attention": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.5,
    },
}
LAGUNA: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "num_attention_heads_per_layer": [4, 6, 6],
}
MIMO: dict[str, Any] = {
    "v_head_dim": 8,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
        for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
    },
}
FAMILIES |= {
    "laguna": Family("laguna", LAGUNA),
    "laguna-elements": Family(
        "laguna",
        {
            **LAGUNA,
            "gating": "per-element",
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 1.5,
            "num_attention_heads_per_layer": LEFT_OUT,
            "rope_parameters": TWO_ROPES,
        },
    ),
    "mimo_v2_flash": Family("mimo_v2_flash", MIMO),
    "mimo_v2_flash-groups": Family(
        "mimo_v2_flash",
        {
            **MIMO,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "attention_value_scale": None,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
        },
    ),
}
GEMMA4: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "top_k_experts": 2,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 20.0,
}
FAMILIES |= {
    "gemma4_text": Family("gemma4_text", GEMMA4, variant=None, is_saved_alike=False),
    "gemma4_text-values-untied": Family(
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": False,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "global_head_dim": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e5,
                    "partial_rotary_factor": 0.6,
                    "factor": 3.0,
                },
            },
        },
        variant=None,
        is_saved_alike=False,
    ),
}
STEP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_router_scaling_factor": 3.0,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_sliding_attention_heads": 6,
    "swiglu_limits": [0, None, 0.5, 0.3],
    "swiglu_limits_shared": [0.7, 0.0, 0.4, 0.6],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            **LLAMA3_ROPE,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
FAMILIES |= {
    "step3p5": Family("step3p5", STEP, variant="published"),
    "step3p5-biases": Family(
        "step3p5",
        {
            **STEP,
            "attention_bias": True,
            "moe_router_scaling_factor": 1.0,
            "mlp_layer_types": ["sparse", "sparse", "dense", "sparse"],
            "num_sliding_attention_heads": 2,
            "rope_parameters": LEFT_OUT,
            "swiglu_limits": None,
        },
        variant="published",
    ),
}
KIMI_LINEAR: dict[str, Any] = {
    "head_dim": LEFT_OUT,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": None,
}
FAMILIES |= {
    "kimi_linear": Family("kimi_linear", KIMI_LINEAR, variant="transformers"),
    "kimi_linear-groups": Family(
        "kimi_linear",
        {
            **KIMI_LINEAR,
            "num_hidden_layers": 5,
            "layer_types": None,
            "q_lora_rank": 24,
            "attention_bias": True,
            "num_expert_group": 4,
            "topk_group": 2,
            "moe_renormalize": False,
            "linear_num_heads": 3,
            "linear_conv_kernel_dim": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
        },
        variant="transformers",
    ),
}
DEEPSEEK_V4: dict[str, Any] = {
    "num_key_value_heads": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 16,  # fewer give scores of zero, which tie
    "index_head_dim": 8,
    "index_topk": 4,
    "sliding_window": 8,
    "partial_rotary_factor": 0.5,
    "layer_types": [
        "compressed_sparse_attention",
        "sliding_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "swiglu_limit": 1.0,
}
FAMILIES |= {
    # transformers counts padding into the first entries.
    "deepseek_v4": Family("deepseek_v4", DEEPSEEK_V4, pads_alike=False, variant="transformers"),
    "deepseek_v4-published-keys": Family(
        "deepseek_v4",
        {
            **DEEPSEEK_V4,
            "partial_rotary_factor": LEFT_OUT,
            "qk_rope_head_dim": 4,
            "layer_types": LEFT_OUT,
            "compress_ratios": [0, 4, 4, 0],
            "compress_rates": LEFT_OUT,
            "mlp_layer_types": LEFT_OUT,
            "num_hash_layers": 2,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 16,
            },
            "hc_mult": 3,
            "hc_sinkhorn_iters": 2,
            "hc_eps": 1e-3,
            "hidden_act": "gelu",
            "routed_scaling_factor": 2.5,
        },
        pads_alike=False,
        variant="transformers",
    ),
}
HY4: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 512,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "swiglu_limit": 0.5,
    "pad_token_id": None,
}
FAMILIES |= {
    "hy_v4": Family("hy_v4", HY4, variant="transformers"),
    "hy_v4-biases": Family(
        "hy_v4",
        {
            **HY4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "attention_bias": True,
            "rope_parameters": DEEPSEEK_YARN,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "hc_mult": 3,
            "hc_magnitude": 1.5,
            "hc_eps": 0.01,
        },
        variant="transformers",
    ),
}
# transformers has no class of it: kimi_k3_reference puts one together of its parts.
KIMI_K3: dict[str, Any] = {
    **{key: value for key, value in KIMI_LINEAR.items() if not key.startswith("linear_")},
    "layer_types": LEFT_OUT,
    "num_hidden_layers": 4,
    "q_lora_rank": 24,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
        "num_heads": 16,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "routed_expert_hidden_size": 48,
    "latent_moe_use_norm": True,
    "hidden_act": "situ",
    "activation_situ_beta": 1.0,
    "activation_situ_linear_beta": 2.0,
    "attn_res_block_size": 2,
    "use_cache": True,
}
FAMILIES |= {
    "kimi_k3": Family("kimi_k3", KIMI_K3, variant=None),
    "kimi_k3-groups": Family(
        "kimi_k3",
        {
            **KIMI_K3,
            "num_hidden_layers": 5,
            "q_lora_rank": None,
            "linear_attn_config": {
                **KIMI_K3["linear_attn_config"],
                "full_attn_layers": [1, 4],
                "kda_layers": [2, 3, 5],
                "num_heads": 3,  # of 16 decay speeds in the file
                "short_conv_kernel_size": 2,
                "gate_lower_bound": None,
            },
            "num_expert_group": 4,
            "topk_group": 2,
            "moe_renormalize": False,
            "routed_scaling_factor": 2.0,
            "latent_moe_use_norm": False,
            "attn_res_block_size": 3,
            "rms_norm_eps": 1e-3,
        },
        variant=None,
        is_saved_alike=False,
    ),
}
LING: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": None,
}
FAMILIES |= {
    "bailing_hybrid": Family("bailing_hybrid", LING, variant="transformers"),
    "bailing_hybrid-unbounded": Family(
        "bailing_hybrid",
        {
            **LING,
            "num_hidden_layers": 5,
            "layer_types": None,
            "layer_group_size": 2,
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "kda_safe_gate": False,
            "short_conv_kernel_size": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "rope_parameters": DEEPSEEK_YARN,
        },
        variant="transformers",
    ),
}
PHI: dict[str, Any] = {"intermediate_size": 32, "num_local_experts": 8, "router_jitter_noise": 0.4}
FAMILIES |= {
    "phimoe": Family("phimoe", {**PHI, "attention_bias": True, "lm_head_bias": True}),
    "phimoe-longrope": Family(
        "phimoe",
        {
            **PHI,
            "sliding_window": 8,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8],
                "long_factor": [2.0] * 8,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 256,
            },
        },
    ),
}
LONG = {  # left to the long run
    "deepseek_v4-published-keys",
    *("lfm2_moe-biases", "laguna-elements", "mimo_v2_flash-groups"),
    *("gemma4_text-values-untied", "kimi_linear-groups", "step3p5-biases"),
    *("bailing_hybrid-unbounded", "phimoe-longrope"),
}
SLOW = {
    "qwen3_5_moe-alternating",
    "qwen3_next-dense-layers",
}  # with transformers' recurrence, token by token


def names(
    slow: Collection[str] = SLOW,
    *,
    is_long: bool = False,
    is_saved: bool = False,
) -> list[Any]:
    """Return the names of FAMILIES as parameters of a test.

    Some are slow, and those that transformers does not have yet are skipped. Of a test that is long
    for each, variants of a family are left to the long run. Of one that `is_saved`, those that
    transformers saves otherwise are left out.
    """
    parameters = []
    for name, family in FAMILIES.items():
        if is_saved and not family.is_saved_alike:
            continue
        is_known = family.model_type in CONFIG_MAPPING
        reason = f"transformers {transformers.__version__} has no {family.model_type}"
        marks = [pytest.mark.skipif(not is_known, reason=reason)]
        marks += [pytest.mark.slow] if name in slow else []
        is_variant = is_long and name != family.model_type
        marks += [pytest.mark.long] if is_variant or name in LONG else []
        parameters.append(pytest.param(name, marks=marks))
    return parameters


# Stored in float32 as published: what chooses experts, and how fast a memory fades.
BIASES = ("e_score_correction_bias", "feed_forward.expert_bias")
EXACT = (*BIASES, "mlp.expert_bias", "A_log", "linear_attn.norm.weight")
EXACT_OF = {  # a family
    "bailing_hybrid": ("conv1d.weight", "dt_bias"),
    "deepseek_v4": ("sinks", "position_bias", "fn", "base", "scale"),
    "hy_v4": (
        *("sinks", "lm_head.weight", "_hc.fn", "_hc.base", "_hc.scale"),
        *("hc_head.hc_fn", "hc_head.hc_base", "hc_head.hc_scale"),
    ),
    "kimi_k3": ("dt_bias", "conv1d.weight", "o_norm.weight"),
}


def write_checkpoint(values: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Write a tiny random checkpoint in bfloat16, as transformers does.

    Biases and norms are not left at their neutral values, so that leaving one out is seen.
    """
    torch.manual_seed(seed)
    if values["model_type"] in WHOLE:
        values = {**WHOLE[values["model_type"]], "text_config": dict(values)}
    config = AutoConfig.for_model(**copy.deepcopy(dict(values)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif not parameter.any():  # a router that AFMoE begins with
                parameter.normal_(0, 0.2)
        ends = (*EXACT, *EXACT_OF.get(values["model_type"], ()))
        exact = {name: tensor.clone() for name, tensor in _tensors(model) if name.endswith(ends)}
        model.to(torch.bfloat16)
        for name, tensor in _tensors(model):
            if name.endswith("tid2eid"):  # a table of experts, all different
                order_VE = torch.rand(len(tensor), config.n_routed_experts).argsort(dim=1)
                tensor.data = order_VE[:, : tensor.shape[1]].clone()
            elif name.endswith(BIASES):
                tensor.data = torch.randn(tensor.shape) * 0.2
            elif name.endswith("layer_scalar"):
                tensor.data.fill_(0.7)
            elif name in exact:
                tensor.data = exact[name]
    model.save_pretrained(folder)


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_buffers(), *model.named_parameters()]


def reference_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return transformers' model of a checkpoint; going from bfloat16 to float32 is exact."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
