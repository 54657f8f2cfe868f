"""FSDP2 over copies of a model whose experts are split, and checkpoints between layouts."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(Layout(2, 2), Layout(2, 2), id="the same", marks=pytest.mark.long),
        pytest.param(Layout(2, 1), Layout(1, 2), id="another", marks=pytest.mark.long),
        pytest.param(
            Layout(2, 1, "cuda"),
            Layout(1, 2, "cuda"),
            id="another of GPUs",
            marks=pytest.mark.skipif(CUDA_DEVICES < 2, reason="needs two CUDA devices"),
        ),
    ],
)
def test_training_goes_on_from_a_checkpoint_in_a_layout(
    run_ranks: Any, tmp_path: Path, before: Layout, after: Layout
) -> None:
    """Train in one layout, go on from its checkpoint in another; compare with one process."""
    folder, half = str(tmp_path / "state"), STEPS // 2

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


SPLIT = [
    Case(tp=2, ep=2, router="gpt-oss", shared="fused"),
    Case(tp=1, ep=4, router="gpt-oss", shared="world"),
    Case(tp=3, ep=1, router="gpt-oss", shared="fused"),
    Case(tp=1, ep=2, router="gpt-oss", shared="world"),
]


@pytest.mark.parametrize(
    "before",
    [SPLIT[0], *(pytest.param(case, marks=pytest.mark.long) for case in SPLIT[1:])],
    ids=str,
)
def test_split_experts_are_saved_as_parts_of_the_whole(
    run_ranks: Any, tmp_path: Path, before: Case
) -> None:
    def build(case: Case, *, is_filled: bool) -> tuple[nn.Module, dict[str, Tensor], Any]:
        whole = reference(replace(before, shared=case.shared))[0].state_dict()
        parallel_state.initialize_model_parallel(config=case.config, watch=False)
        layer = build_layer(case)
        mine = shard_state_dict(layer, whole)
        if is_filled:
            layer.load_state_dict(mine)
        optimizer = torch.optim.Adam(layer.parameters())
        state = distributed_state(layer, parallel_state.get_device_mesh(), optimizer)
        for parameter in layer.parameters():
            optimizer.state[parameter]["exp_avg"].copy_(parameter)
        return layer, mine, (state, optimizer)

    def save(rank: int) -> None:
        state, _ = build(before, is_filled=True)[2]
        quietly(lambda: dcp.save(state, checkpoint_id=tmp_path))

    def load(rank: int, after: Case) -> list[str]:
        layer, mine, (state, optimizer) = build(after, is_filled=False)
        quietly(lambda: dcp.load(state, checkpoint_id=tmp_path))
        wrong = [name for name, each in layer.state_dict().items() if not each.equal(mine[name])]
        moments = {
            name: optimizer.state[each]["exp_avg"] for name, each in layer.named_parameters()
        }
        return wrong + [name for name, each in moments.items() if not each.equal(mine[name])]

    run_ranks(before.tp * before.ep, save)
    for after in SPLIT:
        if (after.shared == "fused") == (before.shared == "fused"):
            found = run_ranks(after.tp * after.ep, partial(load, after=after))
            assert found == [[]] * len(found)


def test_parameters_without_a_gradient_have_a_state_like_any_other(tmp_path: Path) -> None:
    def build(has_stepped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"moe": reference(CASE)[0], "idle": nn.Linear(3, 3)})
        optimizer = torch.optim.AdamW(model.parameters())
        if has_stepped:
            model["moe"](torch.ones(1, 4, 48))[0].sum().backward()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (other, resumed) = build(True), build(False)
    idle = model["idle"].weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        dcp.save(distributed_state(model, None, optimizer), checkpoint_id=tmp_path)
        dcp.load(distributed_state(other, None, resumed), checkpoint_id=tmp_path)
    assert torch.equal(model["idle"].weight, idle)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for kind, value in optimizer.state[theirs].items():
            assert torch.equal(resumed.state[mine][kind], value)
    assert int(optimizer.state[model["idle"].weight]["step"]) == 0
