"""What the kernels' configurations say, for random requests of published sizes.

    python -m tests.golden.settings --write     after a change that is meant to move plans

One outcome for each request: what was chosen and what every function of the modules below answers
that takes the configuration alone, or the sentence of the refusal. The estimates by which buffers
are chosen show too, so a run that only moved these is recognised by `--show NUMBER`.
"""

import argparse
import functools
import inspect
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from nki_kernels.common.formula import limits
from nki_kernels.decode import DecodeSizes, layer_config, make_decode_config
from nki_kernels.decode import config as decode_config
from nki_kernels.decode import items as decode_items
from nki_kernels.decode import layout as decode_layout
from nki_kernels.decode import memory as decode_memory
from nki_kernels.decode.layer_config import make_layer_config
from nki_kernels.prefill import config as prefill_config
from nki_kernels.prefill import make_config as make_prefill
from nki_kernels.prefill import memory as prefill_memory
from nki_kernels.prefill import operands as prefill_operands
from tests.golden import digests
from tests.nki_kernels.decode.cases import records as decode_records
from tests.nki_kernels.decode.layer_cases import FAMILIES, Case
from tests.nki_kernels.prefill.cases import records as prefill_records

FILE = Path(__file__).with_suffix(".json")
COUNT = 300  # requests of each kernel
HIDDEN = (64, 320, 1024, 2048, 2880, 4096, 5120, 6144, 7168, 8192, 16384, 96, 2000)
WIDTHS = (8, 45, 64, 96, 128, 180, 256, 360, 512, 768, 1024, 1408, 2048, 2880, 8192, 20000)
BYTES = ("bfloat16", "bfloat16", "float8_e4m3", "float8_e5m2")
WORDS = ("float4_e2m1fn_x4", "float8_e4m3fn_x4", "float8_e5m2_x4")
CLAMPED = {"gate_limits": limits(None, 7.0), "up_limits": limits(-7.0, 7.0), "up_offset": 1.0}
LIMITED = [
    {"gate_limits": limits(*pair)}
    for pair in ((-2.0, None), (0.5, None), (None, -0.5), (None, 0.5))
]
FORMULAS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    *LIMITED,
    CLAMPED,
    {"activation": "relu", "has_gate": False},
)


def decode(rng: random.Random) -> tuple[Any, ...]:
    """Return sizes, formula, weights and request of a step."""
    is_mx = rng.random() < 0.25
    biases, E = rng.random() < 0.4, rng.choice((1, 2, 4, 16, 32, 128, 512))
    options: dict[str, Any] = {
        "layout": "packed" if is_mx else rng.choice(("ehi", "packed")),
        "format": rng.choice(WORDS if is_mx else BYTES),
        "chip": "trn3" if is_mx else "trn2",
        "mode": rng.choice(("auto", "auto", "selective", "all")),
        "shard": rng.choice(("auto", "auto", "experts", "intermediate")),
        "scaling": rng.choice(("post", "post", "pre", "none")),
        "output_dtype": rng.choice(("float32", "bfloat16")),
        "chunks": rng.choice((0, 0, 0, 1, 2, 4)),
        "parts": rng.choice((0, 0, 0, 1, 2, 4)),
        "weight_buffers": rng.choice((0, 0, 0, 1, 2, 4)),
        "has_gate_up_bias": biases,
        "has_down_bias": biases,
    } | rng.choice(FORMULAS)
    if options["format"].startswith("float8") and not is_mx and rng.random() < 0.7:
        options |= {"has_scales": True, "down_scale": rng.choice(("channel", "none", "expert"))}
    sizes = DecodeSizes(
        rng.choice((1, 2, 4, 5, 16, 33, 64, 128, 129, 200, 256)),
        rng.choice(HIDDEN),
        rng.choice(WIDTHS),
        E,
        rng.choice((1, 1, 2, 4, 8, 16)),
        E * rng.choice((1, 1, 2, 4)),
        rng.choice((1, 2, 2)),
    )
    return sizes, *decode_records(options)


def layer(rng: random.Random) -> tuple[Any, ...]:
    """Return what `make_layer_config` takes for a layer in one launch."""
    sizes, formula, weights, request = decode(rng)
    options: dict[str, Any] = {
        "shared_width": rng.choice((0, 0, 64, 300, 2048)),
        "returns_routing": rng.random() < 0.5,
        "has_residual": rng.random() < 0.5,
    }
    options["has_shared_gate"] = options["shared_width"] > 0 and rng.random() < 0.5
    options["shared_format"] = rng.choice(BYTES)
    case = Case(rng.choice(list(FAMILIES)), 1, options=options, has_norm=rng.random() < 0.7)
    sizes = replace(sizes, K=case.router.top_k)
    return sizes, case.router, formula, case.form, weights, request


def prefill(rng: random.Random) -> tuple[Any, ...]:
    """Return formula, sizes, work and request of a prefill."""
    is_mx, biases = rng.random() < 0.2, rng.random() < 0.4
    stores, block = rng.choice(("rows", "rows", "tiles")), rng.choice((32, 64, 128, 256))
    options: dict[str, Any] = {
        "H": rng.choice(HIDDEN),
        "I": rng.choice(WIDTHS),
        "E": rng.choice((1, 2, 8, 16, 32, 128)),
        "block_size": block,
        "num_slots": block * rng.choice((1, 2, 8, 33, 128, 300)),
        "num_tokens": rng.choice((1, 17, 128, 1024, 2048, 8192)),
        "stores": stores,
        "shard_plan": rng.choice(("balanced", "balanced", "block", "intermediate", "hidden")),
        "loop_plan": rng.choice(("sorted", "sorted", "dynamic", "static")),
        "in_halves": rng.random() < 0.2,
        "skip_weights": rng.random() < 0.2,
        "num_cores": rng.choice((1, 2, 2)),
        "missing": rng.choice(("skip", "skip", "spare")),
        "iterations": rng.choice(("ahead", "alone")),
        "scaling": rng.choice(("none", "none", "pre", "post")),
        "largest_work_tile": rng.choice((1, 2, 4)),
        "chip": "trn3" if is_mx else "trn2",
        "weight_format": rng.choice(WORDS if is_mx else BYTES),
        "weight_parts": rng.choice((None, None, None, (1, 1), (1, 2), (2, 1), (2, 4), (0, 1))),
        "has_gate_up_bias": biases,
        "has_down_bias": biases,
    } | rng.choice(FORMULAS)
    if options["weight_format"].startswith("float8") and not is_mx:
        options["has_scales"] = rng.random() < 0.7
    return prefill_records(**options)


DECODE = (decode_config, decode_items, decode_layout, decode_memory)
KERNELS: dict[str, tuple[Any, Callable[..., Any], tuple[ModuleType, ...]]] = {
    "decode": (decode, make_decode_config, DECODE),
    "layer": (layer, make_layer_config, (layer_config,)),
    "prefill": (prefill, make_prefill, (prefill_config, prefill_memory, prefill_operands)),
}


@functools.cache
def questions(modules: tuple[ModuleType, ...]) -> list[Callable[[Any], Any]]:
    """Return the functions of modules that take a configuration alone."""
    found = [
        function
        for module in modules
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and list(inspect.signature(function).parameters) == ["config"]
    ]
    assert found
    return found


def answer(question: Callable[[Any], Any], config: Any) -> str:
    """Return what a function says of a configuration, or what it raises."""
    try:
        return f"{question.__name__}: {question(config)}"
    except (ValueError, ZeroDivisionError, AssertionError) as error:
        return f"{question.__name__}: {type(error).__name__} {error}"


def outcome(kernel: str, number: int) -> str:
    """Return what becomes of a request."""
    draw, make, modules = KERNELS[kernel]
    try:
        config = make(*draw(random.Random(number)))
    except ValueError as error:
        return str(error)
    chosen = re.sub("reason='[^']*'", "", str(config))  # a sentence with estimates
    return "\n".join([chosen, *(answer(question, config) for question in questions(modules))])


def outcomes(kernel: str, count: int = COUNT) -> Iterator[str]:
    """Give what is kept of the outcomes of requests."""
    for number in range(count):
        yield digests.digits(outcome(kernel, number))


def main() -> None:
    """Write the file, or show one outcome."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.settings", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write what comes of all requests")
    parser.add_argument("--show", type=int, help="print what comes of one request of each kernel")
    args = parser.parse_args()
    if args.write:
        digests.write(FILE, {kernel: list(outcomes(kernel)) for kernel in KERNELS})
    for kernel in KERNELS if args.show is not None else ():
        print(outcome(kernel, args.show))  # noqa: T201


if __name__ == "__main__":
    main()
