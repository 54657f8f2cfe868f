"""What is known of a trace before it is played: prices, queues, and who waits for whom.

A player (playback.py, reorder.py) starts from a `Prepared` and can do so many times, with other
speeds of the chip each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nki_sim import trace as tr
from nki_sim.hardware import Hardware
from nki_sim.time.costs import (
    ComputePrice,
    DmaPrice,
    MatmulPrice,
    MeetingPrice,
    price_compute,
    price_control,
    price_dma,
    price_matmul,
    price_meeting,
)
from nki_sim.time.dependencies import Graph, build, pair_ids
from nki_sim.time.schedule_model import LIKELY, ScheduleModel
from nki_sim.trace import Trace

Price = ComputePrice | MatmulPrice | DmaPrice | MeetingPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions:
    """How a trace is timed.

    Attributes:
        dma_rule: "runs" prices a transfer by its runs and bytes (several queues at work),
            "single_queue" by the latency of each descriptor, "auto" decides per core: a single
            queue if the kernel gives all transfers to the hardware generator of one engine.
        clock_ramp: whether the tensor engine has to warm up.
        reuse: "late" places tensors without an address round and round, so that loads run as far
            ahead as memory allows; "early" gives each the lowest free place, so that a new tile
            waits for the last users of the one before.
        model: what is assumed of the compiler's order, of loops and of exchanges.
    """

    dma_rule: Literal["auto", "runs", "single_queue"] = "auto"
    clock_ramp: bool = True
    reuse: Literal["late", "early"] = "late"
    model: ScheduleModel = LIKELY


def queue_and_price(op: str, engine: int, facts: tr.Facts, chip: Hardware) -> tuple[str, Price]:
    """Return the queue and the price of all instructions that share these facts."""
    if isinstance(facts, tr.MatmulFacts):
        return "tensor", price_matmul(facts, chip)
    if isinstance(facts, tr.DmaFacts):
        dma = price_dma(facts, chip)
        way = {"none": "static", "hwdge": f"hwdge-{facts.queue or 'any'}"}.get(dma.dge, dma.dge)
        direction = "store" if facts.dst_space == tr.HBM else "load"
        # A transfer whose address is computed waits for the computation; it must not hold up the
        # others.
        return f"{way}-{direction}{'-dynamic' if facts.registers else ''}", dma
    if isinstance(facts, tr.SyncFacts):
        own = engine < tr.DMA and facts.kind == "core_barrier"
        return tr.ENGINE_NAMES[engine] if own else "exchange", price_meeting(facts, chip)
    if isinstance(facts, tr.ControlFacts):
        is_loop = facts.kind.startswith("loop")
        name = tr.ENGINE_NAMES[engine if engine < tr.DMA else tr.SYNC]
        return "" if is_loop else name, price_control(facts, chip)
    if op == "memset" and facts.spaces[0] == tr.PSUM:
        engine = tr.GPSIMD
    return tr.ENGINE_NAMES[engine], price_compute(op, engine, facts, chip)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What of a trace does not depend on the speed of the chip, so that it can be played often.

    `pair` numbers the distinct (operation, engine, facts) of the instructions; `kinds` holds these,
    one per number.
    """

    graph: Graph
    pair: NDArray[np.int64]
    kinds: list[tuple[str, int, tr.Facts]]


def prepare(trace: Trace, chip: Hardware, options: TimelineOptions) -> Prepared:
    """Sort a trace into queues and find who waits for whom.

    Of the chip only the generation and the sizes of its memories matter here, of the options only
    the placement of tensors and whether instructions may change places.
    """
    columns = trace.columns()
    pair, samples = pair_ids(columns)
    kinds = []
    for index in samples.tolist():
        row = columns[index]
        kinds.append((trace.ops[row[tr.OP]], int(row[tr.ENGINE]), trace.facts[row[tr.FACTS]]))
    names = [queue_and_price(*kind, chip)[0] for kind in kinds]
    reorders = options.model.order == "list"
    return Prepared(build(trace, chip, names, options.reuse == "late", reorders), pair, kinds)


def prices_of(prepared: Prepared, chip: Hardware) -> list[Price]:
    """Return the price of every kind of instruction."""
    return [queue_and_price(*kind, chip)[1] for kind in prepared.kinds]
