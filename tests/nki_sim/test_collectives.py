"""Collectives over simulated ranks of one or two cores: meaning, order, constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_sim import DeadlockError, IllegalOperand, OutOfBounds, SimOptions, isa
from nki_sim.collectives import (
    ReplicaGroup,
    all_gather,
    all_gather_v,
    all_gather_v_trigger,
    all_reduce,
    all_to_all,
    all_to_all_v,
    all_to_all_v_prepare,
    all_to_all_v_trigger,
    collective_permute,
    collective_permute_implicit,
    collective_permute_implicit_current_processing_rank_id,
    collective_permute_implicit_reduce,
    rank_id,
    reduce_scatter,
)
from nki_sim.language import api as nl

RANDOM = np.random.default_rng(0)
ALL4 = ReplicaGroup([[0, 1, 2, 3]])
HALVES = ReplicaGroup([[0, 2], [3, 1]])
BOTH = pytest.mark.parametrize("lnc", [1, 2])


def inputs(shape: tuple[int, ...], ranks: int = 4, dtype: Any = np.float32) -> list[Any]:
    return [RANDOM.normal(size=shape).astype(dtype) * 4 for _ in range(ranks)]


def run(kernel: Callable[..., Any], data: list[Any], lnc: int, **options: Any) -> list[Any]:
    arguments = [(array,) for array in data]
    return list(
        nki_sim.run_ranks(kernel, arguments, lnc=lnc, options=SimOptions(**options)).outputs
    )


def in_hbm(shape: Any, dtype: Any = nl.float32) -> Any:
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm)


def halves_of(tensor: Any) -> Any:
    """Rows of this core, so that both cores of a rank prepare a part."""
    rows = tensor.shape[0] // nl.num_programs()
    return tensor[nl.program_id() * rows : (nl.program_id() + 1) * rows]


def reduction(groups: ReplicaGroup = ALL4, op: Any = nl.add) -> Callable[[Any], Any]:
    """A kernel that combines its input over ranks."""

    def kernel(x: Any) -> Any:
        total = in_hbm(x.shape, x.dtype)
        all_reduce([x], [total], groups, op)
        return total

    return kernel


@BOTH
@pytest.mark.parametrize(
    ("op", "formula"),
    [("add", np.sum), ("minimum", np.min), ("maximum", np.max)],
)
@pytest.mark.parametrize("groups", [ALL4, HALVES], ids=["one-group", "two-groups"])
def test_all_reduce_combines_the_ranks_of_a_group(
    op: str, formula: Callable[..., Any], groups: ReplicaGroup, lnc: int
) -> None:
    def kernel(x: Any) -> Any:
        part, total = in_hbm(x.shape), in_hbm(x.shape)
        isa.dma_copy(halves_of(part), halves_of(x))  # each core writes its half first
        all_reduce([part], [total], groups, getattr(nl, op))
        return total

    data = inputs((4, 6))
    for rank, found in enumerate(run(kernel, data, lnc)):
        group = next(g for g in groups.groups if rank in g)
        expected = formula(np.stack([data[r] for r in group]).astype(np.float64), axis=0)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("start_core", [0, 1])
def test_barriers_and_exchanges_of_one_rank_wait_for_no_other(start_core: int) -> None:
    def kernel(x: Any) -> Any:
        core, total = nl.program_id(), in_hbm(x.shape)
        mine, theirs = (nl.ndarray((2, 6), nl.float32, buffer=nl.sbuf) for _ in range(2))
        isa.dma_copy(mine, halves_of(x))
        isa.sendrecv(mine, theirs, 1 - core, 1 - core, 0)
        isa.dma_copy(halves_of(total), theirs)
        isa.core_barrier(total, (0, 1))
        return total

    data = inputs((4, 6))
    for found, given in zip(run(kernel, data, 2, start_core=start_core), data, strict=True):
        np.testing.assert_array_equal(found, np.roll(given, 2, axis=0))


def test_the_clock_holds_both_cores_to_what_a_collective_writes() -> None:
    def kernel(x: Any) -> Any:
        part, total, copied = (in_hbm(x.shape) for _ in range(3))
        isa.dma_copy(halves_of(part), halves_of(x))
        all_reduce([part], [total], ALL4, nl.add)
        isa.dma_copy(halves_of(copied), halves_of(total))
        return copied

    found = nki_sim.run_ranks(kernel, [(array,) for array in inputs((4, 6))], lnc=2)
    times = list(found.timeline.intervals())
    sums = [each for each in times if each.op == "all_reduce"]
    copies = [each for each in times if each.op == "dma_copy"]
    before = max(each.end_ns for each in copies if each.start_ns < sums[0].start_ns)
    assert len(sums) == 8
    assert {each.start_ns > sums[0].end_ns for each in copies[-8:]} == {True}
    assert before <= min(each.start_ns for each in sums)


def test_integer_sums_are_exact_and_bfloat16_sums_round_once() -> None:
    kernel = reduction()
    integers = [np.full((1, 4), (1 << 24) + rank, np.int32) for rank in range(4)]
    assert run(kernel, integers, 1)[0].tolist() == [[4 * (1 << 24) + 6] * 4]
    halves = inputs((2, 8), dtype=ml_dtypes.bfloat16)
    wide = np.sum([half.astype(np.float32) for half in halves], axis=0, dtype=np.float32)
    expected = wide.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(run(kernel, halves, 1)[2], expected)


@BOTH
def test_several_tensors_travel_in_one_collective(lnc: int) -> None:
    def kernel(x: Any) -> Any:
        a, b = in_hbm((2, 6)), in_hbm((2, 6))
        all_reduce([x[0:2], x[2:4]], [a, b], ALL4, nl.add)
        return a, b

    data = inputs((4, 6))
    total = np.sum(data, axis=0, dtype=np.float64)
    for a, b in run(kernel, data, lnc):
        np.testing.assert_allclose(np.concatenate((a, b)), total, rtol=1e-5, atol=1e-5)


@BOTH
def test_a_reduction_may_write_over_its_source(lnc: int) -> None:
    def kernel(x: Any) -> Any:
        total = in_hbm(x.shape)
        isa.dma_copy(halves_of(total), halves_of(x))
        all_reduce([total], [total], ALL4, nl.maximum)
        return total

    data = inputs((2, 3))
    for found in run(kernel, data, lnc):
        np.testing.assert_array_equal(found, np.max(data, axis=0))


@BOTH
@pytest.mark.parametrize("groups", [ALL4, HALVES], ids=["one-group", "two-groups"])
def test_all_gather_joins_in_the_order_of_the_group(groups: ReplicaGroup, lnc: int) -> None:
    def kernel(x: Any) -> Any:
        joined = in_hbm((len(groups.groups[0]) * 2, 3))
        all_gather([x], [joined], groups, 0)
        return joined

    data = inputs((2, 3))
    for rank, found in enumerate(run(kernel, data, lnc)):
        group = next(g for g in groups.groups if rank in g)
        np.testing.assert_array_equal(found, np.concatenate([data[r] for r in group]))


@BOTH
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_in_sbuf_joins_the_cores_of_one_number(dim: int, lnc: int) -> None:
    """With two cores, core c gathers what the cores c of all ranks have."""

    def kernel(x: Any) -> Any:
        shape = (8, 5) if dim == 0 else (2, 20)
        mine, joined = nl.ndarray((2, 5), nl.float32), nl.ndarray(shape, nl.float32)
        first = 2 * nl.program_id()
        isa.dma_copy(mine, x[first : first + 2])
        all_gather([mine], [joined], ALL4, dim)
        out = in_hbm((nl.num_programs(), *shape))
        isa.dma_copy(out[nl.program_id()], joined)
        return out

    data = inputs((4, 5))
    for found in run(kernel, data, lnc):
        for core in range(lnc):
            parts = [array[2 * core : 2 * core + 2] for array in data]
            np.testing.assert_array_equal(found[core], np.concatenate(parts, axis=dim))


@BOTH
def test_reduce_scatter_gives_each_rank_its_part(lnc: int) -> None:
    def kernel(x: Any) -> Any:
        part = in_hbm((2, 3))
        reduce_scatter([x], [part], ALL4, 0, nl.add)
        return part

    data = inputs((8, 3))
    total = np.sum(data, axis=0, dtype=np.float64)
    for rank, found in enumerate(run(kernel, data, lnc)):
        np.testing.assert_allclose(found, total[2 * rank : 2 * rank + 2], rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("groups", [ALL4, HALVES], ids=["one-group", "two-groups"])
def test_all_to_all_transposes_the_blocks(groups: ReplicaGroup, lnc: int) -> None:
    def kernel(x: Any) -> Any:
        received = in_hbm(x.shape)
        all_to_all([x], [received], groups, 0)
        return received

    data = inputs((8, 3))
    for rank, found in enumerate(run(kernel, data, lnc)):
        group = next(g for g in groups.groups if rank in g)
        rows, place = 8 // len(group), group.index(rank)
        blocks = [data[sender][place * rows : (place + 1) * rows] for sender in group]
        np.testing.assert_array_equal(found, np.concatenate(blocks))


def tables(counts: Any, has_rdispls: bool) -> list[Any]:
    """Metadata of each rank: packed chunks, received back to back if that is stated."""
    found = []
    for rank in range(4):
        sends = counts[rank]
        rows = [sends, np.cumsum(sends) - sends, np.full(4, 99)]
        if has_rdispls:
            receives = counts[:, rank]
            rows.append(np.cumsum(receives) - receives)
        found.append(np.array(rows, np.uint32))
    return found


def chunked(counts: Any, has_rdispls: bool = False) -> list[tuple[Any, Any, Any]]:
    """Of each rank, what it sends, a buffer of -1 to receive in, and its metadata."""
    old = np.full((32,), -1.0, np.float32)
    data, metadata = inputs((24,)), tables(counts, has_rdispls)
    return [(data[rank], old.copy(), metadata[rank]) for rank in range(4)]


@BOTH
@pytest.mark.parametrize("has_rdispls", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_all_to_all_v_sends_chunks_of_any_size(has_rdispls: bool, known: bool, lnc: int) -> None:
    counts = RANDOM.integers(0, 6, (4, 4))
    given = chunked(counts, has_rdispls)

    def kernel(x: Any, received: Any, table: Any) -> Any:
        all_to_all_v([x], [received], ALL4, table, known, has_rdispls)
        return received, table

    for rank, (got, table) in enumerate(nki_sim.run_ranks(kernel, given, lnc=lnc).outputs):
        expected = np.full(32, -1.0, np.float32)
        at = 0
        for sender in range(4):
            size = counts[sender, rank]
            start = counts[sender, :rank].sum()
            first = at if has_rdispls else 8 * sender
            expected[first : first + size] = given[sender][0][start : start + size]
            at += size
        np.testing.assert_array_equal(got, expected)
        row = [99] * 4 if known else counts[:, rank].tolist()
        assert table[2].tolist() == row


@BOTH
def test_a_collective_in_two_halves_is_the_whole_one(lnc: int) -> None:
    def halves(x: Any, received: Any, table: Any) -> Any:
        ready = all_to_all_v_prepare([x], [received], ALL4, table)
        all_to_all_v_trigger(ready)
        return received, table

    def whole(x: Any, received: Any, table: Any) -> Any:
        all_to_all_v([x], [received], ALL4, table)
        return received, table

    given = chunked(RANDOM.integers(0, 6, (4, 4)))
    got, wanted = (nki_sim.run_ranks(each, given, lnc=lnc).outputs for each in (halves, whole))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


def zero(table: Any) -> None:
    isa.dma_copy(table, nl.zeros((3, 4), nl.uint32))


# What follows a prepare of all_to_all_v, by what is said of it.
MISFITS: dict[str, Callable[..., Any]] = {
    "that of all_to_all_v_prepare, once": lambda ready, x, y, table: [
        all_to_all_v_trigger(ready) for _ in range(2)
    ],
    "one all_to_all_v_trigger after it": lambda ready, x, y, table: None,
    "a second prepare": lambda ready, x, y, table: all_to_all_v_prepare([x], [y], ALL4, table),
    "that of all_gather_v_prepare, once": lambda ready, x, y, table: all_gather_v_trigger(ready),
    "what it held at the prepare": lambda ready, x, y, table: (
        zero(table),
        all_to_all_v_trigger(ready),
    ),
}


@pytest.mark.parametrize("message", MISFITS)
def test_halves_that_do_not_fit_are_refused(message: str) -> None:
    def kernel(x: Any, y: Any, table: Any) -> None:
        MISFITS[message](all_to_all_v_prepare([x], [y], ALL4, table), x, y, table)

    with pytest.raises(nki_sim.NkiValidationError, match=message):
        nki_sim.run_ranks(kernel, chunked(np.full((4, 4), 2)))


def test_what_no_chunk_covers_stays_unwritten() -> None:
    counts = np.full((4, 4), 2)
    data, metadata = inputs((8,)), tables(counts, has_rdispls=False)

    def kernel(x: Any, table: Any, length: int) -> Any:
        received, out = in_hbm((32,)), in_hbm((length,))
        all_to_all_v([x], [received], ALL4, table)
        isa.dma_copy(out, received[8 : 8 + length])  # what rank 1 sent, and behind it
        return out

    found = nki_sim.run_ranks(kernel, [(data[r], metadata[r], 2) for r in range(4)]).outputs
    np.testing.assert_array_equal(found[3], data[1][6:8])
    with pytest.raises(nki_sim.UninitializedRead):
        nki_sim.run_ranks(kernel, [(data[r], metadata[r], 3) for r in range(4)])


def test_all_gather_v_sends_one_chunk_to_everybody() -> None:
    counts = [3, 0, 5, 2]
    data = inputs((8,))
    metadata = [np.zeros((3, 4), np.uint32) for _ in range(4)]
    for rank in range(4):
        metadata[rank][:2, 0] = counts[rank], 1
    old = [np.full((20,), -1.0, np.float32) for _ in range(4)]

    def kernel(x: Any, received: Any, table: Any) -> Any:
        all_gather_v([x], [received], ALL4, table)
        return received, table

    given = [(data[r], old[r], metadata[r]) for r in range(4)]
    for got, table in nki_sim.run_ranks(kernel, given, lnc=2).outputs:
        expected = np.full(20, -1.0, np.float32)
        for sender, size in enumerate(counts):
            expected[5 * sender : 5 * sender + size] = data[sender][1 : 1 + size]
        np.testing.assert_array_equal(got, expected)
        assert table[2].tolist() == counts


@BOTH
def test_collective_permute_follows_its_pairs_and_leaves_the_rest(lnc: int) -> None:
    def kernel(x: Any, old: Any) -> Any:
        collective_permute([x], [old], [(0, 2), (2, 1)])
        return old

    data, old = inputs((2, 3)), inputs((2, 3))
    found = nki_sim.run_ranks(kernel, [(data[r], old[r]) for r in range(4)], lnc=lnc).outputs
    for got, expected in zip(found, (old[0], data[2], data[0], old[3]), strict=True):
        np.testing.assert_array_equal(got, expected)


@BOTH
def test_a_ring_gathers_everything_in_steps(lnc: int) -> None:
    """The rank register says whose data a step works on, as in a fine-grained all-gather."""

    def kernel(x: Any) -> Any:
        joined = in_hbm((4, 2, 3))
        here, there = in_hbm((2, 3)), in_hbm((2, 3))
        isa.dma_copy(halves_of(here), halves_of(x))
        isa.core_barrier(here, (0, 1) if nl.num_programs() == 2 else 0)
        for step in range(4):
            owner = collective_permute_implicit_current_processing_rank_id(step, ALL4)
            target = joined.ap([[6, 1], [3, 2], [1, 3]], scalar_offset=owner, indirect_dim=0)
            if nl.program_id() == 0:
                isa.dma_copy(target, here)
            collective_permute_implicit([[here]], [[there]], ALL4)
            here, there = there, here
        return joined

    data = inputs((2, 3))
    for found in run(kernel, data, lnc):
        np.testing.assert_array_equal(found, np.stack(data))


def test_two_channels_move_two_tensors() -> None:
    def kernel(x: Any) -> Any:
        received = in_hbm((2, 3))
        pairs = [[[tensor[0:1]], [tensor[1:2]]] for tensor in (x, received)]
        collective_permute_implicit(*pairs, ALL4, [0, 1])
        return received

    data = inputs((2, 3))
    for rank, found in enumerate(run(kernel, data, 1)):
        np.testing.assert_array_equal(found, data[(rank - 1) % 4])


def test_a_ring_of_reductions_adds_up_all_ranks() -> None:
    def kernel(x: Any) -> Any:
        running, received = in_hbm((2, 3)), in_hbm((2, 3))
        isa.dma_copy(received, x)
        zeros = nl.zeros((2, 3), nl.float32)
        isa.dma_copy(running, zeros)
        for _ in range(4):
            sent = in_hbm((2, 3))
            collective_permute_implicit_reduce([[running]], [[x]], [[sent]], ALL4, nl.add)
            running = sent
        return running

    data = inputs((2, 3))
    total = np.sum(data, axis=0, dtype=np.float64)
    for found in run(kernel, data, 1):
        np.testing.assert_allclose(found, total, rtol=1e-5, atol=1e-5)


def test_each_channel_reduces_its_own_pair() -> None:
    def kernel(x: Any, y: Any) -> Any:
        received = in_hbm((2, 3))
        lists = [[[tensor[0:1]], [tensor[1:2]]] for tensor in (x, y, received)]
        collective_permute_implicit_reduce(*lists, ALL4, nl.maximum, [0, 1])
        return received

    left, right = inputs((2, 3)), inputs((2, 3))
    pairs = list(zip(left, right, strict=True))
    for rank, found in enumerate(nki_sim.run_ranks(kernel, pairs).outputs):
        before = (rank - 1) % 4
        np.testing.assert_array_equal(found, np.maximum(left[before], right[before]))


def test_rank_id_is_a_register_with_the_rank() -> None:
    def kernel(x: Any) -> Any:
        cell, out = nl.ndarray((1, 1), nl.int32), in_hbm((1, 1), nl.int32)
        isa.register_store(cell, rank_id())
        isa.dma_copy(out, cell)
        return out

    assert [int(found[0, 0]) for found in run(kernel, inputs((1, 1)), 1)] == [0, 1, 2, 3]


def test_what_is_gathered_anew_is_written_again() -> None:
    def kernel(x: Any) -> Any:
        part, total = in_hbm(x.shape), in_hbm((4 * x.shape[0], x.shape[1]))
        isa.dma_copy(part, nl.ndarray(x.shape, x.dtype))  # nobody wrote it
        all_gather([part], [total], ALL4, 0)
        isa.dma_copy(part, x)
        all_gather([part], [total], ALL4, 0)
        return total

    data = inputs((4, 6))
    for found in run(kernel, data, 1):
        np.testing.assert_array_equal(found, np.concatenate(data))


def test_unwritten_elements_stay_unwritten_across_ranks() -> None:
    def kernel(x: Any) -> Any:
        part, joined = in_hbm((2, 3)), in_hbm((8, 3))
        if not isinstance(x, int):
            isa.dma_copy(part[0:1], x[0:1])  # row 1 is never written
        all_gather([part], [joined], ALL4, 0)
        out = in_hbm((1, 3))
        isa.dma_copy(out, joined[2:3])  # row 0 of rank 1
        return out

    data = inputs((2, 3))
    np.testing.assert_array_equal(run(kernel, data, 1)[0], data[1][0:1])

    def leaking(x: Any) -> Any:
        part, joined = in_hbm((2, 3)), in_hbm((8, 3))
        isa.dma_copy(part[0:1], x[0:1])
        all_gather([part], [joined], ALL4, 0)
        return joined

    with pytest.raises(
        nki_sim.UninitializedRead, match=r"test_collectives.py:\d+: all_gather: srcs: expected"
    ):
        run(leaking, data, 1)


def test_a_collective_orders_the_cores_of_a_rank() -> None:
    """Reading the other core's half is a race, unless a collective is between."""

    def kernel(x: Any, ordered: bool) -> Any:
        shared, total, out = in_hbm(x.shape), in_hbm(x.shape), in_hbm(x.shape)
        isa.dma_copy(halves_of(shared), halves_of(x))
        if ordered:
            all_reduce([shared], [total], ReplicaGroup([[0, 1]]), nl.add)
        other = 1 - nl.program_id()
        half = nl.ndarray((2, 3), nl.float32)
        isa.dma_copy(half, shared[2 * other : 2 * other + 2])
        isa.dma_copy(halves_of(out), half)
        return out

    data = inputs((4, 3), ranks=2)
    nki_sim.run_ranks(kernel, [(x, True) for x in data], lnc=2)
    with pytest.raises(nki_sim.RaceError):
        nki_sim.run_ranks(kernel, [(x, False) for x in data], lnc=2)


def test_a_rank_that_stays_away_is_a_deadlock() -> None:
    def kernel(x: Any, joins: bool) -> Any:
        total = in_hbm(x.shape)
        isa.dma_copy(total, x)
        if joins:
            all_reduce([x], [total], ReplicaGroup([[0, 1]]), nl.add)
        return total

    data = inputs((1, 3), ranks=2)
    with pytest.raises((DeadlockError, nki_sim.DivergenceError), match="all_reduce"):
        nki_sim.run_ranks(kernel, [(data[0], True), (data[1], False)])


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_the_result_does_not_depend_on_who_runs_first(start: int) -> None:
    kernel = reduction(ReplicaGroup([[0, 1]]))
    data = inputs((2, 3), ranks=2)
    for found in run(kernel, data, 2, start_core=start, preempt=0.3, seed=start):
        np.testing.assert_array_equal(found, data[0] + data[1])


def test_indices_mode_keeps_integers_and_skips_float_tensors() -> None:
    def kernel(x: Any, i: Any, table: Any) -> Any:
        total, count, received = in_hbm(x.shape), in_hbm(i.shape, nl.int32), in_hbm((32,))
        all_reduce([x], [total], ALL4, nl.add)
        all_reduce([i], [count], ALL4, nl.add)
        flat = x.reshape((x.size,))[0:32]
        part = in_hbm((32,))
        isa.dma_copy(part, flat)
        all_to_all_v([part], [received], ALL4, table)
        return total, count

    def arguments(x: Any) -> list[Any]:
        metadata = tables(np.full((4, 4), 8), has_rdispls=False)
        return [(x, np.full((1, 2), rank, np.int32), metadata[rank]) for rank in range(4)]

    shape = (128, 1024)  # more elements than the mode follows
    traces = []
    for mode, x in (
        ("full", np.ones(shape, np.float32)),
        ("indices", nki_sim.TensorSpec(shape, "float32")),
    ):
        options = SimOptions(mode=mode)  # type: ignore[arg-type]
        result = nki_sim.run_ranks(kernel, arguments(x), lnc=2, options=options)
        assert result.outputs[2][1].tolist() == [[6, 6]]
        traces.append([record[1:] for record in result.trace])
    assert isinstance(result.outputs[0][0], nki_sim.TensorSpec)
    assert traces[0] == traces[1]


def test_ranks_share_the_key_of_a_collective_whatever_they_did_before() -> None:
    def kernel(x: Any, has_pair: bool) -> Any:
        total = in_hbm(x.shape)
        if has_pair:
            all_reduce([x], [total], ReplicaGroup([[0, 1]]), nl.add)
        all_gather([x], [in_hbm((16, 3))], ALL4, 0)
        all_reduce([x], [total], ALL4, nl.add)
        return total

    arguments = [(x, rank < 2) for rank, x in enumerate(inputs((4, 3)))]
    result = nki_sim.run_ranks(kernel, arguments, lnc=2)
    facts = [record.facts for record in result.trace if record.op.startswith("all_")]
    keys = [fact.key for fact in facts]
    assert sorted(keys.count(key) for key in set(keys)) == [4, 8, 8]
    assert {(fact.partners, fact.ranks, fact.moved_bytes) for fact in facts[-8:]} == {(8, 4, 48)}


X23 = np.zeros((4, 3), np.float32)


TWO = ReplicaGroup([[0, 1]])
REFUSALS: dict[str, Callable[..., Any]] = {
    "op: expected nl.add, nl.minimum or nl.maximum; found multiply": lambda x, y: all_reduce(
        [x], [y], TWO, nl.multiply
    ),
    "srcs: expected a list of": lambda x, y: all_reduce(x, [y], TWO, nl.add),
    r"dsts: expected shape \[4, 3\]": lambda x, y: all_reduce([x], [y[0:1]], TWO, nl.add),
    "dsts: expected float32 like srcs; found int32": lambda x, y: all_reduce(
        [x], [y.view(nl.int32)], TWO, nl.add
    ),
    "dsts: expected all tensors in HBM or all in SBUF": lambda x, y: all_reduce(
        [x], [nl.zeros((4, 3), nl.float32)], TWO, nl.add
    ),
    "dsts: expected tensors in HBM or SBUF; found psum": lambda x, y: all_reduce(
        [x], [nl.zeros((4, 3), nl.float32, buffer=nl.psum)], TWO, nl.add
    ),
    "srcs: expected one tensor; found 2": lambda x, y: all_reduce(
        [nl.zeros((4, 3), nl.float32)] * 2, [nl.zeros((4, 3), nl.float32)] * 2, TWO, nl.add
    ),
    "replica_group: expected ranks below 2": lambda x, y: all_reduce(
        [x], [y], ReplicaGroup([[0, 5], [1]]), nl.add
    ),
    r"replica_group: expected this rank \(0\)": lambda x, y: all_reduce(
        [x], [y], ReplicaGroup([[7]]), nl.add
    ),
    "replica_group: expected a ReplicaGroup": lambda x, y: all_reduce([x], [y], [[0, 1]], nl.add),
    "priority: expected None before gen4": lambda x, y: all_reduce(
        [x], [y], TWO, nl.add, priority=1
    ),
    "collective_dim: expected 0 in HBM": lambda x, y: all_gather([x], [y], TWO, 1),
    r"dsts: expected shape \[8, 3\]": lambda x, y: all_gather([x], [y], TWO, 0),
    "collective_dim: expec": lambda x, y: reduce_scatter([x], [y], TWO, 1, nl.add),
    "srcs: expected an axis 0 that 2 ranks divide": lambda x, y: reduce_scatter(
        [x[0:3]], [y], TWO, 0, nl.add
    ),
    "srcs: expected tensors in HBM; found sbuf": lambda x, y: all_to_all(
        [nl.zeros((4, 3), nl.float32)], [y], TWO, 0
    ),
    "metadata_tensor: expected uint32": lambda x, y: all_to_all_v(
        [x], [y], TWO, in_hbm((3, 2), nl.int32)
    ),
    r"metadata_tensor: expected shape \[3, 2\]": lambda x, y: all_to_all_v(
        [x], [y], TWO, in_hbm((4, 2), nl.uint32)
    ),
    "replica_group: expected 4 ranks of 2 cores": lambda x, y: all_gather_v(
        [x], [y], TWO, in_hbm((3, 2), nl.uint32)
    ),
    "has_rdispls: expected False": lambda x, y: all_gather_v(
        [x], [y], TWO, in_hbm((3, 2), nl.uint32), has_rdispls=True
    ),
    "source_target_pairs: expected different targets": lambda x, y: collective_permute(
        [x], [y], [(0, 1), (1, 1)]
    ),
    "srcs: expected one tensor": lambda x, y: collective_permute([x, x], [y, y], [(0, 1)]),
    "channel_ids: expected 0, 1, ..": lambda x, y: collective_permute_implicit(
        [[x]], [[y]], TWO, [1]
    ),
    "dsts_by_channel: expected 1 lists": lambda x, y: collective_permute_implicit(
        [[x]], [[y], [y]], TWO
    ),
    "srcs_by_channel: expected one tensor per channel": lambda x, y: collective_permute_implicit(
        [[x, x]], [[y]], TWO
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_documented_constraint_is_refused(message: str) -> None:
    def kernel(x: Any) -> None:
        REFUSALS[message](x, in_hbm(x.shape, x.dtype))

    with pytest.raises(IllegalOperand, match=message):
        nki_sim.run_ranks(kernel, [(X23,)] * 2)


def test_chunks_outside_their_buffers_are_refused() -> None:
    metadata = np.zeros((3, 2), np.uint32)
    metadata[0] = 10

    def kernel(x: Any, table: Any) -> None:
        all_to_all_v([x], [in_hbm((4, 3))], TWO, table)

    with pytest.raises(OutOfBounds, match="chunks that end before element 6 of dsts"):
        nki_sim.run_ranks(kernel, [(X23, metadata.copy())] * 2)
    metadata[0], metadata[1] = 2, (0, X23.size - 1)  # begins inside and ends outside
    with pytest.raises(OutOfBounds, match=rf"chunks inside the {X23.size} elements of srcs"):
        nki_sim.run_ranks(kernel, [(X23, metadata.copy())] * 2)
    metadata[1] = (0, X23.size - 2)  # and ends with the source
    nki_sim.run_ranks(kernel, [(X23, metadata.copy())] * 2)


def test_ranks_may_be_in_one_group_only() -> None:
    with pytest.raises(ValueError, match="must be lists of ranks without overlap"):
        ReplicaGroup([[0, 1], [1, 2]])
