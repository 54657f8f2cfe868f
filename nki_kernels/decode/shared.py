"""Shared experts in the fused decode layer: a dense MLP every token takes, added to the same y.

The width is cut in parts, which are to the stages what experts are: weights of their own,
contiguous for every partition, in one item or as many as their layout has. The cores take alternate
parts. What a token takes of a part is its gate, or 1. Nothing here depends on the routing, so the
weights load while it is made.

Sources: the stages of stages.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import nki.isa as nisa
import nki.language as nl
import numpy as np
from nki.language import NKIObject

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.memory import tiles_bytes
from nki_kernels.decode.buffers import (
    DecodeBuffers,
    DecodeOperands,
    SumBuffers,
    make_buffers,
)
from nki_kernels.decode.config import DecodeConfig, DecodeRequest, DecodeSizes, WeightForm
from nki_kernels.decode.layout import Array, pack_down, pack_gate_up
from nki_kernels.decode.memory import expert_table
from nki_kernels.decode.options import make_decode_config
from nki_kernels.decode.out import project_out
from nki_kernels.decode.stages import load_item, project_in
from nki_kernels.decode.steps import Group

_WEIGHT_BUFFERS = 2  # most parts on chip at once


@dataclass
class SharedTiles(NKIObject):
    """What the shared experts have on chip."""

    buffers: DecodeBuffers
    part_sb: nl.NkiTensor  # [1, P] int32, the parts
    ones_sb: nl.NkiTensor  # [128, 1] float32


def num_parts(width: int, num_cores: int) -> int:
    """Return in how many parts the shared experts are cut: as many for each core.

    Args:
        width: intermediate size of this rank's share of all shared experts.
        num_cores: physical cores of the launch.
    """
    parts = -(-width // PARTITIONS)
    return -(-parts // num_cores) * num_cores


def make_shared_config(
    config: DecodeConfig, width: int, formula: ExpertFormula, weight_format: str, room: int
) -> DecodeConfig:
    """Return the configuration of the shared experts beside that of the routed ones.

    Args:
        config: of the routed experts.
        width: intermediate size of this rank's share of all shared experts.
        formula: theirs.
        weight_format: of their weights: bfloat16, or 8 bits without scales.
        room: bytes of SBUF per partition that they may take, if one part fits at all.
    """
    parts = num_parts(width, config.num_cores)
    layout = config.weights.layout
    shared = make_decode_config(
        DecodeSizes(
            config.T, config.H, -(-width // parts), parts, min(2, parts), parts, config.num_cores
        ),
        formula,
        WeightForm(weight_format, layout, in_fours=config.h_axis.group > 1),
        DecodeRequest(
            mode="all",
            shard="experts",
            chunks=0 if layout == "packed" else 1,
            weight_buffers=1,
        ),
    )
    shared = replace(shared, gives_rows=config.gives_rows)
    double = replace(shared, weight_buffers=_WEIGHT_BUFFERS)
    return double if _num_items(shared) > 1 and shared_bytes(double) <= room else shared


def _num_items(config: DecodeConfig) -> int:
    """Return the items of a core: its parts, in as many chunks as their layout has."""
    return config.E // config.num_cores * config.chunks


def pack_shared_experts(
    config: DecodeConfig, gate_IH: Array, up_IH: Array, down_HI: Array
) -> tuple[Array, Array]:
    """Return the shared experts' weights as the kernel reads them, to be made once at load time.

    Args:
        config: of the shared experts; the result does not depend on its number of tokens.
        gate_IH, up_IH: [I, H] this rank's share, as in the checkpoint.
        down_HI: [H, I].

    Returns:
        gate_up and down of P experts of I/P, in the layout of the configuration and the type
        given. If P does not divide I, the width is filled up with zeros, which add nothing.
    """
    parts, part = config.E, config.I
    width, hidden_size = gate_IH.shape
    matrices = []
    for matrix_IH in (gate_IH, up_IH, down_HI.T):
        padded = np.zeros((parts * part, hidden_size), matrix_IH.dtype)
        padded[:width] = matrix_IH
        matrices.append(padded.reshape(parts, part, hidden_size))
    gate_PIH, up_PIH, down_PIH = matrices
    gate_up_PH2I = np.concatenate([gate_PIH, up_PIH], axis=1).transpose(0, 2, 1)
    if config.weights.layout == "packed":
        return pack_gate_up(config, gate_up_PH2I), pack_down(config, down_PIH)
    return np.ascontiguousarray(gate_up_PH2I), down_PIH


def shared_bytes(config: DecodeConfig) -> int:
    """Return the bytes of SBUF per partition that the shared experts take."""
    table = expert_table(config)
    kinds = (table.gate_up, table.down, table.inner, table.gate, table.up)
    part_numbers, ones = config.E, PARTITIONS
    return sum(tiles_bytes(kind) for kind in kinds) + 4 * (part_numbers + ones)


def load_shared(
    config: DecodeConfig, sums: SumBuffers, gate_up: nl.NkiTensor, down: nl.NkiTensor
) -> SharedTiles:
    """Load the first items of this core."""
    part_sb = nl.ndarray((1, config.E), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=part_sb, pattern=[[1, config.E]], offset=0, channel_multiplier=0)
    ones_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones_sb, value=1.0, engine=nisa.engine.gpsimd)
    operands = DecodeOperands(gate_up, down, gate_up, down, gate_up, down)
    tiles = SharedTiles(make_buffers(config, operands, sums), part_sb, ones_sb)
    for item in range(min(config.weight_buffers, _num_items(config))):
        _load_item(tiles, item)
    return tiles


def _load_item(tiles: SharedTiles, item: int) -> None:
    """Load an item of this core."""
    b, config = tiles.buffers, tiles.buffers.config
    part = item // config.chunks * config.num_cores + b.sums.core
    part_sb = tiles.part_sb[0:1, part : part + 1]
    buffer, chunk = item % config.weight_buffers, item % config.chunks
    load_item(b, part_sb, buffer, chunk)


def run_shared(
    tiles: SharedTiles, transposed_sb: nl.NkiTensor, gate_rows: list[nl.NkiTensor]
) -> None:
    """Add what this core computes of the shared experts to y.

    Args:
        tiles: of `load_shared`.
        transposed_sb: x^T, [h, H/h, T] view.
        gate_rows: the gate, [128, T] float32 and the same on all partitions; or none.
    """
    b, config = tiles.buffers, tiles.buffers.config
    column_sb = gate_rows[0] if len(gate_rows) > 0 else tiles.ones_sb.broadcast(1, config.T)
    # In the place of an expert's affinities: the stages do not know the difference.
    nisa.tensor_copy(dst=b.banks.column_ps[0], src=column_sb)
    items = _num_items(config)
    for item in range(items):
        buffer = item % config.weight_buffers
        project_in(b, transposed_sb, buffer, item, 0, True, True)
        project_out(b, Group(item, 1, 0, False, True, True))
        # Behind the products that read this buffer last.
        if item + config.weight_buffers < items:
            _load_item(tiles, item + config.weight_buffers)
