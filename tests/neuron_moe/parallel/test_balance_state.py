"""Selection bias and load counters keep their types and count each training token once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.parallel.collectives import SingleRank
from neuron_moe.train.balance import step_selection_biases, update_selection_bias

E, K, H, T = 8, 2, 16, 40
BIAS = "router.e_score_correction_bias"


def build() -> MoE:
    torch.manual_seed(0)
    config = RoutedExpertsMLPOpsConfig(E, H, 12, K, "silu", True)
    router = RouterTopK(E, K, H, act_fn="sigmoid", selection_bias=True)
    layer = MoE(router, ExpertMLPsV2(config), return_expert_index=True).train()
    with torch.no_grad():
        layer.router.e_score_correction_bias.copy_(6.8 + 0.01 * torch.rand(E))
    return layer


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(1, T, H, generator=torch.Generator().manual_seed(seed))


def load_of(layer: MoE) -> Tensor:
    assert layer.expert_load is not None
    return layer.expert_load


def test_a_model_without_selection_biases_is_refused() -> None:
    with pytest.raises(ValueError, match="of its 0 MoE layers has a selection bias"):
        step_selection_biases(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "cast",
    [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda m: m.to(torch.bfloat16)],
    ids=["half", "bfloat16", "double", "to"],
)
def test_a_cast_of_the_layer_leaves_bias_and_load(cast: Callable[[nn.Module], nn.Module]) -> None:
    layer = build()
    layer.enable_load_counters()
    before_E = layer.state_dict()[BIAS].clone()
    hidden = tokens().to(cast(layer).router.linear_router.weight.dtype)  # type: ignore[union-attr]
    with torch.no_grad():
        layer(hidden)
    assert torch.equal(layer.state_dict()[BIAS], before_E)
    assert load_of(layer).dtype == torch.int64
    assert int(load_of(layer).sum()) == T * K


def test_steps_count_tokens_of_training_alone_and_graphs_are_kept() -> None:
    torch._dynamo.reset()
    layer = build()
    step_selection_biases(layer)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for _ in range(3):
        index_TK = compiled(tokens())[1]
        with torch.no_grad():
            layer.eval()(tokens(2))
        layer.train()
        assert torch.equal(load_of(layer), torch.bincount(index_TK.flatten(), minlength=E))
        step_selection_biases(layer)
    assert graphs["unique_graphs"] - before == 1
    assert int(load_of(layer).sum()) == 0
    layer.enable_load_counters()  # requested: any token
    layer.eval()(tokens())
    assert int(load_of(layer).sum()) == T * K


def recomputed(is_reentrant: bool, is_outside: bool) -> Callable[[MoE], Any]:
    def make(layer: MoE) -> Any:
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

        def run(hidden: Tensor) -> Any:
            inner = compiled if is_outside else layer
            return checkpoint(inner, hidden, use_reentrant=is_reentrant)

        return run if is_outside else torch.compile(run, backend="aot_eager", fullgraph=True)

    return make


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            recomputed(False, is_outside=False), id="checkpoint-in-a-graph", marks=pytest.mark.long
        ),
        pytest.param(recomputed(False, is_outside=True), id="graph-in-a-checkpoint"),
        pytest.param(recomputed(True, is_outside=True), id="reentrant", marks=pytest.mark.long),
    ],
)
def test_compiled_and_computed_again_a_token_counts_once(make: Callable[[MoE], Any]) -> None:
    torch._dynamo.reset()
    layer = build()
    layer.enable_load_counters()
    run = make(layer)
    for _ in range(2):
        run(tokens().requires_grad_())[0].sum().backward()
    assert int(load_of(layer).sum()) == 2 * T * K


def test_a_copy_counts_for_itself_and_the_bias_is_in_the_state_dict() -> None:
    layer = build()
    layer.enable_load_counters()
    layer(tokens())
    other = copy.deepcopy(layer)
    other(tokens())
    assert int(load_of(layer).sum()) * 2 == int(load_of(other).sum())
    assert [name for name in layer.state_dict() if "load" in name or "bias" in name] == [BIAS]
    assert [name for name, _ in layer.named_buffers()] == [BIAS]


class Block(nn.Module):
    """A layer and its residual, as a decoder has them."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        return (hidden + self.layer(hidden)[0],)


def steps(layer: MoE, run: Callable[[Tensor], Any], rank: int, size: int) -> list[float]:
    """Take three steps of two micro-batches; return the biases of rank 0's like."""
    step_selection_biases(layer, 0.1)
    for number in range(3):
        for part in range(2):
            run(tokens(10 * number + part + 100 * rank) + rank)[0].sum().backward()
        step_selection_biases(layer, 0.1, None if size > 1 else SingleRank())
    bias_E: list[float] = layer.state_dict()[BIAS].tolist()
    return bias_E


def of_one_process(size: int) -> list[float]:
    layer = build()

    def everyone(hidden: Tensor) -> Any:  # called as rank 0: the others' tokens follow
        seed = next(seeds)
        parts = [tokens(seed + 100 * rank) + rank for rank in range(size)]
        return layer(torch.cat(parts, dim=1))

    seeds = iter([0, 1, 10, 11, 20, 21])
    return steps(layer, everyone, 0, 1)


def test_copies_of_every_kind_keep_one_bias(run_ranks: Any) -> None:
    def run(rank: int) -> list[list[float]]:
        found = []
        layer = build()
        found.append(steps(layer, DistributedDataParallel(layer), rank, 2))
        layer = build()
        found.append(steps(layer, fully_shard(Block(layer)), rank, 2))
        return found

    wanted = pytest.approx(of_one_process(2), abs=1e-6)
    for found in run_ranks(2, run):
        assert found == [wanted, wanted]


def test_a_replicated_dtensor_moves_as_the_plain_bias_does(run_ranks: Any) -> None:
    def run(rank: int) -> tuple[list[float], list[float], str]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plain, placed = build().router, build().router
        bias_E = placed.e_score_correction_bias
        placed.e_score_correction_bias = distribute_tensor(bias_E, mesh, [Replicate()])
        for router in (plain, placed):
            update_selection_bias(router, torch.arange(E), 0.1)
        moved = placed.e_score_correction_bias
        assert isinstance(moved, DTensor)
        return plain.e_score_correction_bias.tolist(), moved.full_tensor().tolist(), str(rank)

    for plain, placed, _ in run_ranks(2, run):
        assert plain == placed


def test_bf16_of_fully_sharded_parameters_leaves_the_choice_to_the_exact_bias(
    run_ranks: Any,
) -> None:
    def run(rank: int) -> tuple[torch.dtype, int]:
        layer = build().eval()
        wanted = copy.deepcopy(layer).bfloat16()(tokens().bfloat16())[1]
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        seen: list[torch.dtype] = []
        layer.router.register_forward_hook(
            lambda router, *_: seen.append(router.e_score_correction_bias.dtype)
        )
        with torch.no_grad():
            index_TK = layer(tokens())[1]
        return seen[0], int((index_TK.sort().values != wanted.sort().values).sum())

    assert run_ranks(2, run) == [(torch.float32, 0)] * 2
