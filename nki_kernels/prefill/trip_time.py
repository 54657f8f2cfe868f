"""How long trips of the prefill kernel take: its stages in the order of kernel.py, on the engines.

A stage is a row tile or a part of the weights on one engine. Who waits for whom follows from the
buffers that stages read and write, as on the chip; bytes, columns and descriptors from the sizes.
Both corners of `nki_sim.time.schedule_model` are played: queues in the order of the source, and
queues that take what is ready but stop at the end of a trip. Transfers stand in queues of their
own: a store that waits for its rows holds up no gather, though GpSimd makes descriptors of both.

Legend: s parity of a visit, j row tile of a visit, part of the intermediate or hidden axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from nki_kernels.common.chip import Core, core
from nki_kernels.common.visits import tiles_of
from nki_kernels.prefill.config import (
    PrefillConfig,
    computed_rows,
    first_tiles,
    loads_in_parts,
    part_tiles,
    parts_ahead,
    tells_short,
)
from nki_kernels.prefill.stage_play import StageList, play_stages
from nki_kernels.prefill.stage_prices import (
    GATHERS,
    GPSIMD,
    LINK,
    LOADS,
    SCALAR,
    STORES,
    TENSOR,
    VECTOR,
    Copies,
    StagePrices,
    Work,
    expected_price,
)
from nki_kernels.prefill.table_stages import (
    write_first_tables,
    write_loops,
    write_other_tables,
)
from nki_sim.time.costs import DmaPrice

CORNERS: Final = ("vendor", "in-order")
_FIRST_BANK: Final = ("outer ps", 0, 0)  # turned rows and output rows share the banks of PSUM
_LEAST_TRIPS, _SHORT_TRIPS = 6, 8  # played after the start; more where they are short
_STEPS: Final = 8  # numbers of live rows, and of visits with a tile, that are told apart


_Expert = tuple[str, int]  # what a load waits for: the id of the expert of visit s


class Pace(NamedTuple):
    """Times of trips alike, in ns: from the start of the kernel to the end of the first, and of
    each further one.
    """

    first_ns: float
    next_ns: float


def pace_of(
    config: PrefillConfig,
    sizes: tuple[int, int],
    live_rows: float,
    present: tuple[float, float] = (1.0, 1.0),
) -> dict[str, Pace]:
    """Return the pace of trips in each corner of the clock.

    Args:
        config: what the kernel is compiled for.
        sizes: of the two visits of a trip, in half tiles.
        live_rows: rows of a tile that hold a token.
        present: shares of a trip's first and second visits that have a tile; descriptors of
            the others' weights move nothing.
    """
    step = config.tile_rows / _STEPS
    rows = min(config.tile_rows, max(1, round(live_rows / step)) * step)
    shares = [round(share * _STEPS) / _STEPS for share in present]
    return _pace_of(core(), config, sizes, rows, (shares[0], shares[1]))


@functools.lru_cache(maxsize=1 << 14)
def _pace_of(
    _core: Core,
    config: PrefillConfig,
    sizes: tuple[int, int],
    live_rows: float,
    present: tuple[float, float],
) -> dict[str, Pace]:
    found = {}
    num_trips = _LEAST_TRIPS + 2 * _SHORT_TRIPS // sum(sizes)
    for corner in CORNERS:
        is_list = corner == "vendor"
        writer = _Writer(config, live_rows, is_list, present)
        writer.start()
        for trip in range(1, num_trips + 1):
            writer.trip = trip
            if config.shard.splits_h:
                writer.two_visits(sizes)
            else:
                writer.visit(0, sizes)
                writer.visit(1, sizes)
        ends = play_stages(writer.stages, num_cores=config.num_cores, is_list=is_list)
        found[corner] = Pace(ends[1], (ends[-1] - ends[2]) / (num_trips - 2))
    return found


class _Writer(StageList):
    """Writes down the stages of visits, in the order of the kernel."""

    def __init__(
        self, config: PrefillConfig, live_rows: float, overlaps: bool, present: tuple[float, float]
    ) -> None:
        super().__init__()
        self._config, self._present = config, present
        self._prices = StagePrices.of(config, live_rows, overlaps=overlaps)
        self._short = self._prices
        if tells_short(config):
            half = replace(config, tile_rows=config.tile_rows // 2)
            self._short = StagePrices.of(half, min(live_rows, half.tile_rows), overlaps=overlaps)
        self._turn_in = 0  # which bank and scratch tiles the next projections take

    def start(self) -> None:
        """See `_start_pipeline` of kernel.py."""
        config, prices = self._config, self._prices
        write_first_tables(self, config, prices.overlaps)
        early = first_tiles(config) / part_tiles(config)
        if early > 0.0:
            early_in = _share_of(prices.load_in, early)
            self.move(LOADS, early_in, ["experts"], [("gate up", 0, 0)])
        for s in range(2):
            self.add(GPSIMD, prices.fetch_ns, ["first ids"], [("ids", s)])
        self._gather(0, 0)
        for s in range(2):
            reads: list[object] = [("ids", 0), "experts"]
            self.add(GPSIMD, prices.fetch_ns, reads, [("expert", s)])
        waits = config.loop.turns == "tensor" and config.loop.first_buffers == 1
        if not waits:
            self._gather(1, 0)
        for s in range(2 if config.shard.splits_h else 1):
            self._load_beside(s, ("expert", s))
            if early < 1.0:
                self._load_gate_up(s, ("expert", s), _share_of(prices.load_in, 1.0 - early))
        loop = config.loop
        if config.shard.splits_h:
            for s in range(2):
                self._load_out(s, ("expert", s))
        else:
            for step in range(1, parts_ahead(loop, loop.in_parts * loop.h_parts)):
                self._load_step(0, step)
            for part in range(parts_ahead(loop, loop.out_parts)):
                self._load_part(0, part)
        for j in range(1, config.loop.row_buffers):
            self._gather(0, j)
        write_other_tables(self, config, prices.overlaps)
        self._turn(0, 0, prices)
        if waits:
            self._gather(1, 0)
        write_loops(self, config)

    def visit(self, s: int, sizes: tuple[int, int]) -> None:
        """See `_run_visit` of kernel.py."""
        size, next_size = tiles_of(sizes[s]), tiles_of(sizes[1 - s])
        self._look_at_outputs(s)
        self._gather_early(s)
        for j in range(size, min(next_size, self._config.loop.row_buffers)):
            self._gather(1 - s, j)
        self._go_in(s, sizes[s], next_size)
        self._turn(1 - s, 0, self._prices)
        self._look_ahead(s)
        self._gather_late(s)
        self._go_out(s, sizes[s], s * tiles_of(sizes[0]))

    def _of_tile(self, size: int, j: int) -> StagePrices:
        """Return the prices of row tile j of a visit."""
        is_full = computed_rows(self._config, size, j) == self._config.tile_rows
        return self._prices if is_full else self._short

    def two_visits(self, sizes: tuple[int, int]) -> None:
        """See exchange.py: the cores add up their gate and up projections."""
        prices = self._prices
        for s in range(2):
            size, next_size = tiles_of(sizes[s]), tiles_of(sizes[1 - s])
            self._gather_early(s)
            for j in range(size, min(next_size, self._config.loop.row_buffers)):
                self._gather(1 - s, j)
            for j in range(size):
                self._multiply_apart(s, j)
                if j + 1 < size:
                    self._turn(s, j + 1, prices)
                    self._gather_after(s, j + 1, size, next_size)
                self._exchange(s, j)
            self._turn(1 - s, 0, prices)
            self._look_at_expert(s)
            self._look_ahead(s)
            self._gather_late(s)
            self._load_gate_up(s, ("expert", s), prices.load_in)
        for s in range(2):
            self._look_at_outputs(s)
            for j in range(tiles_of(sizes[s])):
                count = self._config.i_axis.count
                own = _both(("own", s, j))
                self.compute(prices.added_up, [*own, ("other", s, j)], own)
                self._activate(s, j, s, own, count, 0.0, prices)
            self._load_beside(s, ("expert", s))
            self._go_out(s, sizes[s], s * tiles_of(sizes[0]))

    def _exchange(self, s: int, j: int) -> None:
        taken = self._prices.exchanged
        self.compute(taken, _both(("own", s, j)), [("other", s, j)], LINK)

    def _multiply_apart(self, s: int, j: int) -> None:
        prices, count = self._prices, self._config.i_axis.count
        reads = [*_both(self._turned(s, j)), ("gate up", s, 0)]
        sums = ("inner ps", j % 2)
        self.add(TENSOR, count * prices.in_ns, reads, [sums])
        self._copy(prices.copied, count, count * prices.in_ns, sums, ("own", s, j))

    def _copy(
        self, copies: Copies, count: int, product_ns: float, read: object, write: object
    ) -> None:
        """Add copies of a product in as many pieces, by turns; all but the last of each engine run
        beside it.
        """
        for turn in range(min(count, 2)):
            queue = copies.first if turn == 0 else VECTOR + SCALAR - copies.first
            work = copies.vector if queue == VECTOR else copies.scalar
            work = _last_of(work, (count + 1 - turn) // 2, 2 * product_ns / count)
            self.compute(work, [read], [(write, queue)], queue)

    def _look_at_expert(self, s: int) -> None:
        self.add(GPSIMD, self._prices.fetch_ns, ["experts"], [("expert", s)])

    def _look_ahead(self, s: int) -> None:
        prices = self._prices
        self.add(GPSIMD, prices.fetch_ns + prices.step_ns, ["ids", "scales"], [("ids", s)])

    def _look_at_outputs(self, s: int) -> None:
        names: list[object] = [("out", s), ("expert out", 1 - s)]
        self.add(GPSIMD, 2 * self._prices.fetch_ns + self._prices.step_ns, ["slots"], names)

    def _inner(self, s: int, j: int) -> object:
        return ("inner", s if self._config.shard.splits_h else 0, j)

    def _row(self, s: int, j: int) -> object:
        loop = self._config.loop
        return ("rows", s % loop.first_buffers if j == 0 else 2 + (j - 1) % (loop.row_buffers - 1))

    def _turned(self, s: int, j: int) -> object:
        loop = self._config.loop
        if loop.turns == "dma":
            return ("turned", s if j == 0 else 2 + (j - 1) % (loop.row_buffers - 1))
        return ("turned", j if loads_in_parts(loop) else j % 2)

    def _gather(self, s: int, j: int) -> None:
        transfer = self._prices.gather
        by_dma = self._config.loop.turns == "dma"
        into = _both(self._turned(s, j)) if by_dma else [self._row(s, j)]
        self.move(GATHERS, transfer, [("ids", s)], into)

    def _gather_early(self, s: int) -> None:
        if self._config.loop.first_buffers == 2:
            self.add(GPSIMD, self._prices.fetch_ns, ["ids"], [("first ids", s)])
            self.move(GATHERS, self._prices.gather, [("first ids", s)], [self._row(s, 0)])

    def _gather_late(self, s: int) -> None:
        if self._config.loop.first_buffers == 1:
            self._gather(s, 0)

    def _gather_after(self, s: int, j: int, size: int, next_size: int) -> None:
        ring = self._config.loop.row_buffers - 1
        if j + ring < size:
            self._gather(s, j + ring)
        elif 1 + (j - 1) % ring < next_size:
            self._gather(1 - s, 1 + (j - 1) % ring)

    def _turn(self, s: int, j: int, prices: StagePrices) -> None:
        if self._config.loop.turns == "tensor":
            if prices.scaled is not None:
                row = self._row(s, j)
                self.compute(prices.scaled, [row, "first scales"], [row])
            self.add(TENSOR, prices.turn_ns, [self._row(s, j)], [_FIRST_BANK])
            self._copy(
                prices.turned, prices.turn_banks, prices.turn_ns, _FIRST_BANK, self._turned(s, j)
            )

    def _go_in(self, s: int, halves: int, next_size: int) -> None:
        loop, size = self._config.loop, tiles_of(halves)
        by_dma = loop.turns == "dma"
        steps = loop.in_parts * loop.h_parts
        for step in range(steps):
            buffer = (s * steps + step) % loop.weight_buffers
            part, h_part = step // loop.h_parts, step % loop.h_parts
            beside = (s * loop.in_parts + part) % loop.weight_buffers
            for j in range(size):
                turns = step == 0 and j + 1 < size
                prices = self._of_tile(halves, j)
                tiles = self._config.i_axis.count
                if turns and tiles > 1 and not by_dma:
                    # The next tile is turned before the last product of this one.
                    self._project_in(s, j, buffer, beside, h_part, tiles - 1, prices)
                    tiles = 1
                if turns:
                    self._turn(s, j + 1, self._of_tile(halves, j + 1))
                    if not by_dma:
                        self._gather_after(s, j + 1, size, next_size)
                self._project_in(s, j, buffer, beside, h_part, tiles, prices)
                if by_dma and 0 < j < size - 1:
                    self._gather_after(s, j, size, next_size)
            if step + 1 == steps:
                self._look_at_expert(s)
            self._load_step(s, step + parts_ahead(loop, steps))
            if by_dma and size > 1:
                self._gather_after(s, size - 1, size, next_size)

    def _project_in(
        self,
        s: int,
        j: int,
        buffer: int,
        beside: int,
        h_part: int,
        tiles: int,
        prices: StagePrices,
    ) -> None:
        """Multiply with tiles of the gate and up weights; all but the last one's activations run
        beside the products.
        """
        loop = self._config.loop
        each_ns = prices.in_ns / loop.h_parts
        reads = [*_both(self._turned(s, j)), ("gate up", buffer, 0)]
        sums = ("inner ps", j if loop.h_parts > 1 else self._turn_in)
        self.add(TENSOR, tiles * each_ns, reads, [sums])
        if h_part + 1 == loop.h_parts:
            self._activate(s, j, beside, [sums], tiles, each_ns, prices)

    def _activate(
        self,
        s: int,
        j: int,
        buffer: int,
        projected: list[object],
        tiles: int,
        each_ns: float,
        prices: StagePrices,
    ) -> None:
        """Add what makes the operand of the down projection of tiles, each of which came so long
        after the one before.
        """
        taken, inner = prices.activated, self._inner(s, j)
        reads: list[object] = [*projected, ("gate up", buffer, 1)]
        gate: list[object] = [("gate", self._turn_in)]
        up: list[object] = [("up", self._turn_in)]
        self._turn_in = 1 - self._turn_in
        if taken.before is not None:
            self.compute(_last_of(taken.before, tiles, each_ns), reads, gate)
            reads = [*reads, *gate]
        function = _last_of(taken.function, tiles, each_ns)
        self.compute(function, reads, gate if taken.product is not None else [inner], SCALAR)
        if taken.product is not None:
            if taken.beside is not None:
                self.compute(_last_of(taken.beside, tiles, each_ns), reads, up)
            product = _last_of(taken.product, tiles, each_ns)
            self.compute(product, [*reads, *gate, *up], [inner])

    def _go_out(self, s: int, size: int, first_outer: int) -> None:
        loop = self._config.loop
        for part in range(loop.out_parts):
            buffer = (s * loop.out_parts + part) % loop.weight_buffers
            is_last = part + 1 == loop.out_parts
            for j in range(tiles_of(size)):
                outer = (first_outer + j) % loop.outer_buffers
                self._project_out(s, j, buffer, outer)
                if is_last:
                    self._store(s, outer, self._of_tile(size, j).store)
            self._load_part(s, part + self._ahead_out())

    def _project_out(self, s: int, j: int, buffer: int, outer: int) -> None:
        """Multiply into the banks that turned rows use, and into the others."""
        prices = self._prices
        reads = [("down", buffer, 0), ("down", buffer, 1), self._inner(s, j)]
        first = min(prices.turn_banks, prices.banks)
        for half, banks in enumerate((first, prices.banks - first)):
            if banks:
                out_ns = prices.out_ns * banks / prices.banks
                bank = ("outer ps", j % 2, half)
                self.add(TENSOR, out_ns, reads, [bank])
                self._copy(prices.evicted, banks, out_ns, bank, ("outer", outer, half))

    def _store(self, s: int, outer: int, transfer: DmaPrice) -> None:
        halves = [name for half in range(2) for name in _both(("outer", outer, half))]
        self.move(STORES, transfer, [("out", s), *halves], [])

    def _ahead_out(self) -> int:
        """Return how many parts ahead down weights are asked for; visits apart have their own."""
        loop = self._config.loop
        return 2 if self._config.shard.splits_h else parts_ahead(loop, loop.out_parts)

    def _load_step(self, s: int, step: int) -> None:
        loop = self._config.loop
        steps = loop.in_parts * loop.h_parts
        expert = ("expert", (s + step // steps) % 2)
        if step % loop.h_parts == 0:
            beside = s * loop.in_parts + step // loop.h_parts
            self._load_beside(beside % loop.weight_buffers, expert)
        buffer = (s * steps + step) % loop.weight_buffers
        self._load_gate_up(buffer, expert, self._prices.load_in)

    def _load_part(self, s: int, part: int) -> None:
        loop = self._config.loop
        name = "expert" if part // loop.out_parts == 2 else "expert out"
        expert = (name, (s + part // loop.out_parts) % 2)
        self._load_out((s * loop.out_parts + part) % loop.weight_buffers, expert)

    def _load_gate_up(self, buffer: int, expert: _Expert, price: DmaPrice) -> None:
        self._load(expert, [price], ("gate up", buffer), 0)

    def _load_beside(self, buffer: int, expert: _Expert) -> None:
        self._load(expert, self._prices.beside_in, ("gate up", buffer), 1)

    def _load_out(self, buffer: int, expert: _Expert) -> None:
        self._load(expert, self._prices.beside_out, ("down", buffer), 1)
        self._load(expert, [self._prices.load_out], ("down", buffer), 0)

    def _load(
        self, expert: _Expert, prices: Sequence[DmaPrice], into: tuple[str, int], first: int
    ) -> None:
        for number, price in enumerate(prices, start=first):
            there = expected_price(price, self._present[expert[1]])
            self.move(LOADS, there, [expert], [(*into, number)])


def _both(name: object) -> list[object]:
    """Return the names of what the Vector and the Scalar engine write of something."""
    return [(name, VECTOR), (name, SCALAR)]


def _last_of(work: Work, count: int, every_ns: float) -> Work:
    """Return the last of so many pieces of work, with what stands before it when its operand, the
    last one of many that came so long after one another, is there.
    """
    behind_ns = (count - 1) * max(0.0, work.busy_ns - every_ns)
    return Work(work.busy_ns + behind_ns, work.latency_ns + behind_ns)


def _share_of(price: DmaPrice, share: float) -> DmaPrice:
    """Return the price of a part of a transfer."""
    return replace(
        price,
        engine_ns=share * price.engine_ns,
        single_queue_ns=share * price.single_queue_ns,
        hbm_bytes=int(share * price.hbm_bytes),
    )
