"""Averages and spreads of repeated or compared measurements."""

import math
import statistics
from collections.abc import Sequence


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    if not values:
        return None
    return math.exp(sum(math.log(value) for value in values) / len(values))


def half_quartile_range(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles, 0 of fewer than two."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / 2
