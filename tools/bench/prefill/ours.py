"""Our prefill kernels on a benchmark's case: one launch, with the plan a compiled graph would have.

The plan is the cost model's, from the sizes and the number of tokens alone, as if experts were
chosen alike: the same for every routing. The visits are given, as the vendor's block lists are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import nki_sim
from neuron_moe.blocks import build_block_mapping
from neuron_moe.tools.bench.comparison import runs
from neuron_moe.tools.bench.comparison.layers import Model
from nki_kernels.combine import CombineDims, combine
from nki_kernels.common.formula import ExpertFormula, limits
from nki_kernels.prefill import (
    Candidate,
    Expected,
    ExpertSizes,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    Search,
    best_candidate,
    best_parts,
    blockwise_moe,
    expect_tokens,
    make_config,
    stored_parts,
    visits_of,
)
from nki_sim import SimOptions, TensorSpec

nki_sim.provide()

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

BLOCK_SIZE = 128
FULL_TILES = 0.85  # expected share of live rows from which whole tiles are stored
OPTIONS = SimOptions(mode="indices", uninitialized="off", races="off", capacity="reorder")


def _layer(
    operands: dict[str, Any], config: Any, slot_of_pair_TK: Any, affinities_TK: Any, dims: Any
) -> Any:
    """Run both kernels in one launch, the sum after all slots are written."""
    slots_PSH = blockwise_moe(config=config, **operands)
    if config.stores == "tokens":
        return slots_PSH
    nisa.core_barrier(slots_PSH, (0, 1))
    return combine(slots_PSH, slot_of_pair_TK, affinities_TK, dims)


def configure(
    model: Model, num_tokens: int, num_slots: int, layout: str = "packed"
) -> tuple[PrefillConfig, Candidate]:
    """Return what the kernel is compiled for: the fastest by estimate, and that estimate.

    Args:
        model: the layer.
        num_tokens: T.
        num_slots: N*B, enough for every routing.
        layout: of the weights: plain ([E, H, 2I] and [E, I, H]), or packed: by the parts in which
            they are loaded fastest, where that is faster.
    """
    formula, sizes = formula_of(model), ExpertSizes(model.H, model.I, model.E)
    tokens_E = expect_tokens(num_tokens * model.K, model.E, "uniform")
    rows = int(np.ceil(tokens_E / BLOCK_SIZE).sum()) * BLOCK_SIZE
    stores = "tiles" if num_tokens * model.K >= FULL_TILES * rows else "rows"
    search = Search(block_sizes=(BLOCK_SIZE,))
    if model.K == 1:  # the rows are the output, so there is nothing to add them in
        stores, search = "tokens", Search(block_sizes=(BLOCK_SIZE,), shard_plans=("balanced",))
    scaling = model.options.get("scaling", "none")
    work = PrefillWork(BLOCK_SIZE, num_slots, num_tokens, scaling=scaling, stores=stores)
    expected = Expected(num_tokens=num_tokens, top_k=model.K, scaling=scaling, stores=stores)
    parts = (1, 1) if layout == "plain" else best_parts(make_config(formula, sizes, work))
    found = [
        best_candidate(formula, sizes, expected, PlanRequest(weight_parts=lie), search)
        for lie in (None, parts)
        if lie != (1, 1)
    ]
    candidate = min(found, key=lambda candidate: candidate.estimated_us)
    return make_config(formula, sizes, work, candidate.request), candidate


def formula_of(model: Model) -> ExpertFormula:
    """Return the kernels' formula of a layer."""
    options = {name: value for name, value in model.options.items() if name != "scaling"}
    if options.get("activation") == "swiglu_oai":
        options |= {"activation": "sigmoid", "gates_itself": True, "scale": 1.702}
    for name in ("gate_limits", "up_limits"):
        if name in options:
            options[name] = limits(*options[name])
    return ExpertFormula(**options)


def configure_case(
    model: Model, expert_index_TK: Any, layout: str
) -> tuple[PrefillConfig, Candidate]:
    """Return what the kernel is compiled for on a case, and its estimate."""
    mapping = _mapping(model, expert_index_TK)
    return configure(model, len(expert_index_TK), len(mapping.token_position_to_id), layout)


def _mapping(model: Model, expert_index_TK: Any, block_size: int = BLOCK_SIZE) -> Any:
    return build_block_mapping(torch.from_numpy(expert_index_TK), model.E, block_size)


def launch_ours(
    model: Model, expert_index_TK: Any, config: PrefillConfig, block_size: int = BLOCK_SIZE
) -> nki_sim.Run:
    """Simulate our layer; an expert of -1 is another rank's."""
    T, K = expert_index_TK.shape
    mapping = _mapping(model, expert_index_TK, block_size)
    slots = mapping.token_position_to_id.numpy()
    visits = visits_of(config, slots, mapping.block_to_expert.numpy())
    pair = mapping.pair_of_slot.numpy()
    slot_of_pair = np.zeros(T * K, np.int32)
    slot_of_pair[pair[pair >= 0]] = np.flatnonzero(pair >= 0)
    return runs.run(
        _layer, {**_operands(model, T, slots, config), **_visit_arguments(visits)}, config,
        slot_of_pair.reshape(T, K), TensorSpec((T, K), "float32"),
        CombineDims(nl.bfloat16, False), lnc=2, options=OPTIONS,
    )  # fmt: skip


def plan_in_words(config: PrefillConfig, candidate: Candidate) -> str:
    """Return the plan of a launch in words."""
    loop = config.loop
    lie = "stored in" if loop.by_parts else "loaded in"
    return (
        f"{candidate.request.shard_plan}, visits of {loop.classes[0]}, {loop.weight_buffers} weight"
        f" buffers, {lie} {loop.in_parts}+{loop.out_parts} parts, turned by {loop.turns}, stores"
        f" {config.stores}"
    )


def _visit_arguments(visits: Any) -> dict[str, Any]:
    names = ("visit_expert", "visit_tile", "class_trips")
    return dict(zip(names, visits, strict=True))


def _operands(model: Model, T: int, slots: Any, config: PrefillConfig) -> dict[str, Any]:
    """Return the kernel's tensors, floating-point ones without values."""
    E, H, I = model.E, model.H, model.I  # noqa: E741  the axis letters
    gate_up_shape: tuple[int, ...] = (E, H, 2 * I)
    down_shape: tuple[int, ...] = (E, I, H)
    if config.loop.by_parts:
        in_parts, out_parts = stored_parts(config)
        gate_up_shape = (E, in_parts, H, 2 * I // in_parts)
        down_shape = (E, out_parts, I, H // out_parts)
    found: dict[str, Any] = {
        "hidden": TensorSpec((T, H), "bfloat16"),
        "gate_up": TensorSpec(gate_up_shape, config.weight_format),
        "down": TensorSpec(down_shape, config.weight_format),
        "slots": slots,
    }
    terms = (E, 3, H) if config.has_scales else (E, H)
    if config.formula.has_gate_up_bias:
        found["gate_up_bias"] = TensorSpec((E, 2 * I), "float32")
        found["down_bias"] = TensorSpec(terms, "bfloat16")
    if config.has_scales:
        found["gate_up_scale"] = TensorSpec((E, 2 * I), "float32")
        found["down_scale"] = TensorSpec(terms, "bfloat16")
    if config.scaling != "none":
        found["slot_scale"] = TensorSpec((len(slots),), "float32")
    return found
