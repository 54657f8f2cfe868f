"""One iteration of a loop over list entries: its steps, as `schedule` settled them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.decode.buffers import DecodeBuffers
from nki_kernels.decode.config import DecodeConfig, entry_stride
from nki_kernels.decode.list import Listed
from nki_kernels.decode.out import keep_scales, project_out
from nki_kernels.decode.stages import (
    load_in,
    load_out,
    project_half,
    project_in,
    spread_column,
)
from nki_kernels.decode.steps import Iteration, Step


@dataclass
class Entries(NKIObject):
    """The list entries of an iteration.

    Attributes:
        experts: (1, 1) int32 tiles.
        weights, inputs: tables with a column per entry: the iteration's from `column` on, by
            `stride`.
    """

    experts: list[nl.NkiTensor]
    weights: list[nl.NkiTensor]
    inputs: list[nl.NkiTensor]
    column: int
    stride: int


def known_entries(
    config: DecodeConfig, routing: Listed, iteration: Iteration, position: int
) -> Entries:
    """Return the entries from a known list position on, which stay where they are."""
    stride, column = entry_stride(config), position + iteration.first
    experts = []
    for entry in range(iteration.entries):
        number = column + entry * stride
        experts.append(routing.list_sb[0:1, number : number + 1])
    return Entries(experts, routing.weights, routing.inputs, column, stride)


def look_up(b: DecodeBuffers, routing: Listed, iteration: Iteration, position: Any) -> Entries:
    """Copy the entries from a list position on, a register, to where an iteration has them."""
    config = b.config
    count, first = iteration.entries, iteration.first
    # Loads and products have fixed addresses; only these copies depend on the position.
    _copy_entries(config, b.experts[0:1, 0:count], routing.list_sb, position, first)
    for tile in range(len(routing.weights)):
        columns = b.weights[tile][:, 0:count]
        _copy_entries(config, columns, routing.weights[tile], position, first)
    for tile in range(len(routing.inputs)):
        columns = b.inputs[tile][:, 0:count]
        _copy_entries(config, columns, routing.inputs[tile], position, first)
    # Both cores run these instructions; weights times 0 make nothing of one core's part.
    if iteration.is_twice:
        for table_sb in b.weights + b.inputs[0 : len(routing.inputs)]:
            column_sb = table_sb[:, 0:1]
            nisa.tensor_scalar(
                dst=column_sb, data=column_sb, op0=nl.multiply, operand0=iteration.share
            )
    experts = []
    for entry in range(count):
        experts.append(b.experts[0:1, entry : entry + 1])
    return Entries(experts, b.weights, b.inputs, 0, 1)


def run_iteration(
    b: DecodeBuffers, transposed_sb: nl.NkiTensor, iteration: Iteration, entries: Entries
) -> None:
    """Compute some list entries of this core.

    Args:
        b: buffers.
        transposed_sb: x^T.
        iteration: its steps.
        entries: which experts.
    """
    # The order is that of every engine's queue. Engines wait for the buffers that a step reads or
    # fills, not for the step before: loads run as far ahead as there are buffers.
    for step in iteration.steps:
        if step.kind == "load_in":
            expert = entries.experts[step.entry]
            load_in(b, expert, step.buffer, step.number, step.ends_chunk)
        elif step.kind == "load_out":
            expert = entries.experts[step.entry]
            load_out(b, expert, step.buffer, step.number, step.is_first)
        elif step.group is not None:
            project_out(b, step.group)
        else:
            _project(b, transposed_sb, step, entries, iteration.bias)


def _project(
    b: DecodeBuffers, transposed_sb: nl.NkiTensor, step: Step, entries: Entries, bias: float
) -> None:
    """Do a step of the gate and up projections."""
    item, buffer, ring = step.item, step.buffer, step.entry % 2
    if step.kind == "spread":
        column = entries.column + step.entry * entries.stride
        spread_column(b, entries.weights, entries.inputs, column, ring, bias)
    elif step.kind == "project_half":
        project_half(b, transposed_sb, buffer, item, ring)
    elif step.kind == "project_in":
        project_in(b, transposed_sb, buffer, item, ring, step.starts_chunk, step.ends_chunk)
    elif step.kind == "keep_scales":
        keep_scales(b, buffer, ring)


def _copy_entries(
    config: DecodeConfig, dst_sb: nl.NkiTensor, table_sb: nl.NkiTensor, position: Any, first: int
) -> None:
    """Copy columns of a table, of this core's entries from `position + first` on."""
    rows, size = dst_sb.shape
    pattern = [[table_sb.shape[1], rows], [entry_stride(config), size]]
    source = table_sb.ap(pattern, offset=first, scalar_offset=position, indirect_dim=1)
    nisa.tensor_copy(dst=dst_sb, src=source, engine=nisa.engine.scalar)
