"""Every layout computes what one process computes, and every rank agrees.

Processes are started once per test; the grid runs inside, a failure names its case.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from neuron_moe import (
    ExpertMLPsV2,
    GroupLimitedRouter,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    SharedExperts,
)
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.parallel.placement import ExpertPlacement, place_experts
from neuron_moe.sharded.sharding import shard_state_dict
from tests.neuron_moe.parallel.one_copy import CopyError, check_one_copy
from tests.ranks import cuda_devices

H, I, E = 48, 64, 16  # noqa: E741  the axis letters of the project
ROUNDING = (
    2e-6  # relative to the largest output: sums of a few dozen float32 terms in another order
)

ROUTERS: dict[str, Callable[[], Any]] = {
    "gpt-oss": lambda: RouterTopK(E, 4, H, bias=True, apply_act_fn_over_topk=True),
    "llama4": lambda: RouterTopK(E, 1, H, act_fn="sigmoid"),
    "qwen3": lambda: RouterTopK(E, 4, H),
    "mixtral": lambda: RouterTopK(E, 2, H, renormalize=True),
    "glm": lambda: RouterTopK(
        E, 4, H, act_fn="sigmoid", selection_bias=True, renormalize=True, routed_scaling_factor=1.5
    ),
    "deepseek": lambda: GroupLimitedRouter(
        E, 4, H, n_group=4, topk_group=2, renormalize=True, routed_scaling_factor=2.5
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the grid."""

    tp: int
    ep: int
    sp: bool = False
    dp: int = 1
    strategy: str = "replicate"
    router: str = "gpt-oss"
    shared: str = "none"
    batch: int = 2
    seq: int = 8
    masked: bool = False
    capacity: float | None = None
    replicas: bool = False
    decode_tp: int | None = None
    decode_ep: int | None = None
    backend: str = "torch"

    def __str__(self) -> str:
        given = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join(given)

    @property
    def config(self) -> ParallelConfig:
        return ParallelConfig(
            tp=self.tp,
            ep=self.ep,
            sp=self.sp,
            dp=self.dp,
            strategy=self.strategy,
            decode_moe_tp=self.decode_tp,
            decode_moe_ep=self.decode_ep,
        )


def build_layer(case: Case, placement: ExpertPlacement | None = None) -> MoE:
    router = ROUTERS[case.router]()
    early = case.router == "llama4"
    experts = ExpertMLPsV2(
        RoutedExpertsMLPOpsConfig(
            num_experts=E,
            top_k=router.top_k,
            hidden_size=H,
            intermediate_size=I,
            hidden_act="swiglu" if case.router == "gpt-oss" else "silu",
            glu_mlp=True,
            bias=case.router == "gpt-oss",
            normalize_top_k_affinities=case.router == "qwen3",
            early_expert_affinity_modulation=early,
            capacity_factor=case.capacity,
        ),
        sequence_parallel_enabled=case.sp,
        placement=placement,
        backend=case.backend,
    )
    shared = None
    if case.shared != "none":
        world = parallel_state.get_world_group() if case.shared == "world" else None
        shared = SharedExperts(
            H,
            32,
            2,
            "silu",
            tensor_model_parallel_group=world,
            fused_gate_up_projection=case.shared == "fused",
            sequence_parallel_enabled=case.shared == "sp",
            is_gated=case.shared == "gated",
        )
    return MoE(router, experts, shared, sequence_parallel_enabled=case.sp)


def reference(case: Case) -> tuple[MoE, Tensor, Tensor | None]:
    """Return the layer in one process, its input and its mask; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    layer = build_layer(case)
    with torch.no_grad():
        for parameter in (*layer.parameters(), *layer.buffers()):
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.6 - 0.3)
    hidden = torch.randn(case.batch, case.seq, H, generator=generator)
    mask = None
    if case.masked:
        mask = (torch.rand(case.batch, case.seq, generator=generator) > 0.4).float()
    return layer, hidden, mask


def part_of_rank(case: Case, tensor: Tensor, rank: int, size: int) -> Tensor:
    """Return what a rank holds of [B, S, ..]: uneven parts are allowed."""
    if case.sp:
        return tensor.tensor_split(size, dim=1)[rank]
    if case.dp > 1:
        return tensor.tensor_split(case.dp, dim=0)[rank * case.dp // size]
    return tensor


def run_case(case: Case, device: str = "cpu") -> str | None:
    """Run one case on this rank; return what is wrong with it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, hidden, mask = reference(case)
    wanted = whole(hidden, mask)[0].to(device)
    whole, hidden = whole.to(device), hidden.to(device)
    mask = None if mask is None else mask.to(device)
    scale = float(wanted.abs().max())
    placement = None
    if case.replicas:
        placement = place_experts(torch.arange(E) + 1.0, case.ep, extra_experts=case.ep)
    parallel_state.initialize_model_parallel(config=case.config, watch=False)
    try:
        layer = build_layer(case, placement)
        layer = layer.to(device)
        layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
        mine = part_of_rank(case, hidden, rank, size)
        my_mask = None if mask is None else part_of_rank(case, mask, rank, size)
        output = layer(mine, my_mask)[0]
        problems = []
        expected = part_of_rank(case, wanted, rank, size)
        error = float((output - expected).abs().max()) if mine.numel() else 0.0
        if error > ROUNDING * scale:
            problems.append(f"relative error {error / scale:.1e}")
        if case.sp and mask is not None and not torch.equal(layer(mine, mask)[0], output):
            problems.append("the mask of all ranks means another than that of the part")
        if not case.sp and case.dp == 1:
            everyone = [torch.empty_like(output) for _ in range(size)]
            dist.all_gather(everyone, output.contiguous())
            if not all(torch.equal(everyone[0], other) for other in everyone):
                problems.append("ranks disagree")
        if case.capacity is None:
            check_one_copy(layer, mine, my_mask)
        return "; ".join(problems) or None
    except CopyError as error:
        return f"CopyError: {error}"
    finally:
        parallel_state.destroy_model_parallel()


def run_cases(cases: list[Case], rank: int, device: str = "cpu") -> list[str]:
    failed = []
    with torch.no_grad():
        for case in cases:
            problem = run_case(case, device)
            if problem:
                failed.append(f"[{case}] on rank {rank}: {problem}")
    return failed


def products(size: int) -> list[tuple[int, int]]:
    return [(tp, size // tp) for tp in (1, 2, 4, 8) if size % tp == 0]


def core_cases(size: int) -> Iterator[Case]:
    """Every layout x strategy x SP x prefill and decode; the other axes take turns."""
    routers = itertools.cycle(ROUTERS)
    shared = itertools.cycle(("none", "tp", "sp", "world", "fused", "gated"))
    masked = itertools.cycle((False, True, True))
    lengths = itertools.cycle((8, 13, 3, 40, 6))  # T below and above E / K, even and uneven
    for (tp, ep), strategy in itertools.product(products(size), ("replicate", "all_to_all")):
        for sp, decode in itertools.product((False, True), (False, True)):
            yield Case(
                tp=tp,
                ep=ep,
                sp=sp and not decode,
                strategy=strategy,
                router=next(routers),
                shared=next(shared),
                masked=next(masked),
                seq=1 if decode else next(lengths),
                batch=(1 if sp else 5) if decode else 2,
            )


EXTRA_CASES = [
    Case(tp=2, ep=4, sp=True, strategy="replicate", capacity=0.7, seq=13),
    Case(tp=2, ep=4, sp=True, strategy="all_to_all", capacity=0.7, seq=13, masked=True),
    Case(tp=4, ep=2, strategy="all_to_all", capacity=0.7, seq=13),
    Case(tp=2, ep=4, replicas=True, seq=13, shared="tp"),
    Case(tp=1, ep=8, replicas=True, strategy="all_to_all", sp=True, seq=13, shared="sp"),
    Case(tp=1, ep=8, replicas=True, strategy="all_to_all", seq=1, batch=3),
    Case(tp=8, ep=1, dp=4, batch=5, shared="tp"),
    Case(tp=2, ep=4, dp=2, batch=3, shared="sp", masked=True),
    Case(tp=2, ep=4, dp=8, batch=11, seq=1, shared="world"),
    Case(tp=2, ep=4, dp=2, batch=3, strategy="all_to_all", shared="tp"),
    Case(tp=1, ep=8, dp=4, batch=9, seq=1, strategy="all_to_all", shared="sp"),
    Case(tp=2, ep=4, decode_tp=8, decode_ep=1, batch=3, seq=1),
    Case(tp=2, ep=4, decode_tp=8, decode_ep=1, batch=3, seq=9),
    Case(tp=2, ep=4, decode_tp=2, decode_ep=2, batch=3, seq=1, shared="tp"),
    Case(tp=2, ep=4, decode_tp=2, decode_ep=2, batch=3, seq=9, shared="tp"),
    Case(tp=1, ep=8, decode_tp=1, decode_ep=2, dp=4, batch=6, seq=1, shared="sp"),
]


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_layout_equals_one_process(run_ranks: Any, size: int) -> None:
    cases = list(core_cases(size)) + (EXTRA_CASES if size == 8 else [])
    results = run_ranks(size, lambda rank: run_cases(cases, rank))
    assert [problem for problems in results for problem in problems] == []


UNEVEN_CASES = [
    Case(tp=1, ep=3, router="glm", masked=True),
    Case(tp=1, ep=3, sp=True, strategy="all_to_all", shared="sp", seq=13),
    Case(tp=1, ep=3, seq=1, batch=5, shared="gated", router="qwen3"),
    Case(tp=3, ep=1, shared="fused", router="llama4"),
    Case(tp=3, ep=1, shared="world", seq=1, batch=5),
    Case(tp=3, ep=1, sp=True, shared="sp", seq=13),
]


def test_ranks_that_divide_neither_experts_nor_columns_equal_one_process(run_ranks: Any) -> None:
    results = run_ranks(3, lambda rank: run_cases(UNEVEN_CASES, rank))
    assert [problem for problems in results for problem in problems] == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_whole_grid_equals_one_process(run_ranks: Any, size: int) -> None:
    cases = [
        Case(
            tp=tp,
            ep=ep,
            sp=sp,
            strategy=strategy,
            router=router,
            shared=shared,
            masked=masked,
            batch=batch,
            seq=seq,
        )
        for (tp, ep), strategy, sp, router, shared, masked, (batch, seq) in itertools.product(
            products(size),
            ("replicate", "all_to_all"),
            (False, True),
            ROUTERS,
            ("none", "tp", "sp"),
            (False, True),
            ((1, 1), (5, 1), (2, 8), (1, 13), (2, 40)),
        )
    ]
    results = run_ranks(size, lambda rank: run_cases(cases, rank), timeout_s=3000.0)
    assert [problem for problems in results for problem in problems] == []


@pytest.mark.parametrize("strategy", ["replicate", "all_to_all"])
def test_a_sequence_parallel_layer_decodes_tokens_that_all_ranks_hold(
    run_ranks: Any, strategy: str
) -> None:
    case = Case(tp=2, ep=2, sp=True, strategy=strategy, shared="tp", batch=3, seq=1)

    def run(rank: int) -> list[float]:
        whole, hidden, _ = reference(case)
        with torch.no_grad():
            wanted = whole(hidden)[0]
            parallel_state.initialize_model_parallel(config=case.config, watch=False)
            layer = build_layer(case)
            layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
            errors = [
                float((layer(hidden, phase=phase)[0] - wanted).abs().max() / wanted.abs().max())
                for phase in (None, "decode")
            ]
        parallel_state.destroy_model_parallel()
        return errors

    for errors in run_ranks(4, run):
        assert max(errors) < ROUNDING


def test_the_mask_of_a_split_first_axis_is_batch_by_sequence(run_ranks: Any) -> None:
    case = Case(tp=1, ep=2, sp=True, shared="none", batch=3, seq=5, masked=True)

    def run(rank: int) -> list[float]:
        whole, hidden, mask = reference(case)
        assert mask is not None
        with torch.no_grad():
            wanted = whole(hidden, mask)[0].transpose(0, 1).tensor_split(2)[rank]
            parallel_state.initialize_model_parallel(config=case.config, watch=False)
            built = build_layer(case)
            built.load_state_dict(shard_state_dict(built, whole.state_dict()))
            layer = MoE(
                built.router,
                built.expert_mlps,
                sequence_parallel_enabled=True,
                sequence_dimension=0,
            )
            mine = hidden.transpose(0, 1).tensor_split(2)[rank]
            own = mask.tensor_split(2, dim=1)[rank]
            outputs = [layer(mine, each)[0] for each in (own, mask)]
            check_one_copy(layer, mine, own)
            with pytest.raises(ValueError, match=r"must be \[B, S\] .* which are \[S, B, H\]"):
                layer(mine, mask.t())
        parallel_state.destroy_model_parallel()
        return [float((output - wanted).abs().max() / wanted.abs().max()) for output in outputs]

    for errors in run_ranks(2, run):
        assert max(errors) < ROUNDING


CUDA_DEVICES = cuda_devices()


@pytest.mark.skipif(CUDA_DEVICES < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("part", range(4))
def test_nccl_ranks_equal_one_process(run_ranks: Any, part: int) -> None:
    size = 4 if CUDA_DEVICES >= 4 else 2
    cases = [*core_cases(size), *(replace_size(case, size) for case in EXTRA_CASES)][part::4]

    def run(rank: int) -> list[str]:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=size)
        torch.backends.cuda.matmul.allow_tf32 = False
        return run_cases(cases, rank, f"cuda:{rank}")

    results = run_ranks(size, run, initialize=False, timeout_s=240.0)
    assert [problem for problems in results for problem in problems] == []


def replace_size(case: Case, size: int) -> Case:
    """Shrink a case for 8 ranks to fewer, first in EP and then in TP."""
    ep = max(1, case.ep * size // 8)
    tp = size // ep
    decode = None if case.decode_tp is None else (case.decode_tp, case.decode_ep)
    if decode is not None and size % (decode[0] * (decode[1] or 1)):
        decode = (size, 1)
    return dataclasses.replace(
        case,
        tp=tp,
        ep=ep,
        dp=min(case.dp, size),
        decode_tp=None if decode is None else decode[0],
        decode_ep=None if decode is None else decode[1],
    )
