"""Simulated time of a plan: its kernels on the simulator, with shapes in place of weights.

The launches are those of the plan's own `route` and `experts`, or of its `layer`; numbers of the
weights do not matter to their time, only which experts tokens choose. So a layer on the meta device
can be timed. The clock is that of the source order of instructions (`nki_sim`'s in-order corner).

Axes: T tokens of all ranks, K choices, E experts of this rank, H hidden.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import nki_sim
from neuron_moe.backends.nki.decode import DecodePlan
from neuron_moe.backends.nki.layer import LayerPlan
from neuron_moe.backends.nki.operands import matrices_of
from neuron_moe.backends.nki.prefill import PrefillPlan, compile_for
from neuron_moe.backends.nki.prefill_layer import PrefillLayerPlan
from neuron_moe.backends.nki.routed_plan import RoutedPlan
from neuron_moe.backends.nki.router import router_config
from neuron_moe.blocks import NO_EXPERT
from neuron_moe.plan import LayerParts, Plan
from neuron_moe.router import Router
from neuron_moe.weights.experts import Experts
from neuron_moe.weights.laid_out import from_numpy, to_numpy
from neuron_moe.weights.narrow import NarrowMatrices
from nki_kernels.combine import combine
from nki_kernels.common.rank_sums import ALONE, RankSum
from nki_kernels.decode import (
    DecodeConfig,
    check_layer_form,
    decode_layer,
    decode_moe,
    loads_bias,
    pack_router_weight,
    weight_shapes,
)
from nki_kernels.index import index_blocks
from nki_kernels.layer import check_prefill_layer, prefill_layer, shared_visits
from nki_kernels.prefill import PrefillConfig, blockwise_moe, matrix_shapes
from nki_kernels.prefill.config import num_partials
from nki_kernels.route import route, router_topk
from nki_sim import SimOptions, TensorSpec
from nki_sim.trace import CORE, FACTS, ControlFacts, Trace

TIMES_ONLY = SimOptions(mode="indices", uninitialized="off", races="off", capacity="reorder")
_ROUTER_ELEMENTS = 1 << 28  # of hidden states and router that choose experts in a launch
_NAMES = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}
_SEED = 11
_Launch = tuple[str, Any]  # name of the kernel, and its run
_Start = Callable[..., Any]  # runs a kernel on so many cores
Routed = tuple[Tensor, Tensor]
"""A router's weight [N, H] and hidden states [T, H]: what a launch that routes chooses by."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One launch of a plan.

    Attributes:
        kernel: its name.
        us: simulated microseconds.
        instructions: of the compiled kernel on all cores, the body of a dynamic loop once; a loop
            that made no trip with this routing is not among them.
        executed: those that ran, each trip counted.
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
    start = partial(_run, run or nki_sim.run, options)
    if isinstance(plan, PrefillLayerPlan):
        yield _launch(start, plan, prefill_layer, _prefill_operands(plan, routed))
    elif isinstance(plan, PrefillPlan):
        if plan.parts.router is not None:
            yield _route(plan, own_tokens or len(index_TK), start)
        yield from _prefill(plan, index_TK, start)
    elif isinstance(plan, DecodePlan):
        if plan.parts.router is not None:
            yield _route(plan, own_tokens or plan.step.tokens, start)
        yield _decode(plan, index_TK, start)
    elif isinstance(plan, LayerPlan):
        yield _launch(start, plan, decode_layer, _decode_operands(plan, routed))
    else:
        raise ValueError(
            f"plan of {plan.decision.kernel}: no kernels to simulate. Use backend='nki'."
        )


def draw_choices(
    num_tokens: int, num_experts: int, top_k: int, seed: int = _SEED
) -> NDArray[np.int32]:
    """Return [T, K] different experts of each token, all experts alike."""
    keys = np.random.default_rng(seed).random((num_tokens, num_experts))
    return np.argpartition(keys, top_k - 1, axis=1)[:, :top_k].astype(np.int32)


def _launch(start: _Start, plan: Plan, kernel: Any, operands: dict[str, Any]) -> _Launch:
    return _name_of(kernel), start(kernel, plan.parts.tuning.num_cores, **operands)


def _prefill(plan: PrefillPlan, index_TK: NDArray[np.int32], start: _Start) -> Iterator[_Launch]:
    parts, made = plan.parts, compile_for(plan)
    num_tokens, top_k = index_TK.shape
    num_cores, H = parts.tuning.num_cores, made.config.H
    local_TK = index_TK - parts.first_expert
    is_here = (local_TK >= 0) & (local_TK < parts.weights.num_experts)
    local_TK = np.where(is_here, local_TK, NO_EXPERT).astype(np.int32)
    if plan.given_config is not None:
        yield _launch(start, plan, prefill_layer, _given_operands(plan, local_TK))
        return
    run = start(index_blocks, num_cores, local_TK, made.dims, made.visits)
    yield _name_of(index_blocks), run
    if not isinstance(run, nki_sim.Run):  # a device's, which has a time alone
        simulate = partial(_run, nki_sim.run, TIMES_ONLY)
        run = simulate(index_blocks, num_cores, local_TK, made.dims, made.visits)
    tokens, _, _, _, _, slot_of_pair_TK, *lists = run.outputs
    gate_up, down = _prefill_matrices(parts, made.config)
    beside = _prefill_beside(parts, H)
    if made.config.scaling == "pre":
        beside["slot_scale"] = TensorSpec(tokens.shape, "float32")
    rows = TensorSpec((num_tokens, H), "bfloat16")
    run = start(
        blockwise_moe,
        num_cores,
        rows,
        gate_up,
        down,
        tokens,
        *lists,
        made.config,
        **beside,
    )
    yield _name_of(blockwise_moe), run
    slots = TensorSpec((num_partials(made.config), len(tokens), H), "bfloat16")
    affinities = TensorSpec((num_tokens, top_k), "float32")
    run = start(combine, num_cores, slots, slot_of_pair_TK, affinities, made.out)
    yield _name_of(combine), run


def _given_operands(plan: PrefillPlan, local_TK: NDArray[np.int32]) -> dict[str, Any]:
    """Return the operands of experts in one launch, whose choices are given."""
    H = plan.given_config.experts.H
    gate_up, down = _prefill_matrices(plan.parts, plan.given_config.experts)
    # Loads of weights are made to wait for rows by adding nothing of them to an expert's number.
    hidden_TH = np.zeros((len(local_TK), H), ml_dtypes.bfloat16)
    return {
        "hidden": hidden_TH, "router_weight": None, "gate_up": gate_up, "down": down,
        "first_expert": None, "config": plan.given_config, **_prefill_beside(plan.parts, H),
        "index": local_TK,
        "affinities": np.full(local_TK.shape, 1.0 / local_TK.shape[1], np.float32),
    }  # fmt: skip


def _prefill_matrices(parts: LayerParts, config: PrefillConfig) -> tuple[TensorSpec, ...]:
    """Return both matrices as blockwise_moe reads them: by parts from the copy, or plain."""
    copy = parts.weights.prefill_copy
    if copy is not None and config.loop.by_parts:
        return _spec_of(copy.gate_up), _spec_of(copy.down)
    return tuple(map(_spec_of, matrices_of(parts.weights)))


def _decode(plan: DecodePlan, index_TK: NDArray[np.int32], start: _Start) -> _Launch:
    parts, config = plan.parts, plan.config
    hidden = TensorSpec((config.T, config.H), "bfloat16")
    affinities = TensorSpec(index_TK.shape, "float32")
    run = start(
        decode_moe, parts.tuning.num_cores, hidden, *_decode_matrices(parts, config), index_TK,
        affinities, _first_expert(parts), config, **_decode_beside(parts, config),
    )  # fmt: skip
    return _name_of(decode_moe), run


def _decode_matrices(parts: LayerParts, config: DecodeConfig) -> tuple[TensorSpec, ...]:
    """Return both matrices as the decode kernels read them: from the packed copy, or plain."""
    copy = parts.weights.decode_copy
    if copy is not None and config.weights.layout == "packed":
        return _spec_of(copy.gate_up), _spec_of(copy.down)
    return tuple(map(_spec_of, matrices_of(parts.weights)))


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
    operands = _operands_of(plan)
    config, calls = operands["config"], []
    if isinstance(plan, LayerPlan):
        experts, num_experts = config.moe, config.moe.num_experts
        config = replace(config, form=replace(config.form, ranks=ranks))
        check_layer_form(config.form, experts.T)
    else:
        experts, num_experts = config.experts, config.router.num_experts
        config = replace(config, out=replace(config.out, ranks=ranks))
        check_prefill_layer(config)
    for rank in range(num_ranks):
        first = np.array([[rank * experts.E % num_experts]], np.int32)
        calls.append({**operands, "config": config, "first_expert": first})
    kernel = decode_layer if isinstance(plan, LayerPlan) else prefill_layer
    return nki_sim.run_ranks(kernel, calls, plan.parts.tuning.num_cores, _routing(options))


def _operands_of(plan: LayerPlan | PrefillLayerPlan) -> dict[str, Any]:
    """Return the operands of a fused layer's launch; hidden states and router are drawn."""
    return _decode_operands(plan) if isinstance(plan, LayerPlan) else _prefill_operands(plan)


def _decode_operands(plan: LayerPlan, routed: Routed | None = None) -> dict[str, Any]:
    parts, config = plan.parts, plan.config
    moe, router = config.moe, parts.router
    assert router is not None
    weight_NH, hidden_TH = routed or _routed_inputs(parts, moe.T)
    packed = pack_router_weight(to_numpy(weight_NH), moe.h_axis, config.router_parts)
    named: dict[str, Any] = {**_decode_beside(parts, moe), **_router_biases(router)}
    if config.form.has_norm:
        named["norm_weight"] = torch.ones((1, moe.H), dtype=torch.bfloat16)
    if config.form.has_residual:
        named["residual"] = hidden_TH
    if config.form.has_padding:  # none is, the most work
        named["is_real"] = np.ones((moe.T, 1), np.int32)
    if config.form.shared_width:
        gate_up, down = weight_shapes(config.shared)
        named["shared_gate_up"] = TensorSpec(gate_up, config.form.shared_format)
        named["shared_down"] = TensorSpec(down, config.form.shared_format)
    if config.form.has_shared_gate:
        gate = pack_router_weight(np.zeros((1, moe.H), np.float32), moe.h_axis)
        named["shared_gate"] = TensorSpec(gate.shape, "bfloat16")
    gate_up, down = _decode_matrices(parts, moe)
    return {
        "hidden": hidden_TH, "router_weight": from_numpy(packed, weight_NH.dtype),
        "gate_up": gate_up, "down": down, "first_expert": _first_expert(parts), "config": config,
        **named,
    }  # fmt: skip


def _prefill_operands(plan: PrefillLayerPlan, routed: Routed | None = None) -> dict[str, Any]:
    parts, config = plan.parts, plan.config
    assert parts.router is not None
    num_tokens, H = config.experts.num_tokens, config.experts.H
    weight_NH, hidden_TH = routed or _routed_inputs(parts, num_tokens)
    named = {**_prefill_beside(parts, H), **_router_biases(parts.router)}
    if config.router.has_norm:
        named["norm_weight"] = torch.ones((1, H), dtype=torch.bfloat16)
    if config.out.has_residual:
        named["residual"] = TensorSpec((num_tokens, H), "bfloat16")
    if config.shared is not None:
        operands = _shared_of(config.shared)
        named |= {f"shared_{name}": value for name, value in operands.items()}
    if config.has_padding:  # none is, the most work
        named["is_real"] = np.ones((num_tokens, 1), np.int32)
    if config.out.has_gate:
        named["shared_gate"] = torch.zeros((1, H), dtype=weight_NH.dtype)
    gate_up, down = _prefill_matrices(parts, config.experts)
    return {
        "hidden": hidden_TH, "router_weight": weight_NH, "gate_up": gate_up, "down": down,
        "first_expert": _first_expert(parts), "config": config, **named,
    }  # fmt: skip


def shared_run(plan: PrefillLayerPlan, options: SimOptions = TIMES_ONLY) -> nki_sim.Run | None:
    """Simulate the shared experts of a plan in a launch of their own; None if there are none."""
    config = plan.config.shared
    if config is None:
        return None
    operands = _shared_of(config)
    hidden = TensorSpec((config.num_tokens, config.H), "bfloat16")
    num_slots = config.num_tiles * config.tile_rows
    slots = np.arange(num_slots, dtype=np.int32)
    slots[config.num_tokens :] = -1
    return _run(
        nki_sim.run, options, blockwise_moe, config.num_cores, hidden, operands["gate_up"],
        operands["down"], slots, operands["visit_expert"], operands["visit_tile"],
        operands["trips"], config,
    )  # fmt: skip


def _shared_of(config: Any) -> dict[str, Any]:
    """Return matrices and visits of shared experts."""
    names = ("visit_expert", "visit_tile", "trips")
    gate_up, down = matrix_shapes(config)
    return {
        "gate_up": TensorSpec(gate_up, config.weight_format),
        "down": TensorSpec(down, config.weight_format),
        **dict(zip(names, shared_visits(config), strict=True)),
    }


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


def _router_biases(router: Router) -> dict[str, Any]:
    """Return zeros for the biases that a router has."""
    biases = {
        "router_bias": router.linear_router.bias,
        "selection_bias": router.e_score_correction_bias,
    }
    return {
        name: np.zeros((1, len(bias)), np.float32)
        for name, bias in biases.items()
        if bias is not None
    }


def _route(plan: RoutedPlan, num_tokens: int, start: _Start) -> _Launch:
    router, num_cores, norm = plan.parts.router, plan.parts.tuning.num_cores, plan.norm
    assert router is not None
    weight = router.linear_router.weight
    config = router_config(router, num_tokens, torch.bfloat16, weight.dtype, num_cores, norm)
    bias, selection_bias = (
        None if values is None else TensorSpec((1, config.num_experts), "float32")
        for values in (router.linear_router.bias, router.e_score_correction_bias)
    )
    hidden = TensorSpec((num_tokens, config.hidden_size), "bfloat16")
    run = start(
        router_topk,
        num_cores,
        hidden,
        _spec_of(weight),
        bias,
        selection_bias,
        None if norm is None else TensorSpec((1, config.hidden_size), "bfloat16"),
        config,
    )
    return _name_of(router_topk), run


def _run(
    run: Callable[..., Any], options: SimOptions, kernel: Any, num_cores: int, *operands: Any,
    **named: Any,
) -> Any:  # fmt: skip
    if kernel is decode_layer or kernel is prefill_layer:
        options = _routing(options)
    elif kernel is index_blocks:  # its lists are wanted, of which it adds up some in float32
        options = replace(options, mode="full")
    return run(kernel, *operands, lnc=num_cores, options=options, **named)


def _routing(options: SimOptions) -> SimOptions:
    """Return options under which a launch computes what its router decides."""
    return replace(options, small_elements=_ROUTER_ELEMENTS)


def _name_of(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", None) or kernel.func.__name__)


def _time(name: str, run: nki_sim.Run) -> KernelTime:
    us = float(run.timeline.total_ns) / 1e3
    return KernelTime(name, us, compiled_instructions(run.trace), len(run.trace))


def compiled_instructions(trace: Trace) -> int:
    """Return the instructions of a trace, those of a dynamic loop's body once.

    A body is compiled once whatever its trips, and all trips of a loop are alike.
    """
    rows = trace.columns()
    kinds = {
        number: facts.kind for number, facts in enumerate(trace.facts)
        if isinstance(facts, ControlFacts) and facts.kind.startswith("loop")
    }  # fmt: skip
    return sum(
        _count_once([kinds.get(int(fact), "") for fact in rows[rows[:, CORE] == core, FACTS]])
        for core in np.unique(rows[:, CORE])
    )


def _count_once(kinds: list[str]) -> int:
    """Count the instructions of one core; `kinds` marks loops, '' is an instruction."""
    count, trips = 0, []
    for kind in kinds:
        if kind == "loop_begin":
            trips.append(0)
        elif kind == "loop_trip":
            trips[-1] += 1
        elif kind == "loop_end":
            trips.pop()
        elif all(trip <= 1 for trip in trips):
            count += 1
    return count


def _prefill_beside(parts: LayerParts, hidden_size: int) -> dict[str, Any]:
    """Return biases and scales in the shapes in which blockwise_moe reads them."""
    found, weights = _beside(parts), parts.weights
    experts = weights.num_experts
    if "down_scale" in found:
        found["down_scale"] = TensorSpec((experts, 3, hidden_size), "bfloat16")
    if weights.down_bias_EH is not None:
        terms = (3,) if "down_scale" in found else ()
        found["down_bias"] = TensorSpec((experts, *terms, hidden_size), "bfloat16")
    return found


def _decode_beside(parts: LayerParts, config: DecodeConfig) -> dict[str, Any]:
    """Return biases and scales in the shapes in which the decode kernels read them; packed weights
    have them among them.
    """
    is_packed = config.weights.layout == "packed"
    found = {} if is_packed else _beside(parts)
    if loads_bias(config) if is_packed else parts.weights.down_bias_EH is not None:
        found["down_bias"] = TensorSpec((parts.weights.num_experts, config.H), "bfloat16")
    return found


def _beside(parts: LayerParts) -> dict[str, Any]:
    weights, found = parts.weights, {}
    columns = (weights.num_experts, weights.gate_up_proj_EHI.shape[2])
    if weights.gate_up_bias_EI is not None:
        found["gate_up_bias"] = TensorSpec(columns, "float32")
    if isinstance(weights.packed_down, NarrowMatrices):
        found["gate_up_scale"] = TensorSpec(columns, "float32")
        found["down_scale"] = TensorSpec(tuple(weights.packed_down.scale.shape), "float32")
    return found


def _first_expert(parts: LayerParts) -> NDArray[np.int32]:
    return np.array([[parts.first_expert]], np.int32)


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
