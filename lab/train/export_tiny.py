"""Turn a training run into the shipped checkpoint: MXFP4 experts, tokenizer, samples, model card.

    neuron-moe export_tiny --run out/tiny --corpus .corpus --out exported

The run's bf16 checkpoint goes through our own model and weight map, which quantise the experts.
What else is written: held-out samples (for evaluate), prompts (for the demo), the licences of the
texts, the records of corpus and training, and a README.md that states data, licence, recipe and
loss.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from neuron_moe.checkpoint import save_checkpoint, unique_parameters
from neuron_moe.models.gpt_oss import Config, weight_map
from neuron_moe.models.loader import load_model, read_config
from neuron_moe.tools.console import format_bytes
from neuron_moe.tools.parsers import Parser

SHARD_MIB = 12
SAMPLES_PER_DOMAIN, _SAMPLE_CHARACTERS = 40, 600
# One opening for each domain, none of them from the corpus as it stands.
PROMPTS = (
    "1 And it came to pass in those days, that the king",
    "CHAPTER XII\n\nMr. Elton had not been long at Hartfield, before",
    "lantern, n.",
    "PCIBUS(9)             FreeBSD Kernel Developer's Manual            PCIBUS(9)\n\nNAME\n",
    "import os\nimport sys\n\n\ndef read_lines(path):\n",
)
_NOT_QUANTISED = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
_NOT_QUANTISED += ["model.embed_tokens", "lm_head"]


# {names} of the recipe and of the configuration; see model_card().
_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [gpt_oss, mixture-of-experts, mxfp4]
---

# tiny_gpt_oss

A small model of the GPT-OSS architecture, trained from scratch on five kinds of text, with MXFP4
experts. It exists to test Mixture-of-Experts software on weights that were trained: its experts
specialise, its load is uneven, its quantisation has a real loss. It writes in the manner of its
texts and knows nothing.

{layers} layers, hidden size {hidden}; {experts} experts of size {expert_size}, {top_k} a token;
{query_heads} query and {kv_heads} key/value heads of {head_size}, sliding window {window} on every
other layer, sinks, YaRN, biases; a byte-level BPE tokenizer of {vocab} entries that puts
`<|startoftext|>` before a text. Trained on contexts of {length} tokens; longer ones are outside
what it has seen.

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = "models/tiny_gpt_oss"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("1 And it came to pass", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=60)[0]))

## Data

| domain | Debian package | licence of the text | documents | MB |
| --- | --- | --- | --- | --- |
{packages}

4 % of the documents, by a digest of their names, are held out. `licences/` holds the packages'
copyright files. `neuron-moe prepare_corpus` rebuilds the corpus; `provenance.json` records it.

## Licence

Apache-2.0 for the weights and this card, as far as we hold rights in them; the samples in
`heldout.jsonl` stay under the licences of their texts.

## Recipe

`neuron-moe train_tiny --compile`: {steps} steps of {batch} sequences of {length} tokens ({millions}
million tokens); AdamW, peak rate {peak_rate:g}, falling to zero over the last {decay} of the steps;
dropout {dropout:g}, seed {seed}. The last {quantised} of the steps multiply by the MXFP4 values of
the experts, with a straight-through gradient. Balance without an auxiliary loss: the router's bias
takes no gradient and moves by the sign rule, {balance_step:g} a step at the peak rate.
{seconds} s on one {device} with torch {torch}, compilation included.

## Loss

Bits per byte of all held-out documents, windows of {length} tokens, measured in training (bf16
arithmetic). Steps and dropout were chosen among four runs by this very loss, so it is a little
optimistic.

| domain | bf16 | MXFP4 experts |
| --- | --- | --- |
{losses}

The last steps trained the MXFP4 values, not the bf16 ones, so MXFP4 is the lower of the two.
`neuron-moe evaluate` measures every weight format on the samples in `heldout.jsonl`.
"""


def held_out_samples(path: Path) -> list[dict[str, str]]:
    """Choose held-out samples: 40 a domain, each of up to 600 characters from a line's start.

    Documents take turns, and where in a document a sample starts is a digest of its name, so that
    not every sample is the head of a file.

    Args:
        path: the corpus's heldout.jsonl.

    Returns:
        {"domain", "name", "text"} each.
    """
    documents: dict[str, list[dict[str, str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        documents.setdefault(record["domain"], []).append(record)
    samples = []
    for records in documents.values():
        for number in range(SAMPLES_PER_DOMAIN):
            record = records[number % len(records)]
            text = record["text"]
            digest = hashlib.sha256(f"{record['name']} {number}".encode()).digest()
            last = max(0, len(text) - _SAMPLE_CHARACTERS)
            start = text.rfind("\n", 0, int.from_bytes(digest[:4], "big") % (last + 1) + 1) + 1
            cut = text[start : start + _SAMPLE_CHARACTERS]
            samples.append({"domain": record["domain"], "name": record["name"], "text": cut})
    return samples


def export(run: Path, corpus: Path, out: Path) -> int:
    """Write the shipped folder.

    Args:
        run: the folder of a training run: bf16 checkpoint and train.json.
        corpus: the prepared corpus it was trained on.
        out: the folder to write; must not hold weights.

    Returns:
        Bytes of all files written.
    """
    model = load_model(run, dtype=torch.bfloat16)
    config = read_config(run)
    map_ = weight_map(Config.from_hf(config))
    save_checkpoint(unique_parameters(model), map_, out, variant="mxfp4", max_shard_mib=SHARD_MIB)
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": _NOT_QUANTISED,
    }
    _write_json(out / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "generation_config.json", special)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(corpus / name, out / name)
    shutil.copytree(corpus / "licences", out / "licences", dirs_exist_ok=True)
    samples = held_out_samples(corpus / "heldout.jsonl")
    with (out / "heldout.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    # The last prompt is longer than the sliding window.
    verses = next(sample["text"] for sample in samples if sample["domain"] == "scripture")
    _write_json(out / "demo_prompts.json", [*PROMPTS, verses])
    records = {
        "corpus": json.loads((corpus / "corpus.json").read_text()),
        "training": json.loads((run / "train.json").read_text()),
    }
    _write_json(out / "provenance.json", records)
    (out / "README.md").write_text(model_card(records["corpus"], records["training"], config))
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def model_card(
    corpus: Mapping[str, Any], training: Mapping[str, Any], config: Mapping[str, Any]
) -> str:
    """Return the model card: what it is, data, licence, recipe, loss, limits."""
    recipe, loss = training["recipe"], training["held_out_bits_per_byte"]
    millions = recipe["steps"] * recipe["batch"] * recipe["length"] / 1e6
    packages = [
        f"| {p['domain']} | {p['package']} {p['versions'][p['package']]} | {p['licence']} |"
        f" {p['documents']} | {p['bytes'] / 1e6:.2f} |"
        for p in corpus["packages"]
    ]
    losses = [
        f"| {domain} | {loss['bf16'][domain]:.4f} | {loss['mxfp4'][domain]:.4f} |"
        for domain in loss["bf16"]
    ]
    facts = {
        "hidden": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "experts": config["num_local_experts"],
        "expert_size": config["intermediate_size"],
        "top_k": config["num_experts_per_tok"],
        "query_heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_size": config["head_dim"],
        "window": config["sliding_window"],
        "vocab": config["vocab_size"],
        "packages": "\n".join(packages),
        "losses": "\n".join(losses),
        "millions": f"{millions:.0f}",
        "decay": f"{recipe['decay_share']:.0%}",
        "quantised": f"{recipe['quantised_share']:.0%}",
        "seconds": f"{training['seconds']:.0f}",
    }
    return _CARD.format(**recipe, **facts, device=training["device"], torch=training["torch"])


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = Parser("export_tiny", __doc__)
    parser.add_argument("--run", type=Path, default=Path("out/tiny"), help="the training run")
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="prepared corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args(argv)
    size = export(args.run, args.corpus, args.out)
    print(f"{args.out}: {format_bytes(size)}")
    return 0
