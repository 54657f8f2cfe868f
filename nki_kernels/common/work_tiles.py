"""Work tiles: which row tiles a core of the prefill kernel computes with one load of weights.

A *row tile* is R = min(B, 128) consecutive slots of one block. A *work tile* is up to G row tiles
of one expert that a core computes with one load of the expert's weights; how many is its *size*.
Work tiles of two cores run in lock step: work tile v of both cores has the same size (what is
missing are dummies that move no data), because both cores must take the same iterations of a
dynamic loop.

Everything here is data for one kernel body: which tiles, in which order, on which core. The host
makes it with `list_work_tiles`, the device with `index_blocks`.

Axes: E experts, B slots in a block, R rows in a tile, C cores (lanes), V work tiles of a core, G
tiles in a work tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from nki.language import NKIObject
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class WorkTileDims(NKIObject):
    """How row tiles become work tiles; compile-time constants, the same on host and device.

    Attributes:
        num_lanes: C, lists of work tiles; 0: none are made.
        largest: G, most row tiles of a work tile.
        num_work_tiles: V, the length of a list.
        tile_rows: R.
        in_halves: lane 0 takes the first half of the work tiles, not every second one.
        reload_after: a work tile whose expert is that of the work tile so many before it on its
            lane finds the weights on chip, and names no expert; 0: every work tile loads its
            weights.
    """

    num_lanes: int
    largest: int
    num_work_tiles: int
    tile_rows: int
    in_halves: bool
    reload_after: int


class LiveTiles(NamedTuple):
    """The row tiles that hold a token, in slot order.

    Attributes:
        number_n: [n] int32, which they are.
        expert_n: [n] int32.
    """

    number_n: Ints
    expert_n: Ints


class _WorkTile(NamedTuple):
    """An expert and row tiles of it."""

    expert: int
    tiles: Ints

    @property
    def size(self) -> int:
        """How many tiles."""
        return len(self.tiles)


_Step = list[_WorkTile]  # for each lane, side by side


class WorkTileLists(NamedTuple):
    """The work tiles of every lane; the kernel's index inputs.

    Attributes:
        work_expert_CV: [C, V] int32, expert whose weights the work tile loads; num_experts for
            none.
        work_row_tiles_CVG: [C, V, G] int32, its row tiles; `no_tile(num_tiles)` where there is
            none.
        class_iterations_1L: [1, L] int32, iterations of each loop of `loops_of`.
    """

    work_expert_CV: Ints
    work_row_tiles_CVG: Ints
    class_iterations_1L: Ints


def no_tile(num_tiles: int) -> int:
    """Return the row tile number that stands for none: out of range of slots and outputs."""
    return 2 * num_tiles


def sizes_of(largest: int) -> tuple[int, ...]:
    """Return the sizes of work tiles, descending: each has a loop of its own.

    Args:
        largest: G, most row tiles of a work tile.
    """
    return tuple(range(largest, 0, -1))


def loops_of(classes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the sizes of the two work tiles of an iteration, for every loop in order.

    Beside two work tiles of one size there are iterations of a large work tile and a single tile:
    the one keeps the tensor engine busy, the other the memory.
    """
    loops = []
    for size in classes:
        loops.append((size, size))
        if size > 1:
            loops.append((size, 1))
    return loops


def max_work_tiles(num_tiles: int, num_experts: int, num_lanes: int, largest: int) -> int:
    """Return V, the work tiles of a lane that any routing may need, with two empty ones at the end.

    An expert of n tiles takes ceil(n / G) work tiles, so all take at most min(E, tiles) + tiles /
    G. One empty work tile at most is among them, where their number is odd; the kernel reads two
    ahead.

    Args:
        num_tiles: row tiles in all.
        num_experts: E.
        num_lanes: C.
        largest: G, most row tiles of a work tile.
    """
    work_tiles = min(num_tiles, min(num_experts, num_tiles) + num_tiles // largest)
    return max_steps(work_tiles, num_lanes)


def max_steps(num_work_tiles: int, num_lanes: int) -> int:
    """Return the work tiles of a lane, an even number, with two empty ones at the end."""
    steps = -(-num_work_tiles // num_lanes)
    return steps + steps % 2 + 2


def live_tiles(token_position_to_id: Ints, block_to_expert_N: Ints, tile_rows: int) -> LiveTiles:
    """Return the row tiles that hold a token.

    Args:
        token_position_to_id: [N*B] int32, -1 for padding.
        block_to_expert_N: [N] int32.
        tile_rows: R, a divisor of B.
    """
    holds_token = token_position_to_id.reshape(-1, tile_rows) >= 0
    number = np.flatnonzero(holds_token.any(axis=1)).astype(np.int32)
    tiles_per_block = len(holds_token) // len(block_to_expert_N)
    return LiveTiles(number, block_to_expert_N[number // tiles_per_block])


def list_work_tiles(
    tiles: LiveTiles, dims: WorkTileDims, *, num_tiles: int, num_experts: int
) -> WorkTileLists:
    """Group row tiles into work tiles, and give each lane every num_lanes-th of them.

    An expert's tiles become as few work tiles as can be, ordered by size; neighbours run side by
    side and waste the difference of their sizes. With work tiles of one tile that is the order of
    the slots. `index_blocks` makes the same lists on the device.

    Args:
        tiles: row tiles to compute.
        dims: the rules, and the shapes of the result.
        num_tiles: row tiles in all, live or not.
        num_experts: experts of this rank.

    Returns:
        Arrays whose shapes depend on the sizes only.
    """
    lanes, largest = dims.num_lanes, dims.largest
    work_tiles = _group(tiles, dims)
    expert_CV = np.full((lanes, dims.num_work_tiles), num_experts, np.int32)
    tile_CVG = np.full((lanes, dims.num_work_tiles, largest), no_tile(num_tiles), np.int32)
    steps, iterations = _arrange(_side_by_side(work_tiles, dims), sizes_of(largest))
    for number, step in enumerate(steps):
        for lane, work_tile in enumerate(step):
            expert_CV[lane, number] = work_tile.expert
            tile_CVG[lane, number, : len(work_tile.tiles)] = work_tile.tiles
    if dims.reload_after:
        is_here = expert_CV[:, dims.reload_after :] == expert_CV[:, : -dims.reload_after]
        expert_CV[:, dims.reload_after :][is_here] = num_experts
    return WorkTileLists(expert_CV, tile_CVG, iterations)


def _side_by_side(work_tiles: list[_WorkTile], dims: WorkTileDims) -> list[_Step]:
    """Return the work tiles that the lanes run at the same time."""
    count = -(-len(work_tiles) // dims.num_lanes)
    if dims.in_halves:
        return [work_tiles[k::count] for k in range(count)]
    return [work_tiles[k * dims.num_lanes : (k + 1) * dims.num_lanes] for k in range(count)]


def _group(tiles: LiveTiles, dims: WorkTileDims) -> list[_WorkTile]:
    """Return work tiles of at most G row tiles each, the largest first.

    Where there are too few work tiles to lack one tile each, the last one lacks them all.
    """
    work_tiles: list[_WorkTile] = []
    if len(tiles.number_n) == 0:
        return work_tiles
    largest = dims.largest
    starts = np.flatnonzero(np.diff(tiles.expert_n, prepend=tiles.expert_n[0] - 1))
    for run in np.split(np.arange(len(tiles.number_n)), starts[1:]):
        count = -(-len(run) // largest)
        lacking = largest * count - len(run)
        full = count - lacking if lacking <= count else count - 1
        starts_of = [largest * k - max(0, k - full) for k in range(1, count)]
        for part in np.split(run, starts_of):
            work_tiles.append(_WorkTile(int(tiles.expert_n[part[0]]), tiles.number_n[part]))
    return sorted(work_tiles, key=lambda work_tile: -work_tile.size)


def _arrange(steps: list[_Step], classes: tuple[int, ...]) -> tuple[list[_Step], Ints]:
    """Order steps, which come by descending size, for the kernel's loops; count iterations.

    Single tiles go beside the largest work tiles as long as there are both. What is left of these
    runs in pairs, in the loop of the larger one; an odd one goes beside an empty step.
    """
    large = [step for step in steps if step[0].size > 1]
    small = steps[len(large) :]
    mixed = min(len(large), len(small))
    mixed += (len(large) - mixed) % 2
    order: list[_Step] = []
    iterations: list[int] = []
    for size in classes[:-1]:
        pairs = [k for k in range(mixed, len(large), 2) if large[k][0].size == size]
        beside = [k for k in range(mixed) if large[k][0].size == size]
        for k in pairs:
            order += large[k : k + 2]
        for k in beside:
            order += [large[k], small[k] if k < len(small) else []]
        iterations += [len(pairs), len(beside)]
    rest = small[mixed:]
    rest += [[]] * (len(rest) % 2)
    return order + rest, np.array([[*iterations, len(rest) // 2]], np.int32)
