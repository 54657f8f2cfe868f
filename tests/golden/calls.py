"""Calls of every instruction, most of them nearly right, and what the simulator makes of each.

    python -m tests.golden.calls --write              after a change that is meant to change one
    python -m tests.golden.calls --show NAME NUMBER   a call, and what comes of it

An outcome is the sentence of a refusal, or the recorded instruction and the bits it leaves behind;
bits of functions that differ from one processor to the next are left out.
"""

import argparse
import hashlib
import inspect
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nki_sim import SimOptions, isa
from nki_sim.constants import dma_engine, matmul_perf_mode, nc_version, reduce_cmd
from nki_sim.errors import NkiValidationError
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute
from tests.golden import digests
from tests.golden.traces import digest, plain, shown

FILE = Path(__file__).with_suffix(".json")
CALLS_EACH = 100  # and LONGER times as many in the long run
LONGER = 8
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "uint32",
    "uint8",
    "uint16",
    "int8",
    "float8_e4m3",
)
HELD = ("small", "steps", "ones", "rows", "quarters", "quarters", "wide", "nothing")
WIDE = (
    0.0,
    -0.0,
    1.5,
    -3.0,
    127.5,
    -128.5,
    239.0,
    256.0,
    -449.0,
    65_535.0,
    -70_000.0,
    1e10,
    -3e38,
    1e-40,
    np.inf,
    -np.inf,
    np.nan,
)
# Not the same bits on every processor.
INEXACT = {
    "activation",
    "activation_reduce",
    "activate2",
    "exponential",
    "rand2",
    "bn_stats",
    "bn_aggr",
}
NEWER = {"activate2", "exponential", "nc_matmul_mx", "quantize_mx", "rand2"}  # of generation 4


@dataclass(frozen=True)
class Operand:
    """A tensor of a call.

    Attributes:
        shape, dtype, space, start: as of `Tile`.
        holds: small, steps, ones, quarters, wide (what does not fit most types), rows (0, 1, ..
            downward) or nothing.
        view: what part of it is passed: all, even (columns), turned (two free axes), deep or none.
    """

    shape: tuple[int, ...] = (32, 16)
    dtype: str = "float32"
    space: str = "sbuf"
    start: int = 0
    holds: str = "small"
    view: str = "all"

    def tile(self) -> Tile:
        """Return the tile to allocate."""
        if self.holds == "nothing":
            return Tile(shape=self.shape, dtype=self.dtype, space=self.space, start=self.start)
        count = int(np.prod(self.shape))
        steps = np.arange(count).reshape(self.shape)
        values = {
            "small": steps * 7 % 11,
            "steps": steps % 120,
            "ones": np.ones(self.shape),
            "quarters": steps * 7 % 23 / 4 - 2.5,
            "wide": np.resize(WIDE, self.shape),
            "rows": np.broadcast_to(
                np.arange(self.shape[0]).reshape(-1, *[1] * (len(self.shape) - 1)), self.shape
            ),
        }[self.holds]
        return Tile(values, self.dtype, space=self.space, start=self.start)

    def seen(self, tensor: Any) -> Any:
        """Return the part that is passed."""
        if self.view == "all":
            return tensor
        rows, *columns = tensor.shape
        count = int(np.prod(columns))
        if self.view == "even":
            return tensor[:, ::2]
        if self.view == "turned" and count % 2 == 0:
            return tensor.reshape((rows, 2, count // 2)).permute((0, 2, 1))
        if self.view == "deep" and count % 4 == 0:
            return tensor.reshape((rows, 2, 2, count // 4))
        return tensor


def made(shape: tuple[int, ...] = (32, 16), dtype: str = "float32", space: str = "sbuf") -> Operand:
    """Return an operand to write to."""
    return Operand(shape, dtype, space, holds="nothing")


X, OUT, ONE, EIGHT = Operand(), made(), Operand((32, 1), holds="ones"), Operand((32, 8))
HBM = Operand(space="hbm")
BF16 = Operand(dtype="bfloat16")
SCALE = Operand((32, 16), "uint8", holds="ones")
# A right call of each, by the names of its arguments.
RIGHT: dict[str, dict[str, Any]] = {
    "tensor_tensor": {"dst": OUT, "data1": X, "data2": X, "op": nl.add},
    "tensor_scalar": {
        "dst": OUT,
        "data": X,
        "op0": nl.add,
        "operand0": ONE,
        "op1": nl.multiply,
        "operand1": 2.0,
    },
    "scalar_tensor_tensor": {
        "dst": OUT,
        "data": X,
        "op0": nl.add,
        "operand0": ONE,
        "op1": nl.subtract,
        "operand1": X,
    },
    "tensor_reduce": {"dst": made((32, 1)), "op": nl.add, "data": X, "axis": 1},
    "reciprocal": {"dst": OUT, "data": Operand(holds="ones")},
    "tensor_tensor_scan": {
        "dst": OUT,
        "data0": Operand(holds="ones"),
        "data1": X,
        "initial": 0.0,
        "op0": nl.multiply,
        "op1": nl.add,
    },
    "tensor_copy": {"dst": OUT, "src": X},
    "memset": {"dst": OUT, "value": 0.0},
    "tensor_copy_predicated": {
        "dst": X,
        "src": Operand(holds="steps"),
        "predicate": Operand(dtype="uint8"),
    },
    "activation": {"dst": OUT, "op": nl.exp, "data": X, "bias": ONE, "scale": ONE},
    "activation_reduce": {
        "dst": OUT,
        "op": nl.exp,
        "data": X,
        "reduce_op": nl.add,
        "reduce_res": made((32, 1)),
    },
    "activate2": {
        "dst": OUT,
        "op": nl.exp,
        "data": X,
        "imm0": 1.0,
        "imm1": 0.0,
        "op0": nl.multiply,
        "op1": nl.add,
    },
    "select_reduce": {
        "dst": OUT,
        "predicate": Operand(dtype="uint8"),
        "on_true": X,
        "on_false": 0.0,
        "reduce_res": made((32, 1)),
        "reduce_cmd": reduce_cmd.reset_reduce,
    },
    "range_select": {
        "dst": OUT,
        "on_true_tile": X,
        "comp_op0": nl.greater_equal,
        "comp_op1": nl.less,
        "bound0": ONE,
        "bound1": Operand((32, 1), holds="rows"),
        "reduce_res": made((32, 1)),
    },
    "tensor_scalar_reduce": {
        "dst": OUT,
        "data": X,
        "op0": nl.add,
        "operand0": 1.0,
        "reduce_op": nl.add,
        "reduce_res": made((32, 1)),
    },
    "tensor_scalar_cumulative": {
        "dst": OUT,
        "src": X,
        "op0": nl.multiply,
        "op1": nl.add,
        "imm0": 1.0,
    },
    "exponential": {"dst": OUT, "src": X, "max_value": ONE},
    "max8": {"dst": made((32, 8)), "src": X},
    "nc_find_index8": {"dst": made((32, 8), "uint32"), "data": X, "vals": EIGHT},
    "nc_match_replace8": {
        "dst": OUT,
        "data": X,
        "vals": EIGHT,
        "imm": 0.0,
        "dst_idx": made((32, 8), "uint32"),
    },
    "nc_stream_shuffle": {"dst": OUT, "src": X, "shuffle_mask": tuple(range(31, -1, -1))},
    "bn_stats": {"dst": made((32, 6)), "data": X},
    "bn_aggr": {"dst": made((32, 2)), "data": Operand((32, 12))},
    "iota": {
        "dst": made(dtype="int32"),
        "pattern": ((1, 16),),
        "offset": 3,
        "channel_multiplier": 2,
    },
    "affine_select": {
        "dst": OUT,
        "pattern": ((1, 16),),
        "channel_multiplier": 1,
        "on_true_tile": X,
        "on_false_value": 0.0,
        "cmp_op": nl.greater,
        "offset": -9,
    },
    "nc_n_gather": {"dst": OUT, "data": X, "indices": Operand(dtype="uint32")},
    "local_gather": {
        "dst": made((32, 32)),
        "src_buffer": X,
        "index": Operand((32, 2), "uint16"),
        "num_elem_per_idx": 1,
        "num_valid_indices": 32,
    },
    "nonzero_with_count": {
        "dst": made((32, 17), "int32"),
        "src": X,
        "index_offset": 2,
        "padding_val": -1,
    },
    "sequence_bounds": {"dst": made((1, 2, 16)), "segment_ids": Operand((1, 16), holds="steps")},
    "tensor_partition_reduce": {"dst": made((1, 16)), "op": nl.add, "data": X},
    "topk": {
        "val_dst": made((32, 16), "bfloat16"),
        "idx_dst": made((32, 16), "uint32"),
        "src": BF16,
        "n": 256,
    },
    "nc_transpose": {"dst": made((16, 32)), "data": X},
    "nc_matmul": {"dst": made((16, 16), space="psum"), "stationary": X, "moving": X},
    "nc_matmul_mx": {
        "dst": made((16, 16), space="psum"),
        "stationary": Operand(dtype="float8_e4m3fn_x4", holds="nothing"),
        "moving": Operand(dtype="float8_e4m3fn_x4", holds="nothing"),
        "stationary_scale": SCALE,
        "moving_scale": SCALE,
    },
    "quantize_mx": {
        "dst": made((32, 4), "float8_e4m3fn_x4"),
        "src": BF16,
        "dst_scale": made((32, 4), "uint8"),
    },
    "dma_copy": {"dst": OUT, "src": HBM},
    "dma_transpose": {
        "dst": made((16, 32), "bfloat16"),
        "src": Operand(dtype="bfloat16", space="hbm"),
    },
    "dma_compute": {"dst": OUT, "srcs": (HBM, X), "reduce_op": nl.add},
    "rand2": {"dst": OUT, "min": 0.0, "max": 1.0},
    "rng": {"dst": made(dtype="uint32")},
    "set_rng_seed": {"src_seeds": Operand((1, 1), "uint32")},
    "rand_set_state": {"src_seeds": Operand((32, 6), "uint32")},
    "rand_get_state": {"dst": made((32, 6), "uint32")},
}
# Changes of a right call that are right, too, or nearly.
DEEP = Operand((32, 2, 8))
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "tensor_tensor": (
        {"data1": Operand(space="psum")},
        {"dst": made(dtype="bfloat16")},
        {
            "data1": Operand(dtype="int32"),
            "data2": Operand(dtype="int32"),
            "dst": made(dtype="int32"),
            "op": nl.bitwise_xor,
        },
    ),
    "tensor_scalar": (
        {"operand0": 3.0, "op0": nl.subtract, "reverse0": True, "op1": None},
        {"data": Operand(holds="quarters"), "op0": nl.maximum, "op1": nl.minimum},
        {
            "data": Operand(dtype="int32"),
            "dst": made(dtype="int32"),
            "op0": nl.left_shift,
            "operand0": 3,
            "op1": nl.bitwise_and,
            "operand1": 8,
        },
    ),
    "scalar_tensor_tensor": (
        {"reverse0": True, "op0": nl.subtract},
        {"operand0": 2.0},
        {"reverse1": True},
    ),
    "tensor_reduce": (
        {"data": DEEP, "axis": (1, 2)},
        {"op": nl.maximum, "negate": True},
        {"data": DEEP, "axis": 2, "dst": made((32, 2))},
        {"data": Operand(dtype="int32"), "dst": made((32, 1), "int32")},
    ),
    "tensor_copy": (
        {"src": Operand(holds="wide"), "dst": made(dtype="int32")},
        {"src": Operand(holds="wide"), "dst": made(dtype="float8_e4m3")},
        {"src": Operand(holds="wide"), "dst": made(dtype="uint8")},
        {"src": Operand(holds="wide"), "dst": made(dtype="bfloat16")},
        {"src": Operand(holds="quarters"), "dst": made(dtype="int8")},
        {"src": Operand(space="psum"), "engine": isa.engine.scalar},
    ),
    "memset": (
        {"value": 2.5, "dst": made(dtype="bfloat16")},
        {"value": -1, "dst": made(dtype="int8")},
    ),
    "tensor_tensor_scan": (
        {"op0": nl.maximum},
        {"initial": ONE},
        {"initial": -2.5},
        {"op1": nl.subtract, "data1": Operand(holds="quarters")},
    ),
    "select_reduce": (
        {"reduce_op": nl.maximum},
        {"on_false": 1.0, "reverse_pred": True},
        {"reduce_cmd": reduce_cmd.reduce},
        {"on_true": Operand(holds="quarters")},
    ),
    "range_select": (
        {"comp_op0": nl.equal, "comp_op1": nl.not_equal},
        {"range_start": 3.0},
        {"reduce_cmd": reduce_cmd.reset_reduce, "reduce_op": nl.maximum},
    ),
    "iota": (
        {"pattern": ((1, 4), (10, 4))},
        {"pattern": ((-2, 2), (3, 8)), "offset": -5},
        {"dst": made(dtype="uint8")},
        {"dst": made(), "channel_multiplier": -3},
    ),
    "affine_select": (
        {"pattern": ((1, 4), (-1, 4))},
        {"cmp_op": nl.equal, "offset": 0},
        {"channel_multiplier": -1, "on_false_value": -9.0},
    ),
    "local_gather": (
        {"src_buffer": Operand((32, 32)), "num_elem_per_idx": 2, "dst": made((32, 64))},
        {"num_valid_indices": 16},
        {"num_valid_indices": 31},
        {"index": Operand((32, 2), "uint16", holds="rows")},
    ),
    "nonzero_with_count": (
        {"src": Operand(holds="quarters")},
        {"index_offset": 0, "padding_val": 7},
        {"src": Operand(dtype="int32"), "dst": made((32, 9), "int32")},
    ),
    "nc_n_gather": (
        {"indices": Operand(dtype="uint32", holds="rows")},
        {"indices": Operand((32, 8), "uint32"), "dst": made((32, 8))},
    ),
    "sequence_bounds": (
        {"segment_ids": Operand((1, 16), holds="ones")},
        {"segment_ids": Operand((1, 16), "int32"), "dst": made((1, 2, 16), "int32")},
    ),
    "topk": ({"n": 64}, {"n": 512}, {"src": Operand(dtype="bfloat16", holds="quarters")}),
    "max8": (
        {"src": Operand((32, 8))},
        {"src": Operand(holds="quarters")},
        {"src": Operand((2, 16_384)), "dst": made((2, 8))},
        {"src": Operand((1, 16_385)), "dst": made((1, 8))},
    ),
    "nc_find_index8": (
        {"data": Operand(holds="quarters")},
        {"data": Operand((32, 8))},
        {"data": Operand((1, 16_384)), "vals": Operand((1, 8)), "dst": made((1, 8), "uint32")},
    ),
    "nc_stream_shuffle": (
        {"shuffle_mask": (255,) * 16 + tuple(range(16))},
        {"src": Operand((64, 16)), "dst": made((64, 16))},
        {"src": Operand((128, 8)), "dst": made((128, 8))},
    ),
    "tensor_partition_reduce": (
        {"op": nl.maximum},
        {"data": Operand(holds="quarters")},
        {"data": Operand(dtype="bfloat16")},
    ),
    "nc_matmul": (
        {"stationary": BF16, "moving": BF16},
        {"accumulate": False},
        {
            "stationary": BF16,
            "moving": BF16,
            "tile_position": (0, 32),
            "tile_size": (32, 32),
            "dst": Operand((16, 16), space="psum", start=32),
        },
    ),
    "nc_matmul_mx": (
        {"stationary": Operand(dtype="float4_e2m1fn_x4", holds="nothing")},
        {"stationary_scale": Operand(dtype="uint8", holds="steps")},
        {"dst": made((16, 16), "bfloat16", "psum")},
    ),
    "quantize_mx": (
        {"src": Operand(dtype="bfloat16", holds="wide")},
        {"src": Operand(dtype="bfloat16", holds="quarters")},
        {"src": Operand(dtype="float16", holds="quarters")},
        {"dst": made((32, 4), "float8_e5m2_x4")},
    ),
    "dma_copy": (
        {"dst": made(dtype="bfloat16")},
        {"src": Operand(space="hbm", holds="wide"), "dst": made(dtype="int32")},
        {"dst": made(space="hbm"), "src": X},
    ),
    "dma_transpose": (
        {"src": Operand((16, 3, 8), "bfloat16", "hbm"), "dst": made((8, 3, 16), "bfloat16")},
        {"src": Operand((16, 2, 3, 8), "bfloat16", "hbm"), "dst": made((8, 2, 3, 16), "bfloat16")},
    ),
}
ENGINES = tuple(isa.engine)
ROWS = (1, 2, 16, 31, 33, 63, 64, 65, 96, 127, 128)
WIDTHS = (1, 2, 4, 7, 8, 9, 15, 17, 32, 33, 64, 127, 128, 129, 511, 512, 513)
OPS = (
    nl.add,
    nl.subtract,
    nl.multiply,
    nl.maximum,
    nl.minimum,
    nl.equal,
    nl.not_equal,
    nl.less,
    nl.less_equal,
    nl.greater,
    nl.greater_equal,
    nl.logical_and,
    nl.logical_or,
    nl.bitwise_and,
    nl.bitwise_or,
    nl.bitwise_xor,
    nl.left_shift,
    nl.right_shift,
    nl.divide,
    nl.rsqrt,
    nl.power,
    nl.abs,
    None,
)
ACTIVATIONS = (nl.exp, nl.copy, nl.relu, nl.sigmoid, nl.square, nl.add, None)
NUMBERS = (
    0,
    1,
    -1,
    0.5,
    2,
    3,
    8,
    15,
    16,
    17,
    31,
    32,
    64,
    127,
    128,
    255,
    256,
    -129,
    65_536,
    2**31,
    float("nan"),
    float("inf"),
    None,
    ONE,
    Operand((31, 1)),
    Operand((32, 2)),
    Operand((32, 1), "bfloat16"),
    Operand((32, 1), "int32"),
)
OF_ARGUMENT: dict[str, tuple[Any, ...]] = {
    "engine": ENGINES,
    "reduce_cmd": tuple(reduce_cmd),
    "perf_mode": tuple(matmul_perf_mode),
    "oob_mode": tuple(isa.oob_mode),
    "dge_mode": tuple(isa.dge_mode),
    "dma_engine": tuple(dma_engine),
    "axis": (0, 1, 2, (1, 2), (2, 1), (1, 3), -1, "1", (), (1, 1)),
    "tile_position": ((), (0, 0), (0, 32), (32, 0), (64, 64), (0, 16), (96, 96), (0, 0, 0)),
    "tile_size": ((), (32, 32), (64, 32), (32, 64), (128, 64), (128, 128), (16, 32), (64, 64)),
    "pattern": (
        ((1, 16),),
        ((1, 8), (1, 2)),
        ((-1, 16),),
        ((0, 16),),
        ((1, 17),),
        ((2, 16), (1, 1)),
        ((1, 2), (1, 2), (1, 2), (1, 2)),
        ((1, 2),) * 5,
        (),
        ((1, 0),),
        ((1, 2, 3),),
    ),
    "shuffle_mask": (
        tuple(range(32)),
        tuple(range(31)),
        (255,) * 32,
        (32,) * 32,
        (0,) * 32,
        (-1,) * 32,
    ),
    "srcs": ((HBM,), (X, X), (HBM, HBM, X), (HBM,) * 16, (HBM,) * 17, (), (HBM, made())),
    "scales": (None, (1.0, 1.0), (1.0, 2.0), (1.0,)),
    "axes": (None, (1, 0), (0, 1), (2, 1, 0)),
    "dtype": (None, nl.float32, nl.bfloat16),
    "priority": (None, 0, 1, 8),
    "accumulate": (None, True, False),
    "name": ("a name",),
}


def alternatives(name: str, argument: str, value: Any, rng: random.Random) -> Any:
    """Return another value for an argument of a call."""
    if isinstance(value, Operand) and rng.random() < 0.9:
        return another_operand(value, rng)
    if argument in OF_ARGUMENT:
        return rng.choice(OF_ARGUMENT[argument])
    if argument == "op" and name.startswith("activ"):
        return rng.choice(ACTIVATIONS)
    if re.fullmatch(r"(reduce_|cmp_|comp_)?op\d?", argument):
        return rng.choice(OPS)
    if isinstance(value, bool) or argument.startswith(("reverse", "is_", "unique")):
        return not value
    return rng.choice(NUMBERS)


def another_operand(operand: Operand, rng: random.Random) -> Operand:
    """Return an operand of which one thing is another."""
    rows, *columns = operand.shape
    what = rng.choice(("rows", "columns", "dtype", "dtype", "space", "start", "view", "holds"))
    if what == "rows":
        return replace(operand, shape=(rng.choice(ROWS), *columns))
    if what == "columns":
        width = rng.choice(WIDTHS)
        return replace(operand, shape=(rows, *columns[:-1], width))
    if what == "holds":
        return replace(operand, holds=rng.choice(HELD))
    choices: dict[str, tuple[Any, ...]] = {
        "dtype": DTYPES,
        "space": ("sbuf", "psum", "hbm"),
        "start": (16, 32, 64, 96),
        "view": ("even", "turned", "deep"),
    }
    return replace(operand, **{what: rng.choice(choices[what])})


def drawn(name: str, number: int) -> tuple[dict[str, Any], SimOptions]:
    """Return the arguments and options of a call: the right one, or one with a few changes."""
    rng = random.Random(f"{name} {number}")
    arguments = dict(RIGHT[name])
    if number > 0 and rng.random() < 0.6:
        arguments |= rng.choice(MORE.get(name, ({},)))
    signature = inspect.signature(getattr(isa, name)).parameters
    if number > 0 and rng.random() < 0.4:
        arguments = resized(arguments, rng)
    for _ in range(0 if number == 0 else rng.choice((0, 1, 1, 1, 2))):
        changed = rng.choice([argument for argument in signature if argument != "name"])
        value = arguments.get(changed, signature[changed].default)
        arguments[changed] = alternatives(name, changed, value, rng)
    newest = "trn3" if name in NEWER else "trn2"
    target = newest if number == 0 or rng.random() < 0.8 else rng.choice(("trn1", "trn2", "trn3"))
    return arguments, SimOptions(target=target)


def resized(arguments: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a call whose operands all have other rows, another dtype or another place."""
    what = rng.choice(("rows", "dtype", "start", "columns"))
    rows, width = rng.choice(ROWS), rng.choice(WIDTHS)
    dtype, start = rng.choice(DTYPES), rng.choice((32, 64, 96))

    def other(value: Any) -> Any:
        if not isinstance(value, Operand):
            return value
        if what == "rows":
            shape = tuple(rows if count == 32 else count for count in value.shape)
            return replace(value, shape=shape)
        if what == "columns":
            shape = tuple(width if count == 16 else count for count in value.shape)
            return replace(value, shape=shape)
        return replace(value, dtype=dtype) if what == "dtype" else replace(value, start=start)

    return {argument: other(value) for argument, value in arguments.items()}


def bound(name: str, arguments: dict[str, Any]) -> tuple[Callable[..., None], dict[str, Tile]]:
    """Return a function of tensors that makes a call, and the tiles of these by name."""
    operands: dict[str, Operand] = {}

    def place(argument: str, value: Any) -> Callable[[dict[str, Any]], Any]:
        if isinstance(value, Operand):
            operands[argument] = value
            return lambda views: value.seen(views[argument])
        if isinstance(value, tuple) and any(isinstance(item, Operand) for item in value):
            parts = [place(f"{argument}{n}", item) for n, item in enumerate(value)]
            return lambda views: [part(views) for part in parts]
        return lambda views: value

    found = {argument: place(argument, value) for argument, value in arguments.items()}

    def body(**views: Any) -> None:
        getattr(isa, name)(**{argument: value(views) for argument, value in found.items()})

    return body, {argument: operand.tile() for argument, operand in operands.items()}


def outcome(name: str, number: int) -> str:
    """Run a call; return what comes of it."""
    arguments, options = drawn(name, number)
    body, tiles = bound(name, arguments)
    try:
        with np.errstate(all="ignore"):
            result = execute(body, options=options, **tiles)
    except NkiValidationError as error:
        return shown(error)
    findings = sorted(plain(f"{finding.kind} {finding.text}") for finding in result.run.findings)
    bits = hashlib.sha256()
    exact = name not in INEXACT and not {nl.rsqrt, nl.power} & set(
        map(_hashable, arguments.values())
    )
    for operand in sorted(result.tiles) if exact else ():
        bits.update(_comparable(result.tiles[operand], result.unwritten[operand]))
    return f"{digest([result.run.trace])} {bits.hexdigest()[:8]} {findings}"


def _comparable(values: Any, unwritten: Any) -> bytes:
    """Return the bits of values, but for those that are unwritten or NaN, of which many are."""
    kept = np.where(unwritten, np.zeros((), values.dtype), values)
    is_nan = np.zeros(kept.shape, np.bool_) if kept.dtype.kind in "iub" else np.isnan(kept)
    return np.where(is_nan, np.zeros((), kept.dtype), kept).tobytes()


def _hashable(value: Any) -> Any:
    return value if isinstance(value, nc_version) or value.__hash__ else None


def short(name: str, numbers: range) -> list[str]:
    """Return some digits of the outcome of each call of an instruction."""
    return [digests.digits(outcome(name, number)) for number in numbers]


def main(argv: list[str] | None = None) -> int:
    """Write all outcomes, or show one."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.calls", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write all outcomes")
    parser.add_argument("--show", nargs=2, metavar=("NAME", "NUMBER"), help="tell of one call")
    options = parser.parse_args(argv)
    if options.show:
        name, number = options.show[0], int(options.show[1])
        print(*drawn(name, number), outcome(name, number), sep="\n")  # noqa: T201  a tool
    if options.write:
        numbers = range(CALLS_EACH * LONGER)
        digests.write(FILE, {name: short(name, numbers) for name in RIGHT})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
