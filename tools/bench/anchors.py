"""neuron-moe bench anchors: published times of the chip beside what the simulator says.

An anchor is a time that somebody published for Trainium 2 with what was run. The vendor's own
kernels run at those sizes, from the user's checkout, and are timed in both corners of what is left
open about order and loops (nki_sim/time/schedule_model.py). What of a model is not such a kernel is
added by formula: the weights of a layer that are not experts at the HBM rate or their
multiplications at the peak, whichever takes longer, and two all-reduces. That leaves out attention
itself, recurrences, and whatever the compiler adds: a lower bound, which is shown beside.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import nki_sim
from neuron_moe.tools.bench.comparison.layers import BF16_BYTES, HBM_BYTES_PER_US, choose_experts
from neuron_moe.tools.check.vendor_cases.block_mapping import num_blocks
from neuron_moe.tools.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary
from neuron_moe.tools.check.vendor_cases.moe_prefill import KERNELS
from neuron_moe.tools.console import format_table, print_json_line
from nki_sim import SimOptions, TensorSpec
from nki_sim.hardware import TRN2
from nki_sim.time.costs import price_meeting
from nki_sim.time.prepare import TimelineOptions
from nki_sim.time.timeline import schedule, schedule_corners
from nki_sim.trace import SyncFacts

CORES = 2
OPTIONS = SimOptions(mode="indices", uninitialized="off", races="off", capacity="reorder")
FLOPS_PER_US = 157.3e6  # bf16, two NeuronCore-v3 (architecture guide)
BLOCK_SIZE = 512  # NxD's default

CONTRIB = "aws-neuron/neuronx-distributed-inference contrib/models"
NORM = "aws-neuron/aws-neuron-sdk nki/library/specs/design-rmsnorm-quant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The MoE layers of a model on one rank.

    Attributes:
        count: how many; layers without experts are left out.
        tp: ranks of tensor parallelism.
        H, I, E, K: hidden size, intermediate size of the rank, experts, experts per token.
        other_weights: parameters of a layer on one rank that are not routed experts.
    """

    count: int
    tp: int
    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    K: int
    other_weights: int

    def rest_us(self, tokens: int) -> float:
        """Return the least time of what of a layer is not routed experts (computed)."""
        reads = self.other_weights * BF16_BYTES / HBM_BYTES_PER_US
        multiplies = 2 * tokens * self.other_weights / FLOPS_PER_US
        row_bytes = tokens * self.H * BF16_BYTES
        reduce = SyncFacts("all_reduce", (), 1, row_bytes, ranks=self.tp)
        return max(reads, multiplies) + 2 * price_meeting(reduce, TRN2).duration_ns / 1e3


# Attention: MLA with its projections of rank 1,536 and 512 on every rank, 2 of 128 heads; shared
# expert and router.
DEEPSEEK = Layers(count=58, tp=64, H=7168, I=32, E=256, K=8, other_weights=20_300_000)
# Linear attention of 30 layers as for all, shared expert, router.
QWEN35 = Layers(count=40, tp=8, H=2048, I=64, E=256, K=8, other_weights=5_100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A published time and how to get at it.

    Attributes:
        name: what was run.
        source: the public document that states the time.
        published_us: the time.
        launch: simulates the vendor's kernel; the whole is `repeat` times it and `rest_us`.
        repeat: how often the kernel runs.
        rest_us: all of what is not the kernel, by formula.
        limit: "total": the simulated whole is to be the published one; "at most": it is only a part
            of it and has to be below.
        reason: why a time may lie outside, where that is known.
    """

    name: str
    source: str
    published_us: float
    launch: Callable[[VendorLibrary], nki_sim.Run]
    repeat: int = 1
    rest_us: float = 0.0
    limit: Literal["total", "at most"] = "total"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An anchor beside its simulated times, in microseconds.

    `early_us` is the in-order time with tiles placed as low as possible (`reuse="early"`): public
    profiles show both placements. `lies` is inside, above or below the corners; `better` the corner
    with the smaller error.
    """

    name: str
    source: str
    limit: str
    published_us: float
    vendor_us: float
    in_order_us: float
    early_us: float
    rest_us: float
    lies: str
    better: str
    error: float
    reason: str


def prefill_kernel(
    kernel: str, layers: Layers, bucket: int, tokens: int
) -> Callable[[VendorLibrary], nki_sim.Run]:
    """Return a launch of a blockwise kernel with blocks for a whole bucket.

    Args:
        kernel: shard_on_h, or shard_on_i_hybrid with every block in the dynamic loop.
        layers: the sizes.
        bucket: tokens the graph is compiled for.
        tokens: those that hold something; their experts are drawn alike.
    """

    def launch(library: VendorLibrary) -> nki_sim.Run:
        H, I, E = layers.H, layers.I, layers.E  # noqa: E741  the axis letters
        blocks = num_blocks(bucket, layers.K, E, BLOCK_SIZE)
        ids, experts, live = _blocks(choose_experts("uniform", tokens, E, layers.K), E, blocks)
        is_dynamic = kernel == "shard_on_i_hybrid"
        module, name, _ = KERNELS[kernel]
        found: dict[str, Any] = {
            "hidden_states": TensorSpec((bucket, H), "bfloat16"),
            "expert_affinities_masked": TensorSpec((bucket * E, 1), "bfloat16"),
            "gate_up_proj_weight": TensorSpec((E, H, 2, I), "bfloat16"),
            "down_proj_weight": TensorSpec((E, I, H), "bfloat16"),
            "block_size": BLOCK_SIZE,
            "token_position_to_id": ids,
            "block_to_expert": experts if is_dynamic else experts.reshape(-1, 1),
            "skip_dma": library.get(module, "SkipMode")(True, False),
            "compute_dtype": library.nl.bfloat16,
            "is_tensor_update_accumulating": True,
            "expert_affinities_scaling_mode": library.enum("ExpertAffinityScaleMode", "POST_SCALE"),
        }
        if is_dynamic:
            found["activation_function"] = library.enum("ActFnType", "SiLU")
            found["conditions"] = (np.arange(blocks + 1) < live).astype(np.int32)
            found["num_static_block"] = 0
        return _run(library.get(module, name), **found)

    return launch


def _blocks(expert_index_TK: Any, E: int, blocks: int) -> tuple[Any, Any, int]:
    """Return token ids of the slots, experts of the blocks, and the number of live blocks."""
    T, K = expert_index_TK.shape
    ids = np.full((blocks, BLOCK_SIZE), -1, np.int32)
    experts = np.full(blocks, E - 1, np.int32)
    token, flat, live = np.repeat(np.arange(T, dtype=np.int32), K), expert_index_TK.reshape(-1), 0
    for expert in range(E):
        members = token[flat == expert]
        for first in range(0, len(members), BLOCK_SIZE):
            part = members[first : first + BLOCK_SIZE]
            ids[live, : len(part)], experts[live] = part, expert
            live += 1
    return ids.reshape(-1), experts, live


def decode_kernel(layers: Layers) -> Callable[[VendorLibrary], nki_sim.Run]:
    """Return a launch of the decode kernel for one token, which reads the experts it chose."""

    def launch(library: VendorLibrary) -> nki_sim.Run:
        H, I, E = layers.H, layers.I, layers.E  # noqa: E741  the axis letters
        return _run(
            library.get("core.moe.moe_tkg.moe_tkg", "moe_tkg"),
            hidden_input=TensorSpec((1, H), "bfloat16"),
            expert_gate_up_weights=TensorSpec((E, H, 2, I), "bfloat16"),
            expert_down_weights=TensorSpec((E, I, H), "bfloat16"),
            expert_affinities=TensorSpec((1, E), "float32"),
            expert_index=choose_experts("uniform", 1, E, layers.K),
            is_all_expert=False,
            expert_affinities_scaling_mode=library.enum("ExpertAffinityScaleMode", "POST_SCALE"),
            activation_fn=library.enum("ActFnType", "SiLU"),
        )

    return launch


def norm_kernel(rows: int, columns: int) -> Callable[[VendorLibrary], nki_sim.Run]:
    """Return a launch of the norm that quantises to fp8."""

    def launch(library: VendorLibrary) -> nki_sim.Run:
        module = "core.rmsnorm.rmsnorm_quant"
        return nki_sim.run(
            library.get(module, "rmsnorm_quant_kernel"),
            TensorSpec((1, rows, columns), "bfloat16"),
            TensorSpec((1, columns), "bfloat16"),
            library.get(module, "RmsNormQuantKernelArgs")(),
            lnc=CORES,
            options=OPTIONS,
        )

    return launch


def _run(kernel: Any, **arguments: Any) -> nki_sim.Run:
    with contextlib.redirect_stdout(io.StringIO()):  # the library reports its use of memory
        return nki_sim.run(kernel, lnc=CORES, options=OPTIONS, **arguments)


_TILES = (
    "its tiles follow one another without overlap (profile), as if each took the place of the one "
    "before; the column of early placement has that"
)
_PART = "attention, recurrence, sampling and launches are not in the sum"


def _norm(rows: int, columns: int, published_us: float, where: str) -> Anchor:
    return Anchor(
        name=f"quantising norm {rows} x {columns}",
        source=f"{NORM} ({where})",
        published_us=published_us,
        launch=norm_kernel(rows, columns),
        reason=_TILES,
    )


def _prefill(
    name: str, source: str, ttft_ms: float, layers: Layers, kernel: str, tokens: int
) -> Anchor:
    return Anchor(
        name=name,
        source=f"{CONTRIB}/{source}",
        published_us=ttft_ms * 1e3,
        launch=prefill_kernel(kernel, layers, 512, tokens),
        repeat=layers.count,
        rest_us=layers.count * layers.rest_us(512),
        reason=_PART,
    )


def _decode(name: str, source: str, tpot_ms: float, layers: Layers) -> Anchor:
    return Anchor(
        name=name,
        source=f"{CONTRIB}/{source}",
        published_us=tpot_ms * 1e3,
        launch=decode_kernel(layers),
        repeat=layers.count,
        rest_us=layers.count * layers.rest_us(1),
        limit="at most",
        reason=_PART,
    )


ANCHORS = (
    _norm(160, 16384, 86.0, "profile_overall.png"),
    _norm(2048, 8192, 458.2, "table of sequence lengths"),
    _norm(2048, 16384, 866.81, "table of sequence lengths"),
    _prefill(
        "Qwen3.5-35B-A3B TP8 TTFT, shard on H", "Qwen3.5-35B-A3B, PR 180", 567.0, QWEN35,
        "shard_on_h", 512,
    ),
    _prefill(
        "Qwen3.5-35B-A3B TP8 TTFT, shard on I, 256 tokens", "Qwen3.5-35B-A3B, PR 180", 667.0,
        QWEN35, "shard_on_i_hybrid", 256,
    ),
    _prefill(
        "DeepSeek-V3 TP64 TTFT, 256 tokens", "DeepSeek-V3/README.md", 1667.0, DEEPSEEK,
        "shard_on_h", 256,
    ),
    _decode("Qwen3.5-35B-A3B TP8 TPOT", "Qwen3.5-35B-A3B, PR 180", 7.7, QWEN35),
    _decode("DeepSeek-V3 TP64 TPOT", "DeepSeek-V3/README.md", 20.5, DEEPSEEK),
)  # fmt: skip
"""The published times."""


def measure(anchor: Anchor, library: VendorLibrary) -> Outcome:
    """Simulate an anchor's kernel once and time it in both corners."""
    trace = anchor.launch(library).trace
    corners = schedule_corners(trace)
    early = schedule(trace, TRN2, TimelineOptions(reuse="early"))
    vendor, in_order, placed_early = (
        anchor.repeat * timeline.total_us + anchor.rest_us
        for timeline in (corners["vendor"], corners["in-order"], early)
    )
    lies, better, error = judge(anchor.limit, anchor.published_us, vendor, in_order)
    return Outcome(
        name=anchor.name,
        source=anchor.source,
        limit=anchor.limit,
        published_us=anchor.published_us,
        vendor_us=vendor,
        in_order_us=in_order,
        early_us=placed_early,
        rest_us=anchor.rest_us,
        lies=lies,
        better=better,
        error=error,
        reason="" if lies == "inside" else anchor.reason,
    )


def judge(
    limit: str, published_us: float, vendor_us: float, in_order_us: float
) -> tuple[str, str, float]:
    """Tell where a published time lies, which corner is nearer, and by how much that one is off.

    Returns:
        "inside", "above" or "below" (the corners; of an upper bound "inside" where a corner keeps
        it); the corner; its time over the published one, less one.
    """
    times = {"vendor": vendor_us, "in-order": in_order_us}
    errors = {corner: us / published_us - 1.0 for corner, us in times.items()}
    better = min(errors, key=lambda corner: abs(errors[corner]))
    low, high = sorted((vendor_us, in_order_us))
    if limit == "at most":
        return ("inside" if low <= published_us else "below"), better, errors[better]
    lies = "below" if published_us < low else "above" if published_us > high else "inside"
    return lies, better, errors[better]


def mean_error(outcomes: Sequence[Outcome]) -> float:
    """Return the mean size of the error of the nearer corner, of those that are no upper bounds."""
    errors = [abs(outcome.error) for outcome in outcomes if outcome.limit == "total"]
    return sum(errors) / len(errors) if errors else 0.0


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of the anchors; times in milliseconds."""
    head = ["published time", "ms", "vendor corner", "in order", "placed early", "rest", "lies"]
    lines = [[*head, "nearer", "error"]]
    for outcome in outcomes:
        mark = "<= " if outcome.limit == "at most" else ""
        times = (outcome.vendor_us, outcome.in_order_us, outcome.early_us, outcome.rest_us)
        lines.append(
            [
                outcome.name,
                f"{mark}{outcome.published_us / 1e3:,.3f}",
                *(f"{us / 1e3:,.3f}" for us in times),
                outcome.lies,
                outcome.better,
                f"{outcome.error:+.0%}",
            ]
        )
    notes = [f"{o.name}: {o.source}" + (f"; {o.reason}" if o.reason else "") for o in outcomes]
    mean = f"mean error of the nearer corner: {mean_error(outcomes):.1%}"
    return "\n".join([format_table(lines, numbers_from=1), mean, *notes])


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 0, or 1 where a corner is contradicted without a reason."""
    parser = argparse.ArgumentParser(
        prog="neuron-moe bench anchors", description=__doc__.split("\n")[0]
    )
    default = os.environ.get(LIBRARY_VARIABLE)
    parser.add_argument("--library", type=Path, default=default and Path(default))
    parser.add_argument("--only", nargs="+", help="anchors with one of these words in their name")
    options = parser.parse_args(argv)
    if options.library is None:
        raise ValueError(f"--library: name a checkout of the vendor's, or set {LIBRARY_VARIABLE}.")
    library = VendorLibrary(options.library)
    chosen = [a for a in ANCHORS if not options.only or any(w in a.name for w in options.only)]
    outcomes = []
    for anchor in chosen:
        outcomes.append(measure(anchor, library))
        gc.collect()
    print("trn2; kernels simulated, the rest of a layer computed")
    print(table(outcomes))
    print_json_line(
        "bench anchors",
        chip="trn2",
        kind="simulated",
        mean_error=mean_error(outcomes),
        rows=[asdict(outcome) for outcome in outcomes],
    )
    return int(any(outcome.lies != "inside" and not outcome.reason for outcome in outcomes))
