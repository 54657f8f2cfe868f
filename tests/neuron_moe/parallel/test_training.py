"""Training over ranks: losses and gradients are those of one process.

Everything in float64, so that nothing but another order of sums may differ.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from neuron_moe import MoE
from neuron_moe.parallel import parallel_state
from neuron_moe.router_losses import RouterLosses, auxiliary_loss
from neuron_moe.sharded.sharding import shard_state_dict
from neuron_moe.train.balance import step_selection_biases
from neuron_moe.train.gradients import clip_gradients, sum_shared_gradients
from tests.kernels import NO_TRITON, OLDEST_TRITON
from tests.neuron_moe.parallel.test_layouts import (
    Case,
    H,
    build_layer,
    part_of_rank,
    reference,
)

EXACT = 1e-10  # relative to the largest gradient, in float64
BIAS = "router.e_score_correction_bias"
BIAS_STEP = 1e-2  # of the routers that have a selection bias
LOSSES = RouterLosses(balance=0.3, sequence=0.2, z=0.1)
CASES = [
    Case(tp=1, ep=4, sp=True, strategy="all_to_all", router="glm", shared="sp", seq=13),
    Case(tp=1, ep=4, dp=4, batch=5, strategy="all_to_all", router="qwen3", shared="gated"),
    Case(tp=1, ep=4, strategy="all_to_all", router="deepseek", shared="world", masked=True),
    Case(tp=2, ep=2, sp=True, strategy="all_to_all", shared="sp", seq=13, masked=True),
    Case(tp=2, ep=2, strategy="all_to_all", router="llama4", shared="world"),
    Case(tp=1, ep=4, sp=True, router="mixtral", shared="sp", seq=13),
    Case(tp=2, ep=2, sp=True, shared="world", seq=13, capacity=0.7),
    Case(tp=2, ep=2, router="gpt-oss", masked=True),
    Case(tp=4, ep=1, router="llama4", shared="fused"),
    Case(tp=2, ep=2, dp=2, batch=3, router="glm", shared="sp"),
    Case(tp=1, ep=4, router="mixtral", batch=1, seq=2),  # ranks whose experts nobody chose
    Case(tp=1, ep=4, router="mixtral", batch=1, seq=2, strategy="all_to_all"),
]


def build_whole(case: Case) -> tuple[MoE, Tensor, Tensor | None, Tensor]:
    whole, hidden, mask = reference(case)
    target = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
    whole.use_router_losses(LOSSES)
    return whole.double(), hidden.double(), mask, target.double()


def gradients_of(layer: MoE) -> dict[str, Tensor]:
    """Return a gradient under each name of the state dict, zero where there is none."""
    found = {name: torch.zeros_like(weight) for name, weight in layer.state_dict().items()}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
    return found


def distance(mine: Tensor, wanted: Tensor) -> float:
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return float((mine - wanted).abs().max()) / (scale or 1.0) if wanted.numel() else 0.0


def compare_gradients(case: Case, rank: int, *, is_compiled: bool = False) -> list[str]:
    dtype, exact = (torch.float64, EXACT) if case.backend == "torch" else (torch.float32, 1e-5)
    whole, hidden, mask, target = build_whole(replace(case, backend="torch"))
    hidden.requires_grad_()
    loss = (whole(hidden, mask)[0] * target).sum()
    (loss + auxiliary_loss(whole)).backward()
    parallel_state.initialize_model_parallel(config=case.config, watch=False)
    try:
        layer = build_layer(case).to(dtype)
        layer.use_router_losses(LOSSES)
        layer.load_state_dict(shard_state_dict(layer, whole.to(dtype).state_dict()))
        if is_compiled:
            torch._dynamo.reset()
            layer.compile(backend="aot_eager", fullgraph=True)
        mine = part_of_rank(case, hidden.detach().to(dtype), rank, 4).clone().requires_grad_()
        my_mask = None if mask is None else part_of_rank(case, mask, rank, 4)
        output = layer(mine, my_mask)[0]
        loss = (output * part_of_rank(case, target.to(dtype), rank, 4)).sum()
        (loss + auxiliary_loss(layer)).backward()
        sum_shared_gradients(layer)
        wanted = shard_state_dict(layer, gradients_of(whole))
        errors = {
            name: distance(gradient, wanted[name]) for name, gradient in gradients_of(layer).items()
        }
        assert hidden.grad is not None
        assert mine.grad is not None
        errors["input"] = distance(mine.grad, part_of_rank(case, hidden.grad, rank, 4))
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        errors["norm"] = distance(clip_gradients(layer, 0.1), norm)
        weight, clipped = (each.router.linear_router.weight.grad for each in (layer, whole))
        assert weight is not None
        assert clipped is not None
        errors["clipped"] = distance(weight, clipped)
        return [f"[{case}] {name}: {error:.1e}" for name, error in errors.items() if error > exact]
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("cases", [CASES[:4], pytest.param(CASES[4:], marks=pytest.mark.long)])
def test_gradients_of_every_layout_are_those_of_one_process(
    run_ranks: Any, cases: list[Case]
) -> None:
    def run(rank: int) -> list[str]:
        return list(itertools.chain(*(compare_gradients(case, rank) for case in cases)))

    assert [problem for problems in run_ranks(4, run) for problem in problems] == []


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=mark)
        for case, mark in (
            (Case(tp=2, ep=2, dp=2, batch=4, router="glm", shared="world"), pytest.mark.long),
            (Case(tp=2, ep=2, router="gpt-oss", masked=True), pytest.mark.slow),
            (Case(tp=1, ep=4, sp=True, router="mixtral", shared="sp"), pytest.mark.slow),
        )
    ],
)
def test_gradients_of_a_compiled_layer_are_those_of_one_process(run_ranks: Any, case: Case) -> None:
    found = run_ranks(4, partial(compare_gradients, case, is_compiled=True))
    assert [problem for problems in found for problem in problems] == []


def test_gradients_of_unequal_columns_are_those_of_one_process(run_ranks: Any) -> None:
    case = Case(tp=3, ep=1, router="gpt-oss", shared="fused")
    assert run_ranks(3, lambda rank: compare_gradients(case, rank)) == [[], [], []]


def test_ranks_skip_a_step_together_with_a_scaler_of_all(run_ranks: Any) -> None:
    def scales(rank: int) -> list[float]:
        case = Case(tp=1, ep=2)
        parallel_state.initialize_model_parallel(config=case.config, watch=False)
        layer = build_layer(case)
        before = layer.router.linear_router.weight.detach().clone()
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
        scaler.scale(layer(torch.ones(1, 4, H))[0].sum()).backward()
        gradient = layer.expert_mlps.mlp_op.down_proj.weight.grad
        assert gradient is not None
        if rank == 1:  # an expert of this rank overflows
            gradient[0, 0, 0] = torch.inf
        sum_shared_gradients(layer)
        scaler.step(optimizer)
        scaler.update()
        moved = float((layer.router.linear_router.weight.detach() - before).abs().max())
        return [moved, scaler.get_scale()]

    assert run_ranks(2, scales) == [[0.0, 4.0]] * 2


def loss_of_logits(layer: MoE, hidden: Tensor) -> Tensor:
    layer.return_router_logits = True
    logits = layer(hidden).router_logits
    assert logits is not None
    return logits.square().sum() + auxiliary_loss(layer)


def test_the_norm_of_no_gradients_is_zero() -> None:
    assert clip_gradients(build_whole(CASES[5])[0], max_norm=1.0) == 0.0


@pytest.mark.parametrize("copies", [1, 2, 4], ids="{0}-with-the-same-tokens".format)
def test_a_loss_of_returned_logits_counts_each_token_once(run_ranks: Any, copies: int) -> None:
    case = Case(tp=2, ep=2, dp=4 // copies, batch=4, router="qwen3")

    def run(rank: int) -> float:
        whole, hidden, _, _ = build_whole(case)
        loss_of_logits(whole, hidden).backward()
        wanted = gradients_of(whole)
        parallel_state.initialize_model_parallel(config=case.config, watch=False)
        layer = build_layer(case).double()
        layer.use_router_losses(LOSSES)
        layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
        loss_of_logits(layer, part_of_rank(case, hidden, rank, 4)).backward()
        sum_shared_gradients(layer)
        found = gradients_of(layer)
        parallel_state.destroy_model_parallel()
        routers = [name for name in wanted if name.startswith("router")]
        assert routers
        return max(distance(found[name], wanted[name]) for name in routers)

    assert max(run_ranks(4, run)) < EXACT


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks need Triton's interpreter")
def test_ranks_with_the_cuda_kernels_have_the_gradients_of_one_process(run_ranks: Any) -> None:
    pytest.importorskip("triton", minversion=OLDEST_TRITON, reason=NO_TRITON)
    cases = [replace(CASES[number], backend="cuda") for number in (0, 6)]

    def run(rank: int) -> list[str]:
        return list(itertools.chain(*(compare_gradients(case, rank) for case in cases)))

    assert [problem for problems in run_ranks(4, run) for problem in problems] == []


def train(layer: MoE, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Take a step of Adam and of the balance for each batch; return this rank's losses."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for hidden, target in batches:
        optimizer.zero_grad()
        loss = (layer(hidden)[0] - target).square().sum()
        (loss + auxiliary_loss(layer)).backward()
        sum_shared_gradients(layer)
        optimizer.step()
        if layer.router.e_score_correction_bias is not None:
            step_selection_biases(layer, BIAS_STEP)
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("case", [CASES[0], pytest.param(CASES[6], marks=pytest.mark.long)])
def test_twenty_steps_over_four_ranks_are_those_of_one_process(run_ranks: Any, case: Case) -> None:
    def run(rank: int) -> tuple[float, float]:
        whole, *_ = build_whole(case)
        generator = torch.Generator().manual_seed(5)
        shape = (2, case.batch, case.seq, whole.router.hidden_size)
        batches = [tuple(torch.randn(shape, generator=generator).double()) for _ in range(20)]
        parallel_state.initialize_model_parallel(config=case.config, watch=False)
        layer = build_layer(case).double()
        layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
        start_E = whole.state_dict().get(BIAS, torch.tensor([])).clone()
        wanted = torch.stack(train(whole, batches))
        layer.use_router_losses(LOSSES)
        mine = [tuple(part_of_rank(case, each, rank, 4) for each in batch) for batch in batches]
        losses = torch.stack(train(layer, mine))
        torch.distributed.all_reduce(losses)
        ends = shard_state_dict(layer, whole.state_dict())
        apart = max(distance(weight, ends[name]) for name, weight in layer.state_dict().items())
        parallel_state.destroy_model_parallel()
        if start_E.numel():  # it did move
            assert float((whole.state_dict()[BIAS] - start_E).abs().max()) > 3 * BIAS_STEP
        return float(((losses - wanted) / wanted).abs().max()), apart

    for loss_error, weight_error in run_ranks(4, run):
        assert loss_error < EXACT
        assert weight_error < 1e-7  # Adam divides by gradients that may be close to zero
