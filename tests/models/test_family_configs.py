"""config.json of every family but GPT-OSS: published sizes, published tensors, refusals."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from neuron_moe.checkpoint import Checkpoint, match_parameters, unique_parameters
from neuron_moe.configs import load_config
from neuron_moe.models.deepseek_v32 import Model
from neuron_moe.models.generation import GenerationOptions, generate
from neuron_moe.models.loader import find_model_file
from neuron_moe.models.phimoe import CONTEXT
from neuron_moe.models.phimoe import Model as Phi
from neuron_moe.models.sizes import GROUPS, count_active_parameters, count_parameters
from neuron_moe.serving.options import check_servable
from tests.models import published
from tests.models.families import DBRX, FAMILIES

# Total and activated parameters of the model cards, in billions as they round them; where the name
# is in HEADLESS, activated ones without embedding and head.
SIZES = {
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen3_235b_a22b": (235, 22),
    "mixtral_8x7b": (46.7, 12.9),
    "llama4_scout": (109, 17),
    "llama4_maverick": (400, 17),
    "glm_4_5": (355, 32),
    "glm_4_5_air": (106, 12),
    "deepseek_v3": (671, 37),
    "kimi_k2": (1040, 32.6),
    "deepseek_v4_flash": (284, 13),
    "minimax_m2": (230, 10),
    "ernie_4_5_21b_a3b": (21.8, 3.3),
    "dbrx": (132, 36),
    "qwen3_5_35b_a3b": (35, 3),
    "qwen3_5_397b_a17b": (397, 17),
}
HEADLESS = ("glm_4_5", "glm_4_5_air", "minimax_m2", "deepseek_v4_flash")
NO_EMBEDDING = ("qwen3_5_35b_a3b",)  # but the head

PUBLISHED = (
    *("gpt_oss_20b", "qwen3_30b_a3b", "mixtral_8x7b", "llama4_scout", "llama4_maverick"),
    *("glm_4_5", "glm_4_5_air", "deepseek_v3", "kimi_k2", "minimax_m2"),
    *("ernie_4_5_21b_a3b", "dbrx", "qwen3_5_35b_a3b", "deepseek_v4_flash"),
)


PART = "partial_rotary_factor"


def meta_model(name: str) -> Any:
    """Return the model of a shipped configuration, without memory."""
    values = load_config(name)
    file = find_model_file(values["model_type"])
    with torch.device("meta"):
        return file.Model(file.Config.from_hf(values))


@pytest.mark.parametrize("name", SIZES)
def test_shipped_configurations_have_the_published_size(name: str) -> None:
    model = meta_model(name)
    groups = count_parameters(model)
    assert tuple(groups) == GROUPS
    total, active = sum(groups.values()), count_active_parameters(model)
    embedding = model.embed_tokens.weight.numel()
    if not model.config.tie_word_embeddings and name not in NO_EMBEDDING:
        active += -embedding if name in HEADLESS else embedding
    assert (total / 1e9, active / 1e9) == pytest.approx(SIZES[name], rel=0.021)


def match_published(name: str, checkpoint: Checkpoint) -> set[str]:
    """Match a checkpoint with a model of published size; return the keys that are read."""
    values, model = load_config(name), meta_model(name)
    weight_map = find_model_file(values["model_type"]).weight_map(model.config)
    parameters = unique_parameters(model)
    work = match_parameters(checkpoint, weight_map, parameters)
    assert len(work) == len(parameters)
    read = {key for assignment, _, _ in work for key in assignment.keys}
    left_out = checkpoint.tensors.keys() - read
    others = "vision_model.", "multi_modal_projector.", "model.visual.", "mtp."
    others += (f"model.layers.{len(model.layers)}.",)
    assert all(key.startswith(others) or key.endswith(".inv_freq") for key in left_out)
    return read


def header_of(name: str) -> published.Header:
    values = load_config(name)
    header: published.Header = getattr(published, values["model_type"])(values)
    return header


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_tensor_is_read_and_every_parameter_filled(name: str) -> None:
    checkpoint = published.as_checkpoint(header_of(name))
    read = match_published(name, checkpoint)
    if name != "gpt_oss_20b":  # its blocks hold two weights a byte
        model = meta_model(name)
        kept = dict(model.named_buffers()).keys() & model.state_dict().keys()  # selection biases
        filled = sum(parameter.numel() for parameter in model.parameters())
        filled += sum(model.get_buffer(name).numel() for name in kept)
        assert published.count(checkpoint, read) == filled


LINEAR = (
    r"(self_attn\.\w+_proj(_with_mqa)?|mlp\.(experts\.\d+\.|shared_experts\.)?\w+_proj)\.weight$"
)
# Form and covered matrices of checkpoints published in fp8.
FP8 = {
    "deepseek_v3": ("blocks", LINEAR),
    "kimi_k2": ("blocks", LINEAR),
    "minimax_m2": ("blocks", r"(self_attn\.\w+_proj|experts\.\d+\.w[123])\.weight$"),
    "qwen3_30b_a3b": ("blocks", LINEAR),
    "llama4_maverick": ("channels", r"experts\.\d+\.\w+_proj\.weight$"),
    "glm_4_5_air": ("channels", LINEAR),
}
FEW_TENSORS = ("llama4_maverick",)


@pytest.mark.parametrize(
    "name", [n if n in FEW_TENSORS else pytest.param(n, marks=pytest.mark.slow) for n in FP8]
)
def test_every_tensor_published_in_fp8_is_read_with_its_scales(name: str) -> None:
    form, covered = FP8[name]
    header = published.separate_experts(header_of(name))
    checkpoint = published.as_checkpoint(header, form, covered)
    read = match_published(name, checkpoint)
    assert len(checkpoint.scales) > 1000
    assert {key for key in read if re.search(covered, key)} <= checkpoint.scales.keys()
    assert not any("_scale" in key for key in checkpoint.tensors)


def test_yarn_scales_the_logits_of_deepseek_and_of_kimi() -> None:
    for name, factor in (("deepseek_v3", 40), ("kimi_k2", 32)):
        config = meta_model(name).config
        growth = 0.1 * math.log(factor) + 1
        assert config.logit_scale == pytest.approx(192**-0.5 * growth**2)


def test_every_fourth_layer_of_llama4_sees_everything_and_turns_nothing() -> None:
    for name, step in (("llama4_scout", 1), ("llama4_maverick", 2)):
        model = meta_model(name)
        reaches = [attention.reach.chunk for attention in model.attentions]
        assert reaches == [8192, 8192, 8192, None] * 12
        rotates = [attention.rotates for attention in model.attentions]
        assert rotates == [True, True, True, False] * 12
        assert model.config.moe_layers == tuple(range(step - 1, 48, step))
        assert model.config.attn_temperature_tuning


PHI_ROPE = FAMILIES["phimoe-longrope"].config()["rope_parameters"]
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3-unknown": ("qwen3_moe", {"moe_intermediate": 3}, "unknown key moe_intermediate=3"),
    "qwen3-missing": ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob is missing"),
    "qwen3-two-spellings": ("qwen3_moe", {"num_local_experts": 4}, "num_local_experts=4: must agr"),
    "qwen3-top-k": ("qwen3_moe", {"num_experts_per_tok": 9}, "top_k=9: must not exceed"),
    "qwen3-all-dense": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "must leave a layer with"),
    "qwen3-no-list": ("qwen3_moe", {"mlp_only_layers": "1"}, "must be a whole number or a list"),
    "qwen3-step": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    "qwen3-quantised": (
        "qwen3_moe",
        {"quantization_config": {"quant_method": "gptq"}},
        "GPTQ, integers of 2 to 8 bits: quant_method must be fp8 or compressed-tensors or neuron",
    ),
    "qwen3-small-blocks": (
        "qwen3_moe",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        r"weight_block_size=\[64, 64\] must be \[128, 128\], or absent",
    ),
    "kimi-int8": (
        "deepseek_v3",
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}},
            }
        },
        "'num_bits': 8, 'symmetric': True}, must be of type 'float', or {'type': 'int', 'num_b",
    ),
    "glm4-other-packing": (
        "glm4_moe",
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
            }
        },
        "format='nvfp4-pack-quantized' must be float-quantized or",
    ),
    "glm4-static": (
        "glm4_moe",
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {
                    "group_0": {"weights": {"type": "float"}, "input_activations": STATIC}
                },
            }
        },
        "group_0 has input_activations of dynamic=False, must be dynamic",
    ),
    "glm4-cache": (
        "glm4_moe",
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "kv_cache_scheme": STATIC,
            }
        },
        "kv_cache_scheme, with scales of keys and values, must be null",
    ),
    "mixtral-static": (
        "mixtral",
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        "activation_scheme='static', with scales of activations, must be 'dynamic'",
    ),
    "mixtral-no-window": ("mixtral", {"sliding_window": 0}, "sliding_window=0"),
    "llama4-missing": ("llama4-scout", {"use_qk_norm": None}, "use_qk_norm is missing"),
    "llama4-step": (
        "llama4-scout",
        {"interleave_moe_layer_step": 0},
        "interleave_moe_layer_step=0",
    ),
    "llama4-interval": ("llama4-scout", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
    "llama4-no-experts": (
        "llama4-scout",
        {"moe_layers": []},
        r"moe_layers=\[\]: must be layers",
    ),
    "llama4-far-experts": ("llama4-scout", {"moe_layers": [4]}, "must be layers below num_hidden"),
    "llama4-few-rotations": (
        "llama4-scout",
        {"no_rope_layers": [1, 0]},
        "must have one entry for",
    ),
    "llama4-layer-types": (
        "llama4-scout",
        {"layer_types": ["sliding_attention"] * 4},
        "each chunked_attention or full_attention",
    ),
    "llama4-chunk": ("llama4-scout", {"attention_chunk_size": 0}, "attention_chunk_size=0"),
    "llama4-longrope": (
        "llama4-scout",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "rope_type='longrope': must be 'default' or 'linear' or 'dynamic' or 'yarn' or 'llama3'",
    ),
    "llama4-other": ("llama4-scout", {"model_type": "llama"}, "model_type='llama': must be one of"),
    "glm4-missing": ("glm4_moe", {"use_qk_norm": None}, "use_qk_norm is missing"),
    "glm4-all-dense": (
        "glm4_moe",
        {"first_k_dense_replace": 3},
        "first_k_dense_replace=3: must not be negative, and below num_hidden_layers=3",
    ),
    "glm4-groups": ("glm4_moe", {"topk_group": 2}, "topk_group=2: must not exceed n_group=1"),
    "glm4-uneven-groups": ("glm4_moe", {"n_group": 3}, "n_group=3: num_experts=8 must split"),
    "glm4-rotates-all-and-more": (
        "glm4_moe",
        {"partial_rotary_factor": 1.5},
        "partial_rotary_factor=1.5: must be above 0 and not above 1",
    ),
    "glm4-odd-part": ("glm4_moe", {"partial_rotary_factor": 0.2}, "here 3. Rotary embedding"),
    "deepseek-softmax": (
        "deepseek_v3",
        {"scoring_func": "softmax"},
        "scoring_func='softmax': must be 'sigmoid'",
    ),
    "deepseek-head": ("deepseek_v3", {"head_dim": 16}, "head_dim=16: must be 8"),
    "deepseek-groups": (
        "deepseek_v3",
        {"num_experts_per_tok": 5},
        "top_k=5: topk_group=2 groups of 2 experts offer only 4",
    ),
    "minimax-two-parts": (
        "minimax_m2",
        {"rotary_dim": 4},
        "rotary_dim=4, partial_rotary_factor=0.5: must be the same part of head_dim=16",
    ),
    "minimax-head-norms": (
        "minimax_m2",
        {"qk_norm_type": "per_head"},
        "qk_norm_type='per_head': must be 'per_layer'",
    ),
    "minimax-linear": ("minimax_m2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list=\[1, 0, 1\]"),
    "minimax-window": ("minimax_m2", {"sliding_window": 8}, "sliding_window=8: must be 0"),
    "minimax-top-k": ("minimax_m2", {"num_experts_per_tok": 9}, "top_k=9: must not exceed"),
    "ernie-biases": ("ernie4_5_moe", {"use_bias": True}, "use_bias=True: must be False"),
    "ernie-all-dense": (
        "ernie4_5_moe",
        {"moe_layer_start_index": 3},
        "moe_layer_start_index=3, moe_layer_end_index=2, moe_layer_interval=1: must leave a layer",
    ),
    "ernie-top-k": ("ernie4_5_moe", {"moe_k": 9}, "top_k=9: must not exceed"),
    "dbrx-unknown": ("dbrx", {"num_experts": 8}, "unknown key num_experts=8"),
    "dbrx-unknown-inside": (
        "dbrx",
        {"attn_config": {"kv_n_heads": 2, "clip_qk": 8.0}},
        r"attn_config: unknown key clip_qk=8.0 .did you mean 'clip_qkv'",
    ),
    "dbrx-missing": ("dbrx", {"n_heads": None}, "n_heads is missing"),
    "dbrx-limit": (
        "dbrx",
        {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.0}},
        "clip_qkv=0.0: must be positive",
    ),
    "dbrx-kv-heads": ("dbrx", {"num_key_value_heads": 4}, "num_key_value_heads=4: must be 2"),
    "dbrx-norm": (
        "dbrx",
        {"ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": 2.0}},
        "moe_normalize_expert_weights=2.0: must be 1.0",
    ),
    "dbrx-activation": (
        "dbrx",
        {"ffn_config": {**DBRX["ffn_config"], "ffn_act_fn": {"name": "mish"}}},
        "hidden_act='mish': must be one of gelu, gelu_pytorch_tanh",
    ),
    "dbrx-top-k": (
        "dbrx",
        {"ffn_config": {**DBRX["ffn_config"], "moe_top_k": 9}},
        "top_k=9: must not exceed",
    ),
    "qwen3_5-missing": (
        "qwen3_5_moe",
        {"linear_num_key_heads": None},
        "linear_num_key_heads is missing",
    ),
    "qwen3_5-heads": (
        "qwen3_5_moe",
        {"linear_num_value_heads": 3},
        "num_value_heads=3: must be a multiple of num_key_heads=2",
    ),
    "qwen3_5-layer-types": (
        "qwen3_5_moe",
        {"layer_types": ["linear_attention"] * 3},
        "must name num_hidden_layers=4 layers",
    ),
    "qwen3_5-sliding": (
        "qwen3_5_moe",
        {"layer_types": ["sliding_attention"] * 4},
        "each linear_attention or full_attention",
    ),
    "qwen3_5-gate": ("qwen3_5_moe", {"attn_output_gate": False}, "attn_output_gate=False: must be"),
    "qwen3_5-state": ("qwen3_5_moe", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
    "qwen3_5-top-k": ("qwen3_5_moe", {"num_experts_per_tok": 9}, "top_k=9: must not exceed"),
    "glm4_lite-part": (
        "glm4_moe_lite",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor=0.5: must be 1: qk_rope_head_dim says",
    ),
    "hunyuan-layers": ("hunyuan_v1_moe", {"moe_topk": [3, 3, 2]}, "must be the same in every lay"),
    "hunyuan-groups": ("hunyuan_v1_moe", {"group_limited_greedy": True}, "group_limited_greedy=Tr"),
    "granite-dense": ("granitemoehybrid", {"num_local_experts": 0}, "num_local_experts=0: must be"),
    "granite-places": (
        "granitemoehybrid",
        {"position_embedding_type": "alibi"},
        "position_embedding_type='alibi': must be 'rope', 'nope' or null",
    ),
    "granite-shared": ("granitemoe", {"shared_intermediate_size": 8}, "unknown key shared_interm"),
    "flex-limit": ("flex_olmo", {"clip_qkv": 1.0}, "unknown key clip_qkv=1.0"),
    "afmoe-scores": ("afmoe", {"score_func": "softmax"}, "score_func='softmax': must be 'sigmoid'"),
    "lfm2-layers": ("lfm2_moe", {"layer_types": ["conv"]}, r"layer_types=\['conv'\]: must name"),
    "laguna-cap": ("laguna", {"moe_router_logit_softcapping": -1.5}, "softcap=-1.5: must be"),
    "step-cap": ("step3p5", {"router_softcap": 1.5}, "unknown key router_softcap"),
    "laguna-gate": ("laguna", {"gating": "per-layer"}, "gating='per-layer': must be one of"),
    "laguna-heads": (
        "laguna",
        {"num_attention_heads_per_layer": [4, 3, 4]},
        r"num_attention_heads_per_layer=\[4, 3, 4\]: must name num_hidden_layers=3 layers, each a",
    ),
    "mimo-rope": (
        "mimo_v2_flash",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_parameters: sliding_attention is missing",
    ),
    "mimo-scores": ("mimo_v2_flash", {"scoring_func": "softmax"}, "scoring_func='softmax': must"),
    "mistral4-scores": ("mistral4", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid': must be"),
    "gemma4-dense": (
        "gemma4_text",
        {"enable_moe_block": False},
        "enable_moe_block=False: this Gemma",
    ),
    "gemma4-per-layer": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 8},
        "hidden_size_per_layer_input=8, num_kv_shared_layers=0: must be 0",
    ),
    "gemma4-shared": (
        "gemma4_text",
        {"num_kv_shared_layers": 1},
        "num_kv_shared_layers=1: must be",
    ),
    "gemma4-both-ways": (
        "gemma4_text",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention: must be null or 'vision'",
    ),
    "gemma4-heads": (
        "gemma4_text",
        {"per_layer_config": {"0": {"head_dim": 8}}},
        "must give all layers of full_attention the same",
    ),
    "gemma4-cap": ("gemma4_text", {"final_logit_softcapping": 0.0}, "softcapping=0.0: must be pos"),
    "gemma4-part": (
        "gemma4_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                },
            }
        },
        r"full_attention\.partial_rotary_factor=0\.5: must be 1",
    ),
    "kimi-linear-spelling": ("kimi_linear", {"n_routed_experts": 9}, "num_experts=8: must agree"),
    "kimi-linear-rotated": ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False: must be"),
    "kimi-linear-layers": (
        "kimi_linear",
        {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1]}},
        "must name each of num_hidden_layers=3 layers once, from 1",
    ),
    "v4-kinds": (
        "deepseek_v4-published-keys",
        {"compress_ratios": [0, 4, 2]},
        "compress_ratios: 2 must be one of 0, 4, 128",
    ),
    "v4-layers": ("deepseek_v4", {"layer_types": ["sliding_attention"]}, "must name num_hidden_la"),
    "v4-experts": ("deepseek_v4", {"mlp_layer_types": ["moe", "dense"]}, "each hash_moe or moe"),
    "v4-scores": ("deepseek_v4", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid': must be"),
    "v4-norm": ("deepseek_v4", {"norm_topk_prob": False}, "norm_topk_prob=False: must be True"),
    "v4-shared": ("deepseek_v4", {"n_shared_experts": 2}, "n_shared_experts=2: must be 1"),
    "v4-keys": ("deepseek_v4", {"num_key_value_heads": 2}, "num_key_value_heads=2: must be 1"),
    "v4-groups": ("deepseek_v4", {"o_groups": 3}, "o_groups=3: must divide num_attention_heads=4"),
    "v4-index": ("deepseek_v4", {"index_head_dim": 4}, "index_head_dim=4: must not be below the 8"),
    "v4-limit": ("deepseek_v4", {"swiglu_limit": 0.0}, "swiglu_limit=0.0: must be positive"),
    "v4-rate": (
        "deepseek_v4",
        {"compress_rates": {"heavily_compressed_attention": 0}},
        "heavily_compressed_attention=0: must be",
    ),
    "v4-ropes": (
        "deepseek_v4-published-keys",
        {"rope_parameters": {"rope_type": "default"}},
        "the two spellings disagree",
    ),
    "v4-streams": ("deepseek_v4", {"hc_mult": 0}, "hc_mult=0: must be"),
    "step-limits": (
        "step3p5",
        {"swiglu_limits": [7.0]},
        r"swiglu_limits=\[7\.0\]: must be a list of",
    ),
    "step-limit": (
        "step3p5",
        {"swiglu_limits_shared": [0, 0, 0, -1.0]},
        r"shared=\[0, 0, 0, -1\.0\]: must be a list of num_hidden_layers=4 limits, none below 0",
    ),
    "step-heads": (
        "step3p5",
        {"num_sliding_attention_heads": 5},
        r"num_sliding_attention_heads: num_attention_heads=\[4, 5, 5, 4\]: must name num",
    ),
    "step-other-heads": (
        "step3p5",
        {"attention_other_setting": {"num_attention_groups": 4}},
        "num_attention_groups=4: must be 2",
    ),
    "step-scale": ("step3p5", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar=8: must be 16"),
    "step-gate": ("step3p5", {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate=False"),
    "step-act": ("step3p5", {"hidden_act": "gelu"}, "hidden_act='gelu': must be 'silu'"),
    "step-layers": (
        "step3p5",
        {"mlp_layer_types": None, "moe_layers_enum": "4,x"},
        "moe_layers_enum='4,x': must name layers below num_hidden_layers=4",
    ),
    "step-far-layers": (
        "step3p5",
        {"mlp_layer_types": None, "moe_layers_enum": [4]},
        r"moe_layers_enum=\[4\]: must name layers below num_hidden_layers=4",
    ),
    "step-thetas": (
        "step3p5",
        {"rope_parameters": None, "rope_theta": [1e4, 1e4, 2e4, 1e4]},
        "rope_theta=.*: must be the same in all layers of sliding_attention",
    ),
    "step-scaled": (
        "step3p5",
        {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        r"yarn_only_types=None: must be \['full_attention'\]",
    ),
    "step-unrotated": ("step3p5", {"use_rope_layers": [1, 0, 1, 1]}, "use_rope_layers: must be em"),
    "ling-group": (
        "bailing_hybrid",
        {"layer_types": None, "layer_group_size": 2},
        "layer_group_size=2: must divide num_hidden_layers=3",
    ),
    "ling-limits": (
        "bailing_hybrid",
        {"expert_swiglu_limit_list": [4.0] * 2},
        "limit_list=.*: must be a list of num_hidden_layers=3 limits",
    ),
    "ling-decay": ("bailing_hybrid", {"kda_lower_bound": 0.5}, "kda_lower_bound=0.5: must be bel"),
    "ling-context": (
        "bailing_hybrid",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        "original_max_position_embeddings is missing",
    ),
    "ling-gate": (
        "bailing_hybrid",
        {"gated_attention_proj_granularity_type": "element_wise"},
        "type='element_wise': must be 'head_wise'",
    ),
    "ling-latents": ("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora=False: must be True"),
    "ling-rotated": ("bailing_hybrid", {"rotary_dim": 4}, "rotary_dim=4: must be 8"),
    "ling-shared": (
        "bailing_hybrid",
        {"moe_shared_expert_intermediate_size": 64},
        "moe_shared_expert_intermediate_size=64: must be 32",
    ),
    "phimoe-chosen": ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3: must be 2"),
    "phimoe-jitter": ("phimoe", {"router_jitter_noise": -0.1}, "mixer_jitter=-0.1, formula="),
    "phimoe-rope": (
        "phimoe",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "rope_type='yarn': must be 'default' or 'longrope'",
    ),
    "phimoe-factors": (
        "phimoe-longrope",
        {"rope_parameters": {**PHI_ROPE, "short_factor": [1.0] * 7}},
        "short_factor: must be a list of 8 numbers, half of head_dim=16, but has 7",
    ),
    "phimoe-factor": (
        "phimoe-longrope",
        {"rope_parameters": {**PHI_ROPE, "short_factor": 2.0}},
        "short_factor=2.0: must be a list of positive numbers",
    ),
    "phimoe-mscale": (
        "phimoe-longrope",
        {"rope_parameters": {**PHI_ROPE, "short_mscale": None}},
        "short_mscale is missing",
    ),
    "mixtral-top-k": ("mixtral", {"num_experts_per_tok": 9}, "top_k=9: must not exceed"),
}


def test_a_head_takes_its_part_of_the_hidden_size_where_no_key_says_else() -> None:
    assert read("mixtral", {"head_dim": None}).head_dim == 16
    assert read("mixtral", {"head_dim": 32}).head_dim == 32


def test_hy3_lists_its_sparse_layers() -> None:
    more = {"router_scaling_factor": 1.0}
    kinds = {"mlp_layer_types": ["sparse", "dense", "sparse"]}
    assert read("hy_v3", more).sparse_layers == (1, 2)
    assert read("hy_v3", more | kinds).sparse_layers == (0, 2)
    with pytest.raises(ValueError, match=r"mlp_layer_types=.*must name num_hidden_layers=2 layers"):
        read("hy_v3", more | kinds | {"num_hidden_layers": 2})


def test_kimi_linear_is_read_as_published_and_as_transformers_writes_it() -> None:
    layers = {"full_attn_layers": [2], "kda_layers": [1, 3]}
    section = {**layers, "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}
    left_out = dict.fromkeys(("layer_types", "linear_num_heads", "linear_head_dim"))
    left_out |= {"max_position_embeddings": None}
    more = {"linear_attn_config": section, "model_max_length": 512, "mla_use_nope": True}
    more |= {"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "head_dim": 72}
    assert read("kimi_linear", left_out | more) == read("kimi_linear", {})
    usual = read("kimi_linear", {"layer_types": None, "num_hidden_layers": 6}).layer_types
    assert [layer for layer, kind in enumerate(usual) if kind == "full_attention"] == [4]


def test_deepseek_v4_is_read_as_published_and_as_transformers_writes_it() -> None:
    kinds = ["sliding_attention", *["compressed_sparse_attention"] * 2]
    ropes = {
        "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "compress": {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0}
        | {"factor": 4.0, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.25},
    }
    left_out = dict.fromkeys(("compress_ratios", "num_hash_layers", "rope_scaling"))
    written = {**left_out, "layer_types": kinds, "rope_parameters": ropes}
    written |= {"mlp_layer_types": ["hash_moe", "hash_moe", "moe"], "partial_rotary_factor": 0.25}
    published = read("deepseek_v4-published-keys", {})
    assert read("deepseek_v4-published-keys", written) == published
    assert published.rotated_size == 4
    usual = dict.fromkeys(("layer_types", "mlp_layer_types")) | {"num_hidden_layers": 5}
    assert [kind[:5] for kind in read("deepseek_v4", usual).layer_types] == [
        *("heavi", "heavi", "heavi", "compr", "heavi"),
    ]


def test_ling_is_read_as_published_and_as_transformers_writes_it() -> None:
    written = {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
    written |= {"num_expert_group": 4, "model_max_length": 512, "num_experts_per_token": 2}
    written |= dict.fromkeys(("n_group", "num_experts_per_tok", "max_position_embeddings"))
    written |= {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    published = {"rotary_dim": 8, "partial_rotary_factor": 0.5, "score_function": "sigmoid"}
    published |= {"rope_parameters": {**written["rope_parameters"], PART: 0.5}, "seq_aux": True}
    published |= {"layer_types": None, "layer_group_size": 3, "q_lora_rank": None}
    published |= {"expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": [0, 0, 0]}
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    assert read("bailing_hybrid", published) == read(
        "bailing_hybrid", {**written, "layer_types": kinds}
    )
    assert read("bailing_hybrid", {"kda_safe_gate": False}).lowest_decay is None


def test_phi_is_read_up_to_the_context_of_its_short_frequencies() -> None:
    written = read("phimoe-longrope", {})
    assert written.max_position_embeddings == 256
    published = {key: value for key, value in PHI_ROPE.items() if key != CONTEXT}
    published["type"] = published.pop("rope_type")
    changes = {"rope_parameters": None, "rope_scaling": published}
    assert read("phimoe-longrope", changes) == written
    with pytest.raises(ValueError, match="longer sequences have frequencies"):
        check_servable(Phi(written), 257)


def test_step_is_read_as_published_and_as_transformers_writes_it() -> None:
    text = FAMILIES["step3p5"].config()
    full = text["rope_parameters"]["full_attention"]
    renamed = ("n_routed_experts", "num_experts_per_tok", "num_key_value_heads")
    own = ("rope_parameters", "mlp_layer_types", "num_sliding_attention_heads")
    thetas = [5e5, 1e4, 1e4, 5e5]
    published = {
        **dict.fromkeys((*renamed, *own)),
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "num_attention_groups": 2,
        "moe_layers_enum": "1,2,3",
        "norm_expert_weight": True,
        "num_nextn_predict_layers": 2,
        "rope_theta": [*thetas, 1e4, 1e4],
        "layer_types": [*text["layer_types"], "sliding_attention", "sliding_attention"],
        "swiglu_limits": [*text["swiglu_limits"], 0.0, 0.0],
        "swiglu_limits_shared": [*text["swiglu_limits_shared"], 0.0, 0.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0],
        "rope_scaling": {key: full[key] for key in full if key not in ("rope_theta", PART)},
        "yarn_only_types": ["full_attention"],
        "attention_other_setting": {"attention_type": "sliding_attention", "head_dim": 16}
        | {"num_attention_heads": 6, "num_attention_groups": 2},
    }
    found = read("step3p5", published)
    assert found.prediction_layers == (4, 5)
    assert replace(found, prediction_layers=()) == read("step3p5", {})
    tower = {"width": 32, "layers": 2, "heads": 2}
    whole = {"model_type": "step3p7", "text_config": text, "vision_config": tower}
    assert find_model_file("step3p7").Config.from_hf(whole).num_vision_layers == 2


def test_the_part_of_a_head_that_minimax_turns_has_two_spellings() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6}
    published = read("minimax_m2", {"rope_parameters": rope, "rotary_dim": 8})
    assert published == read("minimax_m2", {})
    assert published.rotated_size == 8


def read(name: str, changes: dict[str, Any]) -> Any:
    """Read a tiny config.json with some keys changed; None leaves one out."""
    values = {**FAMILIES[name].config(), **changes}
    if name != "dbrx":
        values = {"rms_norm_eps": 1e-6, **values}
    if name == "deepseek_v3":
        values = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, **values}
    if (
        "rope_parameters" not in values
        and name not in ("laguna", "gemma4_text")
        and name != "step3p5"
    ):
        values["rope_theta"] = 1e4
    if name.startswith("llama4"):
        values = {"use_qk_norm": True, **values, **changes}
    kept = {key: value for key, value in values.items() if value is not None}
    return find_model_file(values["model_type"]).Config.from_hf(kept)


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_config_is_refused_by_key_and_value(case: str) -> None:
    name, changes, message = BAD[case]
    read(name, {})
    with pytest.raises(ValueError, match=message):
        read(name, changes)


def test_sparse_attention_is_read_up_to_where_it_is_dense() -> None:
    more = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
    model = Model(read("glm_moe_dsa", {**more, "index_topk": 16}))
    generate(model, [[1, 2, 3]], GenerationOptions(max_new_tokens=13))
    with pytest.raises(ValueError, match=r"embeddings=16, config\.json's index_topk"):
        generate(model, [[1, 2, 3]], GenerationOptions(max_new_tokens=14))
    with pytest.raises(ValueError, match=r"max_model_len=17: must be at most 16"):
        check_servable(model, 17)
