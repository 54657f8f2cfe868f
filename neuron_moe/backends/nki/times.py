"""Simulated time of a plan: its kernels on the simulator, with shapes in place of weights.

Numbers of the weights do not matter to the time of the plan's launches, only which experts tokens
choose. So a layer on the meta device can be timed: the likely time of each launch in a graph
(nki_sim/time/estimate.py has its range).

Axes: T tokens of all ranks, K choices, E experts of this rank, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import nki_sim
from neuron_moe.backends.nki.launch import Input, Launch
from neuron_moe.backends.nki.layer import LayerPlan
from neuron_moe.backends.nki.prefill_layer import PrefillLayerPlan
from neuron_moe.blocks import NO_EXPERT
from neuron_moe.plan import Forms, LayerParts, Plan
from neuron_moe.router import Router
from neuron_moe.weights.experts import Experts
from neuron_moe.weights.narrow import NarrowMatrices
from nki_kernels.common.rank_sums import ALONE, RankSum
from nki_kernels.decode import check_layer_form, decode_layer
from nki_kernels.index import index_blocks
from nki_kernels.layer import check_prefill_layer, prefill_layer
from nki_kernels.route import route
from nki_sim import SimOptions, TensorSpec
from nki_sim.trace import CORE, FACTS, ControlFacts, Trace

TIMES_ONLY = SimOptions(mode="indices", uninitialized="off", races="off", capacity="reorder")
_ROUTER_ELEMENTS = 1 << 28  # of hidden states and router that choose experts in a launch
_NAMES = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}
_SEED = 11
Routed = tuple[Tensor, Tensor]
"""A router's weight [N, H] and hidden states [T, H]: what a launch that routes chooses by."""
_VECTORS = {"norm_weight": 1.0, "router_bias": 0.0, "selection_bias": 0.0, "shared_gate": 0.0}


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One launch of a plan.

    Attributes:
        kernel: its name.
        us: simulated microseconds.
        instructions: of the compiled kernel on all cores, the body of a dynamic loop once; a loop
            that made no iteration with this routing is not among them.
        executed: those that ran, each iteration counted.
    """

    kernel: str
    us: float
    instructions: int
    executed: int


def simulate_plan(
    plan: Plan, index_TK: NDArray[np.int32], own_tokens: int | None = None
) -> list[KernelTime]:
    """Return the launches of a plan with their simulated times; see `plan_runs`."""
    return [_time(name, run) for name, run in plan_runs(plan, index_TK, own_tokens)]


def plan_runs(
    plan: Plan,
    index_TK: NDArray[np.int32],
    own_tokens: int | None = None,
    options: SimOptions = TIMES_ONLY,
    *,
    routed: Routed | None = None,
    run: Callable[..., Any] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Simulate the launches of a plan; yield the name of each kernel, and its run.

    Args:
        plan: of the nki backend, for experts alone one without the router's launch; weights may be
            on the meta device.
        index_TK: [T, K] int32 experts of the model that the tokens choose. A plan that routes in
            its launch chooses by what is `routed`, as many.
        own_tokens: that this rank routes, where others route theirs; default: all.
        options: of the simulations.
        routed: what a plan that routes in its launch is given; default: drawn, all experts alike.
        run: runs a kernel with the arguments of `nki_sim.run`, in its place.

    Raises:
        ValueError: a plan of another backend, or weights the kernels do not take.
    """
    plan, drawn = _drawn(plan, routed)
    launches = plan.launches(own_tokens)
    if not launches:
        raise ValueError(
            f"plan of {plan.decision.kernel}: no kernels to simulate. Use backend='nki'."
        )
    step = {"index": _local(plan.parts, index_TK), "model_index": index_TK, **drawn}
    for launch in launches:
        start = partial(_start, launch=launch, values=_values(launch, step), options=options)
        found = start(run or nki_sim.run)
        yield launch.name, found
        if launch.kernel is index_blocks:
            if not isinstance(found, nki_sim.Run):  # a device's, which has a time alone
                found = start(nki_sim.run)
            step |= zip(launch.outputs, found.outputs, strict=True)


def _start(
    run: Callable[..., Any], launch: Launch, values: dict[str, Any], options: SimOptions
) -> Any:
    options = _options_of(launch, options)
    return run(launch.kernel, lnc=launch.num_cores, options=options, **values)


def draw_choices(
    num_tokens: int, num_experts: int, top_k: int, seed: int = _SEED
) -> NDArray[np.int32]:
    """Return [T, K] different experts of each token, all experts alike."""
    keys = np.random.default_rng(seed).random((num_tokens, num_experts))
    return np.argpartition(keys, top_k - 1, axis=1)[:, :top_k].astype(np.int32)


def _drawn(plan: Plan, routed: Routed | None = None) -> tuple[Plan, dict[str, Any]]:
    """Return a plan that routes in its launch with the router and the hidden states it is to have.

    Others stay as they are.
    """
    if not plan.is_fused:
        return plan, {}
    weight_NH, hidden_TH = routed or _routed_inputs(plan.parts, plan.step.tokens)
    router = deepcopy(plan.parts.router)
    assert router is not None
    router.linear_router.weight = nn.Parameter(weight_NH, requires_grad=False)
    parts = replace(plan.parts, router=router, forms=Forms())
    return replace(plan, parts=parts), {"hidden": hidden_TH}


def _values(launch: Launch, step: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a kernel is simulated with: shapes, but for what decides how it runs.

    These are choices, small integers, and what a launch routes with. Weights of a norm are ones
    there, biases and the gate of shared experts zeros.
    """
    routes = "hidden" in step
    values: dict[str, Any] = {}
    for name, value in launch.arguments:
        if isinstance(value, Input):
            values[name] = step[value.name] if value.name in step else _input(launch, value)
        elif not isinstance(value, Tensor):
            values[name] = value
        elif routes and name in _VECTORS:
            values[name] = torch.full(value.shape, _VECTORS[name], dtype=value.dtype)
        elif (routes and name == "router_weight") or value.dtype == torch.int32:
            values[name] = value
        else:
            values[name] = _spec_of(value)
    return values


def _input(launch: Launch, value: Input) -> Any:
    """Return what a step gives to a launch beside choices and what it routes with."""
    if value.name == "is_real":  # all are, the most work
        return np.ones(value.shape, np.int32)
    if launch.kernel is prefill_layer and value.name == "hidden":
        # Loads of weights are made to wait for rows by adding nothing of them to a number.
        return torch.zeros(value.shape, dtype=torch.bfloat16)
    if launch.kernel is prefill_layer and value.name == "affinities":
        return np.full(value.shape, 1.0 / value.shape[1], np.float32)
    return TensorSpec(value.shape, value.dtype)


def _local(parts: LayerParts, index_TK: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return choices as numbers of this rank's experts."""
    local_TK = index_TK - parts.first_expert
    is_here = (local_TK >= 0) & (local_TK < parts.weights.num_experts)
    return np.where(is_here, local_TK, NO_EXPERT).astype(np.int32)


def _options_of(launch: Launch, options: SimOptions) -> SimOptions:
    """Return options under which a launch computes what decides how it runs."""
    if launch.kernel in (decode_layer, prefill_layer):
        return replace(options, small_elements=_ROUTER_ELEMENTS)
    if launch.kernel is index_blocks:  # its lists are wanted, of which it adds up some in float32
        return replace(options, mode="full")
    return options


def launch_on_ranks(
    plan: LayerPlan | PrefillLayerPlan,
    num_ranks: int,
    ranks: RankSum = ALONE,
    options: SimOptions = TIMES_ONLY,
) -> nki_sim.Run:
    """Simulate the launch of a layer on all ranks of a model, the plan's being the first of them.

    Tokens and router are the same on each; the ranks share the experts, or an expert's inner axis.

    Args:
        plan: of a rank; weights may be on the meta device.
        num_ranks: how many there are.
        ranks: what becomes of their partial sums.
        options: of the simulation.

    Raises:
        ValueError: a layer that cannot end in this sum.
    """
    drawn_plan, drawn = _drawn(plan)
    (launch,) = drawn_plan.launches()
    config = launch.records["config"]
    if isinstance(plan, LayerPlan):
        experts, num_experts = config.moe, config.moe.num_experts
        config = replace(config, form=replace(config.form, ranks=ranks))
        check_layer_form(config.form, experts.T)
    else:
        experts, num_experts = config.experts, config.router.num_experts
        config = replace(config, out=replace(config.out, ranks=ranks))
        check_prefill_layer(config)
    values = {**_values(launch, drawn), "config": config}
    firsts = [rank * experts.E % num_experts for rank in range(num_ranks)]
    calls = [{**values, "first_expert": np.array([[first]], np.int32)} for first in firsts]
    return nki_sim.run_ranks(launch.kernel, calls, launch.num_cores, _options_of(launch, options))


def _routed_inputs(parts: LayerParts, num_tokens: int) -> Routed:
    """Return a router's weight [N, H] and hidden states [T, H], drawn; logits are about one.

    Larger ones would make ties of sigmoids, which all go to the first experts.
    """
    assert parts.router is not None
    weight, rng = parts.router.linear_router.weight, np.random.default_rng(_SEED)
    drawn_NH = rng.standard_normal(tuple(weight.shape)) / weight.shape[1] ** 0.5
    weight_NH = torch.from_numpy(drawn_NH).to(weight.dtype)
    drawn_TH = rng.standard_normal((num_tokens, weight.shape[1]), np.float32)
    return weight_NH, torch.from_numpy(drawn_TH).to(torch.bfloat16)


def routed_choices(plan: Plan) -> NDArray[np.int32]:
    """Return [T, K] the experts of the model that a launch which routes itself is simulated with.

    Given to the plan of the same layer in several launches, both compute the same.

    Args:
        plan: of the nki backend.
    """
    parts = plan.parts
    assert parts.router is not None
    weight_NH, hidden_TH = _routed_inputs(parts, plan.step.tokens)
    logits_TN = (hidden_TH.float() @ weight_NH.float().t()).numpy()
    spec = parts.router.spec
    none_N = np.zeros(spec.num_experts, np.float32) if spec.formula.has_selection_bias else None
    return route(logits_TN, spec.formula, none_N)[1].astype(np.int32)


def _time(name: str, run: nki_sim.Run) -> KernelTime:
    us = float(run.timeline.total_ns) / 1e3
    return KernelTime(name, us, compiled_instructions(run.trace), len(run.trace))


def compiled_instructions(trace: Trace) -> int:
    """Return the instructions of a trace, those of a dynamic loop's body once.

    A body is compiled once whatever its iterations, and all iterations of a loop are alike.
    """
    rows = trace.columns()
    kinds = {
        number: facts.kind
        for number, facts in enumerate(trace.facts)
        if isinstance(facts, ControlFacts) and facts.kind.startswith("loop")
    }
    return sum(
        _count_once([kinds.get(int(fact), "") for fact in rows[rows[:, CORE] == core, FACTS]])
        for core in np.unique(rows[:, CORE])
    )


def _count_once(kinds: list[str]) -> int:
    """Count the instructions of one core; `kinds` marks loops, '' is an instruction."""
    count, iterations = 0, []
    for kind in kinds:
        if kind == "loop_begin":
            iterations.append(0)
        elif kind == "loop_iteration":
            iterations[-1] += 1
        elif kind == "loop_end":
            iterations.pop()
        elif all(iteration <= 1 for iteration in iterations):
            count += 1
    return count


def _spec_of(tensor: Tensor) -> TensorSpec:
    name = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return TensorSpec(tuple(tensor.shape), name)


def as_served(router: Router, experts: Experts, weight_format: str) -> None:
    """Give a layer on the meta device the formats in which weights are served; shapes only.

    Experts in 8 bits have a scale for each output channel, but of e5m2, which MXFP4 weights become,
    one for each expert's down projection. Routers are bfloat16, as they are published.

    Args:
        router: of the layer.
        experts: its routed experts.
        weight_format: of these: 'bf16', 'e4m3' or 'e5m2'.
    """
    router.linear_router.to(torch.bfloat16)
    if weight_format != "bf16":
        experts.pack(partial(_narrow_shapes, weight_format))


def _narrow_shapes(
    weight_format: str, first_EHI: Tensor, down_EIH: Tensor
) -> tuple[NarrowMatrices, NarrowMatrices]:
    codes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[weight_format]

    def narrow(plain: Tensor, columns: int) -> NarrowMatrices:
        scale = torch.empty(plain.shape[0], columns, device="meta")
        return NarrowMatrices(plain.to(codes), scale, torch.bfloat16)

    down_columns = 1 if weight_format == "e5m2" else down_EIH.shape[2]
    return narrow(first_EHI, first_EHI.shape[2]), narrow(down_EIH, down_columns)
