"""neuron-moe train: go on training a checkpoint, experts over several ranks, on a CPU or a GPU.

    neuron-moe train --model tiny_gpt_oss --steps 20 --ep 4 --out out/more

Every rank reads the same tokens and holds its part of the experts; attention and the rest are
computed on each. The model is that of `generate`, in float32, so what is trained is what is served.
A step's batch is drawn from the seed and the step's number: a run that was killed goes on with
`--resume` from the last state it saved, over however many ranks, as if nothing had been.

What it writes to --out:

    train.jsonl          step, loss and auxiliary losses of each step
    step-00005/          weights and optimiser, with --save-every; torch.distributed.checkpoint
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional

from neuron_moe import MoE
from neuron_moe.errors import check_positive_int
from neuron_moe.models.loader import load_model
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.models.text import TextCodec
from neuron_moe.parallel import parallel_state
from neuron_moe.router_losses import RouterLosses, auxiliary_loss
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.ranks import run_on_ranks
from neuron_moe.train.balance import step_selection_biases
from neuron_moe.train.distributed_state import distributed_state
from neuron_moe.train.gradients import clip_gradients, sum_shared_gradients

_LENGTH = 96  # tokens of a sequence
_CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run's result depends on, and where it goes.

    Attributes:
        folder: of the checkpoint.
        texts: .jsonl file with a "text" in each line.
        out: folder of log and states.
        steps: optimiser steps in all.
        batch: sequences of a step.
        rate: learning rate of AdamW.
        balance: weight of the balance loss.
        save_percent: see `neuron_moe.spec.Tuning`.
        save_every: steps between states; 0 saves none.
        resume: go on from the last state in `out`.
        seed: of the batches.
    """

    folder: Path
    texts: Path
    out: Path
    steps: int = 20
    batch: int = 4
    rate: float = 1e-4
    balance: float = 0.0
    save_percent: int | None = None
    save_every: int = 0
    resume: bool = False
    seed: int = 0


def main(argv: list[str] | None = None) -> int:
    """Train; return the exit status."""
    run, num_ranks = _parse(argv)
    losses = run_on_ranks(1, num_ranks, lambda: [*train(run)])
    if not losses:
        print(f"{run.out}: holds all {run.steps} steps already. Raise --steps to go on.")
        return 0
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    return 0


def _parse(argv: list[str] | None) -> tuple[Run, int]:
    parser = Parser("train", __doc__)
    parser.add_argument("--model", default=TINY_NAME, help="folder of a checkpoint")
    parser.add_argument("--texts", type=Path, help=".jsonl; default: heldout.jsonl of the model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=Run.steps)
    parser.add_argument("--ep", type=int, default=1, help="ranks that split the experts")
    parser.add_argument("--rate", type=float, default=Run.rate)
    parser.add_argument("--balance", type=float, default=Run.balance, help="of the auxiliary loss")
    parser.add_argument("--save-percent", type=int, help="of the experts' results, see docs")
    parser.add_argument("--save-every", type=int, default=Run.save_every)
    parser.add_argument("--resume", action="store_true", help="go on from the last state in --out")
    args = parser.parse_args(argv)
    for name in ("steps", "ep"):
        check_positive_int(f"--{name}", getattr(args, name))
    folder = checkpoint_folder(args.model)
    texts = args.texts or folder / "heldout.jsonl"
    if not texts.is_file():
        raise FileNotFoundError(f"{texts}: there is no such file. Pass --texts with a .jsonl file.")
    run = Run(
        folder=folder,
        texts=texts,
        out=args.out,
        steps=args.steps,
        rate=args.rate,
        balance=args.balance,
        save_percent=args.save_percent,
        save_every=args.save_every,
        resume=args.resume,
    )
    return run, args.ep


def train(run: Run) -> Iterator[float]:
    """Train on this rank; yield the loss of each step that was still to do."""
    state = find_state(run) if run.resume else None
    tokens = read_tokens(run.folder, run.texts)
    model = build_model(run)
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=run.rate, weight_decay=0.0
    )
    first = 0 if state is None else load_state(state, model, optimizer)
    run.out.mkdir(parents=True, exist_ok=True)
    log = run.out / "train.jsonl"
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    if is_first_rank and not run.resume:
        log.write_text("")
    device = next(model.parameters()).device
    for step in range(first, run.steps):
        record = take_step(model, optimizer, draw_batch(run, tokens, step).to(device))
        if is_first_rank:
            with log.open("a") as lines:
                lines.write(json.dumps({"step": step, **record}) + "\n")
        if run.save_every and (step + 1) % run.save_every == 0:
            save_state(run, model, optimizer, step + 1)
        yield record["loss"]


def read_tokens(folder: Path, texts: Path) -> Tensor:
    """Return the tokens of all texts, one after the other, [n] int64.

    Raises:
        ValueError: they do not fill a sequence.
    """
    codec = TextCodec(folder)
    lines = texts.read_text(encoding="utf-8").splitlines()
    found = [token for line in lines for token in codec.encode(json.loads(line)["text"])]
    if len(found) <= _LENGTH:
        raise ValueError(
            f"{texts}: {len(found)} tokens, must be more than the {_LENGTH} of a sequence. Add"
            " texts."
        )
    return torch.tensor(found)


def build_model(run: Run) -> nn.Module:
    """Return the model in training mode, this rank's part of its experts."""
    has_gpu = torch.cuda.is_available() and not dist.is_initialized()
    backend = "cuda" if has_gpu else "torch"
    model = load_model(run.folder, dtype=torch.float32, backend=backend)
    model = model.to("cuda" if has_gpu else "cpu").train().requires_grad_(True)
    for layer in (each for each in model.modules() if isinstance(each, MoE)):
        experts = layer.expert_mlps
        experts.tuning = replace(experts.tuning, save_percent=run.save_percent)
        layer.use_router_losses(RouterLosses(balance=run.balance))
    return model


def draw_batch(run: Run, tokens: Tensor, step: int) -> Tensor:
    """Return the sequences of a step with the token behind each, [batch, length + 1]."""
    generator = torch.Generator().manual_seed(run.seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - _LENGTH, (run.batch,), generator=generator)
    return torch.stack([tokens[start : start + _LENGTH + 1] for start in starts.tolist()])


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> dict[str, float]:
    """Train on a batch; return its losses."""
    optimizer.zero_grad()
    logits = model(batch[:, :-1]).flatten(0, 1)
    loss = functional.cross_entropy(logits.float(), batch[:, 1:].flatten())
    (loss + auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
    sum_shared_gradients(model)
    clip_gradients(model, _CLIP_NORM)
    optimizer.step()
    layers = [each for each in model.modules() if isinstance(each, MoE)]
    if any(each.router.e_score_correction_bias is not None for each in layers):
        step_selection_biases(model)
    record = {"loss": float(loss.detach())}
    for name in {name for layer in layers for name in layer.losses}:
        record[name] = sum(float(layer.losses[name]) for layer in layers) / len(layers)
    return record


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    is_split = parallel_state.model_parallel_is_initialized()
    mesh = parallel_state.get_device_mesh() if is_split else None
    return distributed_state(model, mesh, optimizer)


def save_state(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save weights and optimiser; the folder gets its name when it is complete."""
    folder, partial = run.out / f"step-{step:05d}", run.out / "incomplete"
    with _quiet():
        save(_state(model, optimizer), checkpoint_id=partial)
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    if dist.is_initialized():
        dist.barrier()


def find_state(run: Run) -> Path:
    """Return the last state of a run.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(run.out.glob("step-*"))
    if not found:
        raise FileNotFoundError(
            f"{run.out}: holds no state to resume from. Leave out --resume, and pass --save-every."
        )
    return found[-1]


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a state; return the step it goes on with."""
    with _quiet():
        load(_state(model, optimizer), checkpoint_id=folder)
    return int(folder.name.removeprefix("step-"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out torch's remark that one process needs no collectives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
