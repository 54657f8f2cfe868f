"""Decode cases from models: one rank of every split of every model, every number of tokens.

TP and EP are powers of two with up to 64 ranks together; H, I / TP, K, the number of experts of all
ranks and the formula are the model's. Weights that nobody chose are never written, so tokens choose
among as many experts as the budget allows; only where the experts of a rank do not fit this machine
at all are there fewer, and the case's variant says so. Routings, formats and layouts take turns; at
FEWEST_AT tokens the rank is the one with the least choices, often none.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lab.check.kernel_cases.models import (
    ATOL,
    BF16_BYTES,
    DEGREES,
    LAYERS,
    RTOL,
    STACK_BYTES,
    Layer,
    splits,
)
from lab.check.kernel_cases.routings import draw_routing
from lab.check.vendor_cases.case import Case
from lab.check.vendor_cases.inputs import Draw

TOKENS = (1, 2, 4, 8, 16, 64, 128, 256)
FEWEST_AT = 2
ROUTINGS = ("uniform", "zipf", "one-expert", "balanced", "empty-experts")
BLOCK_TOKENS = (1, 5, 64)  # 5: a window of speculation
BLOCK_SPLITS = ((64, 1), (8, 8), (1, 64), (4, 16))
MAX_WEIGHTS = 6e7  # of the experts that a case touches, where more than K + 1 are
MAX_BLOCK_WEIGHTS = 3e8
FP8_RTOL = 0.05
FP8_FORMATS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {"quant_dtype": "float4_e2m1fn_x4", "down_scale": "expert"},
    "gpt-oss-120b": {"quant_dtype": "float4_e2m1fn_x4", "down_scale": "expert"},
}
E4M3 = {"quant_dtype": "float8_e4m3"}
# The models' routers, by the names of decode_block cases.
BLOCK_ROUTER = {"router_pre_norm": "router_act_first", "act_fn": "router_fn"}
SHARED = {"llama4-scout": 8192, "llama4-maverick": 8192, "deepseek-v3": 2048}


def decode_model_cases(names: Sequence[str]) -> list[Case]:
    """Return the decode cases of some models, all if none is named: experts, then blocks."""
    layers = [LAYERS[name] for name in names or LAYERS]
    return [case for layer in layers for case in (*_experts_of(layer), *_blocks_of(layer))]


def quick_cases() -> list[Case]:
    """Return a few small cases of every model: the widest splits, each with other tokens."""
    found = []
    for number, layer in enumerate(LAYERS.values()):
        for place, (tp, ep) in enumerate(((64, 1), (8, 8))):
            if splits(layer, tp, ep):
                T = TOKENS[(2 * number + place) % len(TOKENS)]
                found.append(rank_case(layer, tp, ep, T, number + place, max_weights=4e6))
    return found


def _experts_of(layer: Layer) -> Iterator[Case]:
    number = 0
    for ep in DEGREES:
        for tp in DEGREES:
            if splits(layer, tp, ep):
                for tokens in TOKENS:
                    yield rank_case(layer, tp, ep, tokens, number)
                    number += 1
                number += 1  # so that tokens do not always meet the same routing


def rank_case(
    layer: Layer, tp: int, ep: int, tokens: int, number: int, max_weights: float = MAX_WEIGHTS
) -> Case:
    """Return the case of the rank with the most choices, or at FEWEST_AT tokens the least.

    Args:
        layer: of the model.
        tp, ep: how many ranks share an expert, and how many share the experts.
        tokens: T.
        number: decides routing, format and layout.
        max_weights: of all experts that are touched, unless the least are more.
    """
    inner = layer.I // tp
    weights_each = 3 * layer.H * inner
    here = max(1, min(layer.E // ep, int(STACK_BYTES // (weights_each * BF16_BYTES))))
    E = here * ep
    K = min(layer.K, E)
    variant = f"{layer.name} TP{tp} EP{ep}"
    if layer.E != E:
        variant += f", E {layer.E} -> {E} to fit"
    routing = ROUTINGS[number % len(ROUTINGS)]
    pool = _pool(E, K, ep, max_weights / weights_each)
    load_E = np.bincount(_routing(routing, tokens, E, K, pool).reshape(-1), minlength=E)
    pick = np.argmin if tokens == FEWEST_AT else np.argmax
    params = {
        "hidden": layer.H,
        "intermediate": inner,
        "experts": here,
        "num_experts": E,
        "ep_rank": int(pick(load_E.reshape(ep, here).sum(1))),
        "top_k": K,
        "tokens": tokens,
        "routing": routing,
        "routing_pool": pool,
        "layout": ("ehi", "packed")[number % 2],
        **layer.experts,
    }
    is_fp8 = number % 4 == 3
    if is_fp8:
        params |= FP8_FORMATS.get(layer.name, E4M3)
    return Case(
        id=f"{layer.name}/tp{tp}/ep{ep}/T{tokens}",
        kernel="moe_tkg",
        variant=variant,
        platform="trn2",
        params=params,
        rtol=FP8_RTOL if is_fp8 else RTOL,
        atol=ATOL,
    )


def _pool(E: int, K: int, ep: int, most: float) -> int:
    """Return how many experts to choose from, so that a rank has about `most` of them."""
    pool = E
    while pool // ep > most and pool // 2 > K:
        pool //= 2
    return pool


@functools.cache
def _routing(routing: str, tokens: int, E: int, K: int, pool: int) -> np.ndarray:
    return draw_routing(Draw(0), routing, tokens, E, K, pool)


def _blocks_of(layer: Layer) -> Iterator[Case]:
    for tp, ep in BLOCK_SPLITS:
        if not splits(layer, tp, ep):
            continue
        for tokens in BLOCK_TOKENS:
            inner, here = layer.I // tp, layer.E // ep
            if min(here, tokens * layer.K) * 3 * layer.H * inner > MAX_BLOCK_WEIGHTS:
                continue
            params = {
                "hidden": layer.H,
                "intermediate": inner,
                "num_global_experts": layer.E,
                "num_local_experts": here,
                "top_k": layer.K,
                "batch": tokens,
                "has_residual": True,
                "has_shared_expert": layer.name in SHARED,
                "shared_width": max(1, SHARED.get(layer.name, 0) // (tp * ep)),
                "layout": ("ehi", "packed")[tokens % 2],
                **_block_router(layer),
                **layer.experts,
            }
            yield Case(
                id=f"{layer.name}/block/tp{tp}/ep{ep}/T{tokens}",
                kernel="moe_block_tkg",
                variant=f"{layer.name} TP{tp} EP{ep}",
                platform="trn2",
                params=params,
                rtol=RTOL,
                atol=ATOL,
            )


def _block_router(layer: Layer) -> dict[str, Any]:
    return {BLOCK_ROUTER.get(name, name): value for name, value in layer.router.items()}
