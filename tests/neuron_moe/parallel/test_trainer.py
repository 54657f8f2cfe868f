"""transformers' Trainer with our experts in the model: losses as with its own, FSDP2 too."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from neuron_moe.transformers_experts import register_experts
from tests.neuron_moe.test_transformers_experts import qwen
from tests.rows import thinned


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Sixteen sequences of random tokens, the last ones of each padding."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(40, (9,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(9) < 9 - index % 3).long()
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": torch.where(mask > 0, tokens, -100),
        }


def losses(folder: Path, implementation: str, **settings: Any) -> list[float]:
    """Return the logged losses of a few steps."""
    torch.manual_seed(0)
    model: Any = qwen()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    model.set_experts_implementation(implementation)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=5,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


WAYS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of two libraries about a CPU
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("save_percent", thinned([None, 0], 2, pytest.mark.slow))
def test_the_trainer_has_the_losses_of_its_own_experts(
    tmp_path: Path, way: str, save_percent: int | None
) -> None:
    wanted = losses(tmp_path, "eager", **WAYS[way])
    found = losses(tmp_path, register_experts(save_percent=save_percent), **WAYS[way])
    assert len(wanted) == 5
    assert wanted[0] > wanted[-1]
    assert found == pytest.approx(wanted, rel=0.02 if way == "bf16" else 2e-5)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.filterwarnings("ignore")
def test_two_processes_train_alike_by_its_ddp_and_by_fsdp2(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_ddp(rank: int, implementation: str) -> list[float]:
        for name, value in {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        return losses(tmp_path, implementation)

    def by_fsdp2(rank: int, implementation: str) -> list[float]:
        """As accelerate does it, which on a CPU takes DDP instead."""
        torch.manual_seed(0)
        model: Any = qwen()
        model.set_experts_implementation(implementation)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(5):
            batch = {name: each[None] for name, each in Texts()[2 * step + rank].items()}
            optimizer.zero_grad()
            loss = model.train()(**batch).loss
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    for way in (by_ddp, by_fsdp2):
        wanted = run_ranks(2, partial(way, implementation="eager"))
        found = run_ranks(2, partial(way, implementation=register_experts(save_percent=0)))
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
