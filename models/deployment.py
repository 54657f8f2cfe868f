"""How a model is run on a machine: ranks, number format, lengths it is compiled for.

A deployment is checked as a whole: the ranks exist, every axis divides, weights and cache fit the
memory of a rank. What does not is refused with the nearest setting that does.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_moe.configs import load_config
from neuron_moe.errors import check_choice, check_positive_int, closest, reject_unknown
from neuron_moe.models.loader import parse_config
from neuron_moe.models.sizes import Spread
from neuron_moe.models.whole_model import RankMemory, ServingLoad, rank_memory
from neuron_moe.parallel.config import ParallelConfig, divisors
from neuron_moe.parallel.topology import INSTANCES, instance
from neuron_moe.planner.coefficients import Machine
from neuron_moe.spec import Tuning
from neuron_moe.tuned import TunedPlans, TunedPrefill, read_tuned

BLOCK_SIZES = (32, 64, 128, 256, 512)
KERNEL_FORMATS = ("bf16", "e4m3", "e5m2")


class DoesNotFit(ValueError):
    """A rank's memory does not hold a deployment.

    Attributes:
        memory: what it would have to hold.
    """

    def __init__(self, memory: RankMemory, message: str) -> None:
        super().__init__(message)
        self.memory = memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A length of prompts that prefill is compiled for.

    Args:
        tokens: tokens of a step, padding included.
        block_size: token slots of a block of the expert kernels.

    Raises:
        ValueError: a block size no kernel has.
    """

    tokens: int
    block_size: int

    def __post_init__(self) -> None:
        check_positive_int("bucket tokens", self.tokens)
        if self.block_size not in BLOCK_SIZES:
            near = min(BLOCK_SIZES, key=lambda size: abs(size - float(self.block_size)))
            raise ValueError(
                f"block_size={self.block_size}: must be {', '.join(map(str, BLOCK_SIZES))}. Use"
                f" {near}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Settings of one model on one machine.

    Args:
        model: name of a shipped configuration.
        instance: the machine, such as "trn2.48xlarge".
        lnc: physical cores per logical core, 1 or 2.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks.
        sp: whether prefill splits the sequence.
        quantization: format of the routed experts, what `convert --to` writes.
        batch: sequences that are decoded at once.
        max_length: longest sequence, prompt and answer.
        buckets: lengths of prefill, in rising order; of `neuron-moe tune` with their plans.
        config_json: text of the model's config.json; by default that of the shipped configuration.

    Raises:
        ValueError: a setting that cannot be; says the nearest one that can.
    """

    model: str
    instance: str
    lnc: int
    tp: int
    ep: int
    sp: bool
    quantization: str
    batch: int
    max_length: int
    buckets: tuple[Bucket | TunedPrefill, ...]
    config_json: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "batch", "max_length"):
            check_positive_int(name, getattr(self, name))
        check_choice("quantization", self.quantization, KERNEL_FORMATS)
        _ = self.parallel
        lengths = [bucket.tokens for bucket in self.buckets]
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError(f"buckets={lengths}: must be one or more lengths, in rising order.")
        if lengths[-1] > self.max_length:
            fitting = [length for length in lengths if length <= self.max_length]
            raise ValueError(
                f"buckets: {lengths[-1]} tokens must not exceed max_length={self.max_length}. Use"
                f" {(fitting or [self.max_length])[-1]}, or raise max_length."
            )
        self._check_ranks()
        self._check_memory()

    @classmethod
    def read(
        cls, values: Mapping[str, Any], *, model: str, machine: str, config_json: str = ""
    ) -> "Deployment":
        """Read the settings of a file.

        Args:
            values: with the names of the fields, but for those given beside.
            model: name of a shipped configuration, or what messages call the model.
            machine: the instance.
            config_json: of a model that is not shipped.

        Raises:
            ValueError: an unknown or missing name, or a setting that cannot be.
        """
        where = f"deployment of {model} on {machine}"
        fixed = ("model", "instance", "config_json")
        known = [field.name for field in fields(cls) if field.name not in fixed]
        try:
            reject_unknown(where, values, known)
            if missing := [name for name in known if name not in values]:
                hint = closest(missing[0], values)
                raise ValueError(f"{where}: {missing[0]} is missing. {hint}")
            buckets = tuple(_read_bucket(bucket) for bucket in values["buckets"])
            settings = {**values, "buckets": buckets}
            return cls(model=model, instance=machine, config_json=config_json, **settings)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {error}") from error

    def tuned_by(self, path: str | Path) -> "Deployment":
        """Return the deployment with the plans of a file that `neuron-moe tune` wrote.

        Raises:
            ValueError: the file is of another model, or of other ranks.
        """
        found = read_tuned(path)
        found.check(str(path), model=self.model, tp=self.tp, ep=self.ep, lnc=self.lnc)
        return replace(self, buckets=found.plans.prefill)

    @property
    def tuning(self) -> Tuning:
        """What `load_model` takes for these buckets."""
        plans = tuple(bucket for bucket in self.buckets if isinstance(bucket, TunedPrefill))
        return Tuning(num_cores=self.lnc, tuned=TunedPlans(prefill=plans))

    @property
    def parallel(self) -> ParallelConfig:
        """The layout of the ranks, as NxDI cuts a model: experts by tp and ep, the rest by both."""
        ranks = self.tp * self.ep
        return ParallelConfig(tp=ranks, moe_tp=self.tp, moe_ep=self.ep, sp=self.sp)

    @property
    def spread(self) -> Spread:
        """The same for sizes."""
        return Spread(tp=self.tp, ep=self.ep, dense_tp=self.tp * self.ep)

    @property
    def machine(self) -> Machine:
        """One node of the instance."""
        return Machine.build(instance(self.instance), lnc=self.lnc)

    @property
    def load(self) -> ServingLoad:
        """What memory is laid out for."""
        last = self.buckets[-1]
        return ServingLoad(
            batch=self.batch,
            max_length=self.max_length,
            prefill_tokens=last.tokens,
            block_size=last.block_size,
        )

    def build(self) -> tuple[nn.Module, Any]:
        """Return the whole model on the meta device, and its facts."""
        return _build(self.model, self.config_json)

    def memory(self) -> RankMemory:
        """Return what a rank holds."""
        return self._memory_of(self.spread, self.quantization, self.load, self.machine)

    def _memory_of(
        self, spread: Spread, expert_format: str, load: ServingLoad, machine: Machine
    ) -> RankMemory:
        return rank_memory(*self.build(), spread, expert_format, load, machine)

    def _check_ranks(self) -> None:
        model, config = self.build()
        try:
            experts = ParallelConfig(tp=self.tp, ep=self.ep)
            experts.check_topology(self.instance, self.lnc)
            self.spread.check(config, model)
        except ValueError as error:
            layouts = self._layouts(self.instance, self.lnc)
            raise ValueError(f"{error}{self._way_out(layouts)}") from error

    def _check_memory(self) -> None:
        memory = self.memory()
        if not memory.fits:
            gib = 1 << 30
            raise DoesNotFit(
                memory,
                f"tp={self.tp}, ep={self.ep}, quantization={self.quantization!r}, batch="
                f"{self.batch}, max_length={self.max_length}: a rank needs"
                f" {memory.needed / gib:.1f} GiB, must be at most {memory.allowed / gib:.1f}."
                f"{self._way_out(self._changes())}",
            )

    def _way_out(self, changes: Iterator["_Change"]) -> str:
        """Name the smallest change that fits, in doublings; the first of equals; "" of none."""
        by_distance = sorted(changes, key=lambda change: change.distance)
        if not by_distance:
            return ""
        for change in by_distance:
            if self._holds(change):
                return f" The nearest that works is {change.text}."
        return (
            f" No single change makes {self.instance} hold it: quantise to e4m3 and shorten"
            " max_length, or take a larger machine."
        )

    def _changes(self) -> Iterator["_Change"]:
        """Yield single changes: layouts, less to hold, a narrower format, another machine."""
        yield from self._layouts(self.instance, self.lnc)
        for name in ("batch", "max_length"):
            value, distance = getattr(self, name) // 2, 1.0
            while value >= 1:
                if name == "batch" or value >= self.buckets[-1].tokens:
                    load = replace(self.load, **{name: value})
                    yield _Change(f"{name}={value}", distance, self.spread, load=load)
                value, distance = value // 2, distance + 1
        if self.quantization == "bf16":
            yield _Change("quantization='e4m3'", 1.0, self.spread, expert_format="e4m3")
        for other in INSTANCES.values():
            if other.chip is instance(self.instance).chip and other.name != self.instance:
                yield from self._layouts(other.name, self.lnc)

    def _layouts(self, name: str, lnc: int) -> Iterator["_Change"]:
        try:
            machine = Machine.build(instance(name), lnc=lnc)
        except ValueError:
            return
        is_other = name != self.instance
        cores = machine.ranks
        for ranks in (cores,) if is_other else divisors(cores):
            for tp in divisors(ranks):
                spread = Spread(tp=tp, ep=ranks // tp, dense_tp=ranks)
                text = f"tp={tp}, ep={ranks // tp}" + (f" on {name}" if is_other else "")
                distance = abs(log2(tp / self.tp)) + abs(log2(spread.ep / self.ep))
                yield _Change(text, distance + 2 * is_other, spread, machine=machine)

    def _holds(self, change: "_Change") -> bool:
        try:
            return self._memory_of(
                change.spread,
                change.expert_format or self.quantization,
                change.load or self.load,
                change.machine or self.machine,
            ).fits
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of a deployment, and how many doublings it is."""

    text: str
    distance: float
    spread: Spread
    expert_format: str = ""
    load: ServingLoad | None = None
    machine: Machine | None = None


def _read_bucket(values: Mapping[str, Any]) -> Bucket | TunedPrefill:
    if "shard_plan" in values:
        return TunedPrefill.read(values)
    reject_unknown("bucket", values, [field.name for field in fields(Bucket)])
    return Bucket(**values)


@functools.lru_cache(maxsize=4)
def _build(name: str, config_json: str) -> tuple[nn.Module, Any]:
    """Return a model on the meta device, and its facts."""
    raw_config = json.loads(config_json) if config_json else load_config(name)
    file, config = parse_config(raw_config, name)
    with torch.device("meta"):
        model: nn.Module = file.Model(config)
    return model, config
