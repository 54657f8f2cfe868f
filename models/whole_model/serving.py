"""How fast a whole model serves, and how much of it, for every layout of a machine: computed.

Ranks are cut into replicas of the model (dp); those of a replica split experts by tp x ep and
everything else by both. A step takes what `dense_times` says, and for each MoE layer router, routed
and shared experts by the planner's `layer_cost`, on the busiest rank of a drawn routing. Both are
bounds from below, so layouts are ranked, not promised.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, NamedTuple

from torch import Tensor, nn

from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.models.sizes import Spread
from neuron_moe.models.whole_model.dense_time import StepWork, dense_times
from neuron_moe.models.whole_model.memory import ServingLoad, rank_memory
from neuron_moe.models.whole_model.planned import PlannedModel
from neuron_moe.parallel.config import ParallelConfig, divisors
from neuron_moe.planner.coefficients import Machine
from neuron_moe.planner.layer_cost import RoutedTokens, layer_cost
from neuron_moe.planner.sizes import ModelSizes

TARGETS = ("throughput", "ttft", "tpot")
AS_GOOD = 1.02  # times within this factor count as ties
_MOST_TIES = 3
_PROMPT_TOKENS = 8192  # where nobody says
_ANSWER_TOKENS = 1024  # of a sequence behind its prompt, where nobody says


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served.

    Args:
        prompt: tokens of a prompt.
        context: positions of a sequence, prompt and answer.
        batch: sequences that the machine decodes at once.
        expert_format: of the routed experts, one of `sizes.EXPERT_FORMATS`.
        note: what to say where a prompt or context that nobody gave was shortened.

    Raises:
        ValueError: a number that is not positive, or fewer positions than the prompt has.
    """

    prompt: int
    context: int
    batch: int
    expert_format: str
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt", "context", "batch"):
            check_positive_int(name, getattr(self, name))
        if self.context < self.prompt:
            raise ValueError(
                f"context={self.context}: must hold the prompt of {self.prompt}. Raise it."
            )

    @classmethod
    def of(
        cls, planned: PlannedModel, prompt: int | None, batch: int, context: int | None
    ) -> "Serving":
        """Return what is served of a model.

        Args:
            planned: the model.
            prompt: tokens of a prompt; None: the usual number, or what leaves room for an answer.
            batch: sequences that the machine decodes at once.
            context: positions of a sequence; None: the prompt and an answer, as far as there are.

        Raises:
            ValueError: a number that is not positive, or more positions than the model has.
        """
        for name, given in (("prompt", prompt), ("context", context)):
            if given is not None:
                _check_length(name, check_positive_int(name, given), planned)
        longest = planned.longest or _PROMPT_TOKENS + _ANSWER_TOKENS + (prompt or 0)
        limit = min(context or longest, longest)
        taken = prompt or max(1, min(_PROMPT_TOKENS, limit - min(_ANSWER_TOKENS, limit // 2)))
        end = context or min(taken + _ANSWER_TOKENS, longest)
        note = ""
        if end == planned.longest and None in (prompt, context):
            note = (
                f"prompts of {taken} tokens in {end} positions: the model has no more than"
                f" max_position_embeddings={longest}{planned.length_reason}"
            )
        stored = planned.sizes.weight_format
        return cls(
            prompt=taken,
            context=end,
            batch=batch,
            expert_format="e5m2" if stored == "fp8" else stored,
            note=note,
        )


def _check_length(name: str, length: int, planned: PlannedModel) -> None:
    """Raise ValueError for a sequence that the model has no positions for."""
    if planned.longest is not None and length > planned.longest:
        raise ValueError(
            f"{name}={length}: must be at most max_position_embeddings={planned.longest} of"
            f" {planned.sizes.name}{planned.length_reason}. Shorten it."
        )


class WholeModel(NamedTuple):
    """A model and its sizes.

    Attributes:
        model: a `DecoderModel`, which may be on the meta device.
        config: its facts.
        sizes: those of the planner.
        routing_TK: [T, K] choices of the experts by as many tokens as a step has.
    """

    model: nn.Module
    config: Any
    sizes: ModelSizes
    routing_TK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTimes:
    """What a layout does.

    Attributes:
        tp, ep: ranks that split an expert, and the experts, of a replica.
        dp: replicas.
        sp: whether prefill splits the sequence.
        ttft_ms: a prompt until its first token, nothing else running.
        tpot_ms: a decode step with the batch shared out over the replicas, at half the answer.
        tokens_per_s: of all replicas, decode alone.
        max_batch: sequences of all replicas that memory holds at full length.
        weight_bytes, cache_bytes: of a rank; the cache at the batch requested.
    """

    tp: int
    ep: int
    dp: int
    sp: bool
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    max_batch: int
    weight_bytes: int
    cache_bytes: int

    def __str__(self) -> str:
        replicas = "one replica" if self.dp == 1 else f"{self.dp} replicas"
        split = "sequence parallel" if self.sp else "no sequence parallelism"
        return f"TP {self.tp} x EP {self.ep}, {replicas}, {split}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "layout": str(self)}

    def loss_of(self, target: str) -> float:
        """Return what is to be least for a target."""
        check_choice("target", target, TARGETS)
        if target == "throughput":
            return 1.0 / self.tokens_per_s
        return self.ttft_ms if target == "ttft" else self.tpot_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """Which layout of a machine serves a model best; printed, it says so.

    Attributes:
        target: what layouts are ranked by, one of TARGETS.
        serving: what is served.
        layouts: those that can be, the best first.
        rejected: why others cannot be, by layout.
    """

    target: str
    serving: Serving
    layouts: list[ServingTimes]
    rejected: dict[str, str]

    def __str__(self) -> str:
        if not self.layouts:
            layout, reason = list(self.rejected.items())[-1]  # the one over all ranks
            return f"whole model: no layout serves it. {layout}: {reason}"
        best, serving = self.layouts[0], self.serving
        text = f"{serving.note}\n" if serving.note else ""
        text += (
            f"best for {self.target}: {best}\n"
            f"  first token after {best.ttft_ms:.1f} ms (prompt of {serving.prompt}), then"
            f" {best.tpot_ms:.2f} ms a token at batch {serving.batch}:"
            f" {best.tokens_per_s:,.0f} tokens/s  [computed, from peaks: bounds from below]\n"
            f"  a rank holds {best.weight_bytes / (1 << 30):.4g} GiB of weights; up to"
            f" {best.max_batch} sequences of {serving.context} positions fit"
        )
        if same := ties(self.layouts, self.target):
            more = f"; and {len(same) - _MOST_TIES} more" if len(same) > _MOST_TIES else ""
            names = "; ".join(map(str, same[:_MOST_TIES]))
            text += f"\n  as good within {AS_GOOD - 1:.0%}: {names}{more}"
        return text


def plan_serving(
    planned: PlannedModel,
    machine: Machine,
    routing_TK: Tensor,
    serving: Serving,
    target: str = TARGETS[0],
) -> ServingPlan:
    """Return the layouts of a model that serve it, the best first.

    Args:
        planned: the model.
        machine: where.
        routing_TK: [T, K] choices by as many tokens as a step has.
        serving: what is served.
        target: what layouts are ranked by, one of TARGETS.
    """
    if planned.model is None:
        rejected = {"whole model": planned.problem}
        return ServingPlan(target=target, serving=serving, layouts=[], rejected=rejected)
    whole = WholeModel(planned.model, planned.config, planned.sizes, routing_TK)
    found, rejected = serving_layouts(whole, machine, serving)
    layouts = best_first(found, target)
    return ServingPlan(target=target, serving=serving, layouts=layouts, rejected=rejected)


def serving_layouts(
    whole: WholeModel, machine: Machine, serving: Serving
) -> tuple[list[ServingTimes], dict[str, str]]:
    """Return every layout that holds the model and the batch, and why the others do not.

    Args:
        whole: the model.
        machine: where.
        serving: what is served.
    """
    found, rejected = [], {}
    for ranks in divisors(machine.ranks):
        for ep in divisors(ranks):
            tp, dp = ranks // ep, machine.ranks // ranks
            try:
                spread = Spread(tp=tp, ep=ep, dense_tp=ranks)
                found += list(_times(whole, machine, serving, spread, dp))
            except ValueError as error:
                rejected[f"TP {tp} x EP {ep}, {dp} replicas"] = str(error)
    return found, rejected


def best_first(layouts: Sequence[ServingTimes], target: str) -> list[ServingTimes]:
    """Return layouts by a target; of equals the one with more room for sequences."""
    return sorted(layouts, key=lambda each: (each.loss_of(target), -each.max_batch))


def ties(ordered: Sequence[ServingTimes], target: str) -> list[ServingTimes]:
    """Return the layouts that are as good as the first, but for a small share."""
    least = ordered[0].loss_of(target)
    return [each for each in ordered[1:] if each.loss_of(target) <= AS_GOOD * least]


def _times(
    whole: WholeModel, machine: Machine, serving: Serving, spread: Spread, dp: int
) -> Iterator[ServingTimes]:
    """Yield a layout with and without sequence parallelism.

    Raises:
        ValueError: an axis that does not divide, or too little memory.
    """
    ParallelConfig(tp=spread.tp, ep=spread.ep).check_experts(
        whole.sizes.num_experts, whole.sizes.intermediate_size
    )
    spread.check(whole.config, whole.model)
    batch = ceil(serving.batch / dp)
    memory = _memory(whole, machine, serving, spread, batch)
    if not memory.fits:
        gib = 1 << 30
        raise ValueError(
            f"a rank needs {memory.needed / gib:.1f} GiB, must be at most"
            f" {memory.allowed / gib:.1f}: {sum(memory.weights.values()) / gib:.1f} of weights,"
            f" {memory.kv_cache / gib:.1f} of cache"
        )
    positions = (serving.prompt + serving.context + 1) // 2
    decode = StepWork(phase="decode", sequences=batch, new_tokens=1, context=positions)
    tpot_us = _step_us(whole, machine, spread, decode, is_split=False)
    prompt = StepWork(
        phase="prefill", sequences=1, new_tokens=serving.prompt, context=serving.prompt
    )
    for is_split in (True, False) if spread.ranks > 1 else (False,):
        ttft_us = _step_us(whole, machine, spread, prompt, is_split=is_split)
        yield ServingTimes(
            tp=spread.tp,
            ep=spread.ep,
            dp=dp,
            sp=is_split,
            ttft_ms=ttft_us / 1e3,
            tpot_ms=tpot_us / 1e3,
            tokens_per_s=serving.batch / tpot_us * 1e6,
            max_batch=dp * _max_batch(whole, machine, serving, spread),
            weight_bytes=sum(memory.weights.values()),
            cache_bytes=memory.kv_cache + memory.state,
        )


def _step_us(
    whole: WholeModel, machine: Machine, spread: Spread, work: StepWork, *, is_split: bool
) -> float:
    """Return the time of a step of the whole model."""
    dense = dense_times(whole.model, whole.config, spread, machine, work, is_split=is_split)
    routed = RoutedTokens(work.phase, whole.routing_TK[: work.tokens], whole.sizes.num_experts)
    cost = layer_cost(whole.sizes, machine, spread.tp, spread.ep, "replicate", routed)
    computed_us = cost.total_us - cost.collective_us
    return dense.us + whole.sizes.num_moe_layers * computed_us


def _memory(
    whole: WholeModel, machine: Machine, serving: Serving, spread: Spread, batch: int
) -> Any:
    load = ServingLoad(batch=batch, max_length=serving.context, prefill_tokens=serving.prompt)
    return rank_memory(whole.model, whole.config, spread, serving.expert_format, load, machine)


def _max_batch(whole: WholeModel, machine: Machine, serving: Serving, spread: Spread) -> int:
    """Return the most sequences of a replica that memory holds; it grows by as much for each."""
    one = _memory(whole, machine, serving, spread, 1)
    each: int = _memory(whole, machine, serving, spread, 2).needed - one.needed
    spare: int = one.allowed - one.needed
    return max(0, 1 + spare // max(1, each))
