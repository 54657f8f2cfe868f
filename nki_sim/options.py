"""How a kernel is simulated; the default is the strictest."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args, get_origin, get_type_hints

Policy = Literal["error", "report", "off"]
Version = Literal["0.7", "0.6"]
VERSIONS: Final = ("0.7", "0.6")
# What NKI_COMPILER_FRONTEND names: Python itself, or the passes that NKI 0.6 starts with.
_FRONT_ENDS: Final = {"": "0.7", "tracer": "0.7", "custom": "0.6", "parser": "0.6"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """Options of a simulation.

    Attributes:
        nki: the language, "0.7" (kernels are traced by Python) or "0.6" (parsed: `nl.dynamic_range`
            and `while register:` exist, and a tensor as a condition means "is not None"); None
            takes NKI_COMPILER_FRONTEND, where "custom" and "parser" mean 0.6, else 0.7.
        target: "trn1", "trn2" or "trn3"; None takes NEURON_PLATFORM_TARGET_OVERRIDE, else trn2.
        mode: "full", or "indices": integers, registers, control flow and addresses are exact,
            floating-point arithmetic is skipped but for what comes from integers or from small
            inputs alone. The trace is the same in both.
        small_elements: floating-point inputs up to this many elements are small: "indices" mode
            follows them exactly, so that routing inside a kernel works. Raise it for a router whose
            hidden states and weights are to choose experts.
        uninitialized: what to do about reads of memory that nobody wrote. "output" raises when an
            unwritten value reaches a returned tensor or an address and reports the other reads;
            "read" raises at the first read; "report" only reports; "off" takes it to hold `fill`.
        fill: byte that unwritten memory is filled with where it is read (0xFF: NaN, and -1).
        capacity: SBUF and PSUM must hold what is alive, in program order; "reorder" lets loads,
            fills and sums in PSUM wait for their first use, as the compiler's scheduler may.
        overlap: reads of a tensor whose bytes another tensor at the same address has overwritten.
        races: unordered accesses of two cores to the same shared bytes.
        accumulate: matmuls that add to PSUM which no matmul has written, or overwrite what is
            there unread.
        scatter: rows that an indexed write gets several different values for, but for the last row
            of a tensor, where token lists put their padding, which is reported.
        out_of_bounds: "error", or "clamp": dynamic indices of DMA are limited to the tensor, for
            finding the shapes of outputs with made-up inputs.
        numbers: findings about values that overflow or saturate in a narrower type or become
            infinite, integers that float32 rounds, and the first NaN, if all inputs are finite; in
            mode "full" only.
        mx_headroom: powers of two that quantize_mx leaves free above the largest magnitude: 1, or
            0 for kernels written for NKI before 0.5.
        start_core: the core that runs first; results must not depend on it.
        preempt: probability of a switch to another core before an instruction.
        seed: of the preemption.
        callers: keep with each instruction the three calls that led to its line; takes longer.
        most_iterations: in mode "indices", how many iterations of an `nl.fori_loop` run at most,
            for those who ask what a kernel issues, not how often: an iteration that issued other
            instructions than the first would be refused. 0: all. What a shortened loop wrote is
            unwritten after it, so that no address or bound comes from it.
    """

    nki: Version | None = None
    target: str | None = None
    mode: Literal["full", "indices"] = "full"
    small_elements: int = 128 * 128
    uninitialized: Literal["output", "read", "report", "off"] = "output"
    fill: int = 0xFF
    capacity: Literal["error", "reorder", "report", "off"] = "error"
    overlap: Policy = "error"
    races: Policy = "error"
    accumulate: Policy = "error"
    scatter: Policy = "error"
    out_of_bounds: Literal["error", "clamp"] = "error"
    numbers: Literal["report", "off"] = "report"
    mx_headroom: int = 1
    start_core: int = 0
    preempt: float = 0.0
    seed: int = 0
    callers: bool = False
    most_iterations: int = 0

    def __post_init__(self) -> None:
        if self.nki not in (None, *VERSIONS):
            raise ValueError(f'nki={self.nki!r}: must be "0.7", "0.6" or None.')
        for name, choices in _choices().items():
            if (value := getattr(self, name)) not in choices:
                listed = ", ".join(f'"{choice}"' for choice in choices[:-1])
                raise ValueError(f'{name}={value!r}: must be {listed} or "{choices[-1]}".')
        if not 0 <= self.fill <= 255:
            raise ValueError(f"fill={self.fill}: must be a byte, 0 to 255.")
        if self.most_iterations < 0:
            raise ValueError(f"most_iterations={self.most_iterations}: must be 0 (all) or more.")
        if self.most_iterations and self.uninitialized == "off":
            raise ValueError(
                f"most_iterations={self.most_iterations}: what a shortened loop wrote counts as"
                ' unwritten, which uninitialized="off" does not see. Use "report".'
            )
        if self.mx_headroom not in (0, 1):
            raise ValueError(f"mx_headroom={self.mx_headroom}: must be 0 or 1.")
        if not 0.0 <= self.preempt < 1.0:
            raise ValueError(f"preempt={self.preempt}: must be a probability below 1.")


@functools.cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Return the words that each option of words takes."""
    hints = get_type_hints(SimOptions).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}


def find_nki(version: Version | None) -> Version:
    """Return the version of the language; None asks NKI_COMPILER_FRONTEND, else 0.7.

    Raises:
        ValueError: the variable names no front end.
    """
    if version is not None:
        return version
    name = os.environ.get("NKI_COMPILER_FRONTEND", "")
    if name not in _FRONT_ENDS:
        raise ValueError(
            f'NKI_COMPILER_FRONTEND={name!r}: must be "tracer" or "custom". Unset it for NKI 0.7.'
        )
    return cast("Version", _FRONT_ENDS[name])
