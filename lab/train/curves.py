"""Losses of the shipped tiny model while it is fine-tuned by our experts and by transformers' own.

    python -m lab.train.curves           # writes docs/results/train_curves.json and a picture
    python -m lab.train.curves --draw    # the picture again

A way that --out already holds all steps of is not trained anew: a killed run goes on with the next
one. Every run starts from the same weights and sees the same batches (`lab.train.train`): our model with
save_percent 0 and 100, transformers' with its own experts, and with ours in their place.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lab.train.train import Run, build_model, draw_batch, read_tokens
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.timing.condensed import condense
from neuron_moe.transformers_experts import register_experts

RESULT = Path("docs/results/train_curves.json")
PICTURE = Path("docs/pictures/train_curves.png")
_RATE = 1e-4


def main(argv: list[str] | None = None) -> int:
    """Train every way, write the curves; return the exit status."""
    parser = Parser("curves", __doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--draw", action="store_true", help="only the picture, from --out")
    args = parser.parse_args(argv)
    if not args.draw:
        note = f"measured on a CPU in float32 by: python -m lab.train.curves --steps {args.steps}"
        found = json.loads(args.out.read_text())["losses"] if args.out.is_file() else {}
        for name in WAYS:
            if len(found.get(name, ())) != args.steps:
                found[name] = curve(name, args.steps)
                args.out.write_text(condense({"note": note, "rate": _RATE, "losses": found}))
    losses = json.loads(args.out.read_text())["losses"]
    exact = losses["transformers"]
    for name, mine in losses.items():
        apart = max(abs(one - other) for one, other in zip(mine, exact, strict=True))
        print(f"{name:32} {mine[0]:.6f} -> {mine[-1]:.6f}, at most {apart:.1e} apart")
    draw(losses, args.picture)
    return 0


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Draw means of ten steps of each way, and how far each is from transformers'."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.4), dpi=120)
    mean, apart = figure.subplots(1, 2)
    exact = np.array(losses["transformers"])
    for number, (name, found) in enumerate(losses.items()):
        mine = np.array(found)
        tens = mine[: len(mine) // 10 * 10].reshape(-1, 10).mean(1)
        mean.plot(10 * np.arange(1, len(tens) + 1), tens, label=name, linewidth=4 - number)
        if name != "transformers":
            apart.semilogy(np.abs(mine - exact) + 1e-7, label=name, linewidth=1)
    mean.set_ylabel("loss, mean of ten steps, nats")
    apart.set_ylabel("distance from transformers' experts")
    for axes in (mean, apart):
        axes.set_xlabel("step")
        axes.legend(fontsize=7)
    figure.suptitle("tiny_gpt_oss fine-tuned four ways, float32 [measured on a CPU]", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)


def curve(name: str, steps: int) -> list[float]:
    """Return the loss of each step of a way to train."""
    folder = checkpoint_folder(TINY_NAME)
    run = Run(folder=folder, texts=folder / "heldout.jsonl", out=folder, steps=steps, rate=_RATE)
    tokens = read_tokens(run.folder, run.texts)
    return [round(loss, 7) for loss in _train(WAYS[name](run), run, tokens)]


def _ours(save_percent: int) -> Callable[[Run], nn.Module]:
    def build(run: Run) -> nn.Module:
        return build_model(
            Run(folder=run.folder, texts=run.texts, out=run.out, save_percent=save_percent)
        )

    return build


def _theirs(implementation: Callable[[], str]) -> Callable[[Run], nn.Module]:
    def build(run: Run) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)
        model.set_experts_implementation(implementation())
        trained: nn.Module = model
        return trained.float().train()  # transformers 5.17 gives experts in bfloat16

    return build


def _train(model: nn.Module, run: Run, tokens: Tensor) -> Iterator[float]:
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=run.rate, weight_decay=0.0
    )
    for step in range(run.steps):
        batch = draw_batch(run, tokens, step)
        optimizer.zero_grad()
        output = model(batch[:, :-1])
        logits = output if isinstance(output, Tensor) else output.logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield float(loss.detach())


WAYS: dict[str, Callable[[Run], nn.Module]] = {
    "transformers": _theirs(lambda: "eager"),
    "transformers, save_percent=0": _theirs(lambda: register_experts(save_percent=0)),
    "ours, save_percent=0": _ours(0),
    "ours, save_percent=100": _ours(100),
}

if __name__ == "__main__":
    raise SystemExit(main())
