"""Fifty steps of training beside torchtitan's layer and those of transformers.

torchtitan is tried where it can be imported: its clone and what it imports on PYTHONPATH.

Axes: B sequences, S tokens of one, H hidden.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import combinations, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from neuron_moe import MoE
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.train.gradients import sum_shared_gradients
from tests.neuron_moe.peers import HIDDEN, INTERMEDIATE, make_peer

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # torchtitan's router
STEPS, SEQUENCES, LENGTH, RATE, ORDERS = 50, 2, 16, 0.02, 5
PEERS = ("mixtral", "gpt_oss", "torchtitan")


class Widened(TorchFunctionMode):
    """Computes in a wider type what a peer narrows by itself, so that its formula is left."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch._grouped_mm:
            return _grouped(*args, **kwargs)
        if function in (Tensor.float, Tensor.bfloat16):
            return args[0].to(self.dtype)
        given = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(self._wide, args), **given)

    def _wide(self, value: Any) -> Any:
        is_narrow = value is torch.float32 or value is torch.bfloat16
        return self.dtype if is_narrow else value


def _grouped(rows_RH: Tensor, weight_EHI: Tensor, offs: Tensor) -> Tensor:
    starts = [0, *offs.tolist()]
    parts = zip(starts[:-1], starts[1:], weight_EHI, strict=True)
    return torch.cat([rows_RH[start:end] @ weight_HI for start, end, weight_HI in parts])


class Flat(nn.Module):
    """A layer of torchtitan, which takes [T, H]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.layer(hidden.flatten(0, 1))
        return output


def pair(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return a peer's layer and ours with the same weights, ready to train."""
    torch.manual_seed(0)
    if name != "torchtitan":
        peer = make_peer(name)
        ours = peer.build(peer.layer, torch.float32)
        return peer.layer.to(dtype).train(), ours.to(dtype).train()
    from tests.neuron_moe.titan import titan_layers

    theirs, mine = titan_layers(HIDDEN, INTERMEDIATE)
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # it narrows within
    return Flat(theirs).to(wide).train(), Flat(mine).to(wide).train()


def batches(order: int) -> Iterator[Tensor]:
    """Yield the micro-batches of each step, [SEQUENCES, 2, 1, LENGTH, H] inputs and targets.

    An order shuffles the tokens of a step over its micro-batches.
    """
    generator = torch.Generator().manual_seed(3)
    shuffle = torch.Generator().manual_seed(order)
    for _ in range(STEPS):
        both = torch.randn(2, SEQUENCES * LENGTH, HIDDEN, generator=generator)
        places = torch.randperm(SEQUENCES * LENGTH, generator=shuffle)
        yield both[:, places].view(2, SEQUENCES, 1, LENGTH, HIDDEN).transpose(0, 1)


def train(
    layer: nn.Module, dtype: torch.dtype, order: int = 0, part: tuple[int, int] = (0, 1)
) -> Tensor:
    """Return the loss of each step, [STEPS] float64; of a rank of several, its part."""
    rank, ranks = part
    optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
    own = next(layer.parameters()).dtype
    losses = []
    is_peer = not any(isinstance(each, MoE) for each in layer.modules())
    is_wide = is_peer and dtype != torch.bfloat16
    for batch in batches(order):
        optimizer.zero_grad()
        total = 0.0
        for hidden, target in batch[:, :, :, rank::ranks]:
            narrow = torch.autocast("cpu", torch.bfloat16, enabled=own != dtype)
            with narrow, Widened(dtype) if is_wide else nullcontext():
                output = layer(hidden.to(own))
            output = (output[0] if isinstance(output, tuple) else output).view(hidden.shape)
            loss = (output.double() + hidden - target).square().mean() / (SEQUENCES * ranks)
            loss.backward()
            total += float(loss.detach())
        sum_shared_gradients(layer)
        optimizer.step()
        losses.append(total)
    return torch.tensor(losses, dtype=torch.float64)


def need(name: str) -> None:
    if name == "torchtitan":
        pytest.importorskip("torchtitan.models.common.moe", reason="torchtitan is not here")


@pytest.mark.long
@pytest.mark.parametrize("name", PEERS)
def test_losses_in_float64_are_those_of_the_peer_over_ranks_too(run_ranks: Any, name: str) -> None:
    need(name)
    theirs, ours = pair(name, torch.float64)
    wanted = train(theirs, torch.float64)
    assert float((train(ours, torch.float64) - wanted).abs().max()) < 1e-9
    assert float(wanted[0] - wanted[-1]) > 0.1  # it did learn

    def run(rank: int, ranks: int) -> float:
        config = ParallelConfig(ep=ranks, dp=ranks, strategy="all_to_all")
        parallel_state.initialize_model_parallel(config=config, watch=False)
        losses = train(pair(name, torch.float64)[1], torch.float64, part=(rank, ranks))
        dist.all_reduce(losses)
        parallel_state.destroy_model_parallel()
        return float((losses - wanted).abs().max())

    for ranks in (2, 4):
        assert max(run_ranks(ranks, partial(run, ranks=ranks))) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PEERS)
def test_rounded_losses_are_within_the_spread_of_the_peer_and_as_exact(
    name: str, dtype: torch.dtype
) -> None:
    """Each order of ours is as near to the mean of the peer's five orders as the two of these that
    are farthest apart are to each other; and the median order has no larger error than the peer's,
    but for the median of these distances.

    Distances and errors are root mean squares over all steps. torchtitan in bfloat16 [measured on a
    CPU]: ours 0.0092 to 0.0096 from its mean, errors 0.0060 to 0.0066; its orders up to 0.040
    apart, errors 0.0065 to 0.0074 and 0.040, for in one a router's near tie falls otherwise. The
    other four are within 0.003 of each other, which is not within our reach: an order moves no
    token's forward pass, so all round it alike, and torchtitan rounds activations once more.
    """
    need(name)
    exact = train(pair(name, torch.float64)[1], torch.float64)
    theirs, mine = [], []
    for order in range(ORDERS):
        for found, layer in zip((theirs, mine), pair(name, dtype), strict=True):
            found.append(train(layer, dtype, order) - exact)

    def sizes(curves: list[Tensor]) -> Tensor:
        return torch.stack(curves).square().mean(1).sqrt()

    mean = torch.stack(theirs).mean(0)
    apart = sizes([one - other for one, other in combinations(theirs, 2)])
    assert float(sizes([each - mean for each in mine]).max()) <= float(apart.max())
    assert float(sizes(mine).median()) <= float(sizes(theirs).median() + apart.median())


@pytest.mark.long
def test_a_step_in_bfloat16_rounds_no_more_than_torchtitans() -> None:
    """Output and gradients from the same weights, over ten steps: nothing that rounds adds up."""
    need("torchtitan")
    exact = pair("torchtitan", torch.float64)[1]
    layers = dict(zip(("theirs", "mine"), pair("torchtitan", torch.bfloat16), strict=True))
    errors: dict[tuple[str, str], list[float]] = {}
    for batch in islice(batches(0), 10):
        state = {name: value.float() for name, value in exact.state_dict().items()}
        exact.load_state_dict(state)
        wanted = step_of(exact, batch[0], torch.float64)
        for who, layer in layers.items():
            layer.load_state_dict(state)
            for name, value in step_of(layer, batch[0], torch.float32).items():
                error = float((value - wanted[name]).norm() / wanted[name].norm())
                errors.setdefault((name, who), []).append(error)
        with torch.no_grad():
            for parameter in exact.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    for name in wanted:
        theirs, mine = (sum(errors[name, who]) for who in ("theirs", "mine"))
        assert mine < 1.1 * theirs, (name, mine / 10, theirs / 10)


def step_of(layer: nn.Module, batch: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return output and gradients in float64, those of weights under torchtitan's names."""
    hidden, target = batch[0].to(dtype).requires_grad_(), batch[1]
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float64):
        output = layer(hidden).view(hidden.shape)
    (output.double() + hidden.double() - target).square().mean().backward()
    gradients = copy.deepcopy(layer)
    with torch.no_grad():
        for there, here in zip(gradients.parameters(), layer.parameters(), strict=True):
            there.copy_(torch.zeros_like(here) if here.grad is None else here.grad)
    found = {name: value.double() for name, value in gradients.state_dict().items()}
    found = {name: value for name, value in found.items() if bool(value.any())}
    assert hidden.grad is not None
    return {**found, "output": output.detach().double(), "hidden": hidden.grad.double()}
