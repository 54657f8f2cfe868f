"""What the instruction files share: operand checks and cost facts."""

from __future__ import annotations

from typing import Any, Final

from nki_sim import trace as tr
from nki_sim.constants import engine as Engine
from nki_sim.dtypes import DType
from nki_sim.errors import IllegalOperand
from nki_sim.machine import Core, NkiTensor, SequencerValue, VirtualRegister
from nki_sim.machine.geometry import Profile

ENGINE_IDS: Final = {
    Engine.tensor: tr.TENSOR,
    Engine.vector: tr.VECTOR,
    Engine.scalar: tr.SCALAR,
    Engine.gpsimd: tr.GPSIMD,
    Engine.dma: tr.DMA,
    Engine.sync: tr.SYNC,
}
_MAX_FREE_DIMS: Final = 3  # of an access pattern (architecture guide of Trainium 1)
_START_LIMIT: Final = {0: 128, 32: 32, 64: 64, 96: 32}
_FACTS: dict[tuple[Any, ...], tr.ComputeFacts] = {}

# Operand checks. Each raises IllegalOperand with the operand's name.


def check_memory(operand: str, value: Any, spaces: tuple[int, ...]) -> None:
    """The operand is a tensor in one of the memories."""
    if type(value) is not NkiTensor:
        raise IllegalOperand(operand, "a tensor", repr(value))
    if value._alloc.space not in spaces:
        allowed = " or ".join(tr.SPACE_NAMES[space].upper() for space in spaces)
        raise IllegalOperand(operand, f"a tensor in {allowed}", value.buffer.name, _way_from(value))


def _way_from(value: NkiTensor) -> str:
    """Return how a tensor gets out of its memory."""
    return "nisa.dma_copy moves between HBM and SBUF" if value._alloc.space == tr.HBM else ""


def check_partitions(operand: str, value: NkiTensor) -> None:
    """An engine reaches the partitions: start 0 for more than 64, 0 or 64 for 33..64, else any 32.

    DMA is free of this rule (architecture guides, "partition access").
    """
    geometry, address = value.geometry, value._alloc.address
    start = geometry.start_partition + (address[0] if address is not None else 0)
    limit = _START_LIMIT.get(start)
    if limit is None or geometry.partitions > limit:
        raise IllegalOperand(
            operand,
            "a start partition of 0, or 64 with at most 64 partitions, or 32 or 96 with at most 32",
            f"{geometry.partitions} partitions from {start}",
        )


def check_on_chip(*operands: tuple[str, NkiTensor], free_dims: int = _MAX_FREE_DIMS) -> None:
    """Each operand is on the chip, keeps to the partition rule and has at most `free_dims` axes."""
    for name, value in operands:
        if type(value) is not NkiTensor:
            raise IllegalOperand(name, "a tensor", repr(value))
        geometry, address = value.geometry, value._alloc.address
        if geometry.engines_reach and free_dims == _MAX_FREE_DIMS and not (address and address[0]):
            continue
        if value._alloc.space == tr.HBM:
            raise IllegalOperand(
                name, "a tensor in SBUF or PSUM", value.buffer.name, _way_from(value)
            )
        check_partitions(name, value)
        if geometry.free_dims > free_dims:
            raise IllegalOperand(
                name,
                f"at most {free_dims} free dimensions that do not join",
                f"{geometry.free_dims} in shape {list(value.shape)}",
                "Split the instruction",
            )
        geometry.engines_reach = geometry.free_dims <= _MAX_FREE_DIMS


def check_same_partitions(first: tuple[str, NkiTensor], *others: tuple[str, NkiTensor]) -> None:
    """All operands have as many partitions as the first one."""
    expected = first[1].geometry.partitions
    for name, value in others:
        count = value.geometry.partitions
        if count != expected:
            repeats = f"A DMA repeats a row of HBM: row.ap([[0, {expected}], [1, columns]])"
            hint = repeats if count == 1 else ""
            raise IllegalOperand(name, f"{expected} partitions like {first[0]}", str(count), hint)


def check_same_elements(first: tuple[str, NkiTensor], *others: tuple[str, NkiTensor]) -> None:
    """All operands have as many elements per partition as the first one; ranks may differ."""
    expected = first[1].geometry.elements
    for name, value in others:
        if value.geometry.elements != expected:
            raise IllegalOperand(
                name,
                f"{expected} elements per partition like {first[0]} {list(first[1].shape)}",
                f"{value.geometry.elements} ({list(value.shape)})",
            )


def check_tiles(like: tuple[str, NkiTensor], *others: tuple[str, NkiTensor]) -> None:
    """Operands on the chip have as many partitions and elements as the first one."""
    check_on_chip(like, *others)
    check_same_partitions(like, *others)
    check_same_elements(like, *others)


def check_elements(operand: str, value: NkiTensor, count: int, what: str) -> None:
    """The tensor has so many elements per partition; `what` says what they are."""
    found = value.geometry.elements
    if found != count:
        raise IllegalOperand(operand, f"{count} {what}", str(found))


def check_dtype(operand: str, value: NkiTensor, *allowed: DType) -> None:
    """The tensor has one of the types."""
    if value.dtype not in allowed:
        names = ", ".join(map(str, allowed[:-1]))
        expected = f"{names} or {allowed[-1]}" if names else str(allowed[-1])
        raise IllegalOperand(operand, expected, str(value.dtype))


def check_same_dtype(like: tuple[str, NkiTensor], other: tuple[str, NkiTensor]) -> None:
    """Both operands have one type."""
    if other[1].dtype is not like[1].dtype:
        raise IllegalOperand(other[0], f"{like[1].dtype} like {like[0]}", str(other[1].dtype))


def check_integers(operator: str, *operands: tuple[str, NkiTensor]) -> None:
    """A bit operator takes integers."""
    for name, value in operands:
        if not value.dtype.is_integer:
            raise IllegalOperand(name, f"an integer type for {operator}", str(value.dtype))


def check_not_both_psum(first: tuple[str, NkiTensor], second: tuple[str, NkiTensor]) -> None:
    """At most one of two tensor inputs is in PSUM."""
    if first[1]._alloc.space == tr.PSUM and second[1]._alloc.space == tr.PSUM:
        raise IllegalOperand(
            second[0],
            f"SBUF where {first[0]} is in PSUM",
            "both inputs in PSUM",
            "Copy one of them to SBUF",
        )


def check_engine(core: Core, engine: Any, allowed: tuple[Any, ...], default: Any) -> Any:
    """Return the engine to use: `default` for unknown, else one of `allowed`."""
    if engine is Engine.unknown or engine is None:
        return default
    if engine not in allowed:
        names = ", ".join(member.name for member in allowed)
        raise IllegalOperand("engine", f"one of {names}", str(getattr(engine, "name", engine)))
    return engine


def check_gpsimd_memory(*operands: tuple[str, NkiTensor]) -> None:
    """GpSimd reaches SBUF only."""
    for name, value in operands:
        if value._alloc.space != tr.SBUF:
            raise IllegalOperand(
                name, "a tensor in SBUF, as GpSimd reads and writes nothing else", value.buffer.name
            )


def check_generation(core: Core, minimum: Any, what: str) -> None:
    """The target is at least of generation `minimum`."""
    if core.target.version < minimum:
        raise IllegalOperand(what, f"{minimum.name} or later", f"target {core.target.name}")


def scalar_operand(core: Core, operand: str, value: Any, partitions: int) -> Any:
    """Return a scalar operand: a number, a register's value, or a checked (P, 1) tensor."""
    if type(value) is NkiTensor:
        check_on_chip((operand, value))
        geometry = value.geometry
        if geometry.elements != 1 or geometry.partitions != partitions:
            raise IllegalOperand(
                operand, f"a number or a tensor of shape ({partitions}, 1)", f"{list(value.shape)}"
            )
        return value
    if isinstance(value, VirtualRegister):
        return value.read()
    if isinstance(value, SequencerValue):
        raise IllegalOperand(
            operand, "a number, a register or a tensor", repr(value), "Store it in a tile first"
        )
    if isinstance(value, (bool, int, float)) or hasattr(value, "__float__"):
        return value
    raise IllegalOperand(operand, f"a number or a tensor of shape ({partitions}, 1)", repr(value))


# Cost.


def compute_facts(
    dst: NkiTensor,
    inputs: tuple[NkiTensor, ...],
    function: str = "",
    *,
    reads_accumulator: bool = False,
    extent: int = 0,
) -> tr.ComputeFacts:
    """Return the interned facts of a Vector, Scalar or GpSimd instruction.

    Args:
        dst: destination.
        inputs: tensor inputs, (P, 1) operands left out.
        function: activation function or ALU operations, "multiply,add".
        reads_accumulator: whether it stores an accumulator register.
        extent: whatever else the cost scales with (k of topk, elements per index of a gather).
    """
    profiles: tuple[Profile, ...] = (
        dst.geometry.profile,
        *[value.geometry.profile for value in inputs],
    )
    key = (function, profiles, reads_accumulator, extent)
    found = _FACTS.get(key)
    if found is None:
        found = _FACTS[key] = tr.ComputeFacts(
            elements=max(profile.elements for profile in profiles),
            partitions=max(profile.partitions for profile in profiles),
            dtypes=tuple(str(profile.dtype) for profile in profiles),
            spaces=tuple(profile.space for profile in profiles),
            contiguous=tuple(profile.contiguous for profile in profiles),
            function=function,
            reads_accumulator=reads_accumulator,
            extent=extent,
            wide_stride=any(
                profile.wide_stride and profile.space != tr.HBM for profile in profiles
            ),
        )
    return found
