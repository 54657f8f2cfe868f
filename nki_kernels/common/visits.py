"""Visits: which row tiles a core of the prefill kernel computes with one load of weights.

A *row tile* is R = min(B, 128) consecutive slots of one block. A *visit* is up to G row tiles of
one expert that a core computes with one load of the expert's weights. Visits of two cores run in
lock step: visit v of both cores has the same number of tiles (missing ones are dummies that move
no data), because both cores must take the same trips of a dynamic loop.

Everything here is data for one kernel body: which tiles, in which order, on which core. The host
makes it with `list_visits`, the device with `index_blocks`.

Axes: E experts, B slots in a block, R rows in a tile, C cores (lanes), V visits of a core, G tiles
in a visit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from nki.language import NKIObject
from numpy.typing import NDArray

Ints = NDArray[np.int32]
_Step = list[tuple[int, Ints]]  # an expert and its tiles for each lane, side by side


@dataclass(frozen=True)
class VisitDims(NKIObject):
    """How row tiles become visits; compile-time constants, the same on host and device.

    Attributes:
        num_lanes: C, lists of visits; 0: none are made.
        largest: G, most row tiles of a visit.
        num_visits: V, the length of a list.
        tile_rows: R.
        in_halves: lane 0 takes the first half of the visits, not every second one.
        reload_after: a visit whose expert is that of the visit so many before it on its lane finds
            the weights on chip, and names no expert; 0: every visit loads its weights.
    """

    num_lanes: int
    largest: int
    num_visits: int
    tile_rows: int
    in_halves: bool
    reload_after: int


class VisitLists(NamedTuple):
    """The visits of every lane; the kernel's index inputs.

    Attributes:
        visit_expert_CV: [C, V] int32, expert whose weights the visit loads; num_experts for none.
        visit_tile_CVG: [C, V, G] int32, its row tiles; `no_tile(num_tiles)` where there is none.
        class_trips_1L: [1, L] int32, trips of each loop of `loops_of`.
    """

    visit_expert_CV: Ints
    visit_tile_CVG: Ints
    class_trips_1L: Ints


def no_tile(num_tiles: int) -> int:
    """Return the row tile number that stands for none: out of range of slots and outputs."""
    return 2 * num_tiles


def loops_of(classes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the sizes of the two visits of a trip, for every loop of the kernel in order.

    Beside two visits of one size there are trips of a large visit and a single tile: the one keeps
    the tensor engine busy, the other the memory.
    """
    loops = []
    for size in classes:
        loops.append((size, size))
        if size > 1:
            loops.append((size, 1))
    return loops


def max_visits(num_tiles: int, num_experts: int, num_lanes: int, classes: tuple[int, ...]) -> int:
    """Return V, the visits of a lane that any routing may need, with two empty ones at the end.

    An expert of n tiles takes ceil(n / G) visits, so all take at most min(E, tiles) + tiles / G;
    every class may add an empty visit, and the kernel reads two visits ahead.
    """
    visits = min(num_tiles, min(num_experts, num_tiles) + num_tiles // classes[0])
    return max_steps(visits + num_lanes * (len(classes) - 1), num_lanes)


def max_steps(num_visits: int, num_lanes: int) -> int:
    """Return the visits of a lane, an even number, with two empty ones at the end."""
    steps = -(-num_visits // num_lanes)
    return steps + steps % 2 + 2


def live_tiles(
    token_position_to_id: Ints, block_to_expert_N: Ints, tile_rows: int
) -> tuple[Ints, Ints]:
    """Return the row tiles that hold a token, and the expert of each.

    Args:
        token_position_to_id: [N*B] int32, -1 for padding.
        block_to_expert_N: [N] int32.
        tile_rows: R, a divisor of B.
    """
    holds_token = np.any(token_position_to_id.reshape(-1, tile_rows) >= 0, axis=1)
    tile = np.flatnonzero(holds_token).astype(np.int32)
    tiles_per_block = len(holds_token) // len(block_to_expert_N)
    return tile, block_to_expert_N[tile // tiles_per_block]


def list_visits(
    tile: Ints, tile_expert: Ints, dims: VisitDims, *, num_tiles: int, num_experts: int
) -> VisitLists:
    """Group row tiles into visits, and give each lane every num_lanes-th of them.

    An expert's tiles become as few visits as can be, ordered by size; neighbours run side by side
    and waste the difference of their sizes. With visits of one tile that is the order of the slots.
    `index_blocks` makes the same lists on the device.

    Args:
        tile: row tiles to compute, in slot order.
        tile_expert: expert of each.
        dims: the rules, and the shapes of the result.
        num_tiles: row tiles in all, live or not.
        num_experts: experts of this rank.

    Returns:
        Arrays whose shapes depend on the sizes only.
    """
    lanes, largest = dims.num_lanes, dims.largest
    visits = _group(tile, tile_expert, largest)
    expert_CV = np.full((lanes, dims.num_visits), num_experts, np.int32)
    tile_CVG = np.full((lanes, dims.num_visits, largest), no_tile(num_tiles), np.int32)
    steps, trips = _arrange(_side_by_side(visits, dims), tuple(range(largest, 0, -1)))
    for number, step in enumerate(steps):
        for lane, (expert, tiles) in enumerate(step):
            expert_CV[lane, number] = expert
            tile_CVG[lane, number, : len(tiles)] = tiles
    if dims.reload_after:
        is_here = expert_CV[:, dims.reload_after :] == expert_CV[:, : -dims.reload_after]
        expert_CV[:, dims.reload_after :][is_here] = num_experts
    return VisitLists(expert_CV, tile_CVG, trips)


def _side_by_side(visits: list[tuple[int, Ints]], dims: VisitDims) -> list[_Step]:
    """Return the visits that the lanes run at the same time."""
    count = -(-len(visits) // dims.num_lanes)
    if dims.in_halves:
        return [visits[k::count] for k in range(count)]
    return [visits[k * dims.num_lanes : (k + 1) * dims.num_lanes] for k in range(count)]


def _group(tile: Ints, tile_expert: Ints, largest: int) -> list[tuple[int, Ints]]:
    """Return (expert, tiles) of at most `largest` tiles each, the largest first.

    Where there are too few visits to lack one tile each, the last one lacks them all.
    """
    visits: list[tuple[int, Ints]] = []
    if len(tile) == 0:
        return visits
    starts = np.flatnonzero(np.diff(tile_expert, prepend=tile_expert[0] - 1))
    for run in np.split(tile, starts[1:]):
        expert = int(tile_expert[np.searchsorted(tile, run[0])])
        count = -(-len(run) // largest)
        lacking = largest * count - len(run)
        full = count - lacking if lacking <= count else count - 1
        starts_of = [largest * k - max(0, k - full) for k in range(1, count)]
        visits += [(expert, part) for part in np.split(run, starts_of)]
    return sorted(visits, key=lambda visit: -len(visit[1]))


def _arrange(steps: list[_Step], classes: tuple[int, ...]) -> tuple[list[_Step], Ints]:
    """Order steps, which come by descending size, for the loops of the kernel; count the trips.

    Single tiles go beside large visits as long as there are both. What is left of a class runs in
    pairs; an odd one goes beside an empty step.
    """
    small = [step for step in steps if len(step[0][1]) == 1]
    order: list[_Step] = []
    trips: list[int] = []
    for size, below in zip(classes, (*classes[1:], 0), strict=True):
        if size == 1:
            rest = small + [[]] * (len(small) % 2)
            order += rest
            trips.append(len(rest) // 2)
            continue
        mine = [step for step in steps if below < len(step[0][1]) <= size]
        mixed = min(len(mine), len(small))
        mixed += (len(mine) - mixed) % 2
        alone = len(mine) - mixed
        order += mine[:alone]
        trips += [alone // 2, mixed]
        for step in mine[alone:]:
            order += [step, small.pop(0) if small else []]
    return order, np.array([trips], np.int32)
