"""Cases from models instead of a file: one rank of every split of every model, five routings.

TP and EP are powers of two with up to 64 ranks together. H, I / TP, K and the formula are the
model's; T is as large as the budget allows. Where not even FEW_TOKENS tokens fit, they choose among
fewer experts, and the others stay without tokens. Only where a layer does not fit this machine at
all are there fewer experts (and with fewer than K of them fewer choices), and the case's variant
says so.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lab.check.kernel_cases.routings import draw_routing
from lab.check.vendor_cases.case import Case
from lab.check.vendor_cases.inputs import Draw

DEGREES = (1, 2, 4, 8, 16, 32, 64)
ROUTINGS = ("balanced", "uniform", "zipf", "one-expert", "empty-experts")
# Which core runs first; with "core_orders" both are tried and must agree bit for bit.
CORE_ORDERS: dict[str, dict[str, int]] = {
    "balanced": {"start_core": 0},
    "uniform": {"core_orders": 2},
    "zipf": {"start_core": 1},
    "one-expert": {"start_core": 0},
    "empty-experts": {"start_core": 1},
}
FEW_TOKENS = 20
TOKENS = (300, 150, 75, 40, FEW_TOKENS)
ROUTER_TOKENS = (1, 130, 700)
BLOCK_SIZE = 128
BF16_BYTES = 2
STACK_BYTES = 8e9  # of all weights; those nobody chose are never written
PEAK_BYTES = 3e9  # of a running case
MAX_RANKS = 64
RTOL, ATOL = 0.02, 1e-5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The MoE layer of a model.

    Attributes:
        name: of the model.
        H, I, E, K: hidden and intermediate size, experts, experts for each token.
        experts: parameters of a prefill case.
        router: parameters of a router case.
    """

    name: str
    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    K: int
    experts: dict[str, Any]
    router: dict[str, Any]


_SILU = {"act_fn": "SiLU"}
OAI = {
    "act_fn": "Swish",
    "bias": True,
    "gate_clamp_upper": 7.0,
    "up_clamp_upper": 7.0,
    "up_clamp_lower": -7.0,
    "up_offset": 1.0,
}
_PRE = {**_SILU, "affinity_scaling_mode": "PRE_SCALE"}
_OAI_ROUTER = {"act_fn": "SOFTMAX", "has_bias": True}
_SIGMOID = {"act_fn": "SIGMOID"}
_RENORMALISED = {"act_fn": "SOFTMAX", "router_pre_norm": True, "norm_topk_prob": True}
_GROUPED = {
    "act_fn": "SIGMOID",
    "has_selection_bias": True,
    "n_group": 8,
    "topk_group": 4,
    "out_of_group_fill": 0.0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def _layer(name: str, H: int, inner: int, E: int, K: int, experts: Any, router: Any) -> Layer:
    return Layer(name=name, H=H, I=inner, E=E, K=K, experts=experts, router=router)


LAYERS = {
    layer.name: layer
    for layer in (
        _layer("gpt-oss-20b", 2880, 2880, 32, 4, OAI, _OAI_ROUTER),
        _layer("gpt-oss-120b", 2880, 2880, 128, 4, OAI, _OAI_ROUTER),
        _layer("llama4-scout", 5120, 8192, 16, 1, _PRE, _SIGMOID),
        _layer("llama4-maverick", 5120, 8192, 128, 1, _PRE, _SIGMOID),
        _layer("qwen3-30b", 2048, 768, 128, 8, _SILU, _RENORMALISED),
        _layer("qwen3-235b", 4096, 1536, 128, 8, _SILU, _RENORMALISED),
        _layer("deepseek-v3", 7168, 2048, 256, 8, _SILU, _GROUPED),
        _layer("mixtral-8x7b", 4096, 14336, 8, 2, _SILU, _RENORMALISED),
        _layer("dbrx", 6144, 10752, 16, 4, _SILU, _RENORMALISED),
    )
}


def model_cases(names: Sequence[str], max_macs: float) -> list[Case]:
    """Return the cases of some models: routers, then all splits with all routings.

    Args:
        names: keys of LAYERS, none for all of them.
        max_macs: multiply-accumulates of a case; more only where one token needs more.
    """
    layers = [LAYERS[name] for name in names or LAYERS]
    return [case for layer in layers for case in _cases_of(layer, max_macs)]


def _cases_of(layer: Layer, max_macs: float) -> Iterator[Case]:
    for tokens in ROUTER_TOKENS:
        params = {"T": tokens, "H": layer.H, "E": layer.E, "k": layer.K, **layer.router}
        yield _case(f"{layer.name}/router/T{tokens}", "router_topk", layer.name, params)
    for ep in DEGREES:
        for tp in DEGREES:
            if splits(layer, tp, ep):
                for routing in ROUTINGS:
                    yield rank_case(layer, tp, ep, routing, max_macs)


def splits(layer: Layer, tp: int, ep: int) -> bool:
    """Say whether so many ranks can share an expert, and share the experts."""
    return tp * ep <= MAX_RANKS and layer.E % ep == 0 and layer.I % tp == 0


def rank_case(
    layer: Layer, tp: int, ep: int, routing: str, max_macs: float, most: int = TOKENS[0]
) -> Case:
    """Return the case of one rank: the one with the most pairs, or of "empty-experts" the least.

    Args:
        layer: of the model.
        tp, ep: how many ranks share an expert, and how many share the experts.
        routing: one of ROUTINGS.
        max_macs: multiply-accumulates to stay within.
        most: tokens, if that allows them.
    """
    inner = layer.I // tp
    bytes_each = 3 * layer.H * inner * BF16_BYTES
    here = max(1, min(layer.E // ep, int(STACK_BYTES // bytes_each)))
    while here > 1 and _peak_bytes(min(layer.K, here), bytes_each) > PEAK_BYTES:
        here = min(layer.K, here) - 1
    E = here * ep
    K = min(layer.K, E)
    variant = f"{layer.name} TP{tp} EP{ep}"
    if E != layer.E:
        variant += f", E {layer.E} -> {E} to fit"
    pick = np.argmin if routing == "empty-experts" else np.argmax
    for tokens, pool in _sizes(E, K, most):
        load_E = np.bincount(_routing(routing, tokens, E, K, pool).reshape(-1), minlength=E)
        load_RE = load_E.reshape(ep, here)
        rank = int(pick(load_RE.sum(1)))
        tiles = int(np.ceil(load_RE[rank] / BLOCK_SIZE).sum())
        macs = tiles * BLOCK_SIZE * 3 * layer.H * inner
        is_least = tokens <= FEW_TOKENS and pool == min(K + 1, E)
        peak_bytes = _peak_bytes(int(np.count_nonzero(load_RE[rank])), bytes_each)
        if (macs <= max_macs or is_least) and peak_bytes <= PEAK_BYTES:
            break
    params = {
        "hidden": layer.H,
        "intermediate": inner,
        "experts": E,
        "E_local": here,
        "E_offset": rank * here,
        "top_k": K,
        "tokens": tokens,
        "block_size": BLOCK_SIZE,
        "routing": routing,
        "routing_pool": pool,
        **CORE_ORDERS[routing],
        **layer.experts,
    }
    return _case(f"{layer.name}/tp{tp}/ep{ep}/{routing}", "moe_cte", variant, params)


def _peak_bytes(experts: int, bytes_each: int) -> int:
    """Return memory for the experts' weights twice, and for two copies of one in float64."""
    return 2 * experts * bytes_each + 2 * 4 * bytes_each


def _sizes(E: int, K: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield tokens, and experts they choose from, the larger problems first."""
    least, few = min(K + 1, E), min(FEW_TOKENS, most)
    yield most, E
    for tokens in TOKENS:
        if tokens < most:
            yield tokens, E
    pool = E // 2
    while pool > least:
        yield few, pool
        pool //= 2
    yield few, least
    yield 1, least


@functools.cache
def _routing(routing: str, tokens: int, E: int, K: int, pool: int) -> np.ndarray:
    return draw_routing(Draw(0), routing, tokens, E, K, pool)


def _case(name: str, kernel: str, variant: str, params: dict[str, Any]) -> Case:
    return Case(
        id=name,
        kernel=kernel,
        variant=variant,
        platform="trn2",
        params=params,
        rtol=RTOL,
        atol=ATOL,
    )
