"""What the decode kernels keep on chip.

Buffers that outlast a trip of a dynamic loop are allocated once: the body of such a loop has fixed
addresses. Lists are rings; which member is meant is known at compile time.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.tiles import make_tiles, weight_dtype
from nki_kernels.decode.config import (
    BANK_FLOATS,
    BANKS,
    OUT_BANKS,
    DecodeConfig,
    accumulator_banks,
    extra_floats,
    group_size,
    item_bytes,
    keeps_scales,
    packed_rows,
    packed_run,
    weighs_inner,
)


def scratch_banks(config: DecodeConfig) -> int:
    """Return how many banks of y^T may wait for GpSimd on their way to sums in SBUF."""
    if config.sums_in_psum:
        return 0
    return 6 if config.T <= 128 else 3


@dataclass
class DecodeOperands(NKIObject):
    """The tensors of the experts in HBM; optional ones are absent if the configuration says so."""

    gate_up: nl.NkiTensor
    down: nl.NkiTensor
    gate_up_bias: nl.NkiTensor
    down_bias: nl.NkiTensor
    gate_up_scale: nl.NkiTensor
    down_scale: nl.NkiTensor


@dataclass
class SumBuffers(NKIObject):
    """y^T as it is added up, and the PSUM that the rest of a kernel shares.

    Attributes:
        total_ps: banks that hold y^T [h, H/h, T]; none if it is added up in SBUF.
        total_sb: [h, H/h, T] float32; with `total_ps`, what is read out of it.
        work_ps: PSUM banks [128, 512] float32 for everything else, used in turn.
    """

    total_ps: list[nl.NkiTensor]
    total_sb: nl.NkiTensor
    work_ps: list[nl.NkiTensor]


@dataclass
class DecodeBuffers(NKIObject):
    """What computing experts takes; lists are indexed by buffer, item or entry.

    Attributes:
        inner_ps: gate and up projections [128, 2, T].
        out_ps: an expert's part of y^T, where the sums are not in PSUM.
        scratch: the same on its way to the sums.
        kept_scale: channel scales of two experts, where their weight_buffers are loaded again too early.
        expert_in, expert_out, shared_expert: experts whose gate and up, or down weights are loaded
            next, (1, 1) each.
        weights, inputs: columns of the group's experts, per 128 tokens [tokens, unroll].
        column_ps, input_ps: factors of an expert's output and input for every token, the
            same on all partitions, [128, T].
    """

    sums: SumBuffers
    gate_up: list[nl.NkiTensor]
    down: list[nl.NkiTensor]
    gate_up_bias: list[nl.NkiTensor]
    gate_up_scale: list[nl.NkiTensor]
    down_bias: list[nl.NkiTensor]
    down_scale: list[nl.NkiTensor]
    kept_scale: list[nl.NkiTensor]
    inner: list[nl.NkiTensor]
    gate: list[nl.NkiTensor]
    up: list[nl.NkiTensor]
    column_row: list[nl.NkiTensor]
    input_scale: list[nl.NkiTensor]
    inner_ps: list[nl.NkiTensor]
    column_ps: list[nl.NkiTensor]
    input_ps: list[nl.NkiTensor]
    out_ps: list[nl.NkiTensor]
    bias_ps: nl.NkiTensor
    expert_in: list[nl.NkiTensor]
    expert_out: list[nl.NkiTensor]
    shared_expert: nl.NkiTensor
    weights: list[nl.NkiTensor]
    inputs: list[nl.NkiTensor]
    scratch: list[nl.NkiTensor]
    ones: nl.NkiTensor


def make_sums(config: DecodeConfig) -> SumBuffers:
    """Allocate y^T and all of PSUM."""
    held = accumulator_banks(config) if config.sums_in_psum else 0
    banks = make_tiles(BANKS, (PARTITIONS, BANK_FLOATS), nl.float32, nl.psum)
    rows, count = config.h_axis.rows, config.h_axis.count
    total_sb = nl.ndarray((rows, count, config.T), dtype=nl.float32, buffer=nl.sbuf)
    return SumBuffers(banks[0:held], total_sb, banks[held:BANKS])


def routing_bank(sums: SumBuffers) -> nl.NkiTensor:
    """Return the PSUM bank that the routing works in; turning tokens leaves it alone."""
    return sums.work_ps[len(sums.work_ps) - 1]


def clear_sums(config: DecodeConfig, sums: SumBuffers, zeros_sb: nl.NkiTensor) -> None:
    """Set y^T to zero: by a matmul in PSUM, so that others may add to it."""
    if not config.sums_in_psum:
        nisa.memset(dst=sums.total_sb, value=0.0, engine=nisa.engine.gpsimd)
        return
    for bank_ps in sums.total_ps:
        nisa.nc_matmul(
            dst=bank_ps,
            stationary=zeros_sb[0:1, 0:PARTITIONS],
            moving=zeros_sb[0:1, 0:BANK_FLOATS],
            accumulate=False,
        )


def _parts(banks_ps: list[nl.NkiTensor], size: int, count: int) -> list[nl.NkiTensor]:
    """Return tiles [128, size] of the banks, one bank after the other, `count` of each."""
    made = []
    for index in range(count):
        for bank_ps in banks_ps:
            made.append(bank_ps[0:PARTITIONS, index * size : (index + 1) * size])
    return made


def _extras(
    config: DecodeConfig, gate_up: list[nl.NkiTensor], position: int, count: int
) -> list[nl.NkiTensor]:
    """Return the float32 numbers `position`.. of packed runs, [h, count, 1] each."""
    views = []
    if count > 0:
        words = 4 // item_bytes(config)
        begin = packed_run(config) - (extra_floats(config) - position) * words
        for run_sb in gate_up:
            extra_sb = run_sb[0 : run_sb.shape[0], begin : begin + count * words]
            views.append(extra_sb.view(nl.float32).expand_dim(2))
    return views


def _per_token(config: DecodeConfig) -> list[nl.NkiTensor]:
    """Return float32 tiles [tokens, unroll], at most 128 tokens each."""
    made = []
    for first in range(0, config.T, PARTITIONS):
        rows = min(PARTITIONS, config.T - first)
        made.append(nl.ndarray((rows, config.unroll), dtype=nl.float32, buffer=nl.sbuf))
    return made


def _from_end(bank_ps: nl.NkiTensor, size: int, position: int) -> list[nl.NkiTensor]:
    """Return two tiles [128, size] at the end of a bank, after `position` others."""
    made = []
    for index in range(position, position + 2):
        end = BANK_FLOATS - index * size
        made.append(bank_ps[0:PARTITIONS, end - size : end])
    return made


def make_buffers(config: DecodeConfig, sums: SumBuffers) -> DecodeBuffers:
    """Allocate what computing experts takes, with PSUM out of `sums`."""
    T, H, weight_buffers = config.T, config.H, config.weight_buffers
    h_axis, i_axis = config.h_axis, config.i_axis
    i_tile = (i_axis.rows, 2, i_axis.count)
    work_ps = sums.work_ps
    # Columns [128, T] in the last bank; projections [128, 2 T] in it too if there is no other.
    last_ps = work_ps[len(work_ps) - 1 : len(work_ps)]
    inner_banks, out_ps = last_ps, work_ps[0:0]
    if not config.sums_in_psum:
        inner_banks, out_ps = work_ps[OUT_BANKS : BANKS - 1], work_ps[0:OUT_BANKS]
    elif len(work_ps) > 1:
        inner_banks = work_ps[0 : len(work_ps) - 1]
    inner_ps = _parts(
        inner_banks, 2 * T, 2 if len(inner_banks) == 1 and 4 * T <= BANK_FLOATS else 1
    )
    column_ps = _from_end(last_ps[0], T, 0)
    input_ps = column_ps
    used = 4 * T if len(work_ps) == 1 else 0
    if config.scaling == "pre" and weighs_inner(config) and used + 4 * T <= BANK_FLOATS:
        input_ps = _from_end(last_ps[0], T, 2)
    ones_sb = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones_sb, value=1.0, engine=nisa.engine.gpsimd)
    weights = weight_dtype(config.weights.format)
    if config.weights.layout == "packed":
        gate_up = make_tiles(weight_buffers, (packed_rows(config), packed_run(config)), weights)
        columns = h_axis.count * h_axis.rows
        gate_up_bias = _extras(config, gate_up, 0, 2 * int(config.formula.has_gate_up_bias))
        position = 2 * int(config.formula.has_gate_up_bias)
        gate_up_scale = _extras(config, gate_up, position, 2 * int(config.weights.has_scales))
        position = position + 2 * int(config.weights.has_scales)
        down_scale = _extras(config, gate_up, position, extra_floats(config) - position)
    else:
        run = h_axis.count * 2 * i_axis.size
        gate_up = make_tiles(weight_buffers, (h_axis.rows, run), weights)
        columns = H
        gate_up_bias = make_tiles(
            weight_buffers if config.formula.has_gate_up_bias else 0, i_tile, nl.float32
        )
        gate_up_scale = make_tiles(weight_buffers if config.weights.has_scales else 0, i_tile, nl.float32)
        down_scale = make_tiles(
            weight_buffers if config.weights.down_scale != "none" else 0,
            (PARTITIONS, h_axis.count if config.weights.down_scale == "channel" else 1, 1),
            nl.float32,
        )
    return DecodeBuffers(
        sums=sums,
        gate_up=gate_up,
        down=make_tiles(weight_buffers, (i_axis.rows, i_axis.count * columns), weights),
        gate_up_bias=gate_up_bias,
        gate_up_scale=gate_up_scale,
        down_bias=make_tiles(weight_buffers if config.formula.has_down_bias else 0, (1, H), nl.bfloat16),
        down_scale=down_scale,
        kept_scale=make_tiles(
            2 if keeps_scales(config) else 0, (PARTITIONS, h_axis.count, 1), nl.float32
        ),
        inner=make_tiles(2 * group_size(config), (i_axis.rows, i_axis.count, T), nl.bfloat16),
        gate=make_tiles(2, (i_axis.rows, T), nl.float32),
        up=make_tiles(2, (i_axis.rows, T), nl.float32),
        column_row=make_tiles(2 if config.formula.has_down_bias else 0, (1, T), nl.bfloat16),
        input_scale=make_tiles(2 if config.scaling == "pre" else 0, (PARTITIONS, T), nl.float32),
        inner_ps=inner_ps,
        column_ps=column_ps,
        input_ps=input_ps,
        out_ps=out_ps,
        bias_ps=inner_banks[0],
        expert_in=make_tiles(config.unroll, (1, 1), nl.int32),
        expert_out=make_tiles(config.unroll, (1, 1), nl.int32),
        shared_expert=nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf),
        weights=_per_token(config),
        inputs=_per_token(config),
        scratch=make_tiles(scratch_banks(config), (PARTITIONS, BANK_FLOATS), nl.float32),
        ones=ones_sb,
    )
