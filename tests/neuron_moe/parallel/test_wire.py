"""What passes through the collectives is what the formulas say."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lab.bench.wire_counter import count_wire, socket_bytes
from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK, SharedExperts
from neuron_moe.dispatch.all_to_all import destinations
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.planner.wire import (
    WireSizes,
    all_to_all_bytes,
    expected_ranks_per_token,
    naive_bytes,
    replicated_bytes,
    sequence_bytes,
)

T, H, K, E = 192, 64, 4, 32
FLOAT = 4


def build_layer(config: ParallelConfig, dtype: torch.dtype = torch.float32) -> MoE:
    torch.manual_seed(0)
    experts = RoutedExpertsMLPOpsConfig(E, H, 32, K, "silu", True)
    return MoE(
        RouterTopK(E, K, H),
        ExpertMLPsV2(experts, dtype=dtype),
        sequence_parallel_enabled=config.sp,
    )


def sizes_of(config: ParallelConfig, num_bytes: int = FLOAT) -> WireSizes:
    return WireSizes(
        tokens=T,
        hidden_size=H,
        top_k=K,
        num_experts=E,
        tp=config.tp,
        ep=config.ep,
        hidden_bytes=num_bytes,
        reduce_bytes=num_bytes,
    )


def measure(config: ParallelConfig, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Return the bytes of one forward on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(config=config, watch=False)
    layer = build_layer(config, dtype)
    hidden = torch.randn(1, T, H, generator=torch.Generator().manual_seed(1)).to(dtype)
    tally = count_wire(layer)
    layer(hidden.tensor_split(size, dim=1)[rank] if config.sp else hidden)
    parallel_state.destroy_model_parallel()
    return dict(tally.bytes_by_collective)


def exact_all_to_all(config: ParallelConfig, index_TK: Tensor, rank: int) -> int:
    """Count the rows of an all-to-all straight from the routing of all tokens."""
    tp, ep, ranks = config.tp, config.ep, config.model_size
    hits_TD = destinations(index_TK, E // ep, ep)
    owner_T = torch.arange(T) // (T // ranks)
    rows = torch.zeros(ranks, ep, dtype=torch.int64).index_add(0, owner_T, hits_TD.long())
    tensor_rank, expert_rank = rank % tp, rank // tp
    same_slice = [source * tp + tensor_rank for source in range(ep)]
    arriving = int(rows[same_slice, expert_rank].sum()) - int(rows[rank, expert_rank])
    returning = int(rows[rank].sum()) - int(rows[rank, expert_rank])
    slot = max(int(rows[other::tp, expert_rank].sum()) for other in range(tp))
    there, back = H * FLOAT + 8 * K, H * FLOAT
    counts = (ep - 1) * ep * 4 + (tp - 1) * ep * ep * 4 + (ranks - 1) * 8
    return arriving * there + returning * back + (tp - 1) * slot * (there + back) + counts


LAYOUTS = [(1, 8), (2, 4), (4, 2), (8, 1)]


def measure_everything(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with torch.no_grad():
        for tp, ep in LAYOUTS:
            for name, sp, strategy in (
                ("all-reduce", False, "replicate"),
                ("replicate", True, "replicate"),
                ("all-to-all", True, "all_to_all"),
            ):
                config = ParallelConfig(tp=tp, ep=ep, sp=sp, strategy=strategy)
                found[f"{name} {tp}x{ep}"] = measure(config)
        found["bf16"] = measure(ParallelConfig(tp=2, ep=4, sp=True), torch.bfloat16)
        hidden = torch.randn(1, T, H, generator=torch.Generator().manual_seed(1))
        layer = build_layer(ParallelConfig())
        found["index"] = layer.router(hidden).expert_index_TK.tolist()
    return found


def test_measured_bytes_equal_the_formulas(run_ranks: Any) -> None:
    results = run_ranks(8, measure_everything)
    lengths = 7 * 8  # each rank tells the others how many tokens it has, 8 bytes
    for tp, ep in LAYOUTS:
        config = ParallelConfig(tp=tp, ep=ep)
        sizes = sizes_of(config)
        mean = 0.0
        for rank, found in enumerate(results):
            measured = {
                key: sum(found[f"{key} {tp}x{ep}"].values())
                for key in ("all-reduce", "replicate", "all-to-all")
            }
            assert measured["all-reduce"] == replicated_bytes(sizes)
            assert measured["replicate"] == sequence_bytes(sizes) + lengths
            exact = exact_all_to_all(config, torch.tensor(found["index"]), rank)
            assert measured["all-to-all"] == exact
            mean += measured["all-to-all"] / 8
        spread = expected_ranks_per_token(E, K, ep)
        computed = all_to_all_bytes(sizes, spread, 1 / ep)
        assert mean == pytest.approx(computed, rel=0.12)  # 192 tokens: sampling, and row slots
    narrow = sizes_of(ParallelConfig(tp=2, ep=4), 2)
    assert all(sum(found["bf16"].values()) == sequence_bytes(narrow) + lengths for found in results)


def test_the_naive_gather_moves_e_over_2k_times_the_routing(run_ranks: Any) -> None:
    def gather_logits(rank: int) -> int:
        parallel_state.initialize_model_parallel(1, expert_model_parallel_size=8, watch=False)
        config = ParallelConfig(ep=8, sp=True)
        layer = build_layer(config)
        tally = count_wire(layer)
        own = torch.randn(T // 8, H)
        logits = layer.groups["prefill"].model.all_gather(layer.router(own).router_logits_TE)
        assert logits.shape == (T, E)
        parallel_state.destroy_model_parallel()
        return tally.total

    sizes = sizes_of(ParallelConfig(ep=8))
    routing = 7 * (T // 8) * K * 8
    for measured in run_ranks(8, gather_logits):
        assert measured == naive_bytes(sizes) - (sequence_bytes(sizes) - routing)
        assert measured / routing == E / (2 * K)


def test_sockets_carry_what_the_counter_says(run_ranks: Any) -> None:
    rows, columns = 4096, 256

    def carried(rank: int) -> dict[str, tuple[int, int]]:
        groups = parallel_state.initialize_model_parallel(
            1, expert_model_parallel_size=4, watch=False
        )
        x = torch.ones(rows, columns)
        found = {}
        for name, call, wanted in (
            ("all_gather", lambda: groups.model.all_gather(x), 3 * x.nbytes),
            (
                "all_to_all",
                lambda: groups.model.all_to_all(x, [rows // 4] * 4, [rows // 4] * 4),
                3 * x.nbytes // 4,
            ),
            # gloo reduces everything everywhere and keeps a part: twice what is needed.
            ("reduce_scatter", lambda: groups.model.reduce_scatter(x), 2 * 3 * x.nbytes // 4),
            ("all_reduce", lambda: groups.model.all_reduce(x), 6 * x.nbytes // 4),
        ):
            dist.barrier()
            before = socket_bytes()
            call()
            dist.barrier()
            found[name] = (socket_bytes() - before, wanted)
            dist.barrier()  # a rank that ends would take its sockets with it
        parallel_state.destroy_model_parallel()
        return found

    for found in run_ranks(4, carried):
        for name, (measured, wanted) in found.items():
            assert measured == pytest.approx(wanted, rel=0.02), name


def test_each_token_crosses_once_however_many_experts_it_has_there() -> None:
    index_TK = torch.tensor([[0, 1, 2, 3], [0, 4, 8, 12], [-1, -1, -1, -1], [3, 3, 9, 8]])
    hits_TD = destinations(index_TK.int(), 4, 4)
    assert hits_TD.long().tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]


@pytest.mark.parametrize(("ep", "wanted"), [(1, 1.0), (32, 4.0)])
def test_ranks_per_token_at_the_ends(ep: int, wanted: float) -> None:
    assert expected_ranks_per_token(E, K, ep) == pytest.approx(wanted)


def test_ranks_per_token_agrees_with_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(20000)])
    for ep in (2, 4, 8):
        mean = destinations(draws.int(), E // ep, ep).sum(1).float().mean()
        assert float(mean) == pytest.approx(expected_ranks_per_token(E, K, ep), rel=0.01)


def test_shared_experts_add_their_own_gather_under_all_to_all(run_ranks: Any) -> None:
    def measured(rank: int) -> int:
        config = ParallelConfig(tp=2, ep=2, sp=True, strategy="all_to_all")
        parallel_state.initialize_model_parallel(config=config, watch=False)
        layer = build_layer(config)
        layer.shared_experts = SharedExperts(H, 32, 1, "silu")
        tally = count_wire(layer)
        with torch.no_grad():
            layer(torch.randn(1, T // 4, H))
        parallel_state.destroy_model_parallel()
        return tally.calls["reduce_scatter"]

    assert run_ranks(4, measured) == [2] * 4
