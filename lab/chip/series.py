"""Times of many kernels, taken in turn, with the drift of the clock taken out again.

In every round each kernel is launched once, in an order of its own. What all kernels of a round
have in common is drift: the median over kernels of how far they are from their own median. It is
followed by a polynomial in the rounds; times are those at the start of the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lab.chip.device import Loaded

DEGREE: Final = 7
PASSES: Final = 3
_MEDIAN = 1.2533  # standard error of a median over that of a mean
_MAD = 1.4826  # standard deviation over the median of absolute deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What was found of some kernels.

    Attributes:
        ns: [n] time of a launch at the start of the session, without drift.
        error: [n] its standard error, as a share.
        drift: [rounds] the clock over the session, as a share.
    """

    ns: NDArray[np.float64]
    error: NDArray[np.float64]
    drift: NDArray[np.float64]


def measure(
    loaded: Sequence[Loaded],
    rounds: int,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Times:
    """Launch kernels in turn, round after round.

    Args:
        loaded: the kernels.
        rounds: launches of each.
        seed: of the orders.
        tell: called with (rounds done, rounds in all).
    """
    random = np.random.default_rng(seed)
    log_ns = np.empty((rounds, len(loaded)))
    for number in range(rounds):
        for kernel in random.permutation(len(loaded)).tolist():
            log_ns[number, kernel] = np.log(loaded[kernel].time_ns())
        tell(number + 1, rounds)
    return without_drift(log_ns)


def without_drift(log_ns: NDArray[np.float64]) -> Times:
    """Split [rounds, n] logarithms of times into kernels, drift and noise."""
    rounds, count = log_ns.shape
    where = np.linspace(-1.0, 1.0, rounds)
    degree = min(DEGREE, max(0, rounds // 20)) if count > 1 else 0
    drift = np.zeros(rounds)
    for _pass in range(PASSES):
        middle = np.median(log_ns - drift[:, None], axis=0)
        common = np.median(log_ns - middle, axis=1)
        drift = np.polynomial.legendre.Legendre.fit(where, common, degree)(where)
        drift -= drift[0]
    left = log_ns - drift[:, None]
    middle = np.median(left, axis=0)
    spread = _MAD * np.median(np.abs(left - middle), axis=0)
    error = np.maximum(_MEDIAN * spread / np.sqrt(rounds), 1e-4)
    return Times(ns=np.exp(middle), error=error, drift=np.expm1(drift))
