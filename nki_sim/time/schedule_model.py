"""What public documents leave open about order, loops and exchanges, as one frozen record.

A chip runs a compiled program; the record of a run is in the order of the source. Between the two
stand a compiler that may move instructions and loops whose cost nobody has published. A
`ScheduleModel` says what is assumed of them; `LIKELY` is what a single time stands for, and
`nki_sim/time/estimate.py` makes a range of what else may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

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
    """

    order: Literal["in_order", "list"] = "in_order"
    window: int = COMPILER_WINDOW
    loop_edge: Literal["free", "engines", "drain"] = "engines"
    sendrecv: Literal["blocking", "pipelined"] = "blocking"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: must be positive. 1 keeps the order.")


LIKELY: Final = ScheduleModel()
"""What a single time stands for."""
