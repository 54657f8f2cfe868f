"""Names and shapes of the tensors in published checkpoints; facts of their headers, no weights."""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from neuron_moe.checkpoint import Checkpoint, TensorInfo
from neuron_moe.checkpoint.scaled import pair_scales

Header = Iterator[tuple[str, tuple[int, ...]]]


def as_checkpoint(header: Header, form: str = "bf16", covered: str = "") -> Checkpoint:
    """Return a checkpoint whose tensors cannot be read.

    Args:
        header: names and shapes of the weights.
        form: "bf16", "blocks" of 128 x 128 or "channels", float8 codes with their scales.
        covered: pattern of the matrices that are codes.
    """
    tensors: dict[str, TensorInfo] = {}

    def add(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tensors[name] = TensorInfo(name, shape, dtype, Path("published"), 0)

    for name, shape in header:
        if form == "bf16" or not re.search(covered, name):
            is_code = name.endswith(("_blocks", "_scales"))
            plain = torch.int64 if name.endswith("tid2eid") else torch.bfloat16
            add(name, shape, torch.uint8 if is_code else plain)
            continue
        add(name, shape, torch.float8_e4m3fn)
        rows, columns = shape
        if form == "blocks":
            add(name + "_scale_inv", (-(-rows // 128), -(-columns // 128)), torch.float32)
        else:
            add(name + "_scale", (rows, 1), torch.bfloat16)
    return Checkpoint(Path("published"), *pair_scales(tensors))


def separate_experts(header: Header) -> Header:
    """Return experts one by one, as Llama 4 has them in fp8, where they are in one tensor."""
    for name, shape in header:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield name, shape
            continue
        experts, rows, columns = shape
        stem, _, kind = name.rpartition(".")
        for expert in range(experts):
            if kind == "down_proj":
                yield f"{stem}.{expert}.down_proj.weight", (columns, rows)
                continue
            for half in ("gate_proj", "up_proj"):
                yield f"{stem}.{expert}.{half}.weight", (columns // 2, rows)


def count(checkpoint: Checkpoint, keys: set[str]) -> int:
    """Return the number of elements of some tensors."""
    return sum(prod(checkpoint.tensors[key].shape) for key in keys)


def _frame(config: dict[str, Any], prefix: str = "") -> Header:
    """Embedding, norms, head, and attention projections without biases."""
    size, vocab = config["hidden_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or size // config["num_attention_heads"]
    q_size, kv_size = (
        config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value")
    )
    yield prefix + "model.embed_tokens.weight", (vocab, size)
    yield prefix + "model.norm.weight", (size,)
    yield prefix + "lm_head.weight", (vocab, size)
    for layer in range(config["num_hidden_layers"]):
        block = f"{prefix}model.layers.{layer}."
        yield block + "input_layernorm.weight", (size,)
        yield block + "post_attention_layernorm.weight", (size,)
        yield block + "self_attn.q_proj.weight", (q_size, size)
        yield block + "self_attn.k_proj.weight", (kv_size, size)
        yield block + "self_attn.v_proj.weight", (kv_size, size)
        yield block + "self_attn.o_proj.weight", (size, q_size)


def qwen3_moe(config: dict[str, Any]) -> Header:
    """Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B."""
    yield from _frame(config)
    size, inner = config["hidden_size"], config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        yield block + "self_attn.q_norm.weight", (config["head_dim"],)
        yield block + "self_attn.k_norm.weight", (config["head_dim"],)
        yield block + "mlp.gate.weight", (config["num_experts"], size)
        for expert in range(config["num_experts"]):
            yield from _gated(f"{block}mlp.experts.{expert}.", inner, size)


def gpt_oss(config: dict[str, Any]) -> Header:
    """openai/gpt-oss-20b and gpt-oss-120b, experts in MXFP4."""
    yield from _frame(config)
    size, inner, experts = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    widths = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    widths["v"] = widths["k"]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        for name, heads in widths.items():
            yield f"{block}self_attn.{name}_proj.bias", (heads * config["head_dim"],)
        yield block + "self_attn.o_proj.bias", (size,)
        yield block + "self_attn.sinks", (config["num_attention_heads"],)
        yield block + "mlp.router.weight", (experts, size)
        yield block + "mlp.router.bias", (experts,)
        for name, rows, columns in (("gate_up", 2 * inner, size), ("down", size, inner)):
            yield f"{block}mlp.experts.{name}_proj_blocks", (experts, rows, columns // 32, 16)
            yield f"{block}mlp.experts.{name}_proj_scales", (experts, rows, columns // 32)
            yield f"{block}mlp.experts.{name}_proj_bias", (experts, rows)


def mixtral(config: dict[str, Any]) -> Header:
    """mistralai/Mixtral-8x7B-v0.1."""
    yield from _frame(config)
    size, inner = config["hidden_size"], config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}.block_sparse_moe."
        yield block + "gate.weight", (config["num_local_experts"], size)
        yield from _numbered(block, config["num_local_experts"], inner, size)


def dbrx(config: dict[str, Any]) -> Header:
    """databricks/dbrx-base and dbrx-instruct."""
    size, vocab, attention = config["d_model"], config["vocab_size"], config["attn_config"]
    kv_size = size // config["n_heads"] * attention["kv_n_heads"]
    inner, experts = (config["ffn_config"][name] for name in ("ffn_hidden_size", "moe_num_experts"))
    yield "transformer.wte.weight", (vocab, size)
    yield "transformer.norm_f.weight", (size,)
    yield "lm_head.weight", (vocab, size)
    for layer in range(config["n_layers"]):
        block = f"transformer.blocks.{layer}."
        yield block + "norm_attn_norm.norm_1.weight", (size,)
        yield block + "norm_attn_norm.norm_2.weight", (size,)
        yield block + "norm_attn_norm.attn.Wqkv.weight", (size + 2 * kv_size, size)
        yield block + "norm_attn_norm.attn.out_proj.weight", (size, size)
        yield block + "ffn.router.layer.weight", (experts, size)
        for name in ("w1", "v1", "w2"):
            yield f"{block}ffn.experts.mlp.{name}", (experts * inner, size)


def ernie4_5_moe(config: dict[str, Any]) -> Header:
    """baidu/ERNIE-4.5-21B-A3B-PT, without what predicts further tokens."""
    yield from (item for item in _frame(config) if item[0] != "lm_head.weight")
    size, inner, experts = (
        config[name] for name in ("hidden_size", "moe_intermediate_size", "moe_num_experts")
    )
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}.mlp."
        if layer < config["moe_layer_start_index"]:
            yield from _gated(block, config["intermediate_size"], size)
            continue
        yield block + "gate.weight", (experts, size)
        yield block + "moe_statics.e_score_correction_bias", (1, experts)
        yield from _gated(block + "shared_experts.", inner * config["moe_num_shared_experts"], size)
        for expert in range(experts):
            yield from _gated(f"{block}experts.{expert}.", inner, size)


def qwen3_5_moe(config: dict[str, Any]) -> Header:
    """Qwen/Qwen3.5-35B-A3B, with its vision tower and the layer that predicts a further token."""
    text, prefix = config["text_config"], "model.language_model."
    size, experts = text["hidden_size"], text["num_experts"]
    inner, shared = text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
    yield prefix + "embed_tokens.weight", (text["vocab_size"], size)
    yield prefix + "norm.weight", (size,)
    yield "lm_head.weight", (text["vocab_size"], size)
    for layer, kind in enumerate(text["layer_types"]):
        block = f"{prefix}layers.{layer}."
        is_linear = kind == "linear_attention"
        yield from (_delta_net if is_linear else _gated_attention)(text, block)
        yield from _gated_shared(block, size, shared, experts)
        yield block + "mlp.experts.gate_up_proj", (experts, 2 * inner, size)
        yield block + "mlp.experts.down_proj", (experts, size, inner)
    yield from _gated_attention(text, "mtp.layers.0.")
    yield from _gated_shared("mtp.layers.0.", size, shared, experts)
    for expert in range(experts):  # of Qwen3.6 in two tensors
        yield from _gated(f"mtp.layers.0.mlp.experts.{expert}.", inner, size)
    yield "mtp.fc.weight", (size, 2 * size)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{name}.weight", (size,)
    yield from _qwen_vision(config["vision_config"])


def _delta_net(text: dict[str, Any], block: str) -> Header:
    size, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    attention = block + "linear_attn."
    yield attention + "in_proj_qkv.weight", (2 * keys + values, size)
    yield attention + "in_proj_z.weight", (values, size)
    yield attention + "in_proj_b.weight", (heads, size)
    yield attention + "in_proj_a.weight", (heads, size)
    yield attention + "conv1d.weight", (2 * keys + values, 1, text["linear_conv_kernel_dim"])
    yield attention + "A_log", (heads,)
    yield attention + "dt_bias", (heads,)
    yield attention + "norm.weight", (text["linear_value_head_dim"],)
    yield attention + "out_proj.weight", (size, values)


def _gated_attention(text: dict[str, Any], block: str) -> Header:
    size, head = text["hidden_size"], text["head_dim"]
    q_size, kv_size = (text[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    yield block + "self_attn.q_proj.weight", (2 * q_size, size)
    yield block + "self_attn.k_proj.weight", (kv_size, size)
    yield block + "self_attn.v_proj.weight", (kv_size, size)
    yield block + "self_attn.o_proj.weight", (size, q_size)
    yield block + "self_attn.q_norm.weight", (head,)
    yield block + "self_attn.k_norm.weight", (head,)


def _gated_shared(block: str, size: int, width: int, experts: int) -> Header:
    """Norms, router and the gated shared expert."""
    yield block + "input_layernorm.weight", (size,)
    yield block + "post_attention_layernorm.weight", (size,)
    yield block + "mlp.gate.weight", (experts, size)
    yield from _gated(block + "mlp.shared_expert.", width, size)
    yield block + "mlp.shared_expert_gate.weight", (1, size)


def _qwen_vision(config: dict[str, Any]) -> Header:
    """The vision tower; only its names matter here."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    merged = size * config["spatial_merge_size"] ** 2
    block = "model.visual."
    patch = config["in_channels"], config["temporal_patch_size"], *(config["patch_size"],) * 2
    yield block + "patch_embed.proj.weight", (size, *patch)
    yield block + "patch_embed.proj.bias", (size,)
    yield block + "pos_embed.weight", (config["num_position_embeddings"], size)
    shapes = {"merger.norm": (size,), "merger.linear_fc1": (merged, merged)}
    shapes |= {"merger.linear_fc2": (config["out_hidden_size"], merged)}
    for layer in range(config["depth"]):
        own = {"norm1": (size,), "norm2": (size,), "attn.qkv": (3 * size, size)}
        own |= {"attn.proj": (size, size), "mlp.linear_fc1": (inner, size)}
        own |= {"mlp.linear_fc2": (size, inner)}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        yield f"{block}{name}.weight", shape
        yield f"{block}{name}.bias", shape[:1]


def minimax_m2(config: dict[str, Any]) -> Header:
    """MiniMaxAI/MiniMax-M2 in bfloat16."""
    yield from _frame(config)
    size, inner, head = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    experts = config["num_local_experts"]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        yield block + "self_attn.q_norm.weight", (config["num_attention_heads"] * head,)
        yield block + "self_attn.k_norm.weight", (config["num_key_value_heads"] * head,)
        yield block + "block_sparse_moe.gate.weight", (experts, size)
        yield block + "block_sparse_moe.e_score_correction_bias", (experts,)
        yield from _numbered(block + "block_sparse_moe.", experts, inner, size)


def glm4_moe(config: dict[str, Any]) -> Header:
    """zai-org/GLM-4.5 and GLM-4.5-Air, with the layer that predicts a further token."""
    layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    yield from _frame({**config, "num_hidden_layers": layers})
    head, size = config["head_dim"], config["hidden_size"]
    for layer in range(layers):
        block = f"model.layers.{layer}.self_attn."
        yield block + "q_proj.bias", (config["num_attention_heads"] * head,)
        yield block + "k_proj.bias", (config["num_key_value_heads"] * head,)
        yield block + "v_proj.bias", (config["num_key_value_heads"] * head,)
        if config["use_qk_norm"]:
            yield block + "q_norm.weight", (head,)
            yield block + "k_norm.weight", (head,)
    yield from _deepseek_feed_forward(config, size, layers)


def deepseek_v3(config: dict[str, Any]) -> Header:
    """deepseek-ai/DeepSeek-V3 in bfloat16, with the layer that predicts a further token."""
    size, heads, vocab = (
        config[name] for name in ("hidden_size", "num_attention_heads", "vocab_size")
    )
    rotated, rank, query_rank = (
        config[name] for name in ("qk_rope_head_dim", "kv_lora_rank", "q_lora_rank")
    )
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    yield "model.embed_tokens.weight", (vocab, size)
    yield "model.norm.weight", (size,)
    yield "lm_head.weight", (vocab, size)
    for layer in range(layers):
        block = f"model.layers.{layer}."
        yield block + "input_layernorm.weight", (size,)
        yield block + "post_attention_layernorm.weight", (size,)
        yield block + "self_attn.q_a_proj.weight", (query_rank, size)
        yield block + "self_attn.q_a_layernorm.weight", (query_rank,)
        yield block + "self_attn.q_b_proj.weight", (heads * (plain + rotated), query_rank)
        yield block + "self_attn.kv_a_proj_with_mqa.weight", (rank + rotated, size)
        yield block + "self_attn.kv_a_layernorm.weight", (rank,)
        yield block + "self_attn.kv_b_proj.weight", (heads * (plain + value), rank)
        yield block + "self_attn.o_proj.weight", (size, heads * value)
    yield from _deepseek_feed_forward(config, size, layers)


def kimi_k2(config: dict[str, Any]) -> Header:
    """moonshotai/Kimi-K2-Instruct in bfloat16, with the frequencies it publishes too."""
    yield from deepseek_v3(config)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        yield name, (config["qk_rope_head_dim"] // 2,)


def deepseek_v4(config: dict[str, Any]) -> Header:
    """deepseek-ai/DeepSeek-V4-Flash in bfloat16."""
    size, vocab = config["hidden_size"], config["vocab_size"]
    yield "embed.weight", (vocab, size)
    yield "norm.weight", (size,)
    yield "head.weight", (vocab, size)
    yield from _streams("hc_head_", config["hc_mult"], 1, config)
    for layer, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        is_hash = layer < config["num_hash_layers"]
        yield from _deepseek_v4_layer(config, f"layers.{layer}.", ratio, is_hash)
    yield from _deepseek_v4_layer(config, "mtp.0.", 0, False)
    for name in ("e_proj", "h_proj"):
        yield f"mtp.0.{name}.weight", (size, size)
    for name in ("enorm", "hnorm", "norm"):
        yield f"mtp.0.{name}.weight", (size,)
    yield from _streams("mtp.0.hc_head_", config["hc_mult"], 1, config)


def _deepseek_v4_layer(config: dict[str, Any], block: str, ratio: int, is_hash: bool) -> Header:
    size, heads, head = (config[n] for n in ("hidden_size", "num_attention_heads", "head_dim"))
    rank, groups, out_rank = (config[name] for name in ("q_lora_rank", "o_groups", "o_lora_rank"))
    experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    yield block + "attn_norm.weight", (size,)
    yield block + "ffn_norm.weight", (size,)
    for name in ("attn", "ffn"):
        count = config["hc_mult"]
        yield from _streams(f"{block}hc_{name}_", (2 + count) * count, 3, config)
    attention = block + "attn."
    yield attention + "attn_sink", (heads,)
    yield attention + "wq_a.weight", (rank, size)
    yield attention + "q_norm.weight", (rank,)
    yield attention + "wq_b.weight", (heads * head, rank)
    yield attention + "wkv.weight", (head, size)
    yield attention + "kv_norm.weight", (head,)
    yield attention + "wo_a.weight", (groups * out_rank, heads * head // groups)
    yield attention + "wo_b.weight", (size, groups * out_rank)
    if ratio:
        yield from _pool(attention, ratio, head, size)
    if ratio == 4:
        index_heads, index = config["index_n_heads"], config["index_head_dim"]
        yield attention + "indexer.wq_b.weight", (index_heads * index, rank)
        yield attention + "indexer.weights_proj.weight", (index_heads, size)
        yield from _pool(attention + "indexer.", ratio, index, size)
    yield block + "ffn.gate.weight", (experts, size)
    if is_hash:
        yield block + "ffn.gate.tid2eid", (config["vocab_size"], config["num_experts_per_tok"])
    else:
        yield block + "ffn.gate.bias", (experts,)
    yield from _numbered(block + "ffn.", experts, inner, size)
    yield block + "ffn.shared_experts.w1.weight", (inner, size)
    yield block + "ffn.shared_experts.w2.weight", (size, inner)
    yield block + "ffn.shared_experts.w3.weight", (inner, size)


def _pool(prefix: str, ratio: int, width: int, size: int) -> Header:
    """What makes entries of tokens."""
    wide = 2 * width if ratio == 4 else width
    yield prefix + "compressor.ape", (ratio, wide)
    yield prefix + "compressor.wkv.weight", (wide, size)
    yield prefix + "compressor.wgate.weight", (wide, size)
    yield prefix + "compressor.norm.weight", (width,)


def _streams(prefix: str, width: int, scales: int, config: dict[str, Any]) -> Header:
    """What weighs residual streams."""
    yield prefix + "fn", (width, config["hc_mult"] * config["hidden_size"])
    yield prefix + "base", (width,)
    yield prefix + "scale", (scales,)


def _deepseek_feed_forward(config: dict[str, Any], size: int, layers: int) -> Header:
    """Dense layers, then experts and a shared one; at last what predicts a further token."""
    inner = config["moe_intermediate_size"]
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp."
        if layer < config["first_k_dense_replace"]:
            yield from _gated(block, config["intermediate_size"], size)
            continue
        yield block + "gate.weight", (config["n_routed_experts"], size)
        yield block + "gate.e_score_correction_bias", (config["n_routed_experts"],)
        yield from _gated(block + "shared_experts.", inner * config["n_shared_experts"], size)
        for expert in range(config["n_routed_experts"]):
            yield from _gated(f"{block}experts.{expert}.", inner, size)
    for layer in range(config["num_hidden_layers"], layers):
        block = f"model.layers.{layer}."
        yield block + "embed_tokens.weight", (config["vocab_size"], size)
        yield block + "shared_head.head.weight", (config["vocab_size"], size)
        yield block + "shared_head.norm.weight", (size,)
        yield block + "enorm.weight", (size,)
        yield block + "hnorm.weight", (size,)
        yield block + "eh_proj.weight", (size, 2 * size)


def _numbered(block: str, experts: int, inner: int, size: int) -> Header:
    """Experts whose matrices have numbers."""
    for expert in range(experts):
        yield f"{block}experts.{expert}.w1.weight", (inner, size)
        yield f"{block}experts.{expert}.w2.weight", (size, inner)
        yield f"{block}experts.{expert}.w3.weight", (inner, size)


def _gated(prefix: str, width: int, size: int) -> Header:
    """An MLP's three matrices."""
    yield prefix + "gate_proj.weight", (width, size)
    yield prefix + "up_proj.weight", (width, size)
    yield prefix + "down_proj.weight", (size, width)


def llama4(config: dict[str, Any]) -> Header:
    """meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E."""
    text, prefix = config["text_config"], "language_model."
    yield from _frame(text, prefix)
    size, inner, dense = (
        text[name] for name in ("hidden_size", "intermediate_size", "intermediate_size_mlp")
    )
    experts = text["num_local_experts"]
    for layer in range(text["num_hidden_layers"]):
        block = f"{prefix}model.layers.{layer}.feed_forward."
        is_sparse = (layer + 1) % text["interleave_moe_layer_step"] == 0
        if is_sparse:
            yield block + "router.weight", (experts, size)
            yield block + "experts.gate_up_proj", (experts, size, 2 * inner)
            yield block + "experts.down_proj", (experts, inner, size)
        width, mlp = (inner, block + "shared_expert.") if is_sparse else (dense, block)
        yield from _gated(mlp, width, size)
    yield from _llama4_vision(config["vision_config"], size)


def _llama4_vision(config: dict[str, Any], text_size: int) -> Header:
    """The vision tower; only its names matter here."""
    size, inner, head = (
        config[name] for name in ("hidden_size", "intermediate_size", "projector_output_dim")
    )
    num_patches = (config["image_size"] // config["patch_size"]) ** 2
    yield "multi_modal_projector.linear_1.weight", (text_size, config["vision_output_dim"])
    yield "vision_model.class_embedding", (size,)
    yield "vision_model.positional_embedding_vlm", (num_patches + 1, size)
    yield "vision_model.patch_embedding.linear.weight", (size, 3 * config["patch_size"] ** 2)
    yield "vision_model.vision_adapter.mlp.fc1.weight", (config["projector_input_dim"], inner)
    yield "vision_model.vision_adapter.mlp.fc2.weight", (head, head)
    for kind in ("weight", "bias"):
        for name in ("layernorm_pre", "layernorm_post"):
            yield f"vision_model.{name}.{kind}", (size,)
    for layer in range(config["num_hidden_layers"]):
        block = f"vision_model.model.layers.{layer}."
        shapes = {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
        shapes |= {"mlp.fc1": (inner, size), "mlp.fc2": (size, inner)}
        for name, (rows, columns) in shapes.items():
            yield f"{block}{name}.weight", (rows, columns)
            yield f"{block}{name}.bias", (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{block}{name}.weight", (size,)
            yield f"{block}{name}.bias", (size,)
