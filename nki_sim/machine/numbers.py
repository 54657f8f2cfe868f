"""Numbers that a type cannot hold: what overflows, saturates, is rounded, or is none any more.

Findings, no errors: a kernel may mean it. Values are looked at where they are narrowed. The first
NaN and what becomes infinite in float32 show in the flags of the processor that simulates, which
cost nothing; only an instruction that raised one is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from nki_sim import dtypes
from nki_sim.dtypes import Array, DType
from nki_sim.machine.ambient import running

_OVERFLOW, _INVALID = 2, 8  # of NumPy's calls for floating-point errors
_EXACT: Final = 1 << 24  # float32 holds all integers up to here
_LARGE: Final = float(np.finfo(np.float32).max)
_LARGEST: Final = {
    dtype: float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]
    for dtype in (dtypes.bfloat16, dtypes.float16, *dtypes.FP8)
}


class FloatFlags:
    """What the processor said of the arithmetic since somebody asked.

    Attributes:
        raised: bits of NumPy's floating-point errors.
        has_nan: whether a NaN was seen.
    """

    def __init__(self) -> None:
        self.raised = 0
        self.has_nan = False

    def watch(self, *, is_on: bool) -> np.errstate:
        """Return the context in which arithmetic raises these flags, and never warns."""
        mode: Any = "call" if is_on else "ignore"
        return np.errstate(
            divide="ignore", under="ignore", over=mode, invalid=mode, call=self._take
        )

    def _take(self, _: str, flag: int) -> None:
        self.raised |= flag


def watch_narrowing(values: Array, dtype: DType) -> None:
    """Keep a finding if some of `values` overflow, saturate or are rounded integers in `dtype`."""
    core = running()
    if core is None or not core.watches_numbers or not values.size:
        return
    if dtype.kind == "f" and values.dtype.kind == "f":
        limit = _LARGEST.get(dtype)
        if limit is not None and _leaves(values, -limit, limit):
            lost = np.isfinite(values) & ~np.isfinite(dtypes.convert(values, dtype))
            _note(core, "overflow", values, lost, f"overflow {dtype}")
    elif dtype.is_integer and values.dtype.kind in "fiu":
        bounds = np.iinfo(dtype.numpy)
        if _leaves(values, bounds.min, bounds.max):
            rounded = np.rint(values)
            lost = ~((rounded >= bounds.min) & (rounded <= bounds.max))
            _note(core, "overflow", values, lost, f"saturate in {dtype}")
        elif values.dtype.kind == "f" and dtype.itemsize == 4 and _leaves(values, -_EXACT, _EXACT):
            mantissa = np.frexp(values.astype(np.float32))[0] * np.float32(_EXACT)
            lost = (np.abs(values) > _EXACT) & (mantissa % 2 != 0)
            _note(core, "inexact", values, lost, "are integers beyond 2^24, rounded to float32")


def watch_integers(values: Array) -> None:
    """Keep a finding if an engine that computes in float32 reads integers that it rounds.

    The extremes of the type stand for "none" and do not count.
    """
    core = running()
    if core is None or not core.watches_numbers or not values.size:
        return
    if _leaves(values, -_EXACT, _EXACT):
        bounds = np.iinfo(values.dtype)
        lost = values.astype(np.float32).astype(np.int64) != values
        lost &= (values != bounds.min) & (values != bounds.max)
        _note(core, "inexact", values, lost, "are integers that float32 rounds")


def watch_results(core: Any, writes: Sequence[Any], reads: Sequence[Any]) -> None:
    """Keep a finding if the present instruction made the first NaN, or something infinite.

    Where an input is not finite, a NaN is no news.
    """
    flags = core.machine.float_flags
    raised, flags.raised = flags.raised, 0
    if not core.watches_numbers:
        return
    for dst in writes:
        if dst.dtype.kind != "f":
            continue
        values = dtypes.to_float32(dst.array())
        if raised & _INVALID and not flags.has_nan:
            is_nan = np.isnan(values)
            if is_nan.any():
                flags.has_nan = True
                if all(_is_finite(alloc) for alloc in core.machine.inputs()):
                    _note(core, "nan", values, is_nan, "are the first NaN of the run")
        if raised & _OVERFLOW:
            is_infinite = np.isinf(values)
            others = [t for t in reads if t._alloc is not dst._alloc and t.dtype.kind == "f"]
            known = any(np.isinf(t.f32()).any() for t in others)
            if not known:
                _note(core, "overflow", values, is_infinite, "become infinite in float32")


def _leaves(values: Array, low: float, high: float) -> bool:
    """Whether some value is outside of a range, or is no number."""
    if values.dtype == np.float32 and values.flags.c_contiguous:
        flat = values.reshape(-1)
        if low <= -high and np.dot(flat, flat) < min(high * high, _LARGE):
            return False  # one pass, which mostly suffices
    return not (values.max() <= high and values.min() >= low)


def _is_finite(alloc: Any) -> bool:
    """Whether all that the caller put into an input is a number."""
    if alloc.dtype.kind != "f" or not alloc.has_data:
        return True
    values = alloc.data if alloc.original is None else alloc.original
    return bool(np.isfinite(dtypes.to_float32(values.view(alloc.dtype.numpy))).all())


def _note(core: Any, kind: str, values: Array, lost: Array, what: str) -> None:
    count = int(lost.sum())
    if count:
        first = tuple(int(k) for k in np.argwhere(lost)[0])
        text = f"{count} of {values.size} values {what}, the first {values[first]} at {list(first)}"
        core.note(kind, text)
