"""Our prefill kernels on a benchmark's case: one launch, with the plan a compiled graph would have.

The plan is the cost model's, from the sizes and the number of tokens alone, as if experts were
chosen alike: the same for every routing. The visits are given, as the vendor's block lists are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import nki_sim
from neuron_moe.blocks import build_block_mapping, num_blocks
from neuron_moe.tools.prefill_cases import Model
from nki_kernels.blockwise_choice import PlanChoice, choose_plan, expect_tokens
from nki_kernels.blockwise_config import PrefillConfig, stored_parts
from nki_kernels.blockwise_moe import blockwise_moe
from nki_kernels.blockwise_options import best_parts, make_config, plan_on_host
from nki_kernels.combine import CombineDims, combine
from nki_sim import SimOptions, TensorSpec

nki_sim.provide()

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

BLOCK_SIZES = (128, 64, 32)  # those the backend chooses from
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


def configure(model: Model, num_tokens: int) -> tuple[PrefillConfig, PlanChoice]:
    """Return what the kernel is compiled for: the fastest plan by estimate, and that estimate.

    Args:
        model: the layer.
        num_tokens: T.
    """
    found = [
        (choice, block_size, parts)
        for block_size in BLOCK_SIZES
        for choice, parts in _choices(model, num_tokens, block_size)
    ]
    choice, block_size, parts = min(found, key=lambda plan: plan[0].estimated_us)
    config = make_config(
        **_sizes(model, num_tokens), **_slots(model, num_tokens, block_size),
        **_options(model, num_tokens, block_size), shard_plan=choice.shard_plan,
        weight_parts=parts, tiles_per_expert=choice.tiles_per_expert,
        largest_visit=choice.largest_visit,
    )  # fmt: skip
    return config, choice


def _choices(
    model: Model, num_tokens: int, block_size: int
) -> Iterator[tuple[PlanChoice, tuple[int, int] | None]]:
    """Yield the best plan with weights as they are, and by the parts they load fastest in."""
    sizes, options = _sizes(model, num_tokens), _options(model, num_tokens, block_size)
    # With one expert a token the rows are the output, so there is nothing to add parts in.
    shard_plans = ("balanced",) if model.K == 1 else ("balanced", "hidden", "intermediate")
    even = make_config(**sizes, **_slots(model, num_tokens, block_size), **options)
    for parts in (None, best_parts(even)):
        if parts != (1, 1):
            choice = choose_plan(
                **sizes, top_k=model.K, block_sizes=(block_size,), shard_plans=shard_plans,
                weight_parts=parts, **options,
            )  # fmt: skip
            yield choice, parts


def _sizes(model: Model, num_tokens: int) -> dict[str, Any]:
    return {"H": model.H, "I": model.I, "E": model.E, "num_tokens": num_tokens}


def _slots(model: Model, num_tokens: int, block_size: int) -> dict[str, Any]:
    """Return block size and slots, enough for every routing."""
    blocks = num_blocks(num_tokens, model.K, model.E, block_size)
    return {"block_size": block_size, "num_slots": blocks * block_size}


def _options(model: Model, num_tokens: int, block_size: int) -> dict[str, Any]:
    """Return the layer's options, and whether rows or whole tiles are stored."""
    tokens_E = expect_tokens(num_tokens * model.K, model.E, "uniform")
    rows = int(np.ceil(tokens_E / block_size).sum()) * block_size
    stores = "tiles" if num_tokens * model.K >= FULL_TILES * rows else "rows"
    return {**model.options, "stores": "tokens" if model.K == 1 else stores}


def launch_ours(model: Model, expert_index_TK: Any) -> tuple[nki_sim.Run, str]:
    """Simulate our layer; return the run and the plan in words."""
    T, K = expert_index_TK.shape
    config, choice = configure(model, T)
    mapping = build_block_mapping(torch.from_numpy(expert_index_TK), model.E, choice.block_size)
    slots = mapping.token_position_to_id.numpy()
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
        f"{choice.shard_plan}, B={choice.block_size}, visits of {loop.classes[0]}, "
        f"{loop.slots} slots, {lie} {loop.in_parts}+{loop.out_parts} parts, "
        f"turned by {loop.turns}, stores {config.stores}"
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
