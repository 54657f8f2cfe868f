"""`nki.collectives`: data exchange between ranks, over all ranks of one `run_ranks`.

Tensors of shared HBM belong to a rank: all its cores join the collective, which happens once.
Tensors in SBUF belong to one core, which exchanges with the cores of the same number of the other
ranks. Every collective orders what its members did before against what they do after. Reductions
add in float32 (integers in 64 bits) in the order of the ranks. In a ring the successor of a rank is
the next one in its list of the replica group, on every channel.

Not checked: what depends on the machine room, that is, whether a replica group spans nodes, devices
or switches, and how many channels the links of a group allow (at most four are accepted); and that
no collective reads an input or writes an output of the kernel, which the vendor's kernels avoid by
a copy, as the compiler refuses it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final, TypeVar, cast

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.constants import nc_version
from nki_sim.dtypes import Array, DType
from nki_sim.errors import IllegalOperand, NkiValidationError
from nki_sim.isa.exchange import (
    Chunks,
    Combine,
    check_shape,
    check_tensors,
    exchange,
    exchange_chunks,
    reduction,
)
from nki_sim.language.objects import NKIObject
from nki_sim.machine import Core, NkiInstruction, NkiTensor, VirtualRegister, current

_MAX_CHANNELS: Final = 4
_F = TypeVar("_F", bound=Callable[..., Any])
_Result = tuple[Sequence[int], Callable[[list[Array]], Array]]


class ReplicaGroup(NKIObject):
    """Which ranks take part in a collective together.

    Args:
        groups: lists of ranks; no rank is in two of them.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [[int(rank) for rank in group] for group in groups]
        ranks = [rank for group in self.groups for rank in group]
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"groups={self.groups}: must be lists of ranks without overlap. "
                "Put each rank in one list."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplicaGroup) and self.groups == other.groups

    def __hash__(self) -> int:
        return hash(tuple(map(tuple, self.groups)))


def _collective(function: _F) -> _F:
    """Give a collective the running core, and its errors their place."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        core = current()
        try:
            if core.open_loops:
                core.same_as_first_iteration(name, names, args, kwargs)
            result = function(core, *args, **kwargs)
            if core.machine.watcher is not None:
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                core.machine.watcher.issued(core, name, defaults, given, result)
            return result
        except NkiValidationError as error:
            core.locate(error, name)
            raise

    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    names = tuple([parameter.name for parameter in parameters])
    defaults = {parameter.name: parameter.default for parameter in parameters}
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return cast(_F, call)


def _check_priority(core: Core, priority: Any) -> None:
    if priority is None:
        return
    if core.target.version < nc_version.gen4:
        raise IllegalOperand("priority", f"None before gen4 ({core.target.name})", str(priority))
    if priority not in range(4):
        raise IllegalOperand("priority", "0 to 3", repr(priority))


def _ranks_of(core: Core, replica_group: Any, priority: Any = None) -> list[int]:
    """Return the ranks that this rank exchanges with, in the order of the group."""
    _check_priority(core, priority)
    if not isinstance(replica_group, ReplicaGroup):
        raise IllegalOperand("replica_group", "a ReplicaGroup", repr(replica_group))
    for group in replica_group.groups:
        if core.rank in group:
            outside = [rank for rank in group if not 0 <= rank < core.machine.num_ranks]
            if outside:
                raise IllegalOperand(
                    "replica_group", f"ranks below {core.machine.num_ranks}", str(outside)
                )
            return group
    raise IllegalOperand("replica_group", f"this rank ({core.rank})", str(replica_group.groups))


def _source(index: int, make: Callable[[list[Array]], Array]) -> Combine:
    """Apply `make` to source `index` of every rank."""

    def combine(sent: list[list[Array]]) -> Array:
        return make([arrays[index] for arrays in sent])

    return combine


def _exchange(
    core: Core,
    kind: str,
    pairs: list[tuple[NkiTensor, NkiTensor]],
    ranks: list[int],
    result: Callable[[NkiTensor], _Result],
    name: str | None,
) -> None:
    """Run a collective that makes each destination of the same source of all ranks.

    `result` gives, for a source, the shape of its destination and what makes that of the sources.
    """
    outputs = []
    for index, (src, dst) in enumerate(pairs):
        shape, make = result(src)
        check_shape("dsts", dst, shape)
        outputs.append((dst, _source(index, make)))
    exchange(core, kind, ranks, [src for src, _ in pairs], outputs, name)


def _part_of(core: Core, ranks: list[int], src: NkiTensor) -> slice:
    """Return the rows that are this rank's where axis 0 is shared out in equal parts."""
    if src.shape[0] % len(ranks):
        expected = f"an axis 0 that {len(ranks)} ranks divide"
        raise IllegalOperand("srcs", expected, f"{list(src.shape)}")
    rows, position = src.shape[0] // len(ranks), ranks.index(core.rank)
    return slice(position * rows, (position + 1) * rows)


def _check_dim(collective_dim: int, allowed: tuple[int, ...], where: str) -> None:
    if collective_dim not in allowed:
        raise IllegalOperand("collective_dim", where, str(collective_dim))


@_collective
def all_reduce(
    core: Core,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Give every rank the sum, minimum or maximum of all ranks' tensors."""
    ranks = _ranks_of(core, replica_group, priority)

    def result(src: NkiTensor) -> _Result:
        return src.shape, reduction(op, src.dtype)

    _exchange(core, "all_reduce", check_tensors(srcs, dsts), ranks, result, name)


@_collective
def all_gather(
    core: Core,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Give every rank the tensors of all ranks, one after the other along one axis."""
    ranks = _ranks_of(core, replica_group, priority)

    def result(src: NkiTensor) -> _Result:
        _check_dim(collective_dim, (0, 1) if src.on_chip else (0,), "0 in HBM, 0 or 1 in SBUF")
        if src.on_chip and src.ndim != 2:
            raise IllegalOperand("srcs", "2 axes in SBUF", str(src.ndim))
        shape = list(src.shape)
        shape[collective_dim] *= len(ranks)
        return shape, functools.partial(np.concatenate, axis=collective_dim)

    _exchange(core, "all_gather", check_tensors(srcs, dsts), ranks, result, name)


@_collective
def reduce_scatter(
    core: Core,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Reduce the tensors of all ranks and give each rank its part along axis 0."""
    ranks = _ranks_of(core, replica_group, priority)

    def result(src: NkiTensor) -> _Result:
        _check_dim(collective_dim, (0,), "0")
        part, reduce = _part_of(core, ranks, src), reduction(op, src.dtype)
        shape = (src.shape[0] // len(ranks), *src.shape[1:])
        return shape, lambda arrays: reduce([array[part] for array in arrays])

    _exchange(core, "reduce_scatter", check_tensors(srcs, dsts), ranks, result, name)


@_collective
def all_to_all(
    core: Core,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Send block r of axis 0 to the r-th rank of the group; block s comes from the s-th."""
    ranks = _ranks_of(core, replica_group, priority)

    def result(src: NkiTensor) -> _Result:
        _check_dim(collective_dim, (0,), "0")
        part = _part_of(core, ranks, src)
        return src.shape, lambda arrays: np.concatenate([array[part] for array in arrays])

    pairs = check_tensors(srcs, dsts, hbm_only=True)
    _exchange(core, "all_to_all", pairs, ranks, result, name)


# Variable counts: each collective as one call and in two halves.

_Exchange = Callable[..., NkiInstruction]


class _Prepared(NkiInstruction):
    """What a prepare returns: the exchange that a trigger runs, once, and what it has read."""

    __slots__ = ("kind", "metadata", "run", "table")

    def __init__(self, kind: str, metadata: NkiTensor, run: _Exchange) -> None:
        super().__init__(None)
        self.kind, self.metadata, self.run = kind, metadata, run
        self.table = metadata.array().copy()


def _forms(plan: Callable[..., tuple[NkiTensor, _Exchange]]) -> tuple[Callable[..., Any], ...]:
    """Return a collective, its prepare and its trigger, of what checks its arguments and gives its
    metadata and the exchange.
    """
    kind = plan.__name__.removeprefix("_")

    @functools.wraps(plan)
    def whole(core: Core, *args: Any, **kwargs: Any) -> NkiInstruction:
        return plan(core, *args, **kwargs)[1]()

    @functools.wraps(plan)
    def prepare(core: Core, *args: Any, **kwargs: Any) -> NkiInstruction:
        if core.prepared is not None:
            raise IllegalOperand(
                "prepare", f"{core.prepared.kind}_trigger of the one before", "a second prepare"
            )
        prepared: NkiInstruction = _Prepared(kind, *plan(core, *args, **kwargs))
        core.prepared = prepared
        return prepared

    def trigger(core: Core, prepare_instr: Any, name: str | None = None) -> NkiInstruction:
        prepared = core.prepared
        if prepared is None or prepare_instr is not prepared or prepared.kind != kind:
            raise IllegalOperand(
                "prepare_instr", f"that of {kind}_prepare, once", repr(prepare_instr)
            )
        core.prepared = None
        if not np.array_equal(prepared.metadata.array(), prepared.table):
            raise IllegalOperand(
                "metadata_tensor", "what it held at the prepare, which read it", "other counts"
            )
        return cast(NkiInstruction, prepared.run(name=name))

    whole.__name__ = kind
    prepare.__name__ = f"{kind}_prepare"
    prepare.__doc__ = f"Make `{kind}` ready; it reads the metadata only. One trigger must follow."
    trigger.__name__ = f"{kind}_trigger"
    trigger.__doc__ = f"Run what `{kind}_prepare` made ready."
    return _collective(whole), _collective(prepare), _collective(trigger)


def _check_metadata(metadata: Any, rows: int, ranks: int) -> NkiTensor:
    if type(metadata) is not NkiTensor:
        raise IllegalOperand("metadata_tensor", "a tensor", repr(metadata))
    shape = [rows, ranks] if not metadata.on_chip else [1, rows, ranks]
    if metadata._alloc.space == tr.PSUM:
        raise IllegalOperand("metadata_tensor", "a tensor in HBM or SBUF", "psum")
    check_shape("metadata_tensor", metadata, shape)
    if metadata.dtype is not dtypes.uint32:
        raise IllegalOperand("metadata_tensor", "uint32", str(metadata.dtype))
    return metadata


def _all_to_all_v(
    core: Core,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> tuple[NkiTensor, _Exchange]:
    """Send a chunk of its own size to every rank.

    Rows of the metadata: send counts, send offsets, receive counts (written unless they are known),
    and with `has_rdispls` receive offsets; without them chunk r goes to slot r of equal slots.
    """
    ranks = _ranks_of(core, replica_group, priority)
    ((src, dst),) = check_tensors(srcs, dsts, hbm_only=True, one=True)
    metadata = _check_metadata(metadata_tensor, 4 if has_rdispls else 3, len(ranks))

    def chunk_of(table: Array, receiver: int) -> tuple[int, int]:
        return int(table[0, receiver]), int(table[1, receiver])

    chunks = Chunks(chunk_of, has_rdispls, not recv_counts_known)
    what = (core, "all_to_all_v", ranks, src, dst, metadata, chunks)
    return metadata, functools.partial(exchange_chunks, *what, name=name)


def _all_gather_v(
    core: Core,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> tuple[NkiTensor, _Exchange]:
    """Send one chunk (its count and offset in column 0 of the metadata) to every rank."""
    ranks = _ranks_of(core, replica_group, priority)
    if has_rdispls:
        raise IllegalOperand("has_rdispls", "False", "True")
    if len(ranks) != 4 or core.machine.lnc != 2:
        raise IllegalOperand(
            "replica_group", "4 ranks of 2 cores", f"{len(ranks)} ranks of {core.machine.lnc}"
        )
    ((src, dst),) = check_tensors(srcs, dsts, hbm_only=True, one=True)
    metadata = _check_metadata(metadata_tensor, 3, len(ranks))

    def chunk_of(table: Array, receiver: int) -> tuple[int, int]:
        return int(table[0, 0]), int(table[1, 0])

    what = (core, "all_gather_v", ranks, src, dst, metadata)
    chunks = Chunks(chunk_of, False, not recv_counts_known)
    return metadata, functools.partial(exchange_chunks, *what, chunks, name=name)


all_to_all_v, all_to_all_v_prepare, all_to_all_v_trigger = _forms(_all_to_all_v)
all_gather_v, all_gather_v_prepare, all_gather_v_trigger = _forms(_all_gather_v)


# Permutations.


@_collective
def collective_permute(
    core: Core,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    source_target_pairs: list[tuple[int, int]],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Send a tensor from each source rank to its target; a rank in no pair does nothing."""
    _check_priority(core, priority)
    ((src, dst),) = check_tensors(srcs, dsts, hbm_only=True, one=True)
    edges = [(int(source), int(target)) for source, target in source_target_pairs]
    for operand, side in (("sources", 0), ("targets", 1)):
        ends = [edge[side] for edge in edges]
        if len(set(ends)) != len(ends):
            raise IllegalOperand("source_target_pairs", f"different {operand}", str(edges))
    ranks = sorted({rank for edge in edges for rank in edge})
    if any(not 0 <= rank < core.machine.num_ranks for rank in ranks):
        raise IllegalOperand(
            "source_target_pairs", f"ranks below {core.machine.num_ranks}", str(edges)
        )
    check_shape("dsts", dst, src.shape)
    if core.rank not in ranks:
        return
    outputs = []
    for source, target in edges:
        if target == core.rank:
            outputs.append((dst, _source(0, itemgetter(ranks.index(source)))))
    exchange(core, "collective_permute", ranks, srcs, outputs, name)


def _check_channels(by_channel: dict[str, Any], channel_ids: Any) -> list[tuple[list[Any], ...]]:
    """Check the lists of one tensor per channel; return them channel by channel."""
    count = len(channel_ids)
    if list(channel_ids) != list(range(count)) or not 1 <= count <= _MAX_CHANNELS:
        raise IllegalOperand(
            "channel_ids", f"0, 1, .. of at most {_MAX_CHANNELS} channels", str(channel_ids)
        )
    for operand, lists in by_channel.items():
        if len(lists) != count:
            raise IllegalOperand(operand, f"{count} lists, one per channel", str(len(lists)))
        if any(len(tensors) != 1 for tensors in lists):
            raise IllegalOperand(operand, "one tensor per channel", str([len(t) for t in lists]))
    return list(zip(*by_channel.values(), strict=True))


def _pass_on(
    core: Core,
    kind: str,
    by_channel: dict[str, Any],
    channel_ids: Any,
    ranks: list[int],
    combine_of: Callable[[DType], Callable[[list[Array]], Array]],
    name: str | None,
) -> None:
    """Send what is made of each channel's sources to the next rank of the ring.

    `by_channel` holds the lists by operand name, destinations last; `combine_of` gives, for an
    element type, what makes one array of a channel's sources.
    """
    before = (ranks.index(core.rank) - 1) % len(ranks)
    sources: list[NkiTensor] = []
    outputs = []
    for *sides, dsts in _check_channels(by_channel, channel_ids):
        mine = [check_tensors(side, dsts)[0][0] for side in sides]
        for operand, tensor in zip(list(by_channel)[1:], [*mine[1:], *dsts], strict=True):
            check_shape(operand, tensor, mine[0].shape)
        sent = slice(len(sources), len(sources) + len(mine))
        outputs.append((dsts[0], _of_rank(before, sent, combine_of(mine[0].dtype))))
        sources += mine
    exchange(core, kind, ranks, sources, outputs, name)


def _of_rank(position: int, part: slice, make: Callable[[list[Array]], Array]) -> Combine:
    """Apply `make` to some of the sources of one rank."""
    return lambda sent: make(sent[position][part])


@_collective
def collective_permute_implicit(
    core: Core,
    srcs_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    channel_ids: list[int] = [0],  # noqa: B006  the documented default; never changed
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Send each channel's tensor to the next rank of the ring and take that of the one before."""
    ranks = _ranks_of(core, replica_group, priority)
    lists = {"srcs_by_channel": srcs_by_channel, "dsts_by_channel": dsts_by_channel}
    kind = "collective_permute_implicit"
    _pass_on(core, kind, lists, channel_ids, ranks, lambda _: itemgetter(0), name)


@_collective
def collective_permute_implicit_reduce(
    core: Core,
    srcs0_by_channel: list[list[NkiTensor]],
    srcs1_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    op: Any,
    channel_ids: list[int] = [0],  # noqa: B006  the documented default; never changed
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Send ``op(src0, src1)`` of each channel to the next rank of the ring."""
    ranks = _ranks_of(core, replica_group, priority)
    lists = {
        "srcs0_by_channel": srcs0_by_channel,
        "srcs1_by_channel": srcs1_by_channel,
        "dsts_by_channel": dsts_by_channel,
    }
    kind = "collective_permute_implicit_reduce"
    _pass_on(core, kind, lists, channel_ids, ranks, functools.partial(reduction, op), name)


@_collective
def collective_permute_implicit_current_processing_rank_id(
    core: Core,
    iteration_id: int,
    replica_group: ReplicaGroup,
    channel_id: int = 0,
    name: str | None = None,
) -> VirtualRegister:
    """Return a register with the rank whose data is there after so many steps of the ring."""
    ranks = _ranks_of(core, replica_group)
    if not 0 <= channel_id < _MAX_CHANNELS:
        raise IllegalOperand("channel_id", f"0 to {_MAX_CHANNELS - 1}", str(channel_id))
    position = ranks.index(core.rank) - int(iteration_id)
    return VirtualRegister(ranks[position % len(ranks)])


@_collective
def rank_id(core: Core, name: str | None = None) -> VirtualRegister:
    """Return a register with the rank of the running core."""
    return VirtualRegister(core.rank)


__all__ = [
    "ReplicaGroup",
    "all_gather",
    "all_gather_v",
    "all_gather_v_prepare",
    "all_gather_v_trigger",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "all_to_all_v_prepare",
    "all_to_all_v_trigger",
    "collective_permute",
    "collective_permute_implicit",
    "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce",
    "rank_id",
    "reduce_scatter",
]
