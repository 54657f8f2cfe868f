"""Our kernels on a benchmark's prefill: one launch, with the plan a compiled graph would have.

The plan is the layer's, from the sizes and the number of tokens alone: the same for every routing.
Few tokens go through the decode kernel, others in blocks, whose size and plan are the cost model's,
as if experts were chosen alike. The visits are given, as the vendor's block lists are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import nki_sim
from neuron_moe.blocks import build_block_mapping, num_blocks
from neuron_moe.paths import FEW_TOKEN_PATHS, choose_path
from neuron_moe.tools.bench.comparison import runs
from neuron_moe.tools.bench.comparison.layers import Model
from neuron_moe.tools.bench.decode.ours import CORES, expert_specs
from nki_kernels.combine import CombineDims, combine
from nki_kernels.common.formula import ExpertFormula, limits
from nki_kernels.decode import (
    DecodeConfig,
    DecodeRequest,
    DecodeSizes,
    WeightForm,
    decode_moe,
    make_decode_config,
)
from nki_kernels.prefill import (
    Candidate,
    Expected,
    ExpertSizes,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    Search,
    best_parts,
    blockwise_moe,
    by_loss,
    expect_tokens,
    largest_visit_of,
    make_config,
    rank_candidates,
    stored_parts,
    tells_short,
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


@dataclass(frozen=True, slots=True)
class OurPlan:
    """What a kernel of ours is compiled for, the size of its blocks or 0, and both in words."""

    config: PrefillConfig | DecodeConfig
    block_size: int
    words: str


def plan_of(model: Model, num_tokens: int, layout: str) -> OurPlan:
    """Return the plan of a prefill, by the rules of a layer.

    Args:
        model: the layer.
        num_tokens: T.
        layout: of the weights, plain or packed for the kernel.
    """
    decision = choose_path("prefill", num_tokens, model.K, model.E, backend="nki")
    if decision.path not in FEW_TOKEN_PATHS:
        config, candidate = configure(model, num_tokens, layout)
        return OurPlan(config, candidate.block_size, plan_in_words(config, candidate))
    decode = make_decode_config(
        DecodeSizes(num_tokens, model.H, model.I, model.E, model.K, model.E, CORES),
        formula_of(model),
        WeightForm(layout="ehi" if layout == "plain" else "packed"),
        DecodeRequest(scaling=model.options.get("scaling", "post"), output_dtype="bfloat16"),
    )
    cut = f"{decode.chunks} chunks of {decode.parts} parts, {decode.weight_buffers} weight buffers"
    return OurPlan(decode, 0, f"decode kernel, {decode.mode}, {cut}, weights {layout}")


def launch_plan(model: Model, expert_index_TK: Any, plan: OurPlan) -> nki_sim.Run:
    """Simulate our layer by its plan; an expert of -1 is another rank's."""
    if isinstance(plan.config, PrefillConfig):
        return launch_ours(model, expert_index_TK, plan.config, plan.block_size)
    operands = expert_specs(model, plan.config)
    return runs.run(
        decode_moe, TensorSpec((len(expert_index_TK), model.H), "bfloat16"),
        operands.pop("gate_up"), operands.pop("down"), expert_index_TK,
        TensorSpec(expert_index_TK.shape, "float32"), np.zeros((1, 1), np.int32), plan.config,
        lnc=CORES, options=OPTIONS, **operands,
    )  # fmt: skip


def configure(
    model: Model,
    num_tokens: int,
    layout: str = "packed",
    block_sizes: tuple[int, ...] = Search().block_sizes,
) -> tuple[PrefillConfig, Candidate]:
    """Return what the blockwise kernel is compiled for: the fastest by estimate, and the estimate.

    Args:
        model: the layer.
        num_tokens: T.
        layout: of the weights: plain ([E, H, 2I] and [E, I, H]), or packed: by the parts in which
            they are loaded fastest, where that is faster.
        block_sizes: to choose from.
    """
    formula, sizes = formula_of(model), ExpertSizes(model.H, model.I, model.E)
    tokens_E = expect_tokens(num_tokens * model.K, model.E, "uniform")
    rows = int(np.ceil(tokens_E / BLOCK_SIZE).sum()) * BLOCK_SIZE
    stores = "tiles" if num_tokens * model.K >= FULL_TILES * rows else "rows"
    search = Search(block_sizes=block_sizes)
    if model.K == 1:  # the rows are the output, so there is nothing to add them in
        stores, search = "tokens", replace(search, shard_plans=("balanced",))
    scaling = model.options.get("scaling", "none")

    def work(block_size: int) -> PrefillWork:
        num_slots = num_blocks(num_tokens, model.K, model.E, block_size) * block_size
        return PrefillWork(block_size, num_slots, num_tokens, scaling=scaling, stores=stores)

    expected = Expected(num_tokens=num_tokens, top_k=model.K, scaling=scaling, stores=stores)
    parts = (
        (1, 1) if layout == "plain" else best_parts(make_config(formula, sizes, work(BLOCK_SIZE)))
    )
    found = [
        candidate
        for lie in (None, parts)
        if lie != (1, 1)
        for candidate in rank_candidates(
            formula, sizes, expected, PlanRequest(weight_parts=lie), search
        )
    ]
    candidate = by_loss(found)[0]
    config = make_config(formula, sizes, work(candidate.block_size), candidate.request)
    return config, candidate


def formula_of(model: Model) -> ExpertFormula:
    """Return the kernels' formula of a layer."""
    options = {name: value for name, value in model.options.items() if name != "scaling"}
    if options.get("activation") == "swiglu_oai":
        options |= {"activation": "sigmoid", "gates_itself": True, "scale": 1.702}
    for name in ("gate_limits", "up_limits"):
        if name in options:
            options[name] = limits(*options[name])
    return ExpertFormula(**options)


def launch_ours(
    model: Model, expert_index_TK: Any, config: PrefillConfig, block_size: int
) -> nki_sim.Run:
    """Simulate our blockwise layer; an expert of -1 is another rank's."""
    T, K = expert_index_TK.shape
    mapping = build_block_mapping(torch.from_numpy(expert_index_TK), model.E, block_size)
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
    short = "short last tiles, " if tells_short(config) else ""
    blocks = "" if candidate.block_size == BLOCK_SIZE else f"blocks of {candidate.block_size}, "
    lie = "stored in" if loop.by_parts else "loaded in"
    parts = f"{loop.in_parts}x{loop.h_parts}+{loop.out_parts}"
    early = " early" if loop.is_eager else ""
    return (
        f"{candidate.request.shard_plan}, {blocks}visits of {largest_visit_of(config)}, {short}"
        f"{loop.weight_buffers} weight buffers, {lie} {parts} parts{early}, "
        f"turned by {loop.turns}, stores {config.stores}"
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
