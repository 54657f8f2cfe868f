"""What the decode kernels keep on chip.

Buffers that outlast an iteration of a dynamic loop are allocated once: the body of such a loop has
fixed addresses. Lists are rings; which member is meant is known at compile time.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.chip import BANK_FLOATS, BANKS, PARTITIONS
from nki_kernels.common.memory import Tiles, allocate, allocate_rows
from nki_kernels.common.mx import bias_tile
from nki_kernels.common.tiles import make_tiles
from nki_kernels.decode.config import (
    DecodeConfig,
    accumulator_banks,
    bias_is_inside,
    extra_floats,
    is_mx,
    item_bytes,
    out_banks,
    run_of_numbers,
    tiles_beside_columns,
    tiles_in_bank,
    weighs_inner,
)
from nki_kernels.decode.items import mx_form, packed_shapes
from nki_kernels.decode.memory import ExpertTable, expert_table, mx_table, token_table


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
    """y as it is added up, and the PSUM that the rest of a kernel shares.

    Attributes:
        config: what the kernel is compiled for.
        core: number of this core.
        total_sb: y^T [h, H/h, T], or rows [T, H], float32.
        order: numbers of the banks that y takes, in which an expert's part of it is made. Of rows
            those come first whose sums the other core waits for at the end.
        work_ps: PSUM banks [128, 512] float32 for everything else, used in turn.
    """

    config: DecodeConfig
    core: int
    total_sb: nl.NkiTensor
    order: list[int]
    work_ps: list[nl.NkiTensor]


@dataclass
class ExpertBanks(NKIObject):
    """Parts of PSUM that computing experts works in.

    Attributes:
        inner_ps: gate and up projections [128, 2, T].
        column_ps, input_ps: factors of an expert's output and input for every token, the
            same on all partitions, [128, T].
        out_ps: an expert's part of y.
        bias_ps: a bank for down biases that are added apart.
    """

    inner_ps: list[nl.NkiTensor]
    column_ps: list[nl.NkiTensor]
    input_ps: list[nl.NkiTensor]
    out_ps: list[nl.NkiTensor]
    bias_ps: nl.NkiTensor


@dataclass
class MxBuffers(NKIObject):
    """Activations as words; empty lists where the weights are no MX words.

    Attributes:
        fours: x^T with four elements of a token side by side, [h, H/4h, T, 4].
        tokens, token_scales: the same as words [h, H/4h, T], and their scales.
        inner_fours: inner activations of the items under way, [i, T, 4].
        inner, inner_scales: the same as words [i, T], and their scales.
    """

    fours: list[nl.NkiTensor]
    tokens: list[nl.NkiTensor]
    token_scales: list[nl.NkiTensor]
    inner_fours: list[nl.NkiTensor]
    inner: list[nl.NkiTensor]
    inner_scales: list[nl.NkiTensor]


@dataclass
class DecodeBuffers(NKIObject):
    """What computing experts takes; sizes are those of `expert_table`.

    Attributes:
        config: what the kernel is compiled for.
        x: the experts in HBM.
        sums: y.
        banks: parts of PSUM.
        gate_up, down, gate_up_bias, gate_up_scale, down_bias, down_scale: per weight buffer.
        kept_scale: channel scales of two experts, where their buffers are loaded again too early.
        inner: inner activations of the items under way.
        gate, up: projections on the way there, used in turn.
        column_row, input_scale: factors of two experts' outputs on one row, inputs on all.
        experts: of an iteration, [1, unroll].
        weights, inputs: columns of the iteration's experts, per 128 tokens [tokens, unroll].
        scratch: banks of y on their way to sums in SBUF.
        halves: projections for the other core, and from it; none if no expert is shared by halves.
        ones: [128, 128].
        mx: quantised activations.
    """

    config: DecodeConfig
    x: DecodeOperands
    sums: SumBuffers
    banks: ExpertBanks
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
    experts: nl.NkiTensor
    weights: list[nl.NkiTensor]
    inputs: list[nl.NkiTensor]
    scratch: list[nl.NkiTensor]
    halves: list[nl.NkiTensor]
    ones: nl.NkiTensor
    mx: MxBuffers


def make_sums(config: DecodeConfig, core: int) -> SumBuffers:
    """Allocate y and all of PSUM."""
    numbers = run_of_numbers(0, accumulator_banks(config))
    # Each core ends with half of the columns: it begins with those that it sends.
    begin = len(numbers) // 2 if config.gives_rows and core == 0 and config.num_cores > 1 else 0
    banks = make_tiles(BANKS, (PARTITIONS, BANK_FLOATS), nl.float32, nl.psum)
    total_sb = allocate(token_table(config).total)[0]
    order = numbers[begin : len(numbers)] + numbers[0:begin]
    return SumBuffers(config, core, total_sb, order, banks)


def routing_bank(sums: SumBuffers) -> nl.NkiTensor:
    """Return the PSUM bank that the routing works in; transposing tokens leaves it alone."""
    return sums.work_ps[len(sums.work_ps) - 1]


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
        begin = packed_shapes(config)[0][1] - (extra_floats(config) - position) * words
        for run_sb in gate_up:
            # They come with the run of weights, in its transfer.
            extra_sb = run_sb[0 : run_sb.shape[0], begin : begin + count * words]
            views.append(extra_sb.view(nl.float32).expand_dim(2))
    return views


def _per_token(config: DecodeConfig, numbers: Tiles) -> list[nl.NkiTensor]:
    """Return float32 tiles [tokens, unroll], at most 128 tokens each."""
    made = []
    for first in range(0, config.T, PARTITIONS):
        made.append(allocate_rows(numbers, min(PARTITIONS, config.T - first)))
    return made


def _from_end(bank_ps: nl.NkiTensor, size: int, position: int) -> list[nl.NkiTensor]:
    """Return two tiles [128, size] at the end of a bank, after `position` others."""
    made = []
    for index in range(position, position + 2):
        end = BANK_FLOATS - index * size
        made.append(bank_ps[0:PARTITIONS, end - size : end])
    return made


def make_buffers(config: DecodeConfig, x: DecodeOperands, sums: SumBuffers) -> DecodeBuffers:
    """Allocate what computing experts takes, with PSUM out of `sums`."""
    table = expert_table(config)
    banks = _share_banks(config, sums)
    ones_sb = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones_sb, value=1.0, engine=nisa.engine.gpsimd)
    gate_up = allocate(table.gate_up)
    beside = _beside_weights(config, table, gate_up)
    down, down_bias = allocate(table.down), allocate(table.down_bias)
    kept_scale, inner, up = allocate(table.kept_scale), allocate(table.inner), allocate(table.up)
    # The row behind the up projection stays 1: it meets the bias among the down weights.
    if bias_is_inside(config):
        for up_sb in up:
            nisa.memset(dst=up_sb, value=1.0, engine=nisa.engine.gpsimd)
    return DecodeBuffers(
        config=config,
        x=x,
        sums=sums,
        banks=banks,
        gate_up=gate_up,
        down=down,
        gate_up_bias=beside[0],
        gate_up_scale=beside[1],
        down_bias=down_bias,
        down_scale=beside[2],
        kept_scale=kept_scale,
        inner=_by_tile(inner) if is_mx(config) else inner,
        gate=allocate(table.gate),
        up=up,
        column_row=allocate(table.column_row),
        input_scale=allocate(table.input_scale),
        experts=allocate(table.experts)[0],
        weights=_per_token(config, table.weights),
        inputs=_per_token(config, table.inputs),
        scratch=allocate(table.scratch),
        halves=allocate(table.halves),
        ones=ones_sb,
        mx=_make_mx_buffers(config, inner),
    )


def _make_mx_buffers(config: DecodeConfig, inner: list[nl.NkiTensor]) -> MxBuffers:
    """Allocate what quantised activations take; words that no row fills are zeros."""
    table = mx_table(config)
    if is_mx(config) and config.i_axis.rows < table.inner.shape[0]:
        for inner_sb in inner:
            nisa.memset(dst=inner_sb, value=0.0, engine=nisa.engine.gpsimd)
    return MxBuffers(
        fours=allocate(table.fours),
        tokens=allocate(table.tokens),
        token_scales=allocate(table.token_scales),
        inner_fours=inner,
        inner=allocate(table.inner),
        inner_scales=allocate(table.inner_scales),
    )


def _by_tile(inner: list[nl.NkiTensor]) -> list[nl.NkiTensor]:
    """Return views [i, 4, T] of tiles whose four elements are side by side."""
    views = []
    for inner_sb in inner:
        views.append(inner_sb.permute((0, 2, 1)))
    return views


def _share_banks(config: DecodeConfig, sums: SumBuffers) -> ExpertBanks:
    """Return who works in which of the banks.

    Columns [128, T] in the last bank; projections [128, 2 T] in it too if the others do not do.
    """
    T, work_ps = config.T, sums.work_ps
    last_ps, out_ps = work_ps[BANKS - 1 : BANKS], work_ps[0 : out_banks(config)]
    banks_ps = work_ps[out_banks(config) : BANKS - 1]
    count = 2 if len(banks_ps) == 1 and 4 * T <= BANK_FLOATS else 1
    inner_ps, used = _parts(banks_ps, 2 * T, count), 0
    if config.parts > 1:
        # All tiles of a chunk are under way at once.
        beside = tiles_beside_columns(config)
        inner_ps = _parts(banks_ps, 2 * T, tiles_in_bank(config)) + _parts(last_ps, 2 * T, beside)
        used = beside * 2 * T
    # Projections fill the last bank from its start, columns from its end. Where both columns do not
    # fit they share a place: inputs are copied out before the others come (`spread_column`).
    column_ps = _from_end(last_ps[0], T, 0)
    input_ps = column_ps
    if config.scaling == "pre" and weighs_inner(config) and used + 4 * T <= BANK_FLOATS:
        input_ps = _from_end(last_ps[0], T, 2)
    return ExpertBanks(inner_ps, column_ps, input_ps, out_ps, banks_ps[0])


def _beside_weights(
    config: DecodeConfig, table: ExpertTable, gate_up: list[nl.NkiTensor]
) -> list[list[nl.NkiTensor]]:
    """Return gate and up biases, their scales, and down scales, per weight buffer."""
    if config.weights.layout != "packed":
        return [
            allocate(table.gate_up_bias),
            allocate(table.gate_up_scale),
            allocate(table.down_scale),
        ]
    if is_mx(config):
        views = []
        if config.formula.has_gate_up_bias:
            for run_sb in gate_up:
                views.append(bias_tile(mx_form(config), run_sb))
        return [views, [], []]
    biases = 2 * int(config.formula.has_gate_up_bias)
    scales = 2 * int(config.weights.has_scales)
    rest = extra_floats(config) - biases - scales
    return [
        _extras(config, gate_up, 0, biases),
        _extras(config, gate_up, biases, scales),
        _extras(config, gate_up, biases + scales, rest),
    ]
