"""The products for Hopper GPUs compile without one: warpgroup products, no spilled registers; so do
products that decode fp8 and MXFP4, by instructions that Triton's interpreter lacks.
"""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache, partial
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
from neuron_moe.backends.cuda.records import kernel_formula
from neuron_moe.backends.cuda.tiles import HopperTile, decode_tile, token_tile
from nki_kernels.common.formula import ExpertFormula, limits

MOST_SHARED_BYTES = 232448  # of a multiprocessor of an H100 or H200
WORDS = ("wgmma.mma_async", "setmaxnreg", "cp.async.bulk.tensor", "cp.async.cg")
OVERLAPS = {"codes": "griddepcontrol.launch_dependents", "token": "griddepcontrol.wait"}
DECODES = "fma.rn.bf16x2"
CODES = ("float8_e4m3", "float8_e5m2", "mxfp4")
FIRST = {"gathers": "left", "activates": True, "keeps": True, "has_bias": True}
PRODUCTS = {
    "first, gathered": FIRST,
    # As transformers lays weights out.
    "first, gathered, transposed": {**FIRST, "right_is_transposed": True},
    "second": {},
    "rows back": {"right_is_transposed": True},
    "rows back, gathered and copied": {
        "gathers": "left",
        "right_is_transposed": True,
        "copies": True,
    },
    "weights": {"gathers": "right", "sums_rows": True},
}
# The other layouts, in the long run.
MORE_PRODUCTS = {
    f"{name}, {'transposed' if is_transposed else 'straight'}": {
        **fields,
        "right_is_transposed": is_transposed,
    }
    for is_transposed in (False, True)
    for name, fields in {
        "first, kept without bias": {"gathers": "left", "activates": True, "keeps": True},
        "first": {"gathers": "left", "activates": True},
        "first of rows in order": {"activates": True, "has_bias": True},
        "second with bias": {"has_bias": True},
        "gathered": {"gathers": "left"},
    }.items()
} | {"weights, gathered left": {"gathers": "left", "sums_rows": True}}
SILU = ExpertFormula()
FORMULAS = {
    "relu2": ExpertFormula("relu2", has_gate=False),
    "situ": ExpertFormula("sigmoid", gates_itself=True, gate_softcap=4.0, up_softcap=25.0),
    "clamped": ExpertFormula(gate_limits=limits(None, 10.0), up_limits=limits(-10.0, 10.0)),
    "oai": ExpertFormula(
        "sigmoid",
        scale=1.702,
        gates_itself=True,
        gate_limits=limits(None, 7.0),
        up_limits=limits(-7.0, 7.0),
        up_offset=1.0,
    ),
    "gelu_tanh": ExpertFormula("gelu_tanh"),
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


def compile_product(formula: ExpertFormula = SILU, **fields: Any) -> Any:
    sizes = {"num_experts": 8, "height": 512, "depth": 768, "width": 2048, "top_k": 4}
    product = Product(
        HopperTile(), programs=132, **sizes, formula=kernel_formula(formula), **fields
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
        "DEPTH": 768,
        "WIDTH": 1024,
        "TOP_K": 4,
        "DEPTH_PART": tile.depth_part,
        "ROWS": tile.rows,
        "PAIRS": 8,
        "BLOCK_WIDTH": tile.width,
        "BLOCK_DEPTH": tile.depth,
        "PRECISION": "tf32",
        "FORMAT": form,
        "COUNTERS": 8,
        "OVERLAPS": True,
    }
    kinds = {"source_ptr": "*bf16", "index_ptr": "*i32", "matrix_ptr": "*u8", "parts_ptr": "*fp32"}
    kinds["arrived_ptr"] = "*i32"
    kinds["scale_ptr"] = "*u8" if form == "mxfp4" else "*fp32"
    signature = {
        name: "constexpr" if name in known else kinds.get(name, "i32")
        for name in inspect.signature(decode_kernels.project_pairs.fn).parameters
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compile_for_hopper(ASTSource, decode_kernels.project_pairs, signature, known, options)


def compile_token(formula: ExpertFormula = SILU) -> Any:
    """Compile the second product of one token, which begins beside the first."""
    tile = token_tile(4, 768, 1024)
    known = {
        "I": 768,
        "H": 1024,
        "FIRST_PARTS": 2,
        "PARTS": 1,
        "HAS_FIRST_BIAS": True,
        "HAS_BIAS": True,
        "FORMULA": kernel_formula(formula),
        "TOP_K": 4,
        "ROWS": tile.rows,
        "DEPTH_PART": tile.depth_part,
        "BLOCK_WIDTH": tile.width,
        "BLOCK_DEPTH": tile.depth,
        "PRECISION": "tf32",
        "FORMAT": "plain",
        "OVERLAPS": True,
        "scale_ptr": None,
    }
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
    shown = subprocess.run(
        [tools / "cuobjdump", "-res-usage", folder / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {int(size) for size in re.findall(r"STACK:(\d+)", shown.stdout)}


def report(folder: Path, which: str) -> dict[str, dict[str, Any]]:
    """Compile the products of a run, and return what is in them."""
    found = {}
    products = {"products": PRODUCTS, "more": MORE_PRODUCTS}.get(which, {})
    makers: dict[str, Any] = {
        name: partial(compile_product, **fields) for name, fields in products.items()
    }
    if which == "few tokens":
        makers = {**{form: partial(compile_codes, form) for form in CODES}, "token": compile_token}
    if which == "formulas":
        for name, formula in FORMULAS.items():
            makers[name] = partial(compile_product, formula, **FIRST)
            makers[f"token {name}"] = partial(compile_token, formula)
    words = (*WORDS, *OVERLAPS.values(), DECODES)
    for name, make in makers.items():
        compiled = make()
        found[name] = {
            "code": [word for word in words if word in compiled.asm["ptx"]],
            "shared": compiled.metadata.shared,
            "stack": sorted(stack_bytes(compiled.asm["cubin"], folder)),
        }
    return found


@cache
def reported(which: str) -> dict[str, dict[str, Any]]:
    # A process of its own: in this one Triton may be the interpreter.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, which]
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(shown.stdout)
    return found


def check_product(fields: dict[str, Any], found: dict[str, Any]) -> None:
    """Check that a product compiled to warpgroup products and fits into shared memory."""
    assert found["code"] == [*WORDS] if "gathers" in fields else [*WORDS][:-1]
    assert found["shared"] <= MOST_SHARED_BYTES
    assert found["stack"] == [0]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_compile_to_warpgroups_that_fit(name: str) -> None:
    check_product(PRODUCTS[name], reported("products")[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_PRODUCTS)
def test_products_of_other_layouts_compile_too(name: str) -> None:
    check_product(MORE_PRODUCTS[name], reported("more")[name])


@pytest.mark.long
@pytest.mark.parametrize("form", CODES)
def test_codes_are_decoded_four_at_once_in_registers(form: str) -> None:
    found = reported("few tokens")[form]
    assert {DECODES, OVERLAPS["codes"]} <= {*found["code"]}
    assert found["stack"] == [0]


@pytest.mark.long
@pytest.mark.parametrize("name", FORMULAS)
def test_each_formula_compiles_for_many_tokens_and_for_one(name: str) -> None:
    found = reported("formulas")
    check_product(FIRST, found[name])
    assert found[f"token {name}"]["stack"] == [0]


@pytest.mark.long
def test_one_token_waits_for_the_launch_beside_it() -> None:
    found = reported("few tokens")["token"]
    assert OVERLAPS["token"] in found["code"]
    assert found["stack"] == [0]


def test_no_kernel_asks_a_number_that_may_be_a_constant_for_its_type() -> None:
    # Triton makes a constant, which has no methods, of an argument that is 1, if not declared.
    sources = [path.read_text() for path in Path(hopper.__file__).parent.glob("*.py")]
    launched = set(re.findall(r"kernels\.(\w+)\[|hopper\.(\w+)\[", "".join(sources)))
    names = {name for pair in launched for name in pair if name}
    found = {
        node.name: node
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name in names
    }
    assert len(found) >= 14
    for name, node in found.items():
        shown = "".join(map(ast.unparse, node.decorator_list))
        for argument in node.args.args:
            number = argument.arg
            is_number = argument.annotation is None and not number.endswith(("_ptr", "_desc"))
            asks = re.search(rf"\b{number}\.(to|dtype)\b", ast.unparse(node))
            assert not is_number or not asks or number in shown, f"{name}: {number}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report(Path(sys.argv[1]), sys.argv[2])))
