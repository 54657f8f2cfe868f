"""Make a small GPT-OSS checkpoint with random weights, file for file like the published ones.

The folder holds config.json, generation_config.json, the tokenizer and safetensors with MXFP4
experts (or bf16 ones). Nothing else in the project needs to know that the weights are random; the
text they generate is noise, the arithmetic is not.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from neuron_moe.errors import check_choice
from neuron_moe.quantize import MXFP4_GROUP_SIZE, encode_mxfp4

START, PAD, STOP = "<|startoftext|>", "<|endoftext|>", "<|return|>"
EXPERT_FORMATS = ("mxfp4", "bf16")
# What the byte-pair encoder of the sample learns its merges from.
TEXT = """
A mixture of experts keeps many small networks and asks only a few of them for each token. The
router reads the hidden state, scores every expert and sends the token to the best four. The answers
are weighted and added. Most of the weights rest while one token passes, and that is the point: the
model knows much and computes little. Reading the weights is what takes the time when few tokens are
there; multiplying is what takes it when there are many. Tokens that share an expert are gathered
into blocks, so that the weights of an expert are read once for all of them. A block not yet full is
padded, and padding is work for nothing. Small blocks waste little and start often; large blocks
start seldom and waste more. Once upon a time there was a router who liked one expert better than
all the others. The others had nothing to do, and the one had too much. So the tokens waited in a
long line, and the day was slow. Then someone counted them: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10.
"""


def sample_config() -> dict[str, Any]:
    """Return the config.json of the sample: four layers, 16 experts, the published features."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 8,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 512,
    }


def make_checkpoint(
    directory: Path | str,
    config: Mapping[str, Any] | None = None,
    *,
    expert_format: str = "mxfp4",
    seed: int = 0,
) -> Path:
    """Write a checkpoint with random weights and return its folder.

    Args:
        directory: made if missing; files of the same names are replaced.
        config: config.json without token ids; the default is `sample_config()`.
        expert_format: "mxfp4" or "bf16", as transformers reads them.
        seed: of the weights; the same seed writes the same bytes.

    Raises:
        ValueError: an unknown format, or expert sizes that MXFP4 groups do not divide.
    """
    check_choice("expert_format", expert_format, EXPERT_FORMATS)
    folder, values = Path(directory), dict(config or sample_config())
    for name in ("hidden_size", "intermediate_size"):
        if expert_format == "mxfp4" and values[name] % MXFP4_GROUP_SIZE:
            raise ValueError(
                f"{name}={values[name]}: must be a multiple of {MXFP4_GROUP_SIZE}, the group of"
                " MXFP4. Choose such a size, or expert_format='bf16'."
            )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(values["vocab_size"])
    values["pad_token_id"] = tokenizer.token_to_id(PAD)
    values["eos_token_id"] = tokenizer.token_to_id(STOP)
    if expert_format == "mxfp4":
        kept = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens")
        values["quantization_config"] = {
            "modules_to_not_convert": [*kept, "lm_head"],
            "quant_method": "mxfp4",
        }
    stops = [values["eos_token_id"], values["pad_token_id"]]
    _write_json(folder / "config.json", values)
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": stops, "pad_token_id": values["pad_token_id"]},
    )
    write_tokenizer(folder, tokenizer)
    tensors = dict(_encoded(random_tensors(values, seed), expert_format))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a byte-level byte-pair encoder of `vocab_size` entries; the last three are special.

    Raises:
        ValueError: fewer entries than the 256 bytes and the special tokens need.
    """
    special = [START, PAD, STOP]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        raise ValueError(
            f"vocab_size={vocab_size}: must be at least {len(alphabet) + len(special)}, for all"
            " bytes and the special tokens. Choose a larger one."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.split("."), trainer)
    # A text too short for all merges leaves ids free; they get names, so that every id decodes.
    missing = vocab_size - len(special) - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|unused{index}|>" for index in range(missing)])
    tokenizer.add_special_tokens(special)
    return tokenizer


def random_tensors(config: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, bf16 tensor) in the published order of axes, experts not yet encoded.

    Matrices keep the variance of what passes through them, and biases, sinks and norms are not at
    their neutral values, so that leaving any of them out changes the logits.
    """
    stream = torch.Generator().manual_seed(seed)
    size, inner, experts = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts")
    )

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=stream) * scale).to(torch.bfloat16)

    def norm() -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=stream)).to(torch.bfloat16)

    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", normal(config["vocab_size"], size, scale=1.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", norm()
        yield prefix + "post_attention_layernorm.weight", norm()
        shapes = {"q": (q_size, size), "k": (kv_size, size), "v": (kv_size, size)}
        for name, (rows, columns) in {**shapes, "o": (size, q_size)}.items():
            weight = normal(rows, columns, scale=1 / math.sqrt(columns))
            yield f"{prefix}self_attn.{name}_proj.weight", weight
            if config.get("attention_bias", True):
                yield f"{prefix}self_attn.{name}_proj.bias", normal(rows, scale=0.2)
        yield prefix + "self_attn.sinks", normal(config["num_attention_heads"], scale=1.0)
        yield prefix + "mlp.router.weight", normal(experts, size, scale=1 / math.sqrt(size))
        yield prefix + "mlp.router.bias", normal(experts, scale=0.5)
        experts_prefix = prefix + "mlp.experts."
        gate_up = normal(experts, size, 2 * inner, scale=2 / math.sqrt(size))
        yield experts_prefix + "gate_up_proj", gate_up
        yield experts_prefix + "gate_up_proj_bias", normal(experts, 2 * inner, scale=0.5)
        yield experts_prefix + "down_proj", normal(experts, inner, size, scale=1 / math.sqrt(inner))
        yield experts_prefix + "down_proj_bias", normal(experts, size, scale=0.2)
    yield "model.norm.weight", norm()
    yield "lm_head.weight", normal(config["vocab_size"], size, scale=1 / math.sqrt(size))


def _encoded(
    tensors: Iterator[tuple[str, Tensor]], expert_format: str
) -> Iterator[tuple[str, Tensor]]:
    """Replace expert matrices [E, in, out] by MXFP4 blocks and scales of [E, out, in]."""
    for name, tensor in tensors:
        if expert_format == "mxfp4" and name.endswith(("gate_up_proj", "experts.down_proj")):
            blocks, scales = encode_mxfp4(tensor.transpose(1, 2).contiguous())
            yield name + "_blocks", blocks
            yield name + "_scales", scales
        else:
            yield name, tensor


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer and what transformers wants to know of it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": START, "eos_token": STOP, "pad_token": PAD}
    _write_json(
        folder / "tokenizer_config.json",
        {
            **special,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "left",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    _write_json(folder / "special_tokens_map.json", special)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
