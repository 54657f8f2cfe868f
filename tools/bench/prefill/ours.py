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
from neuron_moe.tools.bench.comparison.layers import Model
from nki_kernels.combine.kernel import CombineDims, combine
from nki_kernels.prefill.choice import PlanChoice, choose_plan, expect_tokens
from nki_kernels.prefill.config import PrefillConfig, stored_parts
from nki_kernels.prefill.kernel import blockwise_moe
from nki_kernels.prefill.options import best_parts, make_config, plan_on_host
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


def configure(model: Model, num_tokens: int, num_slots: int) -> tuple[PrefillConfig, PlanChoice]:
    """Return what the kernel is compiled for: the fastest plan by estimate, and that estimate.

    Args:
        model: the layer.
        num_tokens: T.
        num_slots: N*B, enough for every routing.
    """
    sizes: dict[str, Any] = {"H": model.H, "I": model.I, "E": model.E, "num_tokens": num_tokens}
    tokens_E = expect_tokens(num_tokens * model.K, model.E, "uniform")
    rows = int(np.ceil(tokens_E / BLOCK_SIZE).sum()) * BLOCK_SIZE
    stores = "tiles" if num_tokens * model.K >= FULL_TILES * rows else "rows"
    shard_plans: tuple[str, ...] = ("balanced", "hidden", "intermediate")
    if model.K == 1:  # the rows are the output, so there is nothing to add them in
        stores, shard_plans = "tokens", ("balanced",)
    options: dict[str, Any] = {**model.options, "stores": stores}
    slots: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_slots": num_slots}
    even = make_config(**sizes, **slots, **options)
    # Weights lie as they are, or by the parts in which they are loaded fastest.
    found = []
    for parts in (None, best_parts(even)):
        if parts == (1, 1):
            continue
        choice = choose_plan(
            **sizes, top_k=model.K, block_sizes=(BLOCK_SIZE,), shard_plans=shard_plans,
            weight_parts=parts, **options,
        )  # fmt: skip
        found.append((choice, parts))
    choice, parts = min(found, key=lambda pair: pair[0].estimated_us)
    config = make_config(
        **sizes, **slots, **options, shard_plan=choice.shard_plan, weight_parts=parts,
        tiles_per_expert=choice.tiles_per_expert, largest_visit=choice.largest_visit,
    )  # fmt: skip
    return config, choice


def launch_ours(model: Model, expert_index_TK: Any) -> tuple[nki_sim.Run, str]:
    """Simulate our layer; return the run and the plan in words."""
    T, K = expert_index_TK.shape
    mapping = build_block_mapping(torch.from_numpy(expert_index_TK), model.E, BLOCK_SIZE)
    slots = mapping.token_position_to_id.numpy()
    config, choice = configure(model, T, len(slots))
    plan = plan_on_host(config, slots, mapping.block_to_expert.numpy())
    pair = mapping.pair_of_slot.numpy()
    slot_of_pair = np.zeros(T * K, np.int32)
    slot_of_pair[pair[pair >= 0]] = np.flatnonzero(pair >= 0)
    run = nki_sim.run(
        _layer, {**_operands(model, T, slots, config), **_plan_arguments(plan)}, config,
        slot_of_pair.reshape(T, K), TensorSpec((T, K), "float32"),
        CombineDims(nl.bfloat16, False), lnc=2, options=OPTIONS,
    )  # fmt: skip
    loop = config.loop
    lie = "stored in" if loop.by_parts else "loaded in"
    return run, (
        f"{choice.shard_plan}, visits of {loop.classes[0]}, {loop.slots} slots, {lie} "
        f"{loop.in_parts}+{loop.out_parts} parts, turned by {loop.turns}, stores {config.stores}"
    )


def _plan_arguments(plan: Any) -> dict[str, Any]:
    names = ("visit_expert", "visit_tile", "class_trips")
    return dict(zip(names, plan, strict=True))


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
        "gate_up": TensorSpec(gate_up_shape, "bfloat16"),
        "down": TensorSpec(down_shape, "bfloat16"),
        "slots": slots,
    }
    if config.has_gate_up_bias:
        found["gate_up_bias"] = TensorSpec((E, 2 * I), "float32")
        found["down_bias"] = TensorSpec((E, H), "bfloat16")
    if config.scaling != "none":
        found["slot_scale"] = TensorSpec((len(slots),), "float32")
    return found
