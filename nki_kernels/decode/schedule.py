"""What each core does with the list of experts, settled before the kernel is compiled.

A list is gone through in loops, a loop in iterations, an iteration in steps. An iteration is some
entries (experts) of each core, an item is a part of a chunk of one of them. It loads what it uses,
and leaves nothing on chip for another one but the sums: public kernels show no loop whose transfers
are under way from iteration to iteration. Its steps:

1. Load the first items, as many as there are weight buffers: gate and up of an item alternate with
   the down weights that are used after them.
2. Project an item into I, then load gate and up of the item that takes its buffer: nobody reads the
   old ones any more.
3. Project a group of items out of I when the items after it have been projected in, so that the
   tensor engine has work while activations are computed. Then load down weights into its buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from nki_kernels.decode.config import (
    DecodeConfig,
    entry_stride,
    group_size,
    is_direct,
    is_written_out,
    keeps_scales,
    list_width,
    loads_bias,
    loop_sizes,
    shares_halves,
    splits_experts,
)
from nki_kernels.decode.steps import Group, Iteration, Loop, Step


def make_loops(config: DecodeConfig) -> tuple[Loop, ...]:
    """Return the loops over the list of experts, in order.

    Of a list whose length is known at compile time the last entries are written out, and all of a
    short one.
    """
    stride, unroll = entry_stride(config), config.unroll
    is_known = config.mode == "all" or is_direct(config)
    if not is_known:
        # The device alone knows the length: behind the longest iterations at most one of each
        # half, and at last an entry that the cores share.
        sizes = loop_sizes(config) + [0] * (stride > 1)
        return tuple(_loop(config, size) for size in sizes)
    width = list_width(config)
    whole = width // stride * stride
    looped = 0
    loops = []
    if not is_written_out(config):
        looped = width // (stride * unroll) * stride * unroll
    if looped > 0:
        loops.append(_loop(config, unroll, end=looped))
    if looped < whole:
        loops.append(_written_out(config, (whole - looped) // stride, looped))
    # What is left does not divide between the cores: they share each of these experts.
    loops.extend(_written_out(config, 0, begin) for begin in range(whole, width))
    return tuple(loops)


def _loop(config: DecodeConfig, size: int, end: int = -1) -> Loop:
    """Return a loop of iterations of `size` entries of each core; 0: an entry that they share."""
    step = max(1, entry_stride(config) * size)
    return Loop(0, end, step, _iterations(config, size, is_loop=True))


def _written_out(config: DecodeConfig, size: int, begin: int) -> Loop:
    """Return a single iteration from a list position on."""
    return Loop(begin, begin, 0, _iterations(config, size, is_loop=False))


def _iterations(config: DecodeConfig, size: int, *, is_loop: bool) -> tuple[Iteration, ...]:
    """Return what each core does in an iteration."""
    return tuple(
        _Items(config, core, size, is_loop).iteration() for core in range(config.num_cores)
    )


@dataclass(frozen=True)
class _Items:
    """The items of an iteration of one core."""

    config: DecodeConfig
    core: int
    size: int
    is_loop: bool

    @property
    def is_shared(self) -> bool:
        """Whether the cores share the experts."""
        return self.config.num_cores > 1 and not (splits_experts(self.config) and self.size > 0)

    @property
    def is_halved(self) -> bool:
        """Whether they share them by halves; see `project_half`."""
        return self.size == 0 and shares_halves(self.config)

    @property
    def is_twice(self) -> bool:
        """Whether both cores compute what core 0 alone could.

        In a loop the cores have the same instructions: the other one computes it for nothing.
        """
        return self.is_loop and self.config.num_cores > 1 and not self._share(1)

    @property
    def own(self) -> range:
        """The items of an expert that are this core's, by their number in the expert."""
        return self._share(0 if self.is_twice else self.core)

    @property
    def begin(self) -> int:
        """The number of the first item; those of halves are numbered through."""
        return self.own.start if self.is_halved else 0

    @property
    def end(self) -> int:
        """The number behind the last one."""
        return self.begin + max(1, self.size) * len(self.own)

    def iteration(self) -> Iteration:
        """Return what the core does."""
        config = self.config
        takes_turns = splits_experts(config) and self.size > 0
        return Iteration(
            entries=max(1, self.size),
            first=self.core if takes_turns else 0,
            bias=0.0 if self.is_shared and self.core > 0 else 1.0,
            is_twice=self.is_shared and self.is_twice,
            share=0.0 if self.is_twice and self.core > 0 else 1.0,
            steps=tuple(self._steps()),
        )

    def _share(self, core: int) -> range:
        """Return which items of its experts a core computes."""
        config = self.config
        count = config.chunks * config.parts
        if not self.is_shared:
            return range(count)
        # Whole chunks, of which core 0 takes the odd one; by halves the cores exchange projections.
        half = count // 2 if shares_halves(config) else (config.chunks + 1) // 2 * config.parts
        return range(half) if core == 0 else range(half, count)

    def _steps(self) -> Iterator[Step]:
        """Yield the steps in order."""
        config, begin, end = self.config, self.begin, self.end
        if begin == end:
            return
        count, parts = min(end - begin, config.weight_buffers), config.parts
        # Down weights follow a chunk behind: all of it is projected in before any of it goes out.
        for turn in range(count + parts):
            if turn < count:
                yield from self._load("load_in", begin + turn)
            if turn >= parts:
                yield from self._load("load_out", begin + turn - parts)
        groups = list(self._groups())
        for item in range(begin, end):
            yield from self._project_in(item)
            # The products just issued were the last to read this buffer.
            yield from self._load("load_in", item + config.weight_buffers)
            # The last groups have no item behind them to wait for.
            for after, group in groups:
                if after == item or (item == end - 1 and after >= end):
                    yield from self._project_out(group)

    def _load(self, kind: str, item: int) -> Iterator[Step]:
        """Yield the load of an item, if it is one of the iteration."""
        if item < self.end:
            yield self._step(kind, item)

    def _project_in(self, item: int) -> Iterator[Step]:
        """Yield the gate and up projections of an item, and what its expert needs once."""
        config, place = self.config, (item - self.begin) % len(self.own)
        # Before the products: the tensor engine transposes the column while the weights load.
        if place == 0:
            yield self._step("spread", item)
        yield self._step("project_half" if self.is_halved else "project_in", item)
        if keeps_scales(config) and place == min(len(self.own), config.parts) - 1:
            yield self._step("keep_scales", item)

    def _project_out(self, group: Group) -> Iterator[Step]:
        """Yield the down projections of a group, and the loads into its buffers."""
        config = self.config
        yield Step("project_out", group.item, 0, 0, 0, False, False, False, group)
        for item in range(group.item, group.item + group.size):
            yield from self._load("load_out", item + config.weight_buffers)

    def _step(self, kind: str, item: int) -> Step:
        """Return a step with an item."""
        config = self.config
        entry, place = divmod(item - self.begin, len(self.own))
        starts, ends = item % config.parts == 0, self._ends_chunk(place)
        buffer = item % config.weight_buffers
        return Step(kind, item, entry, self.own[place], buffer, place == 0, starts, ends)

    def _ends_chunk(self, place: int) -> bool:
        """Whether the item at a place of its expert is the last one of its chunk on this core."""
        parts = self.config.parts
        return place % parts == min(len(self.own), parts) - 1

    def _groups(self) -> Iterator[tuple[int, Group]]:
        """Yield groups of items, none of two experts, nor of parts of two chunks.

        Each comes with the item after whose projections in it is projected out.
        """
        config, count = self.config, len(self.own)
        together = count if config.parts == 1 else min(count, config.parts)
        firsts = [
            first + turn
            for first in range(self.begin, self.end, together)
            for turn in range(0, together, group_size(config))
        ]
        firsts.append(self.end)
        for number, (item, stop) in enumerate(itertools.pairwise(firsts)):
            entry, place = divmod(item - self.begin, count)
            # Behind the projections of the next chunk or group: the tensor engine has these while
            # activations of this one are computed.
            after = stop - 1 + together
            if config.parts == 1 and number + 2 < len(firsts):
                after = firsts[number + 2] - 1
            adds_bias = loads_bias(config) and place == 0
            is_last = place + stop - item == count
            yield after, Group(item, stop - item, entry % 2, adds_bias, place == 0, is_last)
