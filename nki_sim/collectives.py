"""`nki.collectives`: data exchange between ranks, over all ranks of one `run_ranks`.

Tensors of shared HBM belong to a rank: all its cores join the collective, which happens once.
Tensors in SBUF belong to one core, which exchanges with the cores of the same number of the other
ranks. Every collective orders what its members did before against what they do after. Reductions
add in float32 (integers in 64 bits) in the order of the ranks. In a ring the successor of a rank is
the next one in its list of the replica group, on every channel.

Not checked: what depends on the machine room, that is, whether a replica group spans nodes, devices
or switches, and how many channels the links of a group allow (at most four are accepted).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.constants import nc_version
from nki_sim.dtypes import Array
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
from nki_sim.machine.core import Core, current
from nki_sim.machine.registers import VirtualRegister
from nki_sim.machine.tensor import NkiTensor

_MAX_CHANNELS: Final = 4
F = TypeVar("F", bound=Callable[..., Any])


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


def _collective(function: F) -> F:
    """Give a collective the running core, and its errors their place."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        core = current()
        try:
            return function(core, *args, **kwargs)
        except NkiValidationError as error:
            core.locate(error, name)
            raise

    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return cast(F, call)


def _group_of(core: Core, replica_group: Any) -> list[int]:
    """Return the ranks that this rank exchanges with, in the order of the group."""
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


def _check_priority(core: Core, priority: Any) -> None:
    if priority is None:
        return
    if core.target.version < nc_version.gen4:
        raise IllegalOperand("priority", f"None before gen4 ({core.target.name})", str(priority))
    if priority not in range(4):
        raise IllegalOperand("priority", "0 to 3", repr(priority))


def _source(index: int, make: Callable[[list[Array]], Array]) -> Combine:
    """Apply `make` to source `index` of every rank."""

    def combine(sent: list[list[Array]]) -> Array:
        return make([arrays[index] for arrays in sent])

    return combine


def _check_divisible(src: NkiTensor, ranks: int) -> None:
    if src.shape[0] % ranks:
        raise IllegalOperand("srcs", f"an axis 0 that {ranks} ranks divide", f"{list(src.shape)}")


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
    _check_priority(core, priority)
    ranks = _group_of(core, replica_group)
    pairs = check_tensors(srcs, dsts)
    outputs = []
    for index, (src, dst) in enumerate(pairs):
        check_shape("dsts", dst, src.shape)
        outputs.append((dst, _source(index, reduction(op, src.dtype))))
    exchange(core, "all_reduce", ranks, srcs, outputs, name)


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
    _check_priority(core, priority)
    ranks = _group_of(core, replica_group)
    pairs = check_tensors(srcs, dsts)
    on_chip = pairs[0][0].on_chip
    _check_dim(collective_dim, (0, 1) if on_chip else (0,), "0 in HBM, 0 or 1 in SBUF")

    def join(arrays: list[Array]) -> Array:
        return np.concatenate(arrays, axis=collective_dim)

    outputs = []
    for index, (src, dst) in enumerate(pairs):
        if on_chip and src.ndim != 2:
            raise IllegalOperand("srcs", "2 axes in SBUF", str(src.ndim))
        shape = list(src.shape)
        shape[collective_dim] *= len(ranks)
        check_shape("dsts", dst, shape)
        outputs.append((dst, _source(index, join)))
    exchange(core, "all_gather", ranks, srcs, outputs, name)


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
    _check_priority(core, priority)
    ranks = _group_of(core, replica_group)
    pairs = check_tensors(srcs, dsts)
    _check_dim(collective_dim, (0,), "0")
    position = ranks.index(core.rank)
    outputs = []
    for index, (src, dst) in enumerate(pairs):
        _check_divisible(src, len(ranks))
        rows = src.shape[0] // len(ranks)
        check_shape("dsts", dst, [rows, *src.shape[1:]])
        part = slice(position * rows, (position + 1) * rows)
        outputs.append((dst, _source(index, _sliced(reduction(op, src.dtype), part))))
    exchange(core, "reduce_scatter", ranks, srcs, outputs, name)


def _sliced(reduce: Callable[[list[Array]], Array], part: slice) -> Callable[[list[Array]], Array]:
    def make(arrays: list[Array]) -> Array:
        return reduce([array[part] for array in arrays])

    return make


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
    _check_priority(core, priority)
    ranks = _group_of(core, replica_group)
    pairs = check_tensors(srcs, dsts, hbm_only=True)
    _check_dim(collective_dim, (0,), "0")
    position = ranks.index(core.rank)

    def collect(arrays: list[Array]) -> Array:
        rows = arrays[0].shape[0] // len(arrays)
        return np.concatenate([a[position * rows : (position + 1) * rows] for a in arrays])

    outputs = []
    for index, (src, dst) in enumerate(pairs):
        _check_divisible(src, len(ranks))
        check_shape("dsts", dst, src.shape)
        outputs.append((dst, _source(index, collect)))
    exchange(core, "all_to_all", ranks, srcs, outputs, name)


# Variable counts.


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


@_collective
def all_to_all_v(
    core: Core,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Send a chunk of its own size to every rank.

    Rows of the metadata: send counts, send offsets, receive counts (written unless they are known),
    and with `has_rdispls` receive offsets; without them chunk r goes to slot r of equal slots.
    """
    _check_priority(core, priority)
    ranks = _group_of(core, replica_group)
    ((src, dst),) = check_tensors(srcs, dsts, hbm_only=True, one=True)
    metadata = _check_metadata(metadata_tensor, 4 if has_rdispls else 3, len(ranks))

    def chunk_of(table: Array, receiver: int) -> tuple[int, int]:
        return int(table[0, receiver]), int(table[1, receiver])

    chunks = Chunks(chunk_of, has_rdispls, not recv_counts_known)
    exchange_chunks(core, "all_to_all_v", ranks, src, dst, metadata, chunks, name)


@_collective
def all_gather_v(
    core: Core,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Send one chunk (its count and offset in column 0 of the metadata) to every rank."""
    _check_priority(core, priority)
    ranks = _group_of(core, replica_group)
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

    chunks = Chunks(chunk_of, False, not recv_counts_known)
    exchange_chunks(core, "all_gather_v", ranks, src, dst, metadata, chunks, name)


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
            outputs.append((dst, _source(0, _item(ranks.index(source)))))
    exchange(core, "collective_permute", ranks, srcs, outputs, name)


def _item(position: int) -> Callable[[list[Array]], Array]:
    def make(arrays: list[Array]) -> Array:
        return arrays[position]

    return make


def _check_channels(
    by_channel: list[tuple[str, Any]], channel_ids: Any
) -> list[tuple[list[Any], ...]]:
    """Check the lists of one tensor per channel; return them channel by channel."""
    count = len(channel_ids)
    if list(channel_ids) != list(range(count)) or not 1 <= count <= _MAX_CHANNELS:
        raise IllegalOperand(
            "channel_ids", f"0, 1, .. of at most {_MAX_CHANNELS} channels", str(channel_ids)
        )
    for operand, lists in by_channel:
        if len(lists) != count:
            raise IllegalOperand(operand, f"{count} lists, one per channel", str(len(lists)))
        if any(len(tensors) != 1 for tensors in lists):
            raise IllegalOperand(operand, "one tensor per channel", str([len(t) for t in lists]))
    return list(zip(*(lists for _, lists in by_channel), strict=True))


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
    _check_priority(core, priority)
    ranks = _group_of(core, replica_group)
    lists = [("srcs_by_channel", srcs_by_channel), ("dsts_by_channel", dsts_by_channel)]
    before = _item((ranks.index(core.rank) - 1) % len(ranks))
    sources, outputs = [], []
    for index, (srcs, dsts) in enumerate(_check_channels(lists, channel_ids)):
        ((src, dst),) = check_tensors(srcs, dsts)
        check_shape("dsts_by_channel", dst, src.shape)
        sources.append(src)
        outputs.append((dst, _source(index, before)))
    exchange(core, "collective_permute_implicit", ranks, sources, outputs, name)


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
    _check_priority(core, priority)
    ranks = _group_of(core, replica_group)
    lists = [
        ("srcs0_by_channel", srcs0_by_channel),
        ("srcs1_by_channel", srcs1_by_channel),
        ("dsts_by_channel", dsts_by_channel),
    ]
    before = (ranks.index(core.rank) - 1) % len(ranks)
    sources, outputs = [], []
    for index, (left, right, dsts) in enumerate(_check_channels(lists, channel_ids)):
        ((src0, dst),) = check_tensors(left, dsts)
        ((src1, _),) = check_tensors(right, dsts)
        check_shape("srcs1_by_channel", src1, src0.shape)
        check_shape("dsts_by_channel", dst, src0.shape)
        sources += [src0, src1]
        outputs.append((dst, _both(before, 2 * index, reduction(op, src0.dtype))))
    exchange(core, "collective_permute_implicit_reduce", ranks, sources, outputs, name)


def _both(position: int, index: int, reduce: Callable[[list[Array]], Array]) -> Combine:
    """Reduce two neighbouring sources of one rank."""

    def combine(sent: list[list[Array]]) -> Array:
        return reduce(sent[position][index : index + 2])

    return combine


@_collective
def collective_permute_implicit_current_processing_rank_id(
    core: Core,
    iteration_id: int,
    replica_group: ReplicaGroup,
    channel_id: int = 0,
    name: str | None = None,
) -> VirtualRegister:
    """Return a register with the rank whose data is there after so many steps of the ring."""
    ranks = _group_of(core, replica_group)
    if not 0 <= channel_id < _MAX_CHANNELS:
        raise IllegalOperand("channel_id", f"0 to {_MAX_CHANNELS - 1}", str(channel_id))
    position = ranks.index(core.rank) - int(iteration_id)
    return VirtualRegister(ranks[position % len(ranks)])


@_collective
def rank_id(core: Core, name: str | None = None) -> VirtualRegister:
    """Return a register with the rank of the running core."""
    return VirtualRegister(core.rank)
