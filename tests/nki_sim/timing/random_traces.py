"""Random traces, and what must hold between their instructions, found cell by cell."""

from typing import Any

import numpy as np

from nki_sim import trace as tr
from nki_sim.trace import ControlFacts, SyncFacts

CELLS = 4
WIDTH = 64  # columns of a cell
LOOP_STEPS = ("loop_begin", "loop_iteration", "loop_iteration", "loop_end")


class RandomTrace:
    """A trace of one or two cores on a few tiles of four cells each.

    `cells` holds for every instruction (core, tile, cell, writes).
    """

    def __init__(self, make: Any, seed: int, length: int = 120, cores: int = 1, kinds: str = "all"):
        self.rng = np.random.default_rng(seed)
        first = make()
        self.trace = first.trace
        self.builders = [first] + [make(trace=self.trace, core=core) for core in range(1, cores)]
        self.cells: dict[int, list[tuple[int, int, int, bool]]] = {}
        self.kinds = kinds
        self.sbuf = [[b.tile(CELLS * WIDTH, "float32") for _ in range(4)] for b in self.builders]
        self.psum = [[b.psum(CELLS * WIDTH) for _ in range(2)] for b in self.builders]
        self.source = first.hbm(128, CELLS * WIDTH, "float32")
        for position in range(length):
            if position % 30 == 29:
                self._everywhere(position)
            for core in range(cores):
                self._one(core)

    def _note(self, index: int, core: int, tile: int, cells: range, writes: bool) -> None:
        for cell in cells:
            self.cells.setdefault(index, []).append((core, tile, cell, writes))

    def _part(self) -> range:
        start = int(self.rng.integers(CELLS))
        return range(start, int(self.rng.integers(start + 1, CELLS + 1)))

    def _everywhere(self, position: int) -> None:
        """A step of a loop on each core, or a meeting of all of them."""
        if len(self.builders) > 1 and position % 60 == 29:
            facts: Any = SyncFacts("core_barrier", (position,), len(self.builders))
            engine = tr.VECTOR
        else:
            facts, engine = ControlFacts(LOOP_STEPS[position // 30 % 4]), tr.ALL
        for builder in self.builders:
            builder.emit(facts.kind, engine, facts, [], [])

    def _one(self, core: int) -> None:
        builder, rng = self.builders[core], self.rng
        part = self._part()
        columns = slice(part.start * WIDTH, part.stop * WIDTH)
        dst, src = int(rng.integers(4)), int(rng.integers(4))
        kind = str(rng.choice(["vector", "scalar", "gpsimd", "load", "store", "matmul"]))
        if self.kinds == "compute" and kind in ("load", "store", "matmul"):
            kind = "vector"
        sbuf, psum = self.sbuf[core], self.psum[core]
        if kind == "matmul":
            bank = 4 + dst % 2
            moving = self._part()
            chosen = slice(moving.start * WIDTH, moving.stop * WIDTH)
            index = builder.matmul(
                psum[dst % 2][columns], sbuf[src][0:WIDTH], sbuf[(src + 1) % 4][chosen]
            )
            self._note(index, core, src, range(1), False)
            self._note(index, core, (src + 1) % 4, moving, False)
            self._note(index, core, bank, part, True)
        elif kind == "load":
            index = builder.load(sbuf[dst][columns], self.source, slice(0, 128), columns)
            self._note(index, core, dst, part, True)
        elif kind == "store":
            result = builder.hbm(128, CELLS * WIDTH, "float32", core=core)
            index = builder.store(result, slice(0, 128), columns, sbuf[src][columns])
            self._note(index, core, src, part, False)
        else:
            engine = tr.ENGINE_NAMES.index(kind)
            from_psum = kind != "gpsimd" and self.kinds == "all" and rng.random() < 0.4
            read = psum[src % 2] if from_psum else sbuf[src]
            index = builder.compute(
                "tensor_copy",
                sbuf[dst][columns],
                read[columns],
                engine=engine,
                function=("exp", "")[src % 2],
            )
            self._note(index, core, 4 + src % 2 if from_psum else src, part, False)
            self._note(index, core, dst, part, True)

    def waits(self) -> set[tuple[int, int, str]]:
        """Return (earlier, later, kind) of all pairs that touch a cell, by the last to do so."""
        writer: dict[tuple[int, ...], int] = {}
        readers: dict[tuple[int, ...], list[int]] = {}
        found = set()
        for index in sorted(self.cells):
            touched = self.cells[index]
            for core, tile, cell, writes in touched:
                key = (core, tile, cell)
                before = writer.get(key)
                if before is not None and before != index:
                    found.add((before, index, "WAW" if writes else "RAW"))
                if writes:
                    found |= {(reader, index, "WAR") for reader in readers.get(key, [])}
            for core, tile, cell, writes in touched:
                key = (core, tile, cell)
                if writes:
                    writer[key] = index
                    readers[key] = []
            for core, tile, cell, writes in touched:
                if not writes and writer.get((core, tile, cell)) != index:
                    readers.setdefault((core, tile, cell), []).append(index)
        return {(a, b, kind) for a, b, kind in found if a != b}
