"""The shipped tiny model in transformers' Trainer with our experts; under torchrun by FSDP2.

    python -m lab.train.trainer --batch 4
    torchrun --nproc-per-node 2 -m lab.train.trainer --batch 2    # the same losses

accelerate shards over GPUs, one a process, and keeps copies (DDP) where there are none.
"""

import os
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils.quantization_config import Mxfp4Config

from lab.train.train import Run, draw_batch, read_tokens
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.tools.parsers import Parser
from neuron_moe.transformers_experts import register_experts

_FSDP2: dict[str, Any] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GptOssDecoderLayer"]},
}


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Sequences of the held-out texts, drawn by their number."""

    def __init__(self, length: int) -> None:
        folder = checkpoint_folder(TINY_NAME)
        self.run = Run(folder=folder, texts=folder / "heldout.jsonl", out=folder, batch=1)
        self.tokens = read_tokens(self.run.folder, self.run.texts)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = draw_batch(self.run, self.tokens, index)[0]
        return {"input_ids": tokens, "labels": tokens}


def main(argv: list[str] | None = None) -> int:
    """Train; print the losses; return the exit status."""
    parser = Parser("trainer", __doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a process in a step")
    parser.add_argument("--own-experts", action="store_true", help="transformers', not ours")
    args = parser.parse_args(argv)
    losses = train(args.steps, args.batch, is_ours=not args.own_experts)
    if losses:
        print("losses", *(f"{loss:.6f}" for loss in losses))
    return 0


def train(steps: int, batch: int, *, is_ours: bool) -> list[float]:
    """Return the losses that the first process logged; of others none."""
    has_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint_folder(TINY_NAME),
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    )
    nn.Module.float(model)  # transformers 5.17 gives experts in bfloat16
    ours = register_experts("cuda" if has_gpu else "torch", save_percent=0)
    model.set_experts_implementation(ours if is_ours else "eager")
    is_spread = has_gpu and int(os.environ.get("WORLD_SIZE", "1")) > 1
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=not has_gpu,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **(_FSDP2 if is_spread else {}),
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Texts(1000))
        trainer.train()
    is_first = arguments.process_index == 0
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and is_first]


if __name__ == "__main__":
    raise SystemExit(main())
