"""FSDP2 over copies of a model whose experts are split, and checkpoints between layouts."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from neuron_moe import MoE
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.sharded.sharding import shard_state_dict
from neuron_moe.train.distributed_state import distributed_state
from neuron_moe.train.gradients import sum_shared_gradients
from tests.neuron_moe.parallel.test_layouts import CUDA_DEVICES, Case, build_layer, reference

CASE = Case(tp=1, ep=2, sp=True, strategy="all_to_all", shared="sp", seq=8)
STEPS = 6


class Model(nn.Module):
    """A layer in a model, as FSDP2 wraps it."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.layer(hidden)[0].clone()
        return output


def batches() -> list[Tensor]:
    """Return [input or target, copy, B, S, H] of each step."""
    generator = torch.Generator().manual_seed(4)
    _, hidden, _ = reference(CASE)
    return [torch.randn(2, 2, *hidden.shape, generator=generator).double() for _ in range(STEPS)]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, mine: list[Tensor], copies: int
) -> list[float]:
    losses = []
    for hidden, target in mine:
        optimizer.zero_grad()
        loss = (model(hidden) - target).square().sum() * copies / 2
        loss.backward()
        sum_shared_gradients(model)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def whole_run() -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of one process, which means over the copies, and its weights at the end."""
    model = Model(reference(CASE)[0].double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for hidden, target in batches():
        optimizer.zero_grad()
        parts = [(model(hidden[copy]) - target[copy]).square().sum() / 2 for copy in range(2)]
        sum(parts).backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(sum(float(part.detach()) for part in parts))
    return losses, model.state_dict()


class Layout(NamedTuple):
    """Copies of the model, ranks its experts are split over, and where they compute."""

    copies: int
    ep: int
    device: str = "cpu"

    def place(self, rank: int) -> torch.device:
        """Start the ranks of GPUs; return where a rank computes."""
        if self.device == "cpu":
            return torch.device("cpu")
        device = torch.device(self.device, rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=self.size)
        return device

    @property
    def size(self) -> int:
        return self.copies * self.ep

    def parts(self, some: list[Tensor], rank: int) -> list[Tensor]:
        """Return what a rank gets: its copy's sequences, all of them for one; of them its share."""
        copy = rank // self.ep
        taken = [each[:, copy] if self.copies > 1 else each.flatten(1, 2) for each in some]
        return [each.tensor_split(self.ep, dim=2)[rank % self.ep] for each in taken]


def build_rank(
    layout: Layout, device: torch.device, *, from_start: bool
) -> tuple[nn.Module, Any, Any]:
    """Return model, optimizer and mesh of a rank: experts over ranks, copies fully sharded."""
    whole = reference(CASE)[0].double().state_dict()
    config = ParallelConfig(ep=layout.ep, sp=True, strategy="all_to_all", replicas=layout.copies)
    parallel_state.initialize_model_parallel(config=config, watch=False)
    mesh = parallel_state.get_device_mesh()
    layer = build_layer(CASE).double()
    if from_start:
        layer.load_state_dict(shard_state_dict(layer, whole))
    model = Model(layer).to(device)
    if layout.copies > 1:
        fully_shard(model, mesh=mesh["replica"])
    return model, torch.optim.Adam(model.parameters(), lr=1e-2), mesh


def quietly(run: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run()


def check(run_ranks: Any, folder: str, before: Layout, after: Layout) -> None:
    """Train in one layout, go on from its checkpoint in another; compare with one process."""
    half = STEPS // 2

    def first(rank: int) -> list[float]:
        device = before.place(rank)
        mine = [each.to(device) for each in before.parts(batches()[:half], rank)]
        model, optimizer, mesh = build_rank(before, device, from_start=True)
        losses = train(model, optimizer, mine, before.copies)
        quietly(lambda: dcp.save(distributed_state(model, mesh, optimizer), checkpoint_id=folder))
        return losses

    def second(rank: int) -> list[float]:
        device = after.place(rank)
        mine = [each.to(device) for each in after.parts(batches()[half:], rank)]
        model, optimizer, mesh = build_rank(after, device, from_start=False)
        state = distributed_state(model, mesh, optimizer)
        quietly(lambda: dcp.load(state, checkpoint_id=folder))
        losses = train(model, optimizer, mine, after.copies)
        quietly(lambda: dcp.save(distributed_state(model, mesh), checkpoint_id=f"{folder}_end"))
        return losses

    def elsewhere(rank: int) -> float:
        model, _, mesh = build_rank(Layout(1, 2), torch.device("cpu"), from_start=False)
        quietly(lambda: dcp.load(distributed_state(model, mesh), checkpoint_id=f"{folder}_end"))
        layer_ends = {name.removeprefix("layer."): weight for name, weight in ends.items()}
        expected = shard_state_dict(model.layer, layer_ends)
        found = model.layer.state_dict()
        return max(float((found[name] - each).abs().max()) for name, each in expected.items())

    losses = []
    for layout, run in ((before, first), (after, second)):
        by_rank = run_ranks(layout.size, run, initialize=layout.device == "cpu")
        losses += [sum(each) / layout.copies for each in zip(*by_rank, strict=True)]
    wanted, ends = whole_run()  # not before: backward starts CUDA, which a fork cannot take along
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-6, atol=0.0)
    assert max(run_ranks(2, elsewhere)) < 1e-9


@pytest.mark.long
def test_sharded_copies_train_alike_and_go_on_from_a_checkpoint(
    run_ranks: Any, tmp_path: Path
) -> None:
    check(run_ranks, str(tmp_path / "state"), Layout(2, 2), Layout(2, 2))


@pytest.mark.long
def test_a_checkpoint_goes_on_in_another_layout(run_ranks: Any, tmp_path: Path) -> None:
    check(run_ranks, str(tmp_path / "state"), Layout(2, 1), Layout(1, 2))


@pytest.mark.skipif(CUDA_DEVICES < 2, reason="needs two CUDA devices")
def test_nccl_ranks_train_alike_and_go_on_from_a_checkpoint(run_ranks: Any, tmp_path: Path) -> None:
    check(run_ranks, str(tmp_path / "state"), Layout(2, 1, "cuda"), Layout(1, 2, "cuda"))
