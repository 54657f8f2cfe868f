"""What each step of a deployment takes: kernels by simulation, everything else by formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from neuron_moe.backends.nki.times import KernelTime, as_served, draw_choices, simulate_plan
from neuron_moe.models.deployment import Deployment
from neuron_moe.models.loader import parse_config
from neuron_moe.models.whole_model import (
    DenseTimes,
    LayerKind,
    PartTime,
    StepWork,
    dense_times,
    layer_kinds,
    shared_experts_time,
)
from neuron_moe.moe import MoE
from neuron_moe.parallel import parallel_state
from neuron_moe.plan import Plan, Step
from neuron_moe.tools.compile.request import Request
from neuron_moe.tools.compile.store import digest, read_json, write_json
from nki_sim.hardware import TRN2

Progress = Callable[[int, int], None]
MOST_INSTRUCTIONS = 5_000_000  # of a graph; compilers were reported to fail from there on


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTimes:
    """The experts of one kind of layers in a step.

    Attributes:
        layers: name of the kind.
        count: how many layers.
        path: how the experts are computed.
        why: the plan in words, as `explain()` prints it.
        kernels: launches of one layer, simulated.
    """

    layers: str
    count: int
    path: str
    why: str
    kernels: tuple[KernelTime, ...]

    @property
    def us(self) -> float:
        """Microseconds of one layer."""
        return sum(kernel.us for kernel in self.kernels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """One compiled step of the model.

    Attributes:
        work: the step.
        block_size: token slots of a block; 0 where there are none.
        experts: by kind of layers.
        dense: everything else but shared experts.
        shared: shared experts that no kernel computes, by kind.
    """

    work: StepWork
    block_size: int
    experts: tuple[ExpertTimes, ...]
    dense: DenseTimes
    shared: tuple[PartTime, ...] = field(default=())

    @property
    def experts_us(self) -> float:
        """Simulated microseconds of the kernels of all layers."""
        return sum(each.count * each.us for each in self.experts)

    @property
    def us(self) -> float:
        """Microseconds of the step: kernels simulated, the rest computed."""
        return self.experts_us + self.dense.us + sum(part.count * part.us for part in self.shared)

    @property
    def instructions(self) -> int:
        """Instructions of the compiled graph, estimated."""
        parts = sum(part.count * part.instructions for part in (*self.dense.parts, *self.shared))
        return parts + sum(
            each.count * kernel.instructions for each in self.experts for kernel in each.kernels
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "phase": self.work.phase,
            "tokens": self.work.tokens,
            "sequences": self.work.sequences,
            "context": self.work.context,
            "block_size": self.block_size or None,
            "us": self.us,
            "us_simulated": self.experts_us,
            "us_computed": self.us - self.experts_us,
            "instructions": self.instructions,
            "kernels": [
                {
                    "layers": each.layers,
                    "count": each.count,
                    "path": each.path,
                    "kind": "simulated",
                    **asdict(kernel),
                }
                for each in self.experts
                for kernel in each.kernels
            ],
            "parts": [
                {
                    "kind": "computed",
                    "layers": part.kind,
                    "name": part.name,
                    "count": part.count,
                    "us": part.us,
                    "bound": part.bound,
                    "instructions": part.instructions,
                }
                for part in (*self.dense.parts, *self.shared)
            ],
            "collectives": [
                {"kind": "computed", "layers": layers, "count": count, **asdict(each)}
                for layers, count, each in self.dense.collectives
            ],
            "why": {each.layers: each.why for each in self.experts},
        }


def plan_buckets(
    request: Request, cache: Path, sources: str, progress: Progress
) -> tuple[list[BucketPlan], int]:
    """Plan and time every step of a deployment.

    Args:
        request: what is compiled.
        cache: folder of simulated times, by content of what they depend on.
        sources: content hash of the code.
        progress: called with the steps that are done and their number.

    Returns:
        The steps, and how many simulations an earlier run had done.
    """
    deployment = request.deployment
    kinds = rank_kinds(request)
    works = list(_works(deployment))
    simulations = _Simulations(cache, sources)
    model, config = deployment.build()
    found = []
    for done, (work, block_size) in enumerate(works):
        progress(done, len(works))
        experts = [_expert_times(deployment, kind, work, block_size, simulations) for kind in kinds]
        spread, machine = deployment.spread, deployment.machine
        dense = dense_times(model, config, spread, machine, work, is_split=deployment.sp)
        whole = {kind.name: kind for kind in layer_kinds(model)}
        apart = [each.layers for each in experts if each.kernels[-1].kernel != "decode_layer"]
        shared = (
            shared_experts_time(model, config, spread, machine, work, whole[name]) for name in apart
        )
        found.append(
            BucketPlan(
                work=work,
                block_size=block_size,
                experts=tuple(experts),
                dense=dense,
                shared=tuple(part for part in shared if part is not None),
            )
        )
    progress(len(works), len(works))
    return found, len(simulations.kept)


def rank_kinds(request: Request) -> list[LayerKind]:
    """Return the kinds of layers with experts as the first rank holds them, on the meta device."""
    deployment = request.deployment
    model_file, config = parse_config(request.raw_config, deployment.model)
    with parallel_state.as_rank(deployment.parallel, 0), torch.device("meta"):
        model = model_file.Model(config, backend="nki")
    kinds = [kind for kind in layer_kinds(model) if kind.has_experts]
    for kind in kinds:
        layer = _moe(kind)
        as_served(layer.router, layer.expert_mlps.mlp_op, deployment.quantization)
    return kinds


def _works(deployment: Deployment) -> Iterator[tuple[StepWork, int]]:
    """Yield the steps to compile, with their block sizes: context encoding, token generation."""
    lengths = []
    for bucket in deployment.buckets:
        lengths.append(bucket.tokens)
        yield (
            StepWork(phase="prefill", sequences=1, new_tokens=bucket.tokens, context=bucket.tokens),
            bucket.block_size,
        )
    for length in sorted({*lengths, deployment.max_length}):
        yield (
            StepWork(phase="decode", sequences=deployment.batch, new_tokens=1, context=length),
            0,
        )


def _moe(kind: LayerKind) -> MoE:
    assert isinstance(kind.feed_forward, MoE)
    return kind.feed_forward


def _expert_times(
    deployment: Deployment,
    kind: LayerKind,
    work: StepWork,
    block_size: int,
    simulations: _Simulations,
) -> ExpertTimes:
    """Return what the experts of a kind of layers take."""
    layer = _moe(kind)
    layer.expert_mlps.tuning = replace(
        layer.expert_mlps.tuning, block_size=block_size or None, num_cores=deployment.lnc
    )
    is_part = work.phase == "prefill" and deployment.sp
    plan = layer.plan(Step(work.phase, work.tokens, is_part=is_part))
    own = ceil(work.tokens / deployment.spread.ranks) if is_part else work.tokens
    return ExpertTimes(
        layers=kind.name,
        count=kind.count,
        path=plan.path,
        why=str(plan.explain([])),
        kernels=simulations.run(plan, layer, own),
    )


class _Simulations:
    """Launches of plans with their times, kept in files by content of what they depend on.

    Attributes:
        kept: keys of those that an earlier run had done.
    """

    def __init__(self, cache: Path, sources: str) -> None:
        self.cache, self.sources = cache, sources
        self.kept: set[str] = set()
        self._old = {file.stem for file in cache.glob("*.json")}

    def run(self, plan: Plan, layer: MoE, own_tokens: int) -> tuple[KernelTime, ...]:
        """Return the launches of a plan.

        Args:
            plan: of one step.
            layer: it is of.
            own_tokens: that a rank routes.
        """
        key = self._key(plan, layer, own_tokens)
        path = self.cache / f"{key}.json"
        known = read_json(path)
        if known is not None:
            if key in self._old:
                self.kept.add(key)
            return tuple(KernelTime(**each) for each in known["launches"])
        spec = layer.router.spec
        chosen_TK = draw_choices(plan.step.tokens, spec.num_experts, spec.top_k)
        launches = simulate_plan(plan, chosen_TK, own_tokens)
        write_json(path, {"kind": "simulated", "launches": [asdict(each) for each in launches]})
        return tuple(launches)

    def _key(self, plan: Plan, layer: MoE, own_tokens: int) -> str:
        weights, shared = plan.parts.weights, layer.shared_experts
        facts = (
            repr(TRN2),
            plan.step,
            plan.path,
            plan.parts.tuning,
            plan.parts.spec,
            layer.router.spec,
            tuple(weights.gate_up_proj_EHI.shape),
            getattr(weights.packed_down, "format", "bfloat16"),
            None if shared is None else (shared.spec, shared.width),
            own_tokens,
        )
        return digest(self.sources, *map(repr, facts))
