"""How a model is run on a machine: ranks, number format, lengths it is compiled for.

A deployment is checked as a whole: the ranks exist, every axis divides, weights and cache fit the
memory of a rank. What does not is refused with the nearest setting that does.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_moe.configs import load_config
from neuron_moe.errors import check_choice, check_positive_int, closest, reject_unknown
from neuron_moe.models.loader import parse_config
from neuron_moe.models.sizes import Spread, cache_bytes_per_token, rank_bytes
from neuron_moe.parallel.config import ParallelConfig, divisors
from neuron_moe.parallel.topology import instance
from neuron_moe.spec import Tuning
from neuron_moe.tuned import PrefillChoice, TunedPlans, read_tuned

BLOCK_SIZES = (32, 64, 128, 256, 512)
KERNEL_FORMATS = ("bf16", "e4m3", "e5m2")
_RESERVED = 0.1  # of a rank's memory, for activations, collectives and compiled code
_CACHE_ELEMENT_BYTES = 2  # bfloat16


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
    buckets: tuple[Bucket | PrefillChoice, ...]

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
        instance(self.instance)
        model, config = _build(self.model)
        self._check_ranks(model, config)
        self._check_memory(model, config)

    @classmethod
    def read(cls, values: Mapping[str, Any], *, model: str, machine: str) -> "Deployment":
        """Read the settings of a file.

        Args:
            values: with the names of the fields, but for model and instance.
            model: name of a shipped configuration.
            machine: the instance.

        Raises:
            ValueError: an unknown or missing name, or a setting that cannot be.
        """
        where = f"deployment of {model} on {machine}"
        known = [field.name for field in fields(cls) if field.name not in ("model", "instance")]
        try:
            reject_unknown(where, values, known)
            if missing := [name for name in known if name not in values]:
                hint = closest(missing[0], values)
                raise ValueError(f"{where}: {missing[0]} is missing. {hint}")
            buckets = tuple(_read_bucket(bucket) for bucket in values["buckets"])
            settings = {**values, "buckets": buckets}
            return cls(model=model, instance=machine, **settings)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {error}") from error

    def tuned_by(self, path: str | Path) -> "Deployment":
        """Return the deployment with the plans of a file that `neuron-moe tune` wrote.

        Raises:
            ValueError: the file is of another model, or of other ranks.
        """
        found = read_tuned(path)
        for name in ("model", "tp", "ep", "lnc"):
            here, there = getattr(self, name), getattr(found, name)
            if here != there:
                raise ValueError(
                    f"{path}: tuned for {name}={there}, the deployment has {name}={here}. Tune for"
                    f" --{name} {here}."
                )
        return replace(self, buckets=found.plans.prefill)

    @property
    def tuning(self) -> Tuning:
        """What `load_model` takes for these buckets."""
        plans = tuple(bucket for bucket in self.buckets if isinstance(bucket, PrefillChoice))
        return Tuning(num_cores=self.lnc, tuned=TunedPlans(prefill=plans))

    @property
    def parallel(self) -> ParallelConfig:
        """The layout of the ranks."""
        return ParallelConfig(tp=self.tp, ep=self.ep, sp=self.sp)

    def _check_ranks(self, model: nn.Module, config: Any) -> None:
        try:
            self.parallel.check_topology(self.instance, self.lnc)
            Spread(tp=self.tp, ep=self.ep).check(config, model)
        except ValueError as error:
            raise ValueError(f"{error}{self._nearest(model, config)}") from error

    def _check_memory(self, model: nn.Module, config: Any) -> None:
        needed, held = self._bytes(model, config, self.tp, self.ep), self._memory()
        if needed > held:
            gib = 1 << 30
            raise ValueError(
                f"tp={self.tp}, ep={self.ep}, quantization={self.quantization!r}, batch="
                f"{self.batch}, max_length={self.max_length}: a rank needs {needed / gib:.1f} GiB,"
                f" must be at most {held / gib:.1f}.{self._nearest(model, config)}"
            )

    def _memory(self) -> float:
        return instance(self.instance).hbm_bytes_per_logical_core(self.lnc) * (1 - _RESERVED)

    def _bytes(self, model: nn.Module, config: Any, tp: int, ep: int) -> int:
        """Return the bytes of weights and cache on a rank."""
        spread = Spread(tp=tp, ep=ep)
        weights = sum(rank_bytes(model, config, spread, self.quantization).values())
        cache = cache_bytes_per_token(model, spread, _CACHE_ELEMENT_BYTES)
        return weights + cache * self.batch * self.max_length

    def _nearest(self, model: nn.Module, config: Any) -> str:
        """Name the layout that works and differs least, in factors of two."""
        cores = instance(self.instance).logical_cores(self.lnc)
        fitting = []
        for ranks in divisors(cores):
            for tp in divisors(ranks):
                spread = Spread(tp=tp, ep=ranks // tp)
                try:
                    if self._bytes(model, config, spread.tp, spread.ep) <= self._memory():
                        fitting.append(spread)
                except ValueError:
                    continue
        if not fitting:
            return (
                f" No layout of {self.instance} holds it: quantise to e4m3, shorten max_length or"
                " take a larger machine."
            )
        best = min(fitting, key=lambda spread: _distance(spread, self))
        return f" The nearest that works is tp={best.tp}, ep={best.ep}."


def _distance(spread: Spread, wanted: Deployment) -> float:
    """Say how many doublings lie between two layouts."""
    ratios = (spread.tp / wanted.tp, spread.ep / wanted.ep)
    return sum(max(ratio, 1 / ratio) for ratio in ratios)


def _read_bucket(values: Mapping[str, Any]) -> Bucket | PrefillChoice:
    if "shard_plan" in values:
        return PrefillChoice.read(values)
    reject_unknown("bucket", values, [field.name for field in fields(Bucket)])
    return Bucket(**values)


@functools.lru_cache(maxsize=4)
def _build(name: str) -> tuple[nn.Module, Any]:
    """Return a model of a shipped configuration on the meta device, and its facts."""
    file, config = parse_config(load_config(name), name)
    with torch.device("meta"):
        model: nn.Module = file.Model(config)
    return model, config
