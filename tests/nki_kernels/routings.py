"""Choices of experts, from balanced to as skewed as they come."""

from __future__ import annotations

import re
from typing import Any

import numpy as np


def choose_experts(routing: str, T: int, E: int, K: int, rng: np.random.Generator) -> Any:
    """Return [T, K] different experts of every token, int32."""
    if routing == "balanced":
        first = np.arange(T)[:, None] * K + np.arange(K)[None, :]
        return (first % E).astype(np.int32)
    weight_E = np.ones(E)
    if routing == "zipf":
        weight_E = 1.0 / np.arange(1, E + 1)
    elif routing == "one-expert":
        weight_E = np.where(np.arange(E) == E // 2, 1e9, 1.0)
    elif routing == "empty-experts":
        weight_E = np.where(np.arange(E) % 2 == 0, 1.0, 1e-9)
    keys = np.log(weight_E)[None, :] + rng.gumbel(size=(T, E))
    return np.argsort(-keys, axis=1)[:, :K].astype(np.int32)


def sizes_in(name: str) -> dict[str, int]:
    """Return the sizes that a name tells, as T500-H192-I60-E3-K2-B64 of other words."""
    found = re.findall(r"(?:^|-)([THIEKB])(\d+)(?=-|$)", name)
    return {letter: int(count) for letter, count in found}
