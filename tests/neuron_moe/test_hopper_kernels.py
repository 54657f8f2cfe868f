"""The products for Hopper GPUs compile without one: warpgroup products, no spilled registers; so do
products that decode fp8 and MXFP4, by instructions that Triton's interpreter lacks.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from neuron_moe.backends.cuda import decode_kernels, hopper
from neuron_moe.backends.cuda.products import Product
from neuron_moe.backends.cuda.records import constants_of
from neuron_moe.backends.cuda.tiles import HopperTile, decode_tile, token_tile
from nki_kernels.common.formula import ExpertFormula

MOST_SHARED_BYTES = 232448  # of a multiprocessor of an H100 or H200
WORDS = ("wgmma.mma_async", "setmaxnreg", "cp.async.bulk.tensor", "cp.async.cg")
OVERLAPS = {"codes": "griddepcontrol.launch_dependents", "token": "griddepcontrol.wait"}
DECODES = "fma.rn.bf16x2"
CODES = ("float8_e4m3", "float8_e5m2", "mxfp4")
PRODUCTS = {
    "first, gathered": {"gathers": "left", "activates": True, "keeps": True, "has_bias": True},
    "rows back": {"right_is_turned": True},
    "rows back, gathered and copied": {
        "gathers": "left",
        "right_is_turned": True,
        "copies": True,
    },
    "weights": {"gathers": "right", "sums_rows": True},
}


def describe(block: list[int]) -> str:
    layout = NVMMASharedLayout.get_default_for(block, triton.language.bfloat16)
    return f"tensordesc<bf16[{','.join(map(str, block))}],{layout!r}>"


def compile_for_hopper(
    source: Any, kernel: Any, signature: dict[str, str], known: dict[str, Any], options: Any
) -> Any:
    names = [*signature]
    constants = {(names.index(name),): value for name, value in known.items()}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    made = source(kernel, signature, constants, aligned)
    return triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)


def compile_product(**fields: Any) -> Any:
    sizes = {"num_experts": 8, "height": 512, "depth": 768, "width": 2048, "top_k": 4}
    product = Product(
        HopperTile(), programs=132, **sizes, **constants_of(ExpertFormula()), **fields
    )
    stored = product.stored_block
    blocks = {
        "left_desc": product.left_block,
        "right_desc": product.right_block,
        "out_desc": [1, *stored] if product.sums_rows else stored,
        "kept_desc": [stored[0], 1, stored[1]] if product.is_paired else stored,
        "copy_desc": product.left_block,
    }
    known = {"P": product, "num_warps": 4}
    kinds = {"rows_ptr": "*bf16", "bias_ptr": "*bf16", "first_tile": "i32", "kept_tiles": "i32"}
    signature = {
        name: "constexpr"
        if name in known
        else describe(blocks[name])
        if name in blocks
        else kinds.get(name, "*i32")
        for name in inspect.signature(hopper.multiply.fn).parameters
    }
    options = {"num_warps": known["num_warps"], "enable_fp_fusion": True}
    return compile_for_hopper(GluonASTSource, hopper.multiply, signature, known, options)


def compile_codes(form: str) -> Any:
    """Compile the product for few tokens that reads codes of a format."""
    tile = decode_tile(8, 768, 1024, form)
    known = {
        "DEPTH": 768, "WIDTH": 1024, "TOP_K": 4, "DEPTH_PART": tile.depth_part, "ROWS": tile.rows,
        "PAIRS": 8, "BLOCK_WIDTH": tile.width, "BLOCK_DEPTH": tile.depth, "PRECISION": "tf32",
        "FORMAT": form, "COUNTERS": 8, "OVERLAPS": True,
    }  # fmt: skip
    kinds = {"source_ptr": "*bf16", "index_ptr": "*i32", "matrix_ptr": "*u8", "parts_ptr": "*fp32"}
    kinds["arrived_ptr"] = "*i32"
    kinds["scale_ptr"] = "*u8" if form == "mxfp4" else "*fp32"
    signature = {
        name: "constexpr" if name in known else kinds.get(name, "i32")
        for name in inspect.signature(decode_kernels.project_pairs.fn).parameters
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compile_for_hopper(ASTSource, decode_kernels.project_pairs, signature, known, options)


def compile_token() -> Any:
    """Compile the second product of one token, which begins beside the first."""
    tile = token_tile(4, 768, 1024)
    known = {
        "I": 768, "H": 1024, "FIRST_PARTS": 2, "PARTS": 1, "HAS_FIRST_BIAS": True,
        "HAS_BIAS": True, **constants_of(ExpertFormula()), "TOP_K": 4, "ROWS": tile.rows,
        "DEPTH_PART": tile.depth_part, "BLOCK_WIDTH": tile.width, "BLOCK_DEPTH": tile.depth,
        "PRECISION": "tf32", "FORMAT": "plain", "OVERLAPS": True, "scale_ptr": None,
    }  # fmt: skip
    floats = {"first_ptr": "*fp32", "down_ptr": "*fp32"}
    kinds = dict.fromkeys(("matrix_ptr", "first_bias_ptr", "bias_ptr", "weight_ptr", "out_ptr"))
    kinds = {**dict.fromkeys(kinds, "*bf16"), **floats, "index_ptr": "*i32", "arrived_ptr": "*i32"}
    signature = {
        name: "constexpr" if name in known else kinds.get(name, "i32")
        for name in inspect.signature(decode_kernels.finish_token.fn).parameters
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compile_for_hopper(ASTSource, decode_kernels.finish_token, signature, known, options)


def stack_bytes(cubin: bytes, folder: Path) -> set[int]:
    """Return what functions keep on the stack, which are spilled registers."""
    (folder / "kernel.cubin").write_bytes(cubin)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    told = subprocess.run(
        [tools / "cuobjdump", "-res-usage", folder / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {int(size) for size in re.findall(r"STACK:(\d+)", told.stdout)}


def report(folder: Path) -> dict[str, dict[str, Any]]:
    """Compile every product, and return what is in it."""
    found = {}
    makers = {
        **{name: partial(compile_product, **fields) for name, fields in PRODUCTS.items()},
        **{form: partial(compile_codes, form) for form in CODES},
        "token": compile_token,
    }
    words = (*WORDS, *OVERLAPS.values(), DECODES)
    for name, make in makers.items():
        compiled = make()
        found[name] = {
            "code": [word for word in words if word in compiled.asm["ptx"]],
            "shared": compiled.metadata.shared,
            "stack": sorted(stack_bytes(compiled.asm["cubin"], folder)),
        }
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    # A process of its own: in this one Triton may be the interpreter.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(tmp_path_factory.mktemp("cubin"))]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(told.stdout)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_compile_to_warpgroups_that_fit(
    name: str, compiled: dict[str, dict[str, Any]]
) -> None:
    found = compiled[name]
    expected = [*WORDS] if "gathers" in PRODUCTS[name] else [*WORDS][:-1]
    assert found["code"] == expected
    assert found["shared"] <= MOST_SHARED_BYTES
    assert found["stack"] == [0]


@pytest.mark.long
@pytest.mark.parametrize("form", CODES)
def test_codes_are_decoded_four_at_once_in_registers(
    form: str, compiled: dict[str, dict[str, Any]]
) -> None:
    assert {DECODES, OVERLAPS["codes"]} <= {*compiled[form]["code"]}
    assert compiled[form]["stack"] == [0]


@pytest.mark.long
def test_one_token_waits_for_the_launch_beside_it(compiled: dict[str, dict[str, Any]]) -> None:
    assert OVERLAPS["token"] in compiled["token"]["code"]
    assert compiled["token"]["stack"] == [0]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report(Path(sys.argv[1]))))
