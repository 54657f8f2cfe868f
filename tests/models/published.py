"""Names and shapes of the tensors in published checkpoints; facts of their headers, no weights."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from neuron_moe.checkpoint import Checkpoint, TensorInfo

Header = Iterator[tuple[str, tuple[int, ...]]]


def as_checkpoint(header: Header) -> Checkpoint:
    """Return a checkpoint in bfloat16 whose tensors cannot be read."""
    tensors = {
        name: TensorInfo(name, shape, torch.bfloat16, Path("published"), 0)
        for name, shape in header
    }
    return Checkpoint(Path("published"), tensors)


def count(checkpoint: Checkpoint) -> int:
    """Return the number of elements of all tensors."""
    return sum(prod(info.shape) for info in checkpoint.tensors.values())


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
            yield f"{block}mlp.experts.{expert}.gate_proj.weight", (inner, size)
            yield f"{block}mlp.experts.{expert}.up_proj.weight", (inner, size)
            yield f"{block}mlp.experts.{expert}.down_proj.weight", (size, inner)


def mixtral(config: dict[str, Any]) -> Header:
    """mistralai/Mixtral-8x7B-v0.1."""
    yield from _frame(config)
    size, inner = config["hidden_size"], config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}.block_sparse_moe."
        yield block + "gate.weight", (config["num_local_experts"], size)
        for expert in range(config["num_local_experts"]):
            yield f"{block}experts.{expert}.w1.weight", (inner, size)
            yield f"{block}experts.{expert}.w2.weight", (size, inner)
            yield f"{block}experts.{expert}.w3.weight", (inner, size)
