"""What `schedule` settles and the decode kernels go through: loops, iterations, steps."""

from __future__ import annotations

from dataclasses import dataclass

from nki.language import NKIObject


@dataclass(frozen=True)
class Group(NKIObject):
    """Items of an expert that are projected out together.

    Attributes:
        item: number of the first one, for the rings.
        size: how many.
        ring: buffers of the expert's column.
        adds_bias: whether this group adds the expert's down bias.
        is_first, is_last: whether it is the first and the last group of its expert on this core.
    """

    item: int
    size: int
    ring: int
    adds_bias: bool
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Step(NKIObject):
    """What a core does with an item, or with a group.

    Attributes:
        kind: spread (what tokens take of the expert), load_in, project_in, project_half,
            keep_scales, load_out or project_out (the group).
        item: its number in the iteration, for the rings.
        entry: that of its expert.
        number: which of the expert's items it is.
        buffer: its weight buffer.
        is_first: whether it is the first one of its expert on this core.
        starts_chunk, ends_chunk: whether it is the first and the last one of its chunk there.
        group: of project_out alone.
    """

    kind: str
    item: int
    entry: int
    number: int
    buffer: int
    is_first: bool
    starts_chunk: bool
    ends_chunk: bool
    group: Group | None = None


@dataclass(frozen=True)
class Iteration(NKIObject):
    """What one core does in an iteration.

    Attributes:
        entries: of the list.
        first: how far behind the iteration's position in the list the core's first entry is.
        bias: what the core multiplies the down bias with: where the cores share an expert, one adds
            it, and the other one zeros.
        is_twice: whether both cores compute what one adds.
        share: what the core then multiplies the tokens' weights with, 1 or 0.
        steps: in order.
    """

    entries: int
    first: int
    bias: float
    is_twice: bool
    share: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Loop(NKIObject):
    """Iterations of one size.

    Attributes:
        begin: the list position of the first one, where it is known.
        end: that behind the last one; -1: known at run time, as is then where it begins.
        step: list positions of an iteration of both cores; 0: a single one, written out.
        iterations: of each core.
    """

    begin: int
    end: int
    step: int
    iterations: tuple[Iteration, ...]
