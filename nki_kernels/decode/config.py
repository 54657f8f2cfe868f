"""What the decode kernels are compiled for: sizes, mode, split over cores, formats, activation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.plans import PARTITIONS, AxisTiles, tile_axis
from nki_kernels.prefill.config import ITEM_BYTES, WEIGHT_FORMATS, Limits

MODES = ("selective", "all")
SHARDS = ("experts", "intermediate")
LAYOUTS = ("ehi", "packed")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "swiglu_oai")
SCALINGS = ("post", "pre", "none")
DOWN_SCALES = ("none", "expert", "channel")
OUTPUT_DTYPES = ("float32", "bfloat16")
MAX_TOKENS, MAX_TOP_K, MAX_EXPERTS = 256, 16, 512
JOINED = (32, 64)  # rows of I that start the second half of a tile where engines may begin
BANKS, BANK_FLOATS = 8, 512  # PSUM per partition (Trainium 2 architecture guide)
OUT_BANKS = 5  # for an expert's y^T where it is added up in SBUF
MAX_GROUP = 4  # chunks
MAX_ACCUMULATOR_BANKS = 7  # one bank is left for the projections into I
MAX_CHUNK_BYTES = 48 * 1024  # per partition, of a packed chunk
DIRECT_IN = 1  # tokens; up to here x moves as [h, T, H/h] without passing the tensor engine
DIRECT_OUT = 8  # tokens of a core; the same for y
UNROLLED_ENTRIES = 8  # entries of a core that are written out rather than looped over


@dataclass
class DecodeConfig(NKIObject):
    """Compile-time constants of `decode_moe`; see `make_decode_config`.

    Attributes:
        chunks: parts of an expert's intermediate axis, each loaded and used as one item.
        weight_buffers: items whose weights fit on chip at once, a power of two.
        unroll: list entries (experts) per trip of the loop, a power of two.
        sums_in_psum: whether y is added up in PSUM, or in float32 in SBUF.
        h_axis: the hidden axis on partitions.
        i_axis: the intermediate axis of one chunk on partitions.
        reason: why mode and shard are what they are, in a sentence.
    """

    T: int
    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    K: int
    num_experts: int
    num_cores: int
    mode: str
    shard: str
    weight_layout: str
    weight_format: str
    activation: str
    gate_limits: Limits
    up_limits: Limits
    up_offset: float
    scaling: str
    has_gate_up_bias: bool
    has_down_bias: bool
    has_scales: bool
    down_scale: str
    output_dtype: str
    chunks: int
    weight_buffers: int
    unroll: int
    sums_in_psum: bool
    h_axis: AxisTiles
    i_axis: AxisTiles
    reason: str


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
    """Return how far the list entries of one core lie apart."""
    return config.num_cores if config.shard == "experts" else 1


def read_ahead(config: DecodeConfig) -> int:
    """Return how many entries past the end of a list the loops look up, and never use."""
    return 2 * config.unroll * entry_stride(config)


def is_direct(config: DecodeConfig) -> bool:
    """Whether the touched list is the index row itself: one token, every expert local."""
    return config.mode == "selective" and config.T == 1 and config.num_experts == config.E


def list_width(config: DecodeConfig) -> int:
    """Return the most experts that a launch may touch."""
    if config.mode == "all":
        return config.E
    return min(config.E, config.T * config.K)


def tiles_per_bank(config: DecodeConfig) -> int:
    """Return the tiles of y^T that a PSUM bank holds."""
    return BANK_FLOATS // config.T


def accumulator_banks(config: DecodeConfig) -> int:
    """Return the PSUM banks that all of y^T takes."""
    return -(-config.h_axis.count // tiles_per_bank(config))


def with_split(
    config: DecodeConfig, *, shard: str, chunks: int, weight_buffers: int
) -> DecodeConfig:
    """Return the configuration with another split; the intermediate axis is cut to match."""
    trial = replace(config, shard=shard, chunks=chunks, weight_buffers=weight_buffers)
    unroll = 2
    while unroll * core_chunks(trial) < weight_buffers:
        unroll *= 2
    return replace(trial, unroll=unroll, i_axis=tile_axis(-(-config.I // chunks)))


def packed_axis(size: int) -> AxisTiles:
    """Cut an axis into the fewest tiles, a partition owning consecutive elements.

    The last partition may own fewer: the packed layout fills up with zeros.
    """
    count = -(-size // PARTITIONS)
    return AxisTiles(size, -(-size // count), count, size // count, True)


def packed_chunks(config: DecodeConfig) -> int:
    """Return the chunks of an expert in the packed layout, whatever the number of tokens.

    A chunk is a tile of I, less where the hidden axis is long. With one choice a token, a step may
    touch a single expert, which both cores should have a part of.
    """
    chunks = -(-config.I // PARTITIONS)
    if chunks == 1 and config.K == 1 and config.I // 2 in JOINED:
        return 2
    size = -(-config.I // chunks)
    while item_bytes(config) * config.H * (1 + 2 * size // PARTITIONS) > MAX_CHUNK_BYTES:
        if size <= JOINED[0]:
            return chunks
        chunks = chunks * 2
        size = -(-config.I // chunks)
    return chunks


def joins_projections(config: DecodeConfig) -> bool:
    """Whether gate and up columns of a chunk are one stationary tile, up in its second half."""
    return config.weight_layout == "packed" and config.i_axis.size in JOINED


def extra_floats(config: DecodeConfig) -> int:
    """Return the float32 numbers that follow the weights of a packed gate and up run."""
    per_row = 2 * int(config.has_gate_up_bias) + 2 * int(config.has_scales)
    by_channel = config.h_axis.count if config.down_scale == "channel" else 0
    return per_row + by_channel + int(config.down_scale == "expert")


def packed_rows(config: DecodeConfig) -> int:
    """Return the partitions of a packed gate and up item."""
    if extra_floats(config) == 0:
        return config.h_axis.rows
    if config.down_scale == "expert":
        return PARTITIONS
    return max(config.h_axis.rows, config.i_axis.rows)


def packed_weights(config: DecodeConfig) -> int:
    """Return the weights of a packed gate and up run."""
    return config.h_axis.count * 2 * config.i_axis.size


def packed_run(config: DecodeConfig) -> int:
    """Return the elements of a packed gate and up run; float32 numbers lie on whole words."""
    size = item_bytes(config)
    weights = -(-packed_weights(config) * size // 4) * 4
    return (weights + 4 * extra_floats(config)) // size


def weighs_inner(config: DecodeConfig) -> bool:
    """Whether inner activations are multiplied with the tokens' weights.

    Where the input is scaled, a token that did not choose the expert has zeros there without it,
    as long as no bias comes in and the activation of 0 is 0.
    """
    clamps = config.gate_limits
    moves_zero = (clamps.has_lower and clamps.lower > 0) or (clamps.has_upper and clamps.upper < 0)
    zero_stays = config.activation != "sigmoid" and not moves_zero
    return config.scaling != "pre" or config.has_gate_up_bias or not zero_stays


def holds_expert(config: DecodeConfig) -> bool:
    """Whether an expert's part of y^T is added up in PSUM before it goes to the sums in SBUF."""
    return not config.sums_in_psum and accumulator_banks(config) <= OUT_BANKS


def keeps_scales(config: DecodeConfig) -> bool:
    """Whether an expert's channel scales are copied: its buffer may be loaded before they are used.

    They lie in the buffer of its first chunk, and the sums are made after its last.
    """
    items = config.unroll * config.chunks
    return config.down_scale == "channel" and items > config.weight_buffers


def group_size(config: DecodeConfig) -> int:
    """Return the most chunks of an expert whose down projections go to the sums at once."""
    if config.sums_in_psum or holds_expert(config):
        return 1
    return max(1, min(config.chunks, config.weight_buffers // 2, MAX_GROUP))


def check_sizes(
    T: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    K: int,
    num_experts: int,
    num_cores: int,
) -> None:
    """Raise ValueError unless the kernel takes these sizes."""
    if not 1 <= T <= MAX_TOKENS:
        raise ValueError(
            f"T={T}: must be 1 to {MAX_TOKENS}. Use the prefill kernel for more tokens."
        )
    if H < 64 or H % 16:
        raise ValueError(f"H={H}: must be a multiple of 16, at least 64. Pad the weights.")
    if I < 1:
        raise ValueError(f"I={I}: must be at least 1.")
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(
            f"E={E}: must be 1 to {MAX_EXPERTS} experts of a rank. Use more expert parallelism."
        )
    if num_experts < E:
        raise ValueError(f"num_experts={num_experts}: must be at least E={E}.")
    if not 1 <= K <= min(MAX_TOP_K, num_experts):
        raise ValueError(f"K={K}: must be 1 to {MAX_TOP_K}, and at most num_experts.")
    if num_cores not in (1, 2):
        raise ValueError(f"num_cores={num_cores}: must be 1 or 2.")


def check_choices(**choices: str) -> None:
    """Raise ValueError for an option whose value the kernel does not know."""
    allowed = {
        "mode": ("auto", *MODES),
        "shard": ("auto", *SHARDS),
        "weight_layout": LAYOUTS,
        "weight_format": WEIGHT_FORMATS,
        "activation": ACTIVATIONS,
        "scaling": SCALINGS,
        "down_scale": DOWN_SCALES,
        "output_dtype": OUTPUT_DTYPES,
    }
    for name, value in choices.items():
        if value not in allowed[name]:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed[name])}.")


def item_bytes(config: DecodeConfig) -> int:
    """Return the bytes of one weight."""
    return ITEM_BYTES[config.weight_format]
