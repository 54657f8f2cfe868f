"""Train the small GPT-OSS model on the prepared corpus.

    neuron-moe train_tiny --corpus .corpus --out out/tiny

One command, one GPU, under ten minutes at the defaults; a few steps also run on a CPU. The run is a
function of its options and seed: every batch is drawn from the seed and the step's number, so a
resumed run sees the batches that the unbroken one would have seen.

The last part of the run decays the learning rate to zero; the last part of that multiplies by the
MXFP4 values of the expert weights (see train_tiny_model.py), so that the weights that are trained
are the weights that are shipped.

What it writes to --out:

    model-*.safetensors, config.json   the bf16 checkpoint in the Hugging Face GPT-OSS layout
    train.jsonl, train.json            a line each 50 steps, held-out losses; the final record
    state.pt                           with --save-every: weights, optimiser and step, for --resume

With `--backend cuda` (or torch) the library's own layers are trained, balanced by the bias for
selection that GPT-OSS does not have; then no checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from lab.train.train_tiny_model import TinyConfig, TinyModel, export_state_dict
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.pictures import draw_training

# Shares of a batch. The corpus holds 1 million tokens of scripture and 4 of code: sampled by size,
# the small domains would hardly be learnt; sampled equally, they would be learnt by heart.
DOMAIN_SHARES = {"scripture": 0.11, "novel": 0.11, "dictionary": 0.29, "manual": 0.19, "code": 0.30}
_BOS, _EOS, _PAD = 0, 1, 2  # the tokenizer's special tokens, in the order it was trained with
_SHARD_BYTES = 14 * 2**20
_LOG_EVERY, _HELD_OUT_EVERY = 50, 1000
_BETAS, _WEIGHT_DECAY, _CLIP_NORM = (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a run is trained; with the corpus, all that the result depends on.

    Attributes:
        steps: optimiser steps.
        batch: sequences a step.
        length: tokens a sequence.
        peak_rate: highest learning rate of AdamW.
        warmup_steps: steps over which the rate rises from zero.
        decay_share: last share of the steps, over which the rate falls to zero.
        quantised_share: last share of the steps, trained through MXFP4.
        balance_step: how far the router's bias moves a step, in logits; falls with the rate.
        dropout: share of each sub-layer's output that training drops.
        seed: of the weights, the batches and the dropout.
    """

    steps: int = 4000
    batch: int = 32
    length: int = 1024
    peak_rate: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.6
    quantised_share: float = 0.25
    balance_step: float = 1e-2
    dropout: float = 0.25
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the share of the peak rate at a step: rise, plateau, linear fall."""
        rise = (step + 1) / self.warmup_steps
        fall = (self.steps - step) / max(1, self.decay_share * self.steps)
        return min(1.0, rise, fall)

    def is_quantised(self, step: int) -> bool:
        """Say whether a step is trained through MXFP4."""
        return step >= self.steps - round(self.quantised_share * self.steps)


class Corpus:
    """The tokenised corpus on the training device.

    Args:
        folder: what prepare_corpus wrote.
        device: where batches are made.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.record = json.loads((folder / "corpus.json").read_text())
        self.device = device
        self.tokens: dict[str, Tensor] = {}
        self.starts: dict[str, Tensor] = {}
        self.held_out: dict[str, Tensor] = {}
        for domain in DOMAIN_SHARES:
            for name, held in (
                ("tokens", self.tokens),
                ("starts", self.starts),
                ("heldout", self.held_out),
            ):
                array = np.load(folder / f"{name}_{domain}.npy").astype(np.int64)
                held[domain] = torch.from_numpy(array).to(device)

    def batch(self, recipe: Recipe, step: int) -> Tensor:
        """Draw the batch of one step.

        Half of the windows begin where a document begins, so that the model learns to open a text;
        the others begin anywhere.

        Returns:
            Tokens [batch, length + 1] int64, domains in a fixed proportion.
        """
        generator = torch.Generator().manual_seed(_step_seed(recipe, step))
        windows = []
        for domain, count in _apportion(recipe.batch).items():
            tokens, starts = self.tokens[domain], self.starts[domain]
            last = len(tokens) - recipe.length - 1
            anywhere = torch.randint(last + 1, (count,), generator=generator)
            document = torch.randint(len(starts), (count,), generator=generator)
            opening = torch.arange(count) % 2 == step % 2
            first = torch.where(
                opening.to(self.device),
                starts[document.to(self.device)].clamp(max=last),
                anywhere.to(self.device),
            )
            span = torch.arange(recipe.length + 1, device=self.device)
            windows.append(tokens[first[:, None] + span])
        return torch.cat(windows)

    def held_out_windows(self, domain: str, length: int) -> Tensor:
        """Return a domain's held-out tokens as windows [windows, length + 1], padded at the end.

        Windows overlap by one token: the last target of one is the first input of the next.
        """
        tokens = self.held_out[domain]
        padding = -(len(tokens) - 1) % length
        return F.pad(tokens, (0, padding), value=_PAD).unfold(0, length + 1, length)


@torch.no_grad()
def held_out_bits_per_byte(
    model: TinyModel,
    corpus: Corpus,
    recipe: Recipe,
    *,
    fake_mxfp4: bool,
    most_windows: int | None = None,
) -> dict[str, float]:
    """Return the held-out loss of each domain in bits per byte of UTF-8 text, and their mean.

    Args:
        model: the model; left in training mode.
        corpus: with the held-out tokens.
        recipe: gives the length of a window.
        fake_mxfp4: multiply by the MXFP4 values of the expert weights.
        most_windows: look at the first windows of each domain only; all if None.
    """
    was_fake = model.moes()[0].fake_mxfp4
    model.eval()
    for moe in model.moes():
        moe.fake_mxfp4 = fake_mxfp4
    bits = {}
    for domain in DOMAIN_SHARES:
        nats, num_targets = 0.0, 0
        held_out = corpus.held_out_windows(domain, recipe.length)[:most_windows]
        for windows in torch.split(held_out, 32):
            logits = model(windows[:, :-1]).flatten(0, 1).float()
            targets = windows[:, 1:].flatten()
            nats += F.cross_entropy(logits, targets, ignore_index=_PAD, reduction="sum").item()
            num_targets += int((targets != _PAD).sum())
        counts = corpus.record["held_out"][domain]
        bits[domain] = nats / math.log(2) / num_targets * counts["tokens"] / counts["bytes"]
    bits["mean"] = sum(bits.values()) / len(bits)
    for moe in model.moes():
        moe.fake_mxfp4 = was_fake
    model.train()
    return bits


def make_optimizer(model: TinyModel, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in trained if weight.dim() >= 2 and "bias" not in name]
    others = [weight for name, weight in trained if weight.dim() < 2 or "bias" in name]
    groups = [
        {"params": matrices, "weight_decay": _WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=_BETAS, fused=fused)


def train(
    model: TinyModel,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    recipe: Recipe,
    first_step: int = 0,
    last_step: int | None = None,
    forward: Any = None,
) -> Iterator[dict[str, Any]]:
    """Run steps `first_step` up to `last_step` and yield a record after each.

    Args:
        model: in float32; changed in place.
        optimizer: from `make_optimizer`; changed in place.
        corpus: gives the batches.
        recipe: the whole run's recipe, also when only a part of it is run.
        first_step: the step to begin with.
        last_step: the step to stop before; the end of the run if None.
        forward: a compiled form of the model; the model itself if None.

    Yields:
        step, loss (nats a token, a tensor that nobody has waited for), rate and load: the busiest
        expert's share of the mean load in each layer, a tensor.
    """
    forward = model if forward is None else forward
    model.train()
    for step in range(first_step, recipe.steps if last_step is None else last_step):
        torch.manual_seed(_step_seed(recipe, step))  # of the dropout
        for moe in model.moes():
            moe.fake_mxfp4 = recipe.is_quantised(step)
        rate = recipe.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_rate * rate
        tokens = corpus.batch(recipe, step)
        logits = forward(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        load = torch.stack([moe.balance(recipe.balance_step * rate).max() for moe in model.moes()])
        yield {"step": step, "loss": loss.detach(), "rate": rate, "load": load}


def write_checkpoint(model: TinyModel, folder: Path) -> None:
    """Write the bf16 checkpoint in shards of at most 14 MiB, with index and config.json."""
    tensors = export_state_dict(model)
    shards: list[dict[str, Tensor]] = [{}]
    room = _SHARD_BYTES
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = _SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    config = model.config.hf_config(_BOS, _EOS, _PAD)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_state(path: Path, model: TinyModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write what `load_state` needs to go on before step `step`."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, path)


def load_state(path: Path, model: TinyModel, optimizer: torch.optim.Optimizer) -> int:
    """Load weights and optimiser in place; return the step to go on with."""
    state = torch.load(path, map_location=next(model.parameters()).device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def run(options: argparse.Namespace, recipe: Recipe, config: TinyConfig) -> dict[str, Any]:
    """Train, measure and write; return the final record."""
    device = torch.device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(options.corpus, device)
    model = TinyModel(config, dropout=recipe.dropout, backend=options.backend)
    model.initialise(recipe.seed)
    model.to(device)
    optimizer = make_optimizer(model, recipe)
    state, most_windows = options.out / "state.pt", options.held_out_windows
    first_step = load_state(state, model, optimizer) if options.resume else 0
    forward = torch.compile(model) if options.compile else model
    log = (options.out / "train.jsonl").open("a" if options.resume else "w")
    started = last = time.perf_counter()
    for record in train(model, optimizer, corpus, recipe, first_step, forward=forward):
        step = record["step"]
        done = step + 1
        if done % _LOG_EVERY == 0 or done == recipe.steps:
            loss = record["loss"].item()  # waits for the device
            now = time.perf_counter()
            line = {
                "step": done,
                "loss_nats": round(loss, 4),
                "rate": round(record["rate"], 4),
                "busiest_expert": [round(share, 2) for share in record["load"].tolist()],
                "ms_per_step": round((now - last) * 1e3 / _LOG_EVERY, 2),
            }
            last = now
            log.write(json.dumps(line) + "\n")
            log.flush()
            if done % (10 * _LOG_EVERY) == 0:
                print(f"step {done}: loss {loss:.4f}, {line['ms_per_step']} ms a step", flush=True)
        if options.save_every and done % options.save_every == 0:
            save_state(state, model, optimizer, done)
        if done % _HELD_OUT_EVERY == 0 and done < recipe.steps:
            _log_held_out(log, f"after step {done}", model, corpus, recipe, most_windows)
    seconds = time.perf_counter() - started
    losses = _log_held_out(log, "end", model, corpus, recipe, most_windows)
    log.close()
    if options.backend is None:
        write_checkpoint(model, options.out)
    final = {
        "backend": options.backend,
        "recipe": asdict(recipe),
        "config": asdict(config),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "seconds": round(seconds, 1),
        "held_out_bits_per_byte": losses,
        "kind": "measured",
    }
    (options.out / "train.json").write_text(json.dumps(final, indent=2) + "\n")
    if options.picture is not None:
        lines = (options.out / "train.jsonl").read_text().splitlines()
        title = f"{options.backend or 'layers made for training'}, {final['device']}, measured"
        draw_training([json.loads(line) for line in lines], options.picture, title=title)
    return final


def _log_held_out(
    log: Any,
    when: str,
    model: TinyModel,
    corpus: Corpus,
    recipe: Recipe,
    most_windows: int | None,
) -> dict[str, dict[str, float]]:
    losses = {}
    for name, fake in (("bf16", False), ("mxfp4", True)):
        bits = held_out_bits_per_byte(
            model, corpus, recipe, fake_mxfp4=fake, most_windows=most_windows
        )
        losses[name] = {domain: round(value, 5) for domain, value in bits.items()}
    log.write(json.dumps({"held_out_bits_per_byte": losses, "when": when}) + "\n")
    for name, bits in losses.items():
        text = ", ".join(f"{domain} {value:.3f}" for domain, value in bits.items())
        print(f"held out, {when}, {name}: {text} bits per byte", flush=True)
    return losses


def _step_seed(recipe: Recipe, step: int) -> int:
    return recipe.seed * 1_000_003 + step


def _apportion(batch: int) -> dict[str, int]:
    """Split a batch over the domains by their shares; the rest goes to the largest remainders."""
    exact = {domain: share * batch for domain, share in DOMAIN_SHARES.items()}
    counts = {domain: int(value) for domain, value in exact.items()}
    by_remainder = sorted(exact, key=lambda domain: counts[domain] - exact[domain])
    for domain in by_remainder[: batch - sum(counts.values())]:
        counts[domain] += 1
    return counts


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = Parser("train_tiny", __doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="prepared corpus")
    parser.add_argument("--out", type=Path, default=Path("out/tiny"), help="folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", type=json.loads, default={}, help="JSON: fields of Recipe")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON: fields of TinyConfig")
    parser.add_argument("--backend", choices=("torch", "cuda"), help="train the library's layers")
    parser.add_argument("--picture", type=Path, help="PNG of loss and load over the steps")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--held-out-windows", type=int, help="most windows a domain; default all")
    parser.add_argument("--save-every", type=int, default=0, help="steps between saved states")
    parser.add_argument("--resume", action="store_true", help="go on from state.pt in --out")
    options = parser.parse_args(argv)
    recipe = _from_json(Recipe, "--recipe", options.recipe)
    config = _from_json(TinyConfig, "--config", options.config)
    run(options, recipe, config)
    print(f"{options.out}: trained; the run in numbers is train.json")
    return 0


def _from_json(kind: Any, option: str, values: dict[str, Any]) -> Any:
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            raise ValueError(
                f"{option}: {name}={values[name]!r}: must be one of {', '.join(known)}."
            )
    return kind(**values)
