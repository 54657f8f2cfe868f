"""What a case found out."""

import dataclasses

import numpy as np

from lab.check.vendor_cases.case import Case, difference

NO_WORSE = 1.05  # root mean square error over that of the torch path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one case.

    Attributes:
        failure: what is wrong, "" if nothing.
        note: what differs from the case as listed, "" if nothing.
        simulated_us: time of all kernels one after the other, by the simulator's timeline.
    """

    failure: str
    note: str
    simulated_us: float


def judge(
    name: str,
    actual: np.ndarray,
    exact: np.ndarray,
    peer: np.ndarray,
    case: Case,
    floor: float = 0.0,
) -> str:
    """Return why an output is wrong, or "".

    It must be within the case's tolerance of the float64 formula, and its root mean square error
    must not exceed that of the torch path.

    Args:
        name: of the output.
        actual: from our kernel.
        exact: by the formula in float64.
        peer: from the torch path.
        case: has the tolerance.
        floor: error below which nothing is asked, as a share of the largest output.
    """
    why = difference(actual, exact, case.rtol, case.atol)
    if why:
        return f"{name}: {why}"
    ours, theirs = rms(actual, exact), rms(peer, exact)
    if ours > NO_WORSE * theirs + floor * float(np.abs(exact).max(initial=0.0)):
        return f"{name}: rms error {ours:.3g}, that of the torch path is {theirs:.3g}"
    return ""


def rms(actual: np.ndarray, exact: np.ndarray) -> float:
    """Return the root mean square difference."""
    return float(np.sqrt(np.mean(np.square(actual.astype(np.float64) - exact))))


def join(*notes: str) -> str:
    """Return the notes that say something, in one line."""
    return "; ".join(filter(None, notes))
