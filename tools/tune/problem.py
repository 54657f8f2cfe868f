"""What is tuned: a rank's MoE layer, a routing, and the points that may be the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_moe.backends.nki import features, prefill
from neuron_moe.backends.nki.operands import kernel_formula
from neuron_moe.blocks import num_blocks
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.models.routing_trace import RoutingTrace
from neuron_moe.plan import LayerParts, Plan, Step
from neuron_moe.spec import DEFAULT_BLOCK_SIZE
from neuron_moe.tools.timing.plans import experts_alone, plan_of
from neuron_moe.tools.timing.useful_work import UsefulWork, layer_work
from neuron_moe.tuned import DECODE_MODES, TunedPlans, TunedPrefill
from nki_kernels.prefill import (
    BLOCK_SIZES,
    Expected,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    Search,
    estimate_us,
    make_config,
    rank_candidates,
)

Ints = NDArray[np.int32]
ROUTINGS = ("balanced", "uniform", "zipf:S")
WEIGHTS = ("auto", "plain", "by parts")
_SEED = 0


@dataclass(frozen=True, slots=True)
class Point:
    """A block size and a plan.

    Attributes:
        block_size: B.
        request: of the kernel.
        config: what the kernel is compiled for.
        estimated_us: by the cost model.
    """

    block_size: int
    request: PlanRequest
    config: PrefillConfig
    estimated_us: float


@dataclass(frozen=True, slots=True)
class Problem:
    """One length of prompts on one rank.

    Attributes:
        layer: of the rank.
        tokens: T.
        index_TK: [T, K] choices among the rank's experts, -1 for those of others.
        parts: of the layer, with plain weights and, where that was requested, laid out by parts.
    """

    layer: RankLayer
    tokens: int
    index_TK: Ints
    parts: tuple[LayerParts, ...]

    @classmethod
    def of(cls, layer: RankLayer, tokens: int, index_TK: Ints, weights: str) -> Problem:
        """Lay weights out as asked: plain, 'by parts', or auto for both."""
        plain = layer.parts(Step("prefill", tokens))
        laid_out = prefill.lay_out(plain) if weights != "plain" else None
        if laid_out is None:
            return cls(layer, tokens, index_TK, (plain,))
        copied = replace(plain, weights=replace(plain.weights, prefill_copy=laid_out))
        return cls(layer, tokens, index_TK, (plain, copied) if weights == "auto" else (copied,))

    def work(self) -> UsefulWork:
        """Return what the rank's experts have to compute."""
        return layer_work(experts_alone(self.parts[0]), self.index_TK)

    def plan(self, point: Point) -> Plan:
        """Return the plan of the experts for whoever loads the point from a file."""
        parts = experts_alone(self.parts[-1])
        tuning = replace(parts.tuning, tuned=TunedPlans(prefill=(self.tuned(point),)))
        return plan_of(replace(parts, tuning=tuning), self._step)

    @property
    def _step(self) -> Step:
        return Step("prefill", self.tokens)

    @property
    def tokens_E(self) -> NDArray[np.int64]:
        """[E] tokens of each expert of the rank."""
        chosen = self.index_TK[self.index_TK >= 0]
        return np.bincount(chosen, minlength=self.parts[0].weights.num_experts)

    def point(self, block_size: int, request: PlanRequest) -> Point:
        """Return a point.

        Raises:
            ValueError: no kernel has it.
        """
        parts = self.parts[-1]
        blocks = num_blocks(self.tokens, parts.spec.top_k, parts.weights.num_experts, block_size)
        scaling = "pre" if parts.spec.scales_input else "none"
        work = PrefillWork(
            block_size, blocks * block_size, self.tokens, parts.tuning.num_cores, scaling
        )
        sizes = prefill.expert_sizes(parts.weights)
        config = make_config(kernel_formula(parts.weights), sizes, work, request)
        pairs_T = (self.index_TK >= 0).sum(1)
        spread = np.bincount(pairs_T, minlength=parts.spec.top_k + 1).tolist()
        return Point(block_size, request, config, estimate_us(config, self.tokens_E, spread))

    def untuned(self) -> Point:
        """Return what the backend takes by itself, with the weights laid out alike."""
        best = prefill.rank(self.parts[-1], self._step)[0]
        return self.point(best.block_size, best.request)

    def default(self) -> Point:
        """Return what runs with NxD's default block size and plain weights."""
        best = prefill.rank(self.parts[0], self._step, DEFAULT_BLOCK_SIZE)[0]
        return self.point(DEFAULT_BLOCK_SIZE, best.request)

    def points(self, block_sizes: Sequence[int]) -> list[Point]:
        """Return the points by estimate, the fastest first; of those that do the same, one."""
        parts = self.parts[-1]
        expected = Expected(
            num_tokens=self.tokens,
            top_k=parts.spec.top_k,
            share=float(self.tokens_E.sum() / self.index_TK.size),
            routing=tuple(map(float, self.tokens_E)),
            num_cores=parts.tuning.num_cores,
            scaling="pre" if parts.spec.scales_input else "none",
        )
        formula, sizes = kernel_formula(parts.weights), prefill.expert_sizes(parts.weights)
        search = Search(block_sizes=tuple(block_sizes), largest_work_tile=8)
        found = [
            self.point(candidate.block_size, candidate.request)
            for request in self._requests()
            for candidate in rank_candidates(formula, sizes, expected, request, search)
        ]
        asked = features.prefill_request(parts.tuning)
        loop_plans = ("static",) if asked.loop_plan == "static" else ("dynamic", "static")
        found += [
            self.point(block_size, replace(asked, shard_plan="block", loop_plan=loop_plan))
            for block_size in block_sizes
            for loop_plan in loop_plans
        ]
        return one_of_each(sorted(found, key=lambda point: point.estimated_us))

    def _requests(self) -> list[PlanRequest]:
        asked = features.prefill_request(self.parts[0].tuning)
        requests = [asked] if self.parts[0].weights.prefill_copy is None else []
        copy = self.parts[-1].weights.prefill_copy
        if copy is not None:
            requests.append(replace(asked, weight_parts=copy.parts))
        return requests

    def tuned(self, point: Point) -> TunedPrefill:
        """Return a point as a file has it."""
        return prefill.tuned_of(point.config, self.tokens, point.block_size)


def one_of_each(points: Sequence[Point]) -> list[Point]:
    """Return points without those that cannot differ: other work tiles, and the same estimates."""
    found = dict[Any, Point]()
    for point in points:
        loop = point.config.loop
        does = (
            point.block_size,
            point.request.shard_plan,
            loop.is_sorted,
            loop.is_dynamic,
            loop.by_parts,
            loop.in_parts,
            loop.out_parts,
            loop.h_parts,
            loop.weight_buffers,
            point.estimated_us,
        )
        found.setdefault(does, point)
    return list(found.values())


def decode_plans(layer: RankLayer, tokens: int) -> dict[str, Any]:
    """Return the plan of the experts in each mode that they have for this layer."""
    step = Step("decode", tokens)
    parts = experts_alone(layer.parts(step))
    return {
        mode: plan_of(replace(parts, tuning=replace(parts.tuning, decode_mode=mode)), step)
        for mode in DECODE_MODES
    }


def draw_routing(
    routing: str, trace: RoutingTrace | None, tokens: int, num_experts: int, top_k: int
) -> Ints:
    """Return [T, K] choices among all experts.

    Args:
        routing: balanced (in turn), uniform (drawn alike) or zipf:S (the n-th expert has weight
            n**-S); not read with a trace.
        trace: recorded choices, of the layer with the largest skew; repeated where it is short.
        tokens: T.
        num_experts: E.
        top_k: K.

    Raises:
        ValueError: a name that is none of them, or a trace of another model.
    """
    if trace is not None:
        return _recorded(trace, tokens, num_experts, top_k)
    if routing == "balanced":
        index = np.arange(tokens)[:, None] * top_k + np.arange(top_k)
        return (index % num_experts).astype(np.int32)
    weight_E = np.ones(num_experts)
    name, _, exponent = routing.partition(":")
    rng = np.random.default_rng(_SEED)
    if name == "zipf":
        weight_E = rng.permutation(np.arange(1.0, num_experts + 1) ** -_exponent(routing, exponent))
    elif routing != "uniform":
        raise ValueError(f"--routing {routing}: must be one of {', '.join(ROUTINGS)}.")
    keys = np.log(weight_E) + rng.gumbel(size=(tokens, num_experts))
    return np.argsort(-keys, axis=1)[:, :top_k].astype(np.int32)


def _exponent(routing: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 10.0:
        raise ValueError(
            f"--routing {routing}: the exponent must be a number from 0 to 10, as in zipf:1."
        )
    return value


def _recorded(trace: RoutingTrace, tokens: int, num_experts: int, top_k: int) -> Ints:
    _, _, recorded_k = trace.expert_index_LTK.shape
    if (trace.num_experts, recorded_k) != (num_experts, top_k):
        raise ValueError(
            f"--trace: is of a model with {trace.num_experts} experts, {recorded_k} a token; this"
            f" one has {num_experts}, {top_k}. Record it with neuron-moe routing."
        )
    load_LE = trace.load_LE()
    layer = int((load_LE.max(1) / load_LE.mean(1)).argmax())
    index_TK = trace.expert_index_LTK[layer].astype(np.int32)
    return np.tile(index_TK, (-(-tokens // len(index_TK)), 1))[:tokens]


def check_block_sizes(block_sizes: Sequence[int]) -> None:
    """Raise ValueError for a block size that no kernel has."""
    for block_size in block_sizes:
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"--block-sizes {block_size}: must be of {BLOCK_SIZES}.")
