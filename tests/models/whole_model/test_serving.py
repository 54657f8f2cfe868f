"""Layouts of whole models: sizes, order and limits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from neuron_moe.configs import load_config
from neuron_moe.configs.deployments import load_deployments
from neuron_moe.models.deployment import Deployment
from neuron_moe.models.loader import parse_config
from neuron_moe.models.sizes import Spread, cache_bytes_per_token
from neuron_moe.models.whole_model import (
    Serving,
    ServingTimes,
    WholeModel,
    best_first,
    serving_layouts,
    ties,
)
from neuron_moe.parallel.topology import instance
from neuron_moe.planner.coefficients import Machine
from neuron_moe.planner.layer_cost import RoutedTokens, layer_cost
from neuron_moe.planner.sizes import ModelSizes
from neuron_moe.train.balance import uniform_trace

SERVING = Serving(prompt=2048, context=3072, batch=32, expert_format="bf16")


def sizes_of(name: str) -> ModelSizes:
    return ModelSizes.from_config(name, load_config(name), "bf16")


def whole(name: str, **changes: Any) -> WholeModel:
    config = load_config(name) | changes
    file, facts = parse_config(config, name)
    with torch.device("meta"):
        model = file.Model(facts)
    sizes = ModelSizes.from_config(name, config, "bf16")
    routing = uniform_trace(SERVING.prompt, sizes.num_experts, sizes.top_k)
    return WholeModel(model, facts, sizes, routing)


@pytest.fixture(scope="module")
def served() -> list[ServingTimes]:
    found, rejected = serving_layouts(
        whole("qwen3_30b_a3b"), Machine.build(instance("trn2.3xlarge")), SERVING
    )
    assert all("GiB" in why for why in rejected.values())  # one rank holds too little
    return found


@pytest.mark.parametrize("name", ["gpt_oss_120b", "qwen3_30b_a3b", "deepseek_v3"])
def test_more_expert_parallelism_shortens_a_long_prefill(name: str) -> None:
    sizes, machine = sizes_of(name), Machine.build(instance("trn2.48xlarge"))
    physical_TK = uniform_trace(8192, sizes.num_experts, sizes.top_k)
    times = [
        layer_cost(
            sizes,
            machine,
            64 // ep,
            ep,
            "replicate",
            RoutedTokens("prefill", physical_TK, sizes.num_experts),
        ).experts_us
        for ep in (1, 4, 16)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 2 * times[-1]


def test_memory_limits_batch_and_context(served: list[ServingTimes]) -> None:
    machine, model = Machine.build(instance("trn2.3xlarge")), whole("qwen3_30b_a3b")
    for layout in served:
        assert layout.max_batch >= SERVING.batch
        assert layout.tp * layout.ep * layout.dp == machine.ranks
        spread = Spread(tp=layout.tp, ep=layout.ep, dense_tp=layout.tp * layout.ep)
        a_sequence = cache_bytes_per_token(model.model, spread, 2) * SERVING.context
        assert layout.cache_bytes == a_sequence * SERVING.batch // layout.dp


def test_layouts_are_ranked_by_what_is_asked_for(served: list[ServingTimes]) -> None:
    by_first = best_first(served, "ttft")
    assert by_first[0].ttft_ms == min(each.ttft_ms for each in served)
    by_token = best_first(served, "tpot")
    assert by_token[0].tpot_ms == min(each.tpot_ms for each in served)
    for tie in ties(by_token, "tpot"):
        assert tie.tpot_ms <= 1.02 * by_token[0].tpot_ms
    rates = [each.tokens_per_s for each in best_first(served, "throughput")]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(SERVING.batch / by_token[0].tpot_ms * 1e3, rel=0.5)


def test_longer_contexts_take_longer_and_hold_fewer_sequences() -> None:
    model, machine = whole("qwen3_30b_a3b"), Machine.build(instance("trn2.3xlarge"))
    long = Serving(prompt=2048, context=16384, batch=8, expert_format="bf16")
    short = Serving(prompt=2048, context=3072, batch=8, expert_format="bf16")
    slow, fast = (
        best_first(serving_layouts(model, machine, each)[0], "tpot")[0] for each in (long, short)
    )
    assert slow.tpot_ms > fast.tpot_ms
    assert slow.max_batch < fast.max_batch


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(load_deployments("trn2_3xlarge")))
def test_cache_and_fit_are_those_of_a_compiled_deployment(name: str) -> None:
    values = load_deployments("trn2_3xlarge")[name]
    deployment = Deployment.read(values, model=name, machine="trn2.3xlarge")
    model, facts = deployment.build()
    sizes = sizes_of(name)
    routing = uniform_trace(64, sizes.num_experts, sizes.top_k)
    planned = WholeModel(model, facts, sizes, routing)

    def found(batch: int) -> list[ServingTimes]:
        serving = Serving(
            prompt=deployment.buckets[-1].tokens,
            context=deployment.max_length,
            batch=batch,
            expert_format=deployment.quantization,
        )
        layouts, _ = serving_layouts(planned, deployment.machine, serving)
        ranks = (deployment.tp, deployment.ep, 1)
        return [each for each in layouts if (each.tp, each.ep, each.dp) == ranks]

    memory, asked = deployment.memory(), found(deployment.batch)
    for each in asked:
        assert each.cache_bytes == memory.kv_cache + memory.state
        assert each.weight_bytes == sum(memory.weights.values())
    most = asked[0].max_batch
    assert replace(deployment, batch=most).memory().fits
    with pytest.raises(ValueError, match="a rank needs"):
        replace(deployment, batch=most + 1)
    assert found(most)
    assert not found(most + 1)


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context=10: must hold the prompt of 20"):
        Serving(prompt=20, context=10, batch=1, expert_format="bf16")
