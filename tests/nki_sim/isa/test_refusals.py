"""Every documented constraint is refused, naming operand and value.

A refused call is a right one with some arguments changed. What each instruction refuses alike is in
test_every_operand.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from nki_sim import IllegalOperand, SimOptions, isa
from nki_sim.language import api as nl
from nki_sim.testing import execute
from tests.golden.calls import BF16, EIGHT, HBM, NEWER, ONE, RIGHT, Operand, X, bound, made

ENGINE, HWDGE, SKIP = isa.engine, isa.dge_mode.hwdge, isa.oob_mode.skip
IDLE, LOAD_REDUCE = isa.reduce_cmd.idle, isa.reduce_cmd.load_reduce
REDUCE, RESET_REDUCE = isa.reduce_cmd.reduce, isa.reduce_cmd.reset_reduce
PSUM = Operand(space="psum")
INT = Operand(dtype="int32")
INT_COLUMN, BF16_COLUMN = Operand((32, 1), "int32"), Operand((32, 1), "bfloat16")
BF16_OUT = made(dtype="bfloat16")
BYTES = {"dst": made(dtype="uint8"), "data": Operand(dtype="uint8")}
ONE_OP = {"op1": None, "operand1": None}
X4 = "float8_e4m3fn_x4"
MX64 = {
    **{name: Operand((64, 16), X4, holds="nothing") for name in ("stationary", "moving")},
    **{f"{name}_scale": Operand((64, 16), "uint8") for name in ("stationary", "moving")},
}
BF16_TURN = {"stationary": BF16, "moving": Operand((32, 32), "bfloat16"), "is_transpose": True}
ROWS_20 = {
    "dst": made((20, 32)),
    "src_buffer": Operand((20, 16)),
    "index": Operand((20, 2), "uint16"),
}
TOPK_OF_8_ROWS = {
    "val_dst": made((8, 4), "bfloat16"),
    "idx_dst": made((8, 4), "uint32"),
    "src": Operand((8, 16), "bfloat16"),
}


def packed(*shape: int) -> Operand:
    return Operand(shape, X4, holds="nothing")


def pairs(*shape: int) -> dict[str, Any]:
    """Arguments of a product in double rows."""
    fp8 = Operand(shape, "float8_e4m3")
    return {"stationary": fp8, "moving": fp8, "perf_mode": "double_row"}


def tile(position: tuple[int, int], size: tuple[int, int]) -> dict[str, Any]:
    return {"tile_position": position, "tile_size": size}


# By instruction and message: what is changed, and the target where it is not that of the call.
REFUSALS: dict[str, dict[str, dict[str, Any]]] = {
    "tensor_tensor": {
        r"data1: expected .*\.dma_copy moves": {"data1": HBM},
        "data2: expected SBUF where data1 is in PSUM": {"data1": PSUM, "data2": PSUM},
        r"found 1\. .* row\.ap\(\[\[0, 32\], \[1, col": {"data2": Operand((1, 16))},
        "op: expected an ALU": {"op": nl.exp},
        "dst: expected an integer type for bitwise_or; found float32": {"op": nl.bitwise_or},
        "data1: expected a tensor in SBUF, as GpSimd": {"op": nl.power, "data1": PSUM},
        "engine: expected one of vector, gpsimd; found scalar": {"engine": ENGINE.scalar},
        "needs gen4": {"op": nl.abs_min},
    },
    "tensor_scalar": {
        "operand0: expected a floating-point": ONE_OP | {"operand0": INT_COLUMN},
        "op1: expected two bit operators or two": BYTES
        | {"op0": nl.bitwise_and, "operand0": 1, "op1": nl.add, "operand1": 1},
        "data: expected an integer type for left_shift": ONE_OP
        | {"op0": nl.left_shift, "operand0": 1},
        "operand0: expected an integer for left_shift": ONE_OP
        | BYTES
        | {"op0": nl.left_shift, "operand0": 1.0},
        "operand0: expected None or 0 for abs": ONE_OP | {"op0": nl.abs, "operand0": 2.0},
        "operand1: expected None where op1 is None": {"op1": None, "operand1": 1.0},
        "engine: expected one of gpsimd; found vector": ONE_OP
        | {"op0": nl.rsqrt, "operand0": None, "engine": ENGINE.vector},
        "engine: expected one of vector, scalar; found gpsimd": ONE_OP | {"engine": ENGINE.gpsimd},
        "engine: expected vector, or gen3 with multiply": ONE_OP
        | {"op0": nl.maximum, "operand0": 1.0, "engine": ENGINE.scalar},
    },
    "scalar_tensor_tensor": {
        "op1: expected an arithmetic operator": {"op1": nl.bitwise_or},
        "operand1: expected SB": {"data": PSUM, "operand1": PSUM},
    },
    "tensor_reduce": {
        "axis: expected the last": {"axis": 0},
        "axis: .*found 2 of 2 axes": {"axis": 2},
        "axis: expected the last free": {
            "dst": made((32, 8)),
            "data": Operand((32, 2, 8)),
        },
        "op: expected a reduction operator; found equal": {"op": nl.equal},
        "negate: expected False": BYTES
        | {"dst": made((32, 1), "uint8"), "op": nl.bitwise_or, "negate": True},
        "data: expected an integer type": {"op": nl.bitwise_or},
    },
    "tensor_tensor_scan": {
        "data1: expected SBUF": {"data0": PSUM, "data1": PSUM},
        "op0: expected an arithmetic operator": {"op0": nl.bitwise_or},
    },
    "tensor_copy": {
        "src: expected a tensor in SBUF, as GpSimd": {"src": PSUM, "engine": ENGINE.gpsimd},
        "engine: expected": {"engine": ENGINE.tensor},
        f"dst: expected {X4}, as packed types are not converted": {"src": packed(32, 16)},
        "engine: expected vector or gpsimd before gen3": {
            "engine": ENGINE.scalar,
            "target": "trn1",
        },
    },
    "memset": {
        r"value: expected an int.*1\.5": {"dst": made(dtype="int32"), "value": 1.5},
        "value: expected an int.*nan": {"dst": made(dtype="int32"), "value": math.nan},
        "value: expected an int.*inf": {"dst": made(dtype="int32"), "value": math.inf},
        "value: expected an int.*256": {"dst": made(dtype="uint8"), "value": 256},
        "value: expected 0 for": {"dst": made(dtype="float4_e2m1fn_x4"), "value": 1},
        "dst: expected a tensor in SBUF, as GpSimd": {
            "dst": made(space="psum"),
            "engine": ENGINE.gpsimd,
        },
        "engine: expected one of vector, gpsimd; found scalar": {"engine": ENGINE.scalar},
    },
    "tensor_copy_predicated": {
        "predicate: expected uint8, uint16": {"predicate": Operand(dtype="int8")},
        "src: expected bfloat16": {"dst": BF16},
        "predicate: expected SBUF": {
            "src": PSUM,
            "predicate": Operand(dtype="uint8", space="psum"),
        },
    },
    "select_reduce": {
        "predicate: expected int8, uint8": {"predicate": Operand(dtype="uint32")},
        "on_true: expected a type other": {"on_true": INT},
        "reduce_op: expected maximum; found add": {"reduce_op": nl.add},
        "reduce_res: expected a floating": {"reduce_res": made((32, 1), "int32")},
        "reduce_cmd: expected a reset_reduce": {"reduce_cmd": REDUCE},
    },
    "range_select": {
        "bound1: expected float32": {"bound1": BF16_COLUMN},
        "on_true_tile: expected a float": {"on_true_tile": INT},
        "comp_op0: expected equal, greater": {"comp_op0": nl.not_equal},
        "on_false_value: e": {"on_false_value": 0.0},
        "range_start: exp": {"range_start": 1 << 24},
        "reduce_op: expected": {"reduce_op": nl.add},
        "range_select: expected gen3": {"target": "trn1"},
    },
    "tensor_scalar_reduce": {
        "reverse0: expected False": {"reverse0": True},
        "op0: expected an arithmetic": BYTES | {"op0": nl.bitwise_and, "operand0": 1},
        "operand0: expected a floating-point": {"operand0": INT_COLUMN},
        "reduce_op: expected add, maximum, minimum, multiply": {"reduce_op": nl.subtract},
        "reduce_cmd: expected reset_reduce, reduce, load_reduce; found idle": {"reduce_cmd": IDLE},
        "reduce_init: expected a number or": {"reduce_cmd": LOAD_REDUCE},
        "reduce_init: expected None unless": {"reduce_init": 1.0},
    },
    "tensor_scalar_cumulative": {
        "src: expected a float or an 8- or 16-bit": {"src": INT},
        "op1: expected add, maximum": {"op1": nl.logical_or},
        "reduce_cmd: expected": {"reduce_cmd": IDLE},
    },
    "exponential": {"expected gen4": {"target": "trn2"}},
    "activation": {
        "data: expected an arithmetic type": {"data": packed(32, 16)},
        "op: expected an activation": {"op": nl.add},
        "Use nisa.activate2": {"op": nl.prelu},
        "scale: expected a number or a float32 tensor; found bfloat16": {"scale": BF16_COLUMN},
        "bias: expected any type but tfloat32": {"bias": Operand((32, 1), "tfloat32")},
        r"bias: expected a \(32, 1\) tensor before gen3": {"bias": 1.0, "target": "trn1"},
        "reduce_op: expected add; found maximum": {
            "reduce_op": nl.maximum,
            "reduce_cmd": RESET_REDUCE,
        },
        "reduce_op: expected add": {"reduce_cmd": RESET_REDUCE},
        "reduce_cmd: expected idle, reset, reduce or reset_reduce": {
            "reduce_op": nl.add,
            "reduce_cmd": LOAD_REDUCE,
        },
        "reduce_cmd: expected a reset_reduce": {"reduce_op": nl.add, "reduce_cmd": REDUCE},
        "engine gpsimd: expected gen4": {"engine": ENGINE.gpsimd},
        "data: expected a tensor in SBUF": {
            "data": PSUM,
            "engine": ENGINE.gpsimd,
            "target": "trn3",
        },
        "engine: expected scalar, which alone has reduction registers": {
            "reduce_op": nl.add,
            "reduce_res": made((32, 1)),
            "reduce_cmd": RESET_REDUCE,
            "engine": ENGINE.gpsimd,
            "target": "trn3",
        },
        "engine: expected one of scalar, gpsimd": {"engine": ENGINE.vector, "target": "trn3"},
    },
    "activate2": {
        "activate2: expected gen4": {"target": "trn2"},
        r"op0, op1: expected one of .* found add\+multiply": {"op0": nl.add, "op1": nl.multiply},
        "reverse1: expected False where op1 is bypass": {"op1": nl.bypass, "reverse1": True},
        "imm1: expected float32": {"imm0": ONE, "imm1": BF16_COLUMN},
        "reduce_op: expected abs_max, abs_min, add, maximum, minimum": {
            "reduce_op": nl.multiply,
            "reduce_cmd": RESET_REDUCE,
        },
    },
    "max8": {
        "src: expected 8 to 16384 .*found 7": {"src": Operand((32, 7))},
        "src: expected 8 to 16384 .*found 16385": {"src": Operand((32, 16_385))},
        "src: expected at most": {"src": Operand((32, 2, 3, 4))},
    },
    "nc_find_index8": {
        "dst: expected uint16 or uint32": {"dst": made((32, 8), "int32")},
        "data: expected 8 to 16384": {"data": Operand((32, 7))},
    },
    "nc_match_replace8": {
        "data: expected 1 to 16384": {"dst": made((32, 16_385)), "data": Operand((32, 16_385))},
        "dst_idx: expected uint16 or uint32": {"dst_idx": made((32, 8))},
        "imm: expected a number": {"imm": EIGHT},
    },
    "nc_stream_shuffle": {
        "dst: expected float32 like src": {"dst": BF16_OUT},
        "shuffle_mask: expected 32 entries; found 1": {"shuffle_mask": (0,)},
        "shuffle_mask: expected entries 0..31, or 255": {"shuffle_mask": (32,) * 32},
        "shuffle_mask: expected source partitions below 1": {
            "src": Operand((1, 16)),
            "shuffle_mask": (1,) * 32,
        },
    },
    "bn_stats": {"data: expected at most 512": {"data": Operand((32, 513))}},
    "bn_aggr": {"data: expected a multiple of 3": {"data": Operand((32, 7))}},
    "iota": {
        "dst: expected a": {"dst": made(space="psum")},
        "pattern: expected counts .* 16": {"pattern": ((1, 15),)},
        "pattern: expect": {"dst": made((32, 1)), "pattern": ((1, 1),) * 5},
        "offset: expected a 32-bit": {"offset": 1 << 31},
    },
    "affine_select": {
        "on_true_tile: expected a tensor in SBUF": {"on_true_tile": PSUM},
        "cmp_op: expected a comparison": {"cmp_op": nl.add},
    },
    "local_gather": {
        "src_buffer: expected a multiple of 16 partitions; found 20": ROWS_20,
        "index: expected uint16": {"index": Operand((32, 2), "int32")},
        "dst: expected float32 like": {"dst": made((32, 32), "bfloat16")},
        "num_elem_per_idx: expected 1, 2, 4, 8, 16 or 32; found 3": {"num_elem_per_idx": 3},
        "num_valid_indices: expected 1 to 32": {"num_valid_indices": 33},
        "num_valid_indices: expected 1 to 4096": {
            "index": Operand((32, 257), "uint16"),
            "num_valid_indices": None,
        },
        "src_buffer: expected a": {"src_buffer": PSUM},
    },
    "nc_n_gather": {
        "indices: expected uint32": {"indices": INT},
        "dst: expected float32 like": {"dst": BF16_OUT},
        "data: expected a tensor": {"data": PSUM},
    },
    "nonzero_with_count": {
        "src: expected float32 or int32": {"src": Operand(dtype="int16")},
        "dst: expected int32": {"dst": made((32, 17))},
        "src: expected a tensor in": {"src": PSUM},
        "padding_val: expected a 32-bit int": {"padding_val": 0.5},
        "nonzero_with_count: expected gen3": {"target": "trn1"},
    },
    "topk": {
        "n: expected 8 to 65535": {"n": 7},
        "src: expected at least 17 elements": {"n": 16 * 16 + 1},
        "val_dst: expected 1 to n=8": {"n": 8},
        "val_dst: expected bfloat16": {"val_dst": made((32, 16))},
        "idx_dst: expected uint32": {"idx_dst": made((32, 16), "int32")},
        "src: expected a multiple of 16": TOPK_OF_8_ROWS | {"n": 8},
    },
    "tensor_partition_reduce": {
        "op: expected add, average": {"op": nl.multiply},
        "data: expected integer types": {"op": nl.bitwise_or},
        "data: expected a tensor in SBUF": {"data": PSUM},
    },
    "sequence_bounds": {
        "segment_ids: expected float32 or int32": {"segment_ids": Operand((1, 16), "uint8")},
    },
    "nc_matmul": {
        "start partition 0": {"moving": Operand(start=64)},
        "at most 128": {"stationary": Operand((32, 129))},
        "dst: .*gen4": {"dst": made((16, 16), "bfloat16", "psum")},
        "SBUF": {"stationary": PSUM},
        r"shape \[K, 2, \.\.\] with double_row.*3": pairs(32, 3, 16)
        | {"dst": made((24, 24), space="psum")},
        r"shape \[K, 2, \.\.\] with double_row": pairs(32, 2) | {"dst": made((1, 1), space="psum")},
        "float8_e4m3fn: expected gen4": {
            "stationary": Operand(dtype="float8_e4m3fn"),
            "moving": BF16,
        },
        "8-bit float": {
            "stationary": Operand((32, 2, 8), "bfloat16"),
            "moving": Operand((32, 2, 8), "bfloat16"),
            "dst": made((8, 8), space="psum"),
            "perf_mode": "double_row",
        },
        "double_row": {"perf_mode": "fast"},
        "32, 64, 128": tile((0, 0), (48, 128)),
        "multiples": tile((16, 0), (64, 128)),
        "at least": tile((0, 0), (32, 128))
        | {"stationary": Operand((64, 16)), "moving": Operand((64, 16))},
        "two numbers": {"tile_position": (0, 0)},
        "start partition 32": tile((0, 32), (128, 32)),
        "bfloat16 like stationary": BF16_TURN | {"dst": made((16, 32), space="psum")},
        "no accumulation": BF16_TURN
        | {"dst": made((16, 32), "bfloat16", "psum"), "accumulate": True},
        "identity": BF16_TURN | {"dst": made((16, 16), "bfloat16", "psum"), "moving": BF16},
    },
    "nc_transpose": {
        "32 x 32": {"dst": made((16, 33)), "data": Operand((33, 16))},
        "128 x 128": {"dst": made((128, 16), space="psum"), "data": Operand((16, 129))},
        "data: expected a tensor in SBUF": {
            "dst": made((16, 32), space="psum"),
            "data": PSUM,
            "engine": ENGINE.tensor,
        },
        "dst: expected a tensor in PSUM": {"engine": ENGINE.tensor},
        "dst: expected bfloat16 like": {"data": BF16},
    },
    "nc_matmul_mx": {
        "moving: expected a packed x4 type; found bfloat16": {"moving": BF16},
        "stationary: expected a multiple of 32 partitions; found 48": {
            "stationary": packed(48, 16)
        },
        "moving: expected 32 partitions like stationary": {"moving": packed(64, 16)},
        "stationary: expected an even number up to 128 .*15": {"stationary": packed(32, 15)},
        "stationary: expected an even number up to 128 .*130": {"stationary": packed(32, 130)},
        "moving: expected at most 4096 columns": {"moving": packed(32, 4097)},
        "dst: expected a tensor in PSUM": {"dst": made((16, 16))},
        "dst: expected float32 or bfloat16": {"dst": made((16, 16), "float16", "psum")},
        r"dst: expected shape \[16, 16\]": {"dst": made((16, 17), space="psum")},
        "moving_scale: expected uint8 or float8_e8m0fnu": {"moving_scale": Operand(dtype="int8")},
        "moving_scale: expected 16 elements": {"moving_scale": Operand((32, 8), "uint8")},
        "stationary_scale: expected at least 36 partitions for 2 quadrants": MX64
        | {"stationary_scale": Operand((35, 16), "uint8")},
        "moving_scale: expected a start partition of 0, 4, 8 or 12": {
            "moving_scale": Operand(dtype="uint8", start=16)
        },
        "moving_scale: expected a tensor in SBUF": {
            "moving_scale": Operand(dtype="uint8", space="psum")
        },
        "tile_size: expected all 128 columns.*0, 32.*128, 32": tile((0, 32), (128, 32)),
        "tile_size: expected all 128 columns.*0, 0.*128, 32": tile((0, 0), (128, 32)),
        "tile_size: expected all 128 columns.*0, 32.*128, 128": tile((0, 32), (128, 128)),
        "tile_position: expected 32, 64": tile((128, 0), (128, 128)),
        "tile_position: expected 32, 64 or 128 rows": MX64 | tile((0, 0), (32, 128)),
        "tile_position: expected 32, 64 or 128": MX64 | tile((32, 0), (64, 128)),
        "stationary: expected start partition 64": MX64 | tile((64, 0), (64, 128)),
        "expected gen4 or later; found target trn2": {"target": "trn2"},
    },
    "quantize_mx": {
        "src: expected float16 or bfloat16": {"src": X},
        "src: expected a multiple of 32 partitions": {"src": Operand((48, 16), "bfloat16")},
        "src: expected a multiple of 4 elements": {"src": Operand((32, 18), "bfloat16")},
        "src: expected a tensor in SBUF": {"src": Operand(dtype="bfloat16", space="psum")},
        "dst: expected float8_e4m3fn_x4 or float8_e5m2_x4": {
            "dst": made((32, 4), "float4_e2m1fn_x4")
        },
        "dst: expected 4 packed elements": {"dst": made((32, 5), X4)},
        "dst_scale: expected uint8": {"dst_scale": made((32, 4), "int32")},
        "expected gen4 or later; found target trn2": {"target": "trn2"},
    },
    "dma_copy": {
        "128": {"dst": made((16, 8))},
        "hwdge": {"engine": ENGINE.sync},
        "sync or scalar": {"engine": ENGINE.vector, "dge_mode": HWDGE},
        "gen4": {"priority": 1},
        "HBM or SBUF": {"src": PSUM},
    },
    "dma_transpose": {
        "shape": {"dst": made((15, 32), "bfloat16")},
        "2 or 4 bytes": {
            "dst": made((16, 32), "int8"),
            "src": Operand(dtype="int8", space="hbm"),
        },
        "axes": {"axes": (0, 1)},
        "2 bytes": {"dst": made((16, 32)), "src": HBM, "dge_mode": HWDGE},
        "skip": {"oob_mode": SKIP},
    },
    "dma_compute": {
        "nl.add": {"reduce_op": nl.multiply},
        "scales": {"scales": (1.0, 2.0)},
        "16": {"srcs": (X,) * 17},
        "elements": {"srcs": (X, Operand((16, 16)))},
        "skip": {"oob_mode": SKIP},
    },
    "rng": {
        "dst: expected an integer type": {"dst": made()},
        "dst: expected a tensor in SBUF": {
            "dst": made(dtype="uint32", space="psum"),
            "engine": ENGINE.gpsimd,
        },
        "engine: expected one": {"engine": ENGINE.gpsimd, "target": "trn1"},
    },
    "set_rng_seed": {
        r"src_seeds: expected shape \[1, 1\]": {"src_seeds": Operand((2, 1), "uint32")},
        "src_seeds: expected a 32-bit type": {"src_seeds": Operand((1, 1), "uint16")},
    },
    "rand_set_state": {
        "src_seeds: expected 6 elements per partition on gpsimd": {
            "src_seeds": Operand((32, 24), "uint32")
        },
        "src_seeds: expected uint32": {"src_seeds": Operand((32, 6), "int32")},
    },
    "rand_get_state": {
        "engine: expected one of gpsimd": {
            "dst": made((32, 24), "uint32"),
            "engine": ENGINE.vector,
        },
        "expected gen3": {"target": "trn1"},
    },
    "rand2": {
        "expected gen4": {"target": "trn2"},
        "max: expected more": {"min": 1.0},
        "dst: expected a float": {"dst": made(dtype="bool")},
    },
}


@pytest.mark.parametrize(
    ("name", "message"), [(name, message) for name in REFUSALS for message in REFUSALS[name]]
)
def test_a_documented_constraint_is_refused(name: str, message: str) -> None:
    change = {"target": "trn3" if name in NEWER else "trn2", **REFUSALS[name][message]}
    options = SimOptions(target=change.pop("target"))
    call, tiles = bound(name, RIGHT[name] | change)
    with pytest.raises(IllegalOperand, match=message):
        execute(call, options=options, **tiles)
