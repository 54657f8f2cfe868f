"""Twelve published times of a norm and of whole models, which the clock has met before.

The vendor's own kernels run at the published sizes, from the user's checkout. What of a model is
not such a kernel is added by formula: the weights of a layer that are not experts at the HBM rate
or their multiplications at the peak, whichever takes longer, and two all-reduces. That leaves out
attention itself, recurrences, and whatever the compiler adds. Where it is not published which
experts the tokens chose, the low end has the fewest they can have touched and the high end the
most. A kernel inside a model is no program of its own: nothing is added for a launch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import nki_sim
from lab.bench.anchors.report import Row
from lab.bench.decode.cases import DecodeCase
from lab.bench.decode.vendor import launch_vendor as launch_decode
from lab.bench.prefill.vendor import DEPLOYED, Variant, launch_vendor
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.timing.layers import (
    BF16_BYTES,
    HBM_BYTES_PER_US,
    Model,
    choose_experts,
)
from nki_sim import SimOptions, TensorSpec
from nki_sim.hardware import TRN2
from nki_sim.time.costs import price_meeting
from nki_sim.time.estimate import estimate
from nki_sim.time.prepare import TimelineOptions
from nki_sim.trace import SyncFacts

CORES = 2
OPTIONS = SimOptions(
    nki="0.6", mode="indices", uninitialized="off", races="off", capacity="reorder"
)
FLOPS_PER_US = 157.3e6  # bf16, two NeuronCore-v3 (architecture guide)

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

    @property
    def model(self) -> Model:
        """Return the routed experts as the prefill benchmark has them."""
        sizes = {name: getattr(self, name) for name in ("tp", "H", "I", "E", "K")}
        return Model(name="", options={}, vendor={}, **sizes)

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


Limit = Literal["total", "between", "at most"]
Launch = Callable[[VendorLibrary], nki_sim.Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A published time and how to get at it.

    Attributes:
        name: what was run.
        source: the public document that states the time.
        published_us: the time.
        launch: simulates the vendor's kernel; the whole is `repeat` times it and `rest_us`.
        most: the same with the most experts that the tokens can have touched, where that is not
            published; then `launch` is with the fewest.
        repeat: how often the kernel runs.
        rest_us: all of what is not the kernel, by formula.
        reuse: where tensors are that have no address, if a document says so (`TimelineOptions`).
        limit: "total": the simulated whole is to be the published one; "between": the routing is
            not known; "at most": the kernel is only a part of what was published.
        reason: why a time may be outside, where that is known.
    """

    name: str
    source: str
    published_us: float
    launch: Launch
    most: Launch | None = None
    repeat: int = 1
    rest_us: float = 0.0
    reuse: Literal["late", "early"] = "late"
    limit: Limit = "total"
    reason: str = ""


SHARD_ON_I = Variant("shard_on_i_hybrid", DEPLOYED.block_size)


def prefill_kernel(variant: Variant, layers: Layers, bucket: int, tokens: int) -> Launch:
    """Return a launch of a blockwise kernel with blocks for a whole bucket.

    Args:
        variant: sharded on H, which runs every block, or on I, which stops after those in use.
        layers: the sizes.
        bucket: tokens the graph is compiled for.
        tokens: those that are routed; their experts are drawn alike.
    """

    def launch(library: VendorLibrary) -> nki_sim.Run:
        choices = choose_experts("uniform", tokens, layers.E, layers.K)
        return launch_vendor(library, layers.model, choices, variant, OPTIONS, bucket)

    return launch


def decode_kernel(layers: Layers) -> Launch:
    """Return a launch of the decode kernel for one token, which reads the experts it chose."""

    def launch(library: VendorLibrary) -> nki_sim.Run:
        case = DecodeCase(
            kernel="decode_moe", model=layers.model, B=1, routing="uniform", format="bf16"
        )
        return launch_decode(library, case, "selective", OPTIONS)

    return launch


def norm_kernel(rows: int, columns: int) -> Launch:
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


# Read off profile_overall.png: the first trigger stands at 27.2 us of the profile's own time; the
# loads of the later core end 3.1 us after those of the other one. Of the row of factors, which all
# tiles load again, the page says that the compiler may cut it into pieces of 4 bytes.
BEFORE_FIRST_TRIGGER_US = 27.2
PIECES_US_PER_COLUMN = 3.1 / 16384
TILE_ROWS = 128
_PROFILE = (
    "its Vector and Scalar bars are met; what a load of the later core takes longer is guessed"
)
_TARGETS = (
    "the page calls these times targets and advises a stack allocator, under which a tile waits for"
    " the one before; on the stack PSUM, too, gives the published time per tile, PSUM banks in turn"
    " one a fifth shorter"
)
_PART = "attention, recurrence, sampling and launches are not in the sum"
_ROUTING = (
    "the model passes no padding mask to its experts (modeling_qwen35.py: self.moe(hidden_states)),"
    " so padding is routed, too: at least the experts of the tokens, at most those of the bucket"
)


def _norm(rows: int, columns: int, published_us: float) -> Anchor:
    tiles = -(-rows // (CORES * TILE_ROWS))
    return Anchor(
        name=f"quantising norm {rows} x {columns}",
        source=f"{NORM} (table of sequence lengths)",
        published_us=published_us,
        launch=norm_kernel(rows, columns),
        rest_us=BEFORE_FIRST_TRIGGER_US + tiles * columns * PIECES_US_PER_COLUMN,
        reuse="early",
        reason=_TARGETS,
    )


def _prefill(
    name: str, source: str, ttft_ms: float, layers: Layers, variant: Variant, tokens: int
) -> Anchor:
    """Return the time of a first token, whose graph is compiled for 512 tokens."""
    is_drawn = tokens < layers.E  # with fewer tokens some experts have no block
    return Anchor(
        name=name,
        source=f"{CONTRIB}/{source}",
        published_us=ttft_ms * 1e3,
        launch=prefill_kernel(variant, layers, 512, tokens),
        most=prefill_kernel(variant, layers, 512, 512) if is_drawn else None,
        repeat=layers.count,
        rest_us=layers.count * layers.rest_us(512),
        limit="between" if is_drawn else "total",
        reason=_ROUTING if is_drawn else _PART,
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


_QWEN = "Qwen3.5-35B-A3B/README.md"
ANCHORS = (
    Anchor(
        name="quantising norm 160 x 16384, from trigger to end",
        source=f"{NORM} (profile_overall.png)",
        published_us=86.0,
        launch=norm_kernel(160, 16384),
        rest_us=16384 * PIECES_US_PER_COLUMN,
        reason=_PROFILE,
    ),
    _norm(2048, 8192, 458.2),
    _norm(32768, 8192, 6287.0),
    _norm(2048, 16384, 866.81),
    _norm(32768, 16384, 13214.4),
    _prefill("Qwen3.5-35B-A3B TP8 TTFT, shard on H", _QWEN, 567.0, QWEN35, DEPLOYED, 512),
    _prefill(
        "Qwen3.5-35B-A3B TP8 TTFT, shard on I, 16 tokens", _QWEN, 480.0, QWEN35, SHARD_ON_I, 16
    ),
    _prefill(
        "Qwen3.5-35B-A3B TP8 TTFT, shard on I, 64 tokens", _QWEN, 575.5, QWEN35, SHARD_ON_I, 64
    ),
    _prefill(
        "Qwen3.5-35B-A3B TP8 TTFT, shard on I, 256 tokens", _QWEN, 667.1, QWEN35, SHARD_ON_I, 256
    ),
    _prefill(
        "DeepSeek-V3 TP64 TTFT, 256 tokens",
        "DeepSeek-V3/README.md",
        1667.0,
        DEEPSEEK,
        DEPLOYED,
        256,
    ),
    _decode("Qwen3.5-35B-A3B TP8 TPOT", _QWEN, 7.7, QWEN35),
    _decode("DeepSeek-V3 TP64 TPOT", "DeepSeek-V3/README.md", 20.5, DEEPSEEK),
)
"""The published times."""


FAMILY = "models and norms"
_LIMITS = {"total": "", "between": "the routing is not published", "at most": "an upper bound"}


def measure(anchor: Anchor, library: VendorLibrary) -> Row:
    """Simulate an anchor's kernel and estimate the whole."""
    options = TimelineOptions(reuse=anchor.reuse)
    launches = [anchor.launch, *([anchor.most] if anchor.most else [])]
    ends = []
    for launch in launches:
        ends.append(estimate(launch(library).trace, TRN2, options, is_alone=False))
        gc.collect()  # tiles in circles of references count as alive in what runs next
    likely_us = (ends[0].us * ends[-1].us) ** 0.5
    low, us, high = (
        anchor.repeat * one + anchor.rest_us
        for one in (ends[0].low_us, likely_us, ends[-1].high_us)
    )
    return Row(
        kernel=anchor.name,
        family=FAMILY,
        source=anchor.source,
        chip_us=anchor.published_us,
        low_us=low,
        estimate_us=us,
        high_us=high,
        half="fitted",
        doubt=_LIMITS[anchor.limit],
    )
