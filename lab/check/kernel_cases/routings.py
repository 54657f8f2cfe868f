"""Choices of experts, from balanced to as skewed as they come."""

import numpy as np

from lab.check.vendor_cases.inputs import Draw

ROUTINGS = ("uniform", "balanced", "zipf", "skewed", "one-expert", "empty-experts")
HOT_EXPERTS, HOT_PAIRS = 0.25, 0.8  # skewed: this share of the experts gets this share of the pairs


def draw_routing(
    draw: Draw, name: str, tokens: int, experts: int, top_k: int, pool: int | None = None
) -> np.ndarray:
    """Return [T, K] int32, different experts for each token.

    Args:
        draw: source of random numbers.
        name: one of ROUTINGS.
        tokens: T.
        experts: E.
        top_k: K, at most E.
        pool: how many experts, evenly spaced, are chosen from; all by default.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ROUTINGS:
        raise ValueError(f"routing={name!r}: must be one of {', '.join(ROUTINGS)}.")
    if pool is not None and pool < experts:
        chosen_TK = draw_routing(draw, name, tokens, pool, top_k)
        return (chosen_TK * (experts // pool)).astype(np.int32)
    if name == "balanced":
        pair = np.arange(tokens * top_k).reshape(tokens, top_k)
        return (pair % experts).astype(np.int32)
    number = np.arange(experts)
    weight_E = np.ones(experts)
    if name == "zipf":
        weight_E = 1.0 / (number + 1)
    elif name == "skewed":
        hot = max(1, round(HOT_EXPERTS * experts))
        rest = max(1, experts - hot)
        weight_E = np.where(number < hot, HOT_PAIRS / hot, (1 - HOT_PAIRS) / rest)
    elif name == "one-expert":
        weight_E = np.where(number == experts // 2, 1e9, 1.0)
    elif name == "empty-experts":
        weight_E = np.where(number % 2 == 0, 1.0, 1e-9)
    # The K largest of log(weight) + Gumbel noise are K draws without replacement.
    keys_TE = np.log(weight_E) + draw.rng.gumbel(size=(tokens, experts))
    return np.argsort(-keys_TE, axis=1)[:, :top_k].astype(np.int32)
