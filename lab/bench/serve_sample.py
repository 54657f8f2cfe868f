"""A Qwen3-MoE checkpoint with random weights, for servers to be measured with.

Small enough for two servers on one machine, and with experts that most of the time goes to: 64 of
them in each layer, 8 for each token, as in the published models.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from neuron_moe.models.sample_checkpoint import make_tokenizer, write_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "max_window_layers": 6,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 4096,
}


def make_qwen3_moe(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint, 1.2 GB in bfloat16, and return its folder.

    Args:
        folder: made if missing.
        seed: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    write_tokenizer(folder, make_tokenizer(CONFIG["vocab_size"]))
    save_file(dict(_tensors(seed)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield name and bfloat16 tensor; matrices keep the variance of what passes through them."""
    stream = torch.Generator().manual_seed(seed)
    size, inner, vocabulary, head = (
        CONFIG[name] for name in ("hidden_size", "moe_intermediate_size", "vocab_size", "head_dim")
    )
    q_size, kv_size = (CONFIG[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    shapes = {"q": (q_size, size), "k": (kv_size, size), "v": (kv_size, size), "o": (size, q_size)}
    of_expert = {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}

    def matrix(rows: int, columns: int) -> Tensor:
        drawn = torch.randn((rows, columns), generator=stream) / math.sqrt(columns)
        return drawn.to(torch.bfloat16)

    def norm(length: int) -> Tensor:
        return torch.ones(length, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", matrix(vocabulary, size)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", norm(size)
        for name, shape in shapes.items():
            yield f"{prefix}self_attn.{name}_proj.weight", matrix(*shape)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", norm(head)
        yield f"{prefix}mlp.gate.weight", matrix(CONFIG["num_experts"], size)
        for expert in range(CONFIG["num_experts"]):
            for name, shape in of_expert.items():
                yield f"{prefix}mlp.experts.{expert}.{name}_proj.weight", matrix(*shape)
    yield "model.norm.weight", norm(size)
    yield "lm_head.weight", matrix(vocabulary, size)
