"""neuron-moe bench prefill: simulated time of a MoE layer's prefill, beside the vendor's kernels.

Ours is one launch: the blockwise kernel, a barrier, the weighted sum over a token's experts (left
out with one expert per token). The vendor's kernels run on the same simulated chip, from the user's
checkout, with the token blocks ready as for ours; the fastest of their variants and block sizes
counts. The roofline is computed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nki_sim
from neuron_moe.blocks import build_block_mapping
from neuron_moe.tools.console import format_table, print_json_line
from neuron_moe.tools.prefill_cases import (
    MODELS,
    ROUTINGS,
    TOKENS,
    Model,
    choose_experts,
    roofline_us,
)
from neuron_moe.tools.prefill_vendor import VARIANTS, launch_vendor
from neuron_moe.tools.vendor_cases.library import VendorLibrary
from nki_kernels.blockwise_moe import blockwise_moe
from nki_kernels.blockwise_options import make_config
from nki_kernels.combine import CombineDims, combine
from nki_kernels.plans import live_tiles, plan_visits
from nki_sim import SimOptions, TensorSpec
from nki_sim.sensitivity import compare

nki_sim.provide()

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

LIBRARY_VARIABLE = "NKI_LIBRARY_PATH"
BLOCK_SIZE = 128
FULL_TILES = 0.85  # share of live rows from which whole tiles are stored
OPTIONS = SimOptions(mode="indices", uninitialized="off", races="off", capacity="reorder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; times in microseconds, of one layer on one rank (two cores)."""

    model: str
    tp: int
    T: int
    routing: str
    ours_us: float
    vendor_us: float | None
    roofline_us: float
    speedup: float | None
    roofline_share: float
    ours_plan: str
    vendor_plan: str
    bottleneck: str
    survives: bool | None


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    library = VendorLibrary(options.library) if options.library else None
    rows = []
    for model, tokens, routing in _cases(options):
        started = time.monotonic()
        rows.append(measure(model, tokens, routing, library, options.sensitivity))
        gc.collect()
        print(_line(rows[-1], time.monotonic() - started), file=sys.stderr, flush=True)
    print(_table(rows))
    result = {"chip": "trn2", "kind": "simulated", **_summary(rows), "rows": _as_dicts(rows)}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print_json_line("bench prefill", **result)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="neuron-moe bench prefill", description=__doc__.split("\n")[0]
    )
    default = os.environ.get(LIBRARY_VARIABLE)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument(
        "--library",
        type=Path,
        default=default and Path(default),
        help=f"checkout of the vendor's library ({LIBRARY_VARIABLE}); without it only ours runs",
    )
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="also halve and double every assumed coefficient, and see who stays the faster",
    )
    parser.add_argument("--json", type=Path, help="write the result to this file too")
    options = parser.parse_args(argv)
    if any(tokens < 1 for tokens in options.tokens):
        raise ValueError(f"--tokens {options.tokens}: must be positive.")
    return options


def _cases(options: argparse.Namespace) -> Iterator[tuple[Model, int, str]]:
    for model in MODELS:
        if model.name in options.models:
            for tokens in options.tokens:
                for routing in options.routings:
                    yield model, tokens, routing


def measure(
    model: Model, tokens: int, routing: str, library: VendorLibrary | None, sensitivity: bool
) -> Row:
    """Simulate one case with our kernels and, with a library, the vendor's."""
    expert_index_TK = choose_experts(routing, tokens, model.E, model.K)
    ours, plan = launch_ours(model, expert_index_TK)
    timeline = ours.timeline
    bound_us = roofline_us(model, expert_index_TK)
    vendor_us, vendor_plan, survives = None, "", None
    if library is not None:
        vendor, vendor_plan = _fastest(library, model, expert_index_TK)
        if vendor is not None:
            vendor_us = vendor.total_us
            if sensitivity:
                survives = compare(timeline, vendor, ("ours", "vendor")).survives
    worst = timeline.critical_path()[0]
    return Row(
        model=model.name, tp=model.tp, T=tokens, routing=routing, ours_us=timeline.total_us,
        vendor_us=vendor_us, roofline_us=bound_us,
        speedup=vendor_us / timeline.total_us if vendor_us else None,
        roofline_share=bound_us / timeline.total_us, ours_plan=plan, vendor_plan=vendor_plan,
        bottleneck=f"{worst.op} {Path(worst.file).name}:{worst.line} {worst.share:.0%}",
        survives=survives,
    )  # fmt: skip


def _layer(
    operands: dict[str, Any], config: Any, slot_of_pair_TK: Any, affinities_TK: Any, dims: Any
) -> Any:
    """Run both kernels in one launch, the sum after all slots are written."""
    slots_PSH = blockwise_moe(config=config, **operands)
    if config.stores == "tokens":
        return slots_PSH
    nisa.core_barrier(slots_PSH, (0, 1))
    return combine(slots_PSH, slot_of_pair_TK, affinities_TK, dims)


def launch_ours(model: Model, expert_index_TK: Any) -> tuple[nki_sim.Run, str]:
    """Simulate our layer; return the run and the plan in words."""
    T, K = expert_index_TK.shape
    mapping = build_block_mapping(torch.from_numpy(expert_index_TK), model.E, BLOCK_SIZE)
    slots = mapping.token_position_to_id.numpy()
    tile, expert = live_tiles(slots, mapping.block_to_expert.numpy(), BLOCK_SIZE)
    fill = T * K / (len(tile) * BLOCK_SIZE)
    stores = "tokens" if K == 1 else "tiles" if fill >= FULL_TILES else "rows"
    config = make_config(
        H=model.H, I=model.I, E=model.E, block_size=BLOCK_SIZE, num_slots=len(slots),
        num_tokens=T, stores=stores, tiles_per_expert=len(tile) / model.E, **model.options,
    )  # fmt: skip
    plan = plan_visits(
        tile, expert, num_tiles=config.num_tiles, num_experts=model.E,
        num_lanes=config.shard.num_lanes, classes=config.loop.classes,
    )  # fmt: skip
    pair = mapping.pair_of_slot.numpy()
    slot_of_pair = np.zeros(T * K, np.int32)
    slot_of_pair[pair[pair >= 0]] = np.flatnonzero(pair >= 0)
    run = nki_sim.run(
        _layer, {**_operands(model, T, slots, config), **_plan_arguments(plan)}, config,
        slot_of_pair.reshape(T, K), TensorSpec((T, K), "float32"),
        CombineDims(nl.bfloat16, False), lnc=2, options=OPTIONS,
    )  # fmt: skip
    loop = config.loop
    words = f"visits of {loop.classes[0]}, {loop.slots} slots, {loop.in_parts}+{loop.out_parts} "
    return run, words + f"parts, turned by {loop.turns}, stores {stores}"


def _plan_arguments(plan: Any) -> dict[str, Any]:
    names = ("visit_expert", "visit_tile", "class_trips")
    return dict(zip(names, plan, strict=True))


def _operands(model: Model, T: int, slots: Any, config: Any) -> dict[str, Any]:
    """Return the kernel's tensors, floating-point ones without values."""
    E, H, I = model.E, model.H, model.I  # noqa: E741  the axis letters
    found: dict[str, Any] = {
        "hidden": TensorSpec((T, H), "bfloat16"),
        "gate_up": TensorSpec((E, H, 2 * I), "bfloat16"),
        "down": TensorSpec((E, I, H), "bfloat16"),
        "slots": slots,
    }
    if config.has_gate_up_bias:
        found["gate_up_bias"] = TensorSpec((E, 2 * I), "float32")
        found["down_bias"] = TensorSpec((E, H), "bfloat16")
    if config.scaling != "none":
        found["slot_scale"] = TensorSpec((len(slots),), "float32")
    return found


def _fastest(library: VendorLibrary, model: Model, expert_index_TK: Any) -> tuple[Any, str]:
    """Return the timeline of the vendor's fastest variant and its name; None if none runs."""
    best, name, failures = None, "", []
    for variant in VARIANTS:
        try:
            timeline = launch_vendor(library, model, expert_index_TK, variant, OPTIONS)
        except (nki_sim.NkiValidationError, AssertionError, NotImplementedError) as error:
            failures.append(f"{variant.name}: {type(error).__name__}")
            continue
        if best is None or timeline.total_ns < best.total_ns:
            best, name = timeline, variant.name
    return best, name or "; ".join(failures)


def _as_dicts(rows: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def _summary(rows: list[Row]) -> dict[str, Any]:
    """Return what the targets are about."""
    speedups = [row.speedup for row in rows if row.speedup is not None]
    long = [row.roofline_share for row in rows if max(TOKENS) == row.T]
    mean = math.exp(sum(math.log(s) for s in speedups) / len(speedups)) if speedups else None
    return {
        "geometric_mean_speedup": mean,
        "least_speedup": min(speedups, default=None),
        "least_roofline_share_at_8192": min(long, default=None),
    }


def _line(row: Row, seconds: float) -> str:
    vendor = "-" if row.vendor_us is None else f"{row.vendor_us:.0f}"
    return (
        f"{row.model} TP{row.tp} T={row.T} {row.routing}: ours {row.ours_us:.0f} us, vendor "
        f"{vendor} us ({row.vendor_plan}), roofline {row.roofline_us:.0f} us [{seconds:.0f} s]"
    )


def _table(rows: list[Row]) -> str:
    head = ["model", "T", "routing", "roofline us", "ours us", "share", "vendor us", "speed-up"]
    lines = [head]
    for row in rows:
        vendor = "-" if row.vendor_us is None else f"{row.vendor_us:,.0f}"
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        lines.append(
            [
                f"{row.model} TP{row.tp}",
                str(row.T),
                row.routing,
                f"{row.roofline_us:,.0f}",
                f"{row.ours_us:,.0f}",
                f"{row.roofline_share:.0%}",
                vendor,
                speedup,
            ]
        )
    return "trn2, one layer on one rank; ours and vendor simulated, roofline computed\n" + (
        format_table(lines, numbers_from=3)
    )
