"""Simulated times of plans: the launches are those that run, on shapes alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import nki_sim
from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK, SharedExperts
from neuron_moe.backends.nki import launch, times
from neuron_moe.backends.nki.times import (
    as_served,
    compiled_instructions,
    draw_choices,
    simulate_plan,
)
from neuron_moe.models.layers import RMSNorm
from neuron_moe.parallel.topology import INSTANCES
from neuron_moe.plan import Step
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.decode import DecodeSizes, WeightForm, decode_moe, make_decode_config
from nki_kernels.index import BlockDims, index_blocks
from nki_sim import TensorSpec
from nki_sim.errors import IllegalOperand

E, K, H, I = 8, 2, 256, 128  # noqa: E741
CONFIG = RoutedExpertsMLPOpsConfig(
    num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, hidden_act="silu", glu_mlp=True
)


def layer(device: str, *, has_shared: bool = False, **options: Any) -> MoE:
    torch.manual_seed(3)
    with torch.device(device):
        router = RouterTopK(E, K, H, act_fn="softmax", dtype=torch.bfloat16)
        experts = ExpertMLPsV2(CONFIG, dtype=torch.bfloat16, backend="nki")
        shared = SharedExperts(H, I, 1, "silu", torch.bfloat16) if has_shared else None
        return MoE(router, experts, shared, **options).eval()


STEPS = {
    "prefill": Step("prefill", 160),
    "decode": Step("decode", 4),
    "prefill with padding": Step("prefill", 160, has_padding=True),
    "decode with padding": Step("decode", 4, has_padding=True),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_layer_without_numbers_has_the_launches_of_one_with(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = STEPS[case]
    seen: list[Any] = []
    original: Callable[..., Any] = nki_sim.run

    def record(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        run = original(kernel, *args, **kwargs)
        seen.append((kernel.__name__, len(run.trace)))
        return run

    real = layer("cpu")
    hidden_TH = torch.randn(step.tokens, H).to(torch.bfloat16)
    monkeypatch.setattr(launch.nki_sim, "run", record)
    with torch.no_grad():
        shaped = hidden_TH.view(1, -1, H) if step.phase == "prefill" else hidden_TH.unsqueeze(1)
        mask = torch.ones(shaped.shape[:2]) if step.has_padding else None
        real(shaped, padding_mask=mask)
        chosen = real.router(hidden_TH).expert_index_TK.to(torch.int32).numpy()
    monkeypatch.undo()
    found = simulate_plan(layer("meta").plan(step), chosen)
    assert [each.kernel for each in found] == [name for name, _ in seen]
    for each, (name, executed) in zip(found, seen, strict=True):
        assert each.us > 0
        assert each.instructions <= each.executed
        if name not in ("decode_layer", "router_topk"):  # their choices, and logits, are drawn
            assert each.executed == executed, name


@pytest.mark.parametrize("weight_format", ["e4m3", "e5m2"])
def test_experts_in_8_bits_are_read_in_8_bits(weight_format: str) -> None:
    plain, narrow = layer("meta", has_shared=True), layer("meta", has_shared=True)
    as_served(narrow.router, narrow.expert_mlps.mlp_op, weight_format)
    for step in (Step("decode", 4), Step("prefill", 160)):
        plan = narrow.plan(step)
        assert any(f"float8_{weight_format}" in note for note in plan.notes())
        chosen = draw_choices(step.tokens, E, K)
        assert [each.kernel for each in simulate_plan(plan, chosen)] == [
            each.kernel for each in simulate_plan(plain.plan(step), chosen)
        ]


def test_a_router_of_fewer_tokens_is_faster() -> None:
    plan = layer("meta", return_router_logits=True).plan(Step("prefill", 1024))  # two launches
    chosen = draw_choices(1024, E, K)
    whole, part = (simulate_plan(plan, chosen, own)[0].us for own in (1024, 64))
    assert part < 0.7 * whole


def test_a_layer_that_adds_its_input_is_timed() -> None:
    plain, adding = layer("meta"), layer("meta")
    with torch.device("meta"):
        adding.take_frame(RMSNorm(H, 1e-6, dtype=torch.bfloat16))
    (without,), (with_input,) = (
        simulate_plan(moe.plan(Step("decode", 4)), draw_choices(4, E, K)) for moe in (plain, adding)
    )
    assert with_input.executed > without.executed


def test_choices_are_different_and_all_experts_alike() -> None:
    chosen_TK = draw_choices(4096, E, K)
    assert all(len(set(row)) == K for row in chosen_TK.tolist())
    counts = np.bincount(chosen_TK.reshape(-1), minlength=E)
    assert counts.max() < 1.1 * counts.mean()


def test_a_loop_is_compiled_once() -> None:
    iteration, begin, end = "loop_iteration", "loop_begin", "loop_end"
    inner = [begin, iteration, "", iteration, "", end]
    assert times._count_once(["", begin, iteration, "", "", iteration, "", "", end, ""]) == 4
    assert times._count_once([begin, iteration, "", *inner, iteration, "", *inner, end]) == 2
    plan = layer("meta").plan(Step("prefill", 1024))
    (experts,) = simulate_plan(plan, draw_choices(1024, E, K))
    assert experts.kernel == "prefill_layer"
    assert experts.instructions < experts.executed


def test_a_kernel_without_loops_is_compiled_as_it_runs() -> None:
    dims = BlockDims(E, 128, 16)
    run = nki_sim.run(index_blocks, draw_choices(256, E, K), dims, lnc=2)
    assert compiled_instructions(run.trace) == len(run.trace)


def test_the_torch_backend_has_no_kernels() -> None:
    experts = ExpertMLPsV2(CONFIG)
    with pytest.raises(ValueError, match=r"no kernels to simulate\. Use backend='nki'"):
        simulate_plan(experts.plan(Step("decode", 4)), draw_choices(4, E, K))


def test_trn1_lacks_what_is_said_of_it() -> None:
    options = replace(times.TIMES_ONLY, target="trn1")
    sizes = DecodeSizes(T=4, H=H, I=I, E=E, K=K, num_experts=E, num_cores=2)
    config = make_decode_config(sizes, ExpertFormula("silu"), WeightForm())
    reasons = " ".join(INSTANCES["trn1.32xlarge"].refuses)
    with pytest.raises(IllegalOperand, match="expected gen3 or later; found target trn1") as error:
        nki_sim.run(
            decode_moe,
            TensorSpec((4, H), "bfloat16"),
            TensorSpec((E, H, 2 * I), "bfloat16"),
            TensorSpec((E, I, H), "bfloat16"),
            draw_choices(4, E, K),
            TensorSpec((4, K), "float32"),
            np.zeros((1, 1), np.int32),
            config,
            lnc=2,
            options=options,
        )
    assert any(
        name in str(error.value) and name in reasons
        for name in ("dge_mode.hwdge", "nonzero_with_count", "vector_offset")
    )
