"""What public documents leave open about order and loops, as one frozen record with two corners.

A chip runs a compiled program; the record of a run is in the order of the source. Between the two
stand a compiler that may move instructions and loops whose cost nobody has published. A
`ScheduleModel` says what is assumed of them. No single answer is right, so there are two corners:
`IN_ORDER` moves nothing and lets every engine pass a loop's edge by itself, which is hard on
unrolled kernels and easy on dynamic loops; `VENDOR` moves what may be moved, lets independent
Vector work overlap and exchanges follow one another, and stops all engines at the edge of a loop.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

from nki_sim.hardware import Hardware

COMPILER_WINDOW: Final = 512
"""Instructions of a queue among which the compiler is taken to choose (assumed: not published)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleModel:
    """How instructions are ordered, and what loops and exchanges hold up.

    Every value is an assumption: the guides say that the compiler may reorder (`nl.no_reorder`
    exists to forbid it) and that the body of a dynamic loop stays in the loop, and no more.

    Attributes:
        order: "in_order" keeps each queue in the order of the source. "list" lets a queue issue the
            oldest instruction that is ready among the next `window` ones; who waits for whom is
            kept, matmuls into the same PSUM bytes stay in order, nothing passes a step of a dynamic
            loop, and nothing is put behind a meeting of cores that came before it.
        window: instructions, counted from the oldest that has not been issued; 1 is in order.
        loop_edge: what an iteration of a dynamic loop waits for. "free": nothing, each queue passes
            by itself; "engines": until every engine of the core has finished what came before and
            every transfer before has been triggered; "drain": until these have ended, too.
        sendrecv: "blocking": an exchange starts when the one before has ended; "pipelined": only
            the bytes of exchanges follow one another, their latencies overlap.
        vector_overlaps: whether the Vector engine takes an instruction every few cycles where the
            next does not need the result.
    """

    order: Literal["in_order", "list"] = "in_order"
    window: int = COMPILER_WINDOW
    loop_edge: Literal["free", "engines", "drain"] = "free"
    sendrecv: Literal["blocking", "pipelined"] = "blocking"
    vector_overlaps: bool = False

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: must be positive. 1 keeps the order.")

    def on(self, chip: Hardware) -> Hardware:
        """Return the record of the chip as this model has it."""
        return dataclasses.replace(chip, vector_issue_cycles=0) if self.vector_overlaps else chip


IN_ORDER: Final = ScheduleModel()
"""The order of the source: the time of an unrolled kernel is an upper bound."""

VENDOR: Final = ScheduleModel(
    order="list", loop_edge="engines", sendrecv="pipelined", vector_overlaps=True
)
"""Kind to unrolled kernels, hard on dynamic loops."""

CORNERS: Final = {"vendor": VENDOR, "in-order": IN_ORDER}


def find_corner(name: str) -> ScheduleModel:
    """Return one of the two corners.

    Raises:
        ValueError: there is no such corner.
    """
    found = CORNERS.get(name)
    if found is None:
        raise ValueError(f"corner={name!r}: unknown. Use one of {', '.join(CORNERS)}.")
    return found
