"""The protocol of four collectives: dtypes, uneven parts, gradients, graphs, shuffles, NxD."""

import itertools
import sys
import types
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lab.bench.wire_counter import WireCounter, WireTally
from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.dispatch import Own, Rows, TokenBatch, build_dispatches
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.parallel.collectives import (
    Collectives,
    SingleRank,
    all_gather_rows,
    as_collectives,
    enter_common,
    gather_common,
    gather_lengths,
    reduce_scatter_rows,
    share_common,
    sum_common,
)
from neuron_moe.router import Routing
from neuron_moe.sharded.sharding import shard_state_dict


def small_layer(**settings: Any) -> MoE:
    torch.manual_seed(0)
    config = RoutedExpertsMLPOpsConfig(8, 16, 32, 2, "silu", True)
    return MoE(RouterTopK(8, 2, 16), ExpertMLPsV2(config), **settings)


def test_one_rank_and_counters_follow_the_protocol() -> None:
    single = SingleRank()
    assert isinstance(single, Collectives)
    assert isinstance(WireCounter(single, WireTally()), Collectives)
    x = torch.randn(3, 2)
    assert single.all_to_all(x, [3], [3]) is x
    assert all_gather_rows(single, x, [3]) is x
    assert reduce_scatter_rows(single, x, [3]) is x


def exercise(rank: int) -> list[str]:
    groups = parallel_state.initialize_model_parallel(4, watch=False)
    group, problems = groups.model, []

    def check(name: str, is_right: bool) -> None:
        if not is_right:
            problems.append(name)

    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn):
        x = torch.full((2, 3), float(rank)).to(dtype)
        gathered = group.all_gather(x).float()
        check(f"all_gather {dtype}", gathered[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3])
        moved = group.all_to_all(torch.full((4, 2), float(rank)).to(dtype), [1] * 4, [1] * 4)
        check(f"all_to_all {dtype}", moved.float()[:, 0].tolist() == [0, 1, 2, 3])
    check("all_reduce", group.all_reduce(torch.full((2,), float(rank))).tolist() == [6, 6])
    check(
        "reduce_scatter", group.reduce_scatter(torch.arange(4.0) + rank).tolist() == [4 * rank + 6]
    )
    x = torch.ones(3)
    group.all_reduce(x)
    check("input unchanged", x.tolist() == [1, 1, 1])

    lengths = [3, 0, 1, 2]
    own = torch.full((lengths[rank], 2), float(rank))
    check("lengths", gather_lengths(group, lengths[rank], own.device) == (3, 0, 1, 2))
    rows = all_gather_rows(group, own, lengths)
    check("all_gather_rows", rows[:, 0].tolist() == [0, 0, 0, 2, 3, 3])
    part = reduce_scatter_rows(group, torch.arange(6.0).unsqueeze(1), lengths)
    start = sum(lengths[:rank])
    check(
        "reduce_scatter_rows",
        part[:, 0].tolist() == [4.0 * (start + i) for i in range(lengths[rank])],
    )
    uneven = group.all_to_all(torch.full((rank * 4, 1), float(rank)), [rank] * 4, [0, 1, 2, 3])
    check("uneven all_to_all", uneven[:, 0].tolist() == [1, 2, 2, 3, 3, 3])

    for name, call, error in (
        ("float8 sum", lambda: group.all_reduce(torch.ones(2).to(torch.float8_e5m2)), ValueError),
        ("uneven scatter", lambda: group.reduce_scatter(torch.ones(5)), ValueError),
    ):
        try:
            call()
            problems.append(f"{name}: not refused")
        except error:
            pass
    parallel_state.destroy_model_parallel()
    return problems


def test_every_dtype_and_uneven_parts_travel(run_ranks: Any) -> None:
    assert run_ranks(4, exercise) == [[]] * 4


def test_the_device_mesh_has_the_same_ranks(run_ranks: Any) -> None:
    def ranks(rank: int) -> tuple[bool, bool]:
        groups = parallel_state.initialize_model_parallel(
            2, expert_model_parallel_size=2, watch=False
        )
        mesh = parallel_state.get_device_mesh()
        found = [tuple(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in ("tp", "ep")]
        parallel_state.destroy_model_parallel()
        return found[0] == groups.tensor.ranks, found[1] == groups.expert.ranks

    assert run_ranks(4, ranks) == [(True, True)] * 4


def test_a_gradient_through_a_bare_method_raises_instead_of_being_wrong(run_ranks: Any) -> None:
    def backward(rank: int) -> str:
        parallel_state.initialize_model_parallel(2, watch=False)
        group = as_collectives(parallel_state.get_world_group(), "world")
        summed = group.all_reduce(torch.ones(3, requires_grad=True))
        try:
            summed.sum().backward()
        except NotImplementedError as error:
            return str(error)
        return "no error"

    for message in run_ranks(2, backward):
        assert "through a method of Collectives" in message


@pytest.mark.long
def test_gradients_in_a_compiled_graph_are_those_outside(run_ranks: Any) -> None:
    def work(group: Collectives, x: Tensor) -> Tensor:
        x = enter_common(group, x)
        rows = all_gather_rows(group, x * (group.rank + 1), [3, 3])
        part = reduce_scatter_rows(group, rows.square(), [3, 3])
        whole = gather_common(group, part, [3, 3])
        return sum_common(group, (group.rank + 2) * x).square().sum() + whole.sum()

    def differ(rank: int) -> float:
        group = as_collectives(dist.group.WORLD, "world")
        compiled = torch.compile(partial(work, group), backend="aot_eager", fullgraph=True)
        gradients = []
        for each in (partial(work, group), compiled):
            x = torch.arange(3.0, requires_grad=True)
            loss = share_common(group, each(x))
            gradients += torch.autograd.grad(loss, x)
        return float((gradients[0] - gradients[1]).abs().max())

    assert run_ranks(2, differ) == [0.0, 0.0]


def test_replicate_and_reduce_exports_and_all_to_all_says_why_not(run_ranks: Any) -> None:
    def export(rank: int) -> list[str]:
        found = []
        hidden = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(1))
        for config in (
            ParallelConfig(tp=2, ep=2),
            ParallelConfig(tp=2, ep=2, sp=True),
            ParallelConfig(ep=4, strategy="all_to_all"),
        ):
            parallel_state.initialize_model_parallel(config=config, watch=False)
            layer = small_layer(sequence_parallel_enabled=config.sp).eval().requires_grad_(False)
            mine = hidden.chunk(4, 1)[rank].contiguous() if config.sp else hidden
            try:
                with torch.no_grad():
                    wanted = layer(mine)[0]
                    graph = torch.export.export(layer, (mine,), strict=False)
                    error = (graph.module()(mine)[0] - wanted).abs().max()
                found.append("equal" if float(error) < 1e-6 else f"error {float(error)}")
                names = {str(node.target) for node in graph.graph.nodes}
                found.append(" ".join(sorted(n for n in names if "c10d" in n)))
            except ValueError as error:
                found.append(str(error))
            parallel_state.destroy_model_parallel()
        return found

    for found in run_ranks(4, export):
        assert found[0] == found[2] == "equal"
        assert "all_reduce" in found[1]
        assert "all_gather" in found[3]
        assert "reduce_scatter" in found[3]
        assert "Use strategy='replicate' for torch.export" in found[4]


def test_shuffled_tokens_come_home(run_ranks: Any) -> None:
    def shuffled(rank: int) -> list[bool]:
        hidden = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))
        mask = (torch.rand(2, 16, generator=torch.Generator().manual_seed(2)) > 0.3).float()
        wanted = small_layer()(hidden, mask)[0].chunk(4, 1)[rank]
        same = []
        for strategy in ("replicate", "all_to_all"):
            config = ParallelConfig(tp=2, ep=2, sp=True, strategy=strategy)
            parallel_state.initialize_model_parallel(config=config, watch=False)
            parallel_state.initialize_token_shuffle_group(2)
            settings = {"sequence_parallel_enabled": True, "return_expert_index": True}
            plain = small_layer(**settings)
            mixed = small_layer(token_shuffle_group_size=2, token_shuffle_seed=5, **settings)

            for layer in (plain, mixed):
                layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
            mine, my_mask = hidden.chunk(4, 1)[rank], mask.chunk(4, 1)[rank]
            first, second = plain(mine, my_mask), mixed(mine, my_mask)
            same.append(bool(torch.equal(first.expert_index, second.expert_index)))
            same.append(bool(torch.allclose(second.output, wanted, atol=1e-6)))
            parallel_state.destroy_model_parallel()
        return same

    whole = small_layer()
    with torch.no_grad():
        assert run_ranks(4, shuffled) == [[True] * 4] * 4


def test_groups_of_an_initialised_nxd_are_taken_over(run_ranks: Any) -> None:
    def adopt(rank: int) -> tuple[int, int, bool]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        strided = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        nxd = types.ModuleType("neuronx_distributed.parallel_layers.parallel_state")
        nxd.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
        nxd.get_tensor_model_parallel_group = lambda: groups[rank // 2]  # type: ignore[attr-defined]
        nxd.get_expert_model_parallel_group = lambda: strided[rank % 2]  # type: ignore[attr-defined]
        nxd.get_expert_model_parallel_size = lambda: 2  # type: ignore[attr-defined]
        nxd.get_world_group = lambda: dist.group.WORLD  # type: ignore[attr-defined]
        whole = small_layer()  # afterwards a layer would take NxD's groups
        for name in ("neuronx_distributed", "neuronx_distributed.parallel_layers"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[nxd.__name__] = nxd
        hidden = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            wanted = whole(hidden)[0]
            parallel_state.adopt_nxd_groups()

            layer = small_layer()
            layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
            is_equal = torch.allclose(layer(hidden)[0], wanted, atol=1e-6)
        experts = layer.expert_mlps
        return experts.shard.tp_rank, experts.shard.ep_rank, bool(is_equal)

    assert run_ranks(4, adopt) == [(0, 0, True), (1, 0, True), (0, 1, True), (1, 1, True)]


def test_explicit_groups_work_without_parallel_state(run_ranks: Any) -> None:
    def explicit(rank: int) -> bool:
        tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        expert = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        hidden = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1))
        whole = small_layer()

        with torch.no_grad():
            experts = ExpertMLPsV2(
                whole.expert_mlps.config,
                tensor_model_parallel_group=tensor,
                expert_model_parallel_group=expert,
                strategy="all_to_all",
            )
            layer = MoE(RouterTopK(8, 2, 16), experts, tensor_model_parallel_group=dist.group.WORLD)
            layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
            return bool(torch.allclose(layer(hidden)[0], whole(hidden)[0], atol=1e-6))

    assert run_ranks(4, explicit) == [True] * 4


def test_partial_sums_are_summed_in_the_dtype_asked_for(run_ranks: Any) -> None:
    """In float32 a sum is rounded once; in bfloat16 once for each rank."""

    def of_both_experts(own: Own) -> tuple[Rows, Routing]:
        num_own = own.hidden_TH.shape[0]
        index_TK = torch.tensor([[0, 1]], dtype=torch.int32).repeat(num_own, 1)
        ones_TK = torch.ones(num_own, 2)
        return Rows(own.hidden_TH, index_TK, ones_TK), Routing(ones_TK, ones_TK, index_TK)

    def sums(rank: int) -> list[bool]:
        generator = torch.Generator().manual_seed(3)
        partial_RH = torch.randn(4, 256, generator=generator).bfloat16()
        exact_H = partial_RH.double().sum(0).bfloat16()
        is_exact = []
        for strategy, dtype in itertools.product(
            ("replicate", "all_to_all"), (torch.float32, None)
        ):
            config = ParallelConfig(tp=2, ep=2, strategy=strategy)
            groups = parallel_state.initialize_model_parallel(config=config, watch=False)
            way = build_dispatches(
                {"prefill": groups.prefill, "decode": groups.decode}, 2, None, dtype
            )["prefill"]
            batch = TokenBatch(partial_RH, 1, None, "prefill", False, ())
            entered = way.enter(way.tokens(batch, dict), of_both_experts)
            partial_NH = partial_RH[rank].expand(len(entered.rows.hidden_TH), -1)
            result_TH, _ = way.leave(partial_NH.contiguous(), entered, None)
            is_exact.append(bool((result_TH == exact_H).all()))
            parallel_state.destroy_model_parallel()
        return is_exact

    assert run_ranks(4, sums) == [[True, False, True, False]] * 4
