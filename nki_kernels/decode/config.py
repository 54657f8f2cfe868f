"""What the decode kernels are compiled for, and what follows from it.

A caller gives sizes, an `ExpertFormula`, the form of the weights and a request, which
`make_decode_config` makes a `DecodeConfig` of. Stages, accounting and cost read that one record.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.axes import AxisTiles
from nki_kernels.common.chip import BANK_FLOATS, BANKS, PARTITIONS
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.mx import QUADRANT, is_mx_format, mx_chunks
from nki_kernels.common.tiles import rows_of
from nki_kernels.common.weight_formats import ITEM_BYTES
from nki_kernels.decode.steps import Loop

MAX_TOKENS, MAX_TOP_K, MAX_EXPERTS = 256, 32, 1024
_JOINED = (32, 64)  # rows of I that start the second half of a tile where engines may begin
_TRANSPOSED_TOKENS = 64  # a matmul of fewer columns takes as long: up to here y^T is made, not rows
_OUT_BANKS = 5  # for an expert's y^T, at most
DIRECT_IN = 1  # tokens; up to here x moves as [h, T, H/h] without passing the tensor engine
DIRECT_OUT = 8  # tokens of a core; the same for y
_ASKING_TOKENS = 128  # up to here rows of tokens and the first weights are on chip together
UNROLLED_ENTRIES = 8  # entries of a core that are written out rather than looped over
_MAX_GROUP = 4  # chunks
_MAX_CHUNK_BYTES = 48 * 1024  # per partition, of a packed chunk
_MAX_ROW = 16 * 1024  # hidden size up to which whole rows fit beside weights on a partition
_QUADRANTS = PARTITIONS // QUADRANT


@dataclass(frozen=True)
class DecodeSizes(NKIObject):
    """The sizes of a step on one rank.

    Attributes:
        T: tokens, 1 to 256.
        H: hidden size.
        I: intermediate size of this rank.
        E: experts of this rank.
        K: choices of a token, 1 to 16.
        num_experts: experts of all ranks.
        num_cores: physical cores of the launch (LNC), 1 or 2.
    """

    T: int
    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    K: int
    num_experts: int
    num_cores: int = 2


@dataclass(frozen=True)
class WeightForm(NKIObject):
    """The layout of the experts' weights in HBM.

    Attributes:
        format: bfloat16, float8_e4m3, float8_e5m2, or one of MX: float4_e2m1fn_x4,
            float8_e4m3fn_x4, float8_e5m2_x4, which have scales of their own.
        layout: ehi ([E, H, 2I] and [E, I, H]) or packed, see layout.py and, for MX, mx_layout.py.
        has_scales: the gate and up weights have a scale per output channel.
        down_scale: what scales of the down weights belong to: expert, (output) channel or none.
        in_fours: the hidden axis is on chip as MX words need it, whatever the format; packed.
    """

    format: str = "bfloat16"
    layout: str = "ehi"
    has_scales: bool = False
    down_scale: str = "none"
    in_fours: bool = False


@dataclass(frozen=True)
class DecodeRequest(NKIObject):
    """What a caller wants of a launch, and what it leaves to the cost model.

    Attributes:
        mode: selective (read the touched experts), all, or auto.
        shard: whether the cores split the experts or the intermediate axis, or auto.
        scaling: what the affinity multiplies: the expert's output (post), its input (pre), nothing
            (none).
        output_dtype: float32 or bfloat16.
        chunks: equal pieces of an expert's intermediate axis, computed in turn; 0: auto.
        parts: of a chunk, loaded in turn: gate and up by rows of the hidden axis, down by rows of
            the chunk; 0: auto.
        weight_buffers: items whose weights fit on chip at once, a power of two; 0: auto.
        front_ns: time until the choices are on chip, where the same launch makes them.
        chip: what the launch is for; MX weights need a trn3.
    """

    mode: str = "auto"
    shard: str = "auto"
    scaling: str = "post"
    output_dtype: str = "float32"
    chunks: int = 0
    parts: int = 0
    weight_buffers: int = 0
    front_ns: float = 0.0
    chip: str = "trn2"


@dataclass(frozen=True)
class DecodeConfig(NKIObject):
    """Compile-time constants of `decode_moe`; see `make_decode_config`.

    The letters are those of `DecodeSizes`; mode to weight_buffers as in `DecodeRequest`, decided.

    Attributes:
        formula: what an expert computes.
        weights: layout of its weights in HBM.
        unroll: list entries (experts) per iteration of the loop, a power of two.
        h_axis: the hidden axis on partitions.
        i_axis: the intermediate axis of one chunk on partitions.
        reason: why mode and shard are what they are, in a sentence.
        parts: of a chunk; an item is one of them.
        chip: what its choices were made for.
        gives_rows: whether y is added up in rows, [T, H], else transposed, y^T [h, H/h, T].
        loops: what each core does in which order; follows from the rest.
    """

    T: int
    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    K: int
    num_experts: int
    num_cores: int
    formula: ExpertFormula
    weights: WeightForm
    mode: str
    shard: str
    scaling: str
    output_dtype: str
    chunks: int
    weight_buffers: int
    unroll: int
    h_axis: AxisTiles
    i_axis: AxisTiles
    reason: str = ""
    parts: int = 1
    chip: str = "trn2"
    gives_rows: bool = False
    loops: tuple[Loop, ...] = field(default=(), compare=False, repr=False)


def is_mx(config: DecodeConfig) -> bool:
    """Whether the weights are words of an MX format."""
    return is_mx_format(config.weights.format)


def output_dtype(config: DecodeConfig) -> nl.DType:
    """Return the element type of the output."""
    return nl.float32 if config.output_dtype == "float32" else nl.bfloat16


def splits_experts(config: DecodeConfig) -> bool:
    """Whether the cores take alternate experts."""
    return config.shard == "experts" and config.num_cores > 1


def core_chunks(config: DecodeConfig) -> int:
    """Return the chunks of an expert that one core computes."""
    return config.chunks // (config.num_cores if config.shard == "intermediate" else 1)


def entry_stride(config: DecodeConfig) -> int:
    """Return how far the list entries of one core are apart."""
    return config.num_cores if config.shard == "experts" else 1


def loop_sizes(config: DecodeConfig) -> list[int]:
    """Return the entries of each core in an iteration, for each loop over whole entries in order:
    behind the longest iterations at most one of each half.
    """
    sizes, size = [config.unroll], config.unroll
    while size > 1:
        size = size // 2
        sizes.append(size)
    return sizes


def is_direct(config: DecodeConfig) -> bool:
    """Whether the touched list is the index row itself: one token, every expert local."""
    return config.mode == "selective" and config.T == 1 and config.num_experts == config.E


def list_width(config: DecodeConfig) -> int:
    """Return the most experts that a launch may touch."""
    if config.mode == "all":
        return config.E
    return min(config.E, config.T * config.K)


def is_written_out(config: DecodeConfig) -> bool:
    """Whether the list is short, and known at compile time, so that no loop goes through it."""
    is_known = config.mode == "all" or is_direct(config)
    return is_known and list_width(config) <= entry_stride(config) * UNROLLED_ENTRIES


def is_direct_in(config: DecodeConfig) -> bool:
    """Whether tokens are loaded as x^T, without transposing them."""
    return config.h_axis.is_strided and config.T <= DIRECT_IN


def is_direct_out(config: DecodeConfig, tokens: int) -> bool:
    """Whether so many tokens of y^T are stored without transposing them."""
    return config.h_axis.is_strided and tokens <= DIRECT_OUT


def may_give_rows(T: int, H: int, axis: AxisTiles, weights: WeightForm) -> bool:
    """Whether an expert's output is better made in rows than transposed.

    The tensor engine takes as long where all its columns are tokens. Scales by channel and MX words
    want channels on the partitions.
    """
    is_plain = axis.group == 1 and weights.down_scale != "channel"
    return _TRANSPOSED_TOKENS < T <= PARTITIONS and H <= _MAX_ROW and is_plain


def row_width(config: DecodeConfig) -> int:
    """Return the columns of a row as it is added up, with those that packed weights fill up."""
    if config.weights.layout == "packed":
        return config.h_axis.rows * config.h_axis.count
    return config.H


def sum_shape(config: DecodeConfig) -> tuple[int, ...]:
    """Return the shape in which y is added up."""
    if config.gives_rows:
        return config.T, row_width(config)
    return config.h_axis.rows, config.h_axis.count, config.T


def sum_floats(config: DecodeConfig) -> int:
    """Return the numbers of y that a partition has."""
    return row_width(config) if config.gives_rows else config.h_axis.count * config.T


def _bank_size(config: DecodeConfig) -> int:
    """Return what a PSUM bank holds of y: tiles of y^T, or columns, whole runs of a partition."""
    if config.gives_rows:
        return BANK_FLOATS // config.h_axis.count * config.h_axis.count
    return BANK_FLOATS // config.T


def bank_span(config: DecodeConfig, number: int) -> tuple[int, int]:
    """Return the first tile of y^T, or column of y, in a bank, and the first behind it."""
    size, end = _bank_size(config), sum_shape(config)[1]
    return number * size, min(end, (number + 1) * size)


def accumulator_banks(config: DecodeConfig) -> int:
    """Return the PSUM banks that all of y takes."""
    return -(-sum_shape(config)[1] // _bank_size(config))


def packed_chunks(config: DecodeConfig) -> int:
    """Return the chunks of an expert in the packed layout, whatever the number of tokens.

    A chunk is a tile of I, less where the hidden axis is long. With one choice a token, a step may
    touch a single expert, which both cores should have a part of.
    """
    if is_mx(config):
        is_alone = config.E == 1 or config.K == 1
        return mx_chunks(config.weights.format, config.H, config.I, is_alone)
    chunks = -(-config.I // PARTITIONS)
    if chunks == 1 and config.K == 1 and config.I // 2 in _JOINED:
        return 2
    size = -(-config.I // chunks)
    while item_bytes(config) * config.H * (1 + 2 * size // PARTITIONS) > _MAX_CHUNK_BYTES:
        if size <= _JOINED[0]:
            return chunks
        chunks = chunks * 2
        size = -(-config.I // chunks)
    return chunks


def joins_projections(config: DecodeConfig) -> bool:
    """Whether gate and up columns of a chunk are one stationary tile, up in its second half."""
    if is_mx(config):
        return False
    return config.weights.layout == "packed" and config.i_axis.size in _JOINED


def extra_floats(config: DecodeConfig) -> int:
    """Return the float32 numbers that follow the weights of a packed gate and up run."""
    per_row = 2 * int(config.formula.has_gate_up_bias) + 2 * int(config.weights.has_scales)
    by_channel = config.h_axis.count if config.weights.down_scale == "channel" else 0
    return per_row + by_channel + int(config.weights.down_scale == "expert")


def packed_rows(config: DecodeConfig) -> int:
    """Return the partitions of a packed gate and up item."""
    if extra_floats(config) == 0:
        return config.h_axis.rows
    if config.weights.down_scale == "expert":
        return PARTITIONS
    return max(config.h_axis.rows, config.i_axis.rows)


def packed_weights(config: DecodeConfig) -> int:
    """Return the weights of a packed gate and up run."""
    return config.h_axis.count * 2 * config.i_axis.size


def packed_run(config: DecodeConfig) -> int:
    """Return the elements of a packed gate and up run; float32 numbers start at whole words."""
    size = item_bytes(config)
    weights = -(-packed_weights(config) * size // 4) * 4
    return (weights + 4 * extra_floats(config)) // size


def bias_is_inside(config: DecodeConfig) -> bool:
    """Whether the down bias is a spare contraction row of packed down weights.

    Chunks of fewer than 128 rows have one; it costs a transfer less, and no matmul of its own.
    """
    formula, weights = config.formula, config.weights
    has_both = formula.has_gate_up_bias and formula.has_down_bias  # so that inner is weighed
    is_wide = weights.format == "bfloat16" and weights.layout == "packed"
    return has_both and is_wide and config.i_axis.size < PARTITIONS


def loads_bias(config: DecodeConfig) -> bool:
    """Whether the down bias is an operand of its own."""
    return config.formula.has_down_bias and not bias_is_inside(config)


def weighs_inner(config: DecodeConfig) -> bool:
    """Whether inner activations are multiplied with the tokens' weights.

    Where the input is scaled, a token that did not choose the expert has zeros there without it,
    as long as no bias comes in and the activation of 0 is 0.
    """
    formula, clamps = config.formula, config.formula.gate_limits
    moves_zero = (clamps.has_lower and clamps.lower > 0) or (clamps.has_upper and clamps.upper < 0)
    is_zero_at_zero = formula.activation != "sigmoid" or formula.gates_itself
    zero_stays = is_zero_at_zero and not moves_zero
    return config.scaling != "pre" or formula.has_gate_up_bias or not zero_stays


def asks_early(config: DecodeConfig) -> bool:
    """Whether the first weights are loaded while rows of tokens are still on chip."""
    return config.T <= _ASKING_TOKENS and config.H <= _MAX_ROW


def bias_quadrants(config: DecodeConfig) -> int:
    """Return the quadrants that hold an expert's down bias, as many tiles each, on a partition.

    A long hidden axis on one partition would leave no room for weights on that one.
    """
    is_even = config.h_axis.is_strided and config.h_axis.count % _QUADRANTS == 0
    return _QUADRANTS if config.H > _MAX_ROW and is_even else 1


def bias_partitions(config: DecodeConfig) -> int:
    """Return the partitions that a down bias spans, and the tokens' weights beside it."""
    return (bias_quadrants(config) - 1) * QUADRANT + 1


def shares_halves(config: DecodeConfig) -> bool:
    """Whether an expert that the cores share is cut by rows, not by chunks.

    Each core projects half of the hidden axis in; they exchange and add the projections, and each
    projects half of the intermediate axis out.
    """
    return splits_experts(config) and config.chunks == 1 and config.parts % 2 == 0


def tiles_in_bank(config: DecodeConfig) -> int:
    """Return the tiles of gate and up projections that a PSUM bank holds."""
    return BANK_FLOATS // (2 * config.T)


def out_banks(config: DecodeConfig) -> int:
    """Return the PSUM banks for an expert's y."""
    if config.parts == 1:
        return _OUT_BANKS
    return min(_OUT_BANKS, BANKS - 1 - -(-config.i_axis.count // tiles_in_bank(config)))


def tiles_beside_columns(config: DecodeConfig) -> int:
    """Return the tiles of projections of a chunk in parts for which only the last bank is left."""
    left = BANKS - 1 - out_banks(config)
    return max(0, config.i_axis.count - left * tiles_in_bank(config))


def holds_expert(config: DecodeConfig) -> bool:
    """Whether an expert's part of y is added up in PSUM before it goes to the sums in SBUF."""
    return accumulator_banks(config) <= out_banks(config)


def most_exchanged(config: DecodeConfig) -> int:
    """Return the most tiles of I that a core has of an expert shared by halves."""
    return -(-config.i_axis.count // 2)


def most_tiles(axis: AxisTiles, config: DecodeConfig) -> int:
    """Return the tiles of an axis in the largest part of a chunk."""
    return -(-axis.count // config.parts)


def inner_rows(config: DecodeConfig, tile: int) -> int:
    """Return the rows of a tile of inner activations, that of a bias among them."""
    return rows_of(config.i_axis, tile) + int(bias_is_inside(config))


def tiles_of_part(axis: AxisTiles, config: DecodeConfig, part: int) -> tuple[int, int]:
    """Return the first tile of an axis in a part of a chunk, and the first behind it."""
    return axis.count * part // config.parts, axis.count * (part + 1) // config.parts


def rows_out(config: DecodeConfig) -> int:
    """Return the partitions of inner activations and down weights, that of a bias among them."""
    return config.i_axis.rows + int(bias_is_inside(config))


def keeps_scales(config: DecodeConfig) -> bool:
    """Whether an expert's channel scales are copied: its buffer may be loaded before they are used.

    They are in the buffer of its first chunk, and the sums are made after its last.
    """
    return config.weights.down_scale == "channel"


def group_size(config: DecodeConfig) -> int:
    """Return the most chunks of an expert whose down projections go to the sums at once."""
    if holds_expert(config):
        return 1
    together = config.chunks if config.parts == 1 else config.parts
    return max(1, min(together, min(config.weight_buffers // 2, _MAX_GROUP)))


def run_of_numbers(begin: int, end: int) -> list[int]:
    """Return the numbers from one up to another."""
    numbers: list[int] = []
    while begin + len(numbers) < end:
        numbers.append(begin + len(numbers))
    return numbers


def item_bytes(config: DecodeConfig) -> int:
    """Return the bytes of an element as weights are stored: MX words are bytes among others."""
    return 1 if is_mx(config) else ITEM_BYTES[config.weights.format]
