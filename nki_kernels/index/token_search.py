"""Which token each place of an expert holds: its n-th choice, found by bisection.

A core's choices of an expert are numbered by tiles of tokens, then partitions. Choice n is that of
the first token up to which more than n chose the expert. Experts are on the partitions, copies of
them side by side where they are few: copy c of expert e is partition c * E + e and looks for every
C-th row tile of places. With 0-1 tiles chosen [128 tokens, E] of T tiles of tokens,

    inside[e, t, p] = sum over q <= p of chosen_t[q, e], a matmul with a triangle
    ends[e, t]      = sum over u <= t of inside[e, u, 127]
    tile, then partition of choice n: bisected in ends[e], then in inside[e, tile]

A step compares the count in the middle of what is left with n, for all places of all experts. The
middles of a step are a strided table, where what is left is number `index` of as many parts, so
that the next number is 2 * index, or one more. Counts are exact: at most 128 in bfloat16, others in
float32.

Cost: log2(128 T) steps of a gather on GpSimd, of the step's table, and of two passes over the
places on the Vector engine, an operand of each in PSUM, which it reads beside one of SBUF at full
rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import apply_with, divide_down
from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.token_tiles import TokenTiles


@dataclass
class ChoiceCounts(nl.NKIObject):
    """Choices of up to 128 experts up to each token of a core; M = C * E partitions."""

    first: int  # expert
    experts: int  # E
    copies: int  # C
    inside_sb: nl.ndarray  # [M, T filled up to a power of two, 128] bfloat16
    starts_sb: nl.ndarray  # [M, as many] float32, choices before each tile
    ends_sb: nl.ndarray  # likewise, up to and with it


@dataclass
class SearchBanks(nl.NKIObject):
    """Banks of PSUM that searches use one after the other, [128, BANK_FLOATS] float32."""

    number_ps: nl.ndarray  # of the choices; what tiles add to tokens as soon as they are known
    inside_ps: nl.ndarray  # numbers inside their tiles as soon as these are known
    more_ps: nl.ndarray  # scratch


@dataclass
class PlaceSearch(nl.NKIObject):
    """Some row tiles of places of all experts of `counts`, [M, places] each."""

    tokens: TokenTiles
    counts: ChoiceCounts
    banks: SearchBanks
    first: int  # row tile of places
    number_sb: nl.ndarray  # float32, of the choice
    index_sb: nl.ndarray  # uint32, which part is left, of 2^step
    found_sb: nl.ndarray  # the count in its middle, on its way; at last 1 plus the token, float32
    step: int


def start_counts(tokens: TokenTiles, num_experts: int, places: int) -> list[ChoiceCounts]:
    """Return counts for which no tile has been counted.

    Args:
        tokens: of this core.
        num_experts: of all of them.
        places: row tiles of places of an expert.
    """
    counts, tiles = [], filled_tiles(tokens)
    for first in range(0, num_experts, PARTITIONS):
        experts = min(PARTITIONS, num_experts - first)
        copies = num_copies(num_experts, places)
        shape = (copies * experts, tiles)
        inside_sb = nl.ndarray((copies * experts, tiles, PARTITIONS), nl.bfloat16, buffer=nl.sbuf)
        counted = max(1, tokens.count)
        if counted < tiles:
            nisa.memset(dst=inside_sb[:, counted:tiles, :], value=0.0, engine=nisa.engine.gpsimd)
        starts_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
        ends_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
        counts.append(ChoiceCounts(first, experts, copies, inside_sb, starts_sb, ends_sb))
    return counts


def num_copies(num_experts: int, places: int) -> int:
    """Return the copies of each expert, for so many row tiles of places."""
    if num_experts > PARTITIONS:  # of which parts would not be side by side in a list
        return 1
    return min(places, PARTITIONS // num_experts)


def places_each(num_experts: int, places: int) -> int:
    """Return the row tiles of places that each partition looks for."""
    return -(-places // num_copies(num_experts, places))


def filled_tiles(tokens: TokenTiles) -> int:
    """Return the tiles of tokens of a core, filled up to a power of two."""
    tiles: int = 1
    while tiles < tokens.count:
        tiles *= 2
    return tiles


def count_inside(
    counts: ChoiceCounts, chosen_sb: nl.ndarray, triangle_sb: nl.ndarray, tiles: slice
) -> None:
    """Count the choices of some tiles up to each of their tokens.

    Args:
        counts: to complete.
        chosen_sb: [128, tiles, experts], 1 where a token chose an expert.
        triangle_sb: [128, 128], 1 where the row does not come after the column.
        tiles: which.
    """
    experts, at_once = slice(counts.first, counts.first + counts.experts), BANK_FLOATS // PARTITIONS
    for first in range(tiles.start, tiles.stop, at_once):
        count = min(at_once, tiles.stop - first)
        shape = (counts.inside_sb.shape[0], count, PARTITIONS)
        bank_ps = nl.ndarray(shape, nl.float32, buffer=nl.psum)
        for tile in range(count):
            chosen = chosen_sb[:, first + tile, experts].expand_dim(1)
            nisa.nc_matmul(
                dst=bank_ps[:, tile, :],
                stationary=chosen.broadcast(1, counts.copies),
                moving=triangle_sb,
                accumulate=False,
            )
        nisa.tensor_copy(
            dst=counts.inside_sb[:, first : first + count, :],
            src=bank_ps,
            engine=nisa.engine.vector if first // at_once % 2 == 0 else nisa.engine.scalar,
        )


def count_ends(counts: ChoiceCounts) -> None:
    """Add up the choices of all tiles, once each is counted."""
    of_tile = counts.inside_sb[:, :, PARTITIONS - 1]
    # No count is negative, so that the maximum changes nothing.
    nisa.tensor_tensor_scan(
        dst=counts.ends_sb, data0=of_tile, data1=of_tile, initial=0.0, op0=nl.add, op1=nl.maximum
    )
    nisa.tensor_tensor(dst=counts.starts_sb, data1=counts.ends_sb, data2=of_tile, op=nl.subtract)


def make_banks() -> SearchBanks:
    """Allocate the banks of all searches."""
    banks = []
    for _bank in range(3):
        banks.append(nl.ndarray((PARTITIONS, BANK_FLOATS), nl.float32, buffer=nl.psum))
    return SearchBanks(banks[0], banks[1], banks[2])


def start_searches(
    tokens: TokenTiles,
    counts: ChoiceCounts,
    banks: SearchBanks,
    rows: int,
    places: int,
    is_backwards: bool,
) -> list[PlaceSearch]:
    """Return searches for all places, of which none has made a step.

    Args:
        tokens: of this core.
        counts: of some experts.
        banks: that other searches may use, too.
        rows: R.
        places: row tiles of an expert.
        is_backwards: number n of a row tile stands for number R - 1 - n.
    """
    R, M, copies = rows, counts.inside_sb.shape[0], counts.copies
    partition_sb = nl.ndarray((M, 1), nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=partition_sb, pattern=[[1, 1]], offset=0, channel_multiplier=1)
    copy_sb = nl.ndarray((M, 1), nl.int32, buffer=nl.sbuf)
    divide_down(copy_sb, partition_sb, counts.experts)
    ahead_sb = nl.ndarray((M, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=ahead_sb, data=copy_sb, op0=nl.multiply, operand0=float(R))
    every, at_once, searches = -(-places // copies), BANK_FLOATS // R, []
    step = -1 if is_backwards else 1
    for first in range(0, every, at_once):
        count = min(at_once, every - first)
        shape = (M, count * R)
        line_sb = nl.ndarray((M, count, R), nl.float32, buffer=nl.sbuf)
        nisa.iota(
            dst=line_sb,
            pattern=[[copies * R, count], [step, R]],
            offset=first * copies * R + (R - 1 if is_backwards else 0),
            channel_multiplier=0,
        )
        number_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=number_sb,
            data=line_sb.reshape(shape),
            op0=nl.add,
            operand0=ahead_sb,
            engine=nisa.engine.scalar,
        )
        searches.append(
            PlaceSearch(tokens, counts, banks, first * copies, number_sb, number_sb, number_sb, 0)
        )
    return searches


def num_steps(counts: ChoiceCounts) -> int:
    """Return the steps of a search."""
    steps, left = 0, counts.ends_sb.shape[1] * PARTITIONS
    while left > 1:
        steps, left = steps + 1, left // 2
    return steps


@dataclass
class LookUp(nl.NKIObject):
    """A gather that may come at any time; operands of nc_n_gather."""

    dst: nl.ndarray
    data: nl.ndarray
    indices: nl.ndarray


@dataclass
class Meanwhile(nl.NKIObject):
    """What goes on while short instructions wait for each other."""

    searches: list[PlaceSearch]
    look_ups: list[LookUp]


def go_on(meanwhile: Meanwhile) -> None:
    """Make a step of the first search that is not done, and a gather, if any.

    Engines work in order: whoever has short instructions that wait for each other calls this
    between them, as a step waits for GpSimd.
    """
    is_done = False
    for search in meanwhile.searches:
        if not is_done and search.step < num_steps(search.counts):
            _bisect(search)
            is_done = True
    if len(meanwhile.look_ups) > 0:
        _look_up(meanwhile.look_ups.pop(0))


def look_up_rest(meanwhile: Meanwhile) -> None:
    """Do all gathers that are left."""
    while len(meanwhile.look_ups) > 0:
        _look_up(meanwhile.look_ups.pop(0))


def finish_searches(searches: list[PlaceSearch]) -> None:
    """Make all steps that are left."""
    for search in searches:
        while search.step < num_steps(search.counts):
            _bisect(search)


def _look_up(each: LookUp) -> None:
    nisa.nc_n_gather(dst=each.dst, data=each.data, indices=each.indices)


def _bisect(search: PlaceSearch) -> None:
    """Make a step: halve what is left of the tokens, for each place; the first one quarters it."""
    counts, step = search.counts, search.step
    tiles, steps = counts.ends_sb.shape[1], num_steps(counts)
    index_sb = nl.ndarray(search.number_sb.shape, nl.uint32, buffer=nl.sbuf)
    if step == 0:
        _quarter(search, index_sb)
    else:
        is_inside = tiles > 1 and (1 << step) >= tiles
        wanted_ps = search.banks.inside_ps if is_inside else search.banks.number_ps
        more_ps = _of_bank(search, search.banks.more_ps)
        nisa.tensor_tensor(
            dst=more_ps, data1=search.found_sb, data2=_of_bank(search, wanted_ps), op=nl.less_equal
        )
        apply_with(index_sb, search.index_sb, nl.multiply, 2.0, nl.add, more_ps)
    search.index_sb = index_sb
    search.step = step + 2 if step == 0 and tiles != 2 else step + 1
    if tiles > 1 and (1 << search.step) == tiles:
        _enter_tiles(search)
    if search.step < steps:
        table = _middles(counts, search.step)
        search.found_sb = nl.ndarray(index_sb.shape, table.dtype, buffer=nl.sbuf)
        nisa.nc_n_gather(dst=search.found_sb, data=table, indices=index_sb)
    else:
        _name_tokens(search)


def _quarter(search: PlaceSearch, index_sb: nl.ndarray) -> None:
    """Write which quarter of the tokens is left, or which tile of two: places are compared with the
    counts at the ends of all of them, and nothing is looked up.
    """
    counts, number_sb, banks = search.counts, search.number_sb, search.banks
    nisa.tensor_copy(
        dst=_of_bank(search, banks.number_ps), src=number_sb, engine=nisa.engine.scalar
    )
    parts = 2 if counts.ends_sb.shape[1] == 2 else 4
    sums = (_of_bank(search, banks.inside_ps), _of_bank(search, banks.more_ps))
    for part in range(1, parts):
        ended = index_sb if part + 1 == parts else sums[part % 2]
        end = _count_until(counts, part, parts)
        if part == 1:
            nisa.tensor_scalar(dst=ended, data=number_sb, op0=nl.greater_equal, operand0=end)
        else:
            apply_with(ended, number_sb, nl.greater_equal, end, nl.add, sums[(part - 1) % 2])


def _count_until(counts: ChoiceCounts, part: int, parts: int) -> nl.ndarray:
    """Return the choices up to the end of so many of all parts, [M, 1]."""
    tiles = counts.ends_sb.shape[1]
    if tiles > 1:
        end = part * tiles // parts
        return counts.ends_sb[:, end - 1 : end]
    end = part * PARTITIONS // parts
    return counts.inside_sb[:, 0, end - 1 : end]


def _of_bank(search: PlaceSearch, bank_ps: nl.ndarray) -> nl.ndarray:
    """Return the part of a bank that a search uses."""
    rows, width = search.number_sb.shape
    return bank_ps[0:rows, 0:width]


def _middles(counts: ChoiceCounts, step: int) -> nl.ndarray:
    """Return the counts in the middle of each of the 2^step parts that a step may find left."""
    tiles, parts = counts.ends_sb.shape[1], 1 << step
    if parts < tiles:
        every = tiles // parts
        return counts.ends_sb[:, every // 2 - 1 : tiles : every]
    every = PARTITIONS * tiles // parts
    return counts.inside_sb[:, :, every // 2 - 1 : PARTITIONS : every]


def _enter_tiles(search: PlaceSearch) -> None:
    """Number the places of each tile from its first choice on."""
    start_sb = nl.ndarray(search.index_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=start_sb, data=search.counts.starts_sb, indices=search.index_sb)
    number_ps = _of_bank(search, search.banks.number_ps)
    nisa.tensor_tensor(
        dst=_of_bank(search, search.banks.inside_ps),
        data1=number_ps,
        data2=start_sb,
        op=nl.subtract,
    )
    # Token 128 * tile + partition of the search is number partition * count + tile of the core.
    tokens = search.tokens
    nisa.tensor_scalar(
        dst=number_ps,
        data=search.index_sb,
        op0=nl.multiply,
        operand0=1.0 - PARTITIONS * tokens.count,
        op1=nl.add,
        operand1=tokens.first + 1.0,
        engine=nisa.engine.scalar,
    )


def _name_tokens(search: PlaceSearch) -> None:
    """Find 1 plus the token at each place, 0 for none, once all steps are made."""
    tokens, ends_sb = search.tokens, search.counts.ends_sb
    token_ps = _of_bank(search, search.banks.more_ps)
    if ends_sb.shape[1] > 1:
        number_ps = _of_bank(search, search.banks.number_ps)
        apply_with(token_ps, search.index_sb, nl.multiply, float(tokens.count), nl.add, number_ps)
    else:
        nisa.tensor_scalar(
            dst=token_ps, data=search.index_sb, op0=nl.add, operand0=tokens.first + 1.0
        )
    last = ends_sb.shape[1] - 1
    search.found_sb = nl.ndarray(search.number_sb.shape, nl.float32, buffer=nl.sbuf)
    end = ends_sb[:, last : last + 1]
    apply_with(search.found_sb, search.number_sb, nl.less, end, nl.multiply, token_ps)


def list_found(list_sb: nl.ndarray, search: PlaceSearch, num_experts: int, rows: int) -> None:
    """Write what a search has found to columns place * experts + expert of the rows of a list.

    Args:
        list_sb: [R, W + 1] uint16, W columns of places.
        search: that has made all its steps.
        num_experts: of all of them.
        rows: R.
    """
    counts, shape = search.counts, search.number_sb.shape
    places = (list_sb.shape[1] - 1) // num_experts
    for block in range(shape[1] // rows):
        transposed_ps = nl.ndarray((rows, shape[0]), nl.float32, buffer=nl.psum)
        found = search.found_sb[:, block * rows : (block + 1) * rows]
        nisa.nc_transpose(dst=transposed_ps, data=found)
        place = search.first + block * counts.copies
        kept = min(counts.copies, places - place)
        first = place * num_experts + counts.first
        nisa.tensor_copy(
            dst=list_sb[:, first : first + kept * counts.experts],
            src=transposed_ps[:, 0 : kept * counts.experts],
            engine=nisa.engine.vector if block % 2 == 0 else nisa.engine.scalar,
        )


def search_columns(tokens: TokenTiles, num_experts: int, width: int, num_passes: int) -> int:
    """Return the columns of the matmuls that list the tokens of a core.

    Args:
        tokens: of the core.
        num_experts: of all of them.
        width: W.
        num_passes: searches of all places.
    """
    places = width // num_experts
    # Partitions that are transposed, of all copies; counts take 128 columns a tile for each part.
    transposed = places_each(num_experts, places) * num_copies(num_experts, places) * num_experts
    parts = -(-num_experts // PARTITIONS)
    return parts * max(1, tokens.count) * PARTITIONS + num_passes * transposed
