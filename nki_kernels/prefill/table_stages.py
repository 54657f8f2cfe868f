"""What stands before the first visit: the tables of buffers.py, and empty loops.

Stages of visits read "experts", "slots", and what was looked up: "ids" and "scales",
the first of them apart.
"""

from __future__ import annotations

from typing import Final

from nki_kernels.common.chip import chip_in_force
from nki_kernels.common.visits import loops_of
from nki_kernels.prefill.config import (
    PrefillConfig,
    core_width,
    first_entries,
    has_scale_table,
    largest_visit_of,
    num_visits,
    row_places,
    stored_rows,
    stores_pieces,
)
from nki_kernels.prefill.stage_play import StageList
from nki_kernels.prefill.stage_prices import (
    GATHERS,
    QUEUES,
    TABLES,
    TENSOR,
    table_price,
    vector_work,
)

_LOOKED_UP: Final = 128  # indices of one transfer


def write_first_tables(stages: StageList, config: PrefillConfig, overlaps: bool) -> None:
    """Write the stages that bring the first visits of a core on chip; see `fill_first`.

    Args:
        stages: to add to.
        config: what the kernel is compiled for.
        overlaps: the Vector engine takes an instruction before the last one's result is there.
    """
    first = range(min(first_entries(config), _entries(config)))
    _look_up(stages, config, "first ids", first, overlaps)
    stages.move(TABLES, table_price(1, num_visits(config) * 4), [], ["experts"])
    if has_scale_table(config):
        _look_up(stages, config, "first scales", first, overlaps)
    _clear_rows(stages, config, overlaps)


def write_other_tables(stages: StageList, config: PrefillConfig, overlaps: bool) -> None:
    """Write the stages that bring the other visits of a core on chip; see `fill_rest`."""
    others = range(first_entries(config), _entries(config))
    _look_up(stages, config, "ids", others, overlaps)
    if has_scale_table(config):
        _look_up(stages, config, "scales", others, overlaps)
    for name in ("trips", "tiles"):
        stages.move(TABLES, table_price(1, _entries(config) * 4), [], [name])
    if stores_pieces(config):
        _number_pieces(stages, config, _entries(config), overlaps)
    elif config.stores == "rows":
        _number_slots(stages, config, _entries(config), overlaps)


def _entries(config: PrefillConfig) -> int:
    return num_visits(config) * largest_visit_of(config)


def write_loops(stages: StageList, config: PrefillConfig) -> None:
    """Write what each queue does to find a loop that has trips."""
    if config.loop.is_dynamic:
        wait_ns = len(loops_of(config.loop.classes)) * chip_in_force().register_load_sbuf_ns
        for queue in range(QUEUES):
            if queue != TENSOR:  # it waits for rows and weights in any case
                stages.add(queue, wait_ns, ["trips"], [])


def _look_up(
    stages: StageList, config: PrefillConfig, name: str, entries: range, overlaps: bool
) -> None:
    """See `load_table` of tiles.py."""
    chip, R = chip_in_force(), config.tile_rows
    for begin in entries[::_LOOKED_UP]:
        size = min(_LOOKED_UP, entries.stop - begin)
        tile = (name, begin)
        stages.move(TABLES, table_price(size, size * 4), [], [tile])
        names_ns = chip.swdge_ns + size * chip.swdge_index_ns
        stages.move(GATHERS, table_price(size, size * R * 4, names_ns), [tile], [tile])
        stages.compute(vector_work(R, overlaps), [tile], [tile])
        columns = chip.fp32_transpose_passes * max(size, chip.matmul_floor_cycles)
        stages.add(TENSOR, columns / chip.tensor_clock_ghz, [tile], [tile])
        stages.compute(vector_work(size, overlaps), [tile], [name])


def _number_slots(stages: StageList, config: PrefillConfig, entries: int, overlaps: bool) -> None:
    """See `_fill_row_table` of buffers.py."""
    R = config.tile_rows
    stages.move(TABLES, table_price(R, R * entries * 4), [], ["tiles of rows"])
    for source in ("ids", "tiles of rows", "slots", "slots"):
        stages.compute(vector_work(entries, overlaps), [source], ["slots"])


def _number_pieces(stages: StageList, config: PrefillConfig, entries: int, overlaps: bool) -> None:
    """See `_fill_piece_table` of buffers.py."""
    chip = chip_in_force()
    columns_ns = max(entries, chip.matmul_floor_cycles) / chip.tensor_clock_ghz
    stages.compute(vector_work(entries, overlaps), ["ids"], ["slots"])
    for _piece in range(config.tile_rows // stored_rows(config)):
        stages.compute(vector_work(entries, overlaps), ["tiles"], ["numbers"])
        stages.add(TENSOR, columns_ns, ["slots"], ["sums"])
        stages.compute(vector_work(entries, overlaps), ["sums", "numbers"], ["slots"])


def _clear_rows(stages: StageList, config: PrefillConfig, overlaps: bool) -> None:
    """Fill gathered rows with zeros, so that padding is a number."""
    is_turned = config.loop.turns == "dma"
    columns = config.h_axis.count * config.tile_rows if is_turned else core_width(config)
    work = vector_work(columns / chip_in_force().fast_memset_speedup, overlaps)
    for j in range(row_places(config.loop)):
        stages.compute(work, [], [("turned" if is_turned else "rows", j)])
