"""What `neuron-moe tune` found for a model: how each length of prompts, and each number of decoded
tokens, goes through the kernels. Read and written as YAML.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from neuron_moe.errors import check_choice, check_positive_int, reject_unknown

DECODE_MODES = ("selective", "all_experts")
SHARD_PLANS = ("balanced", "block", "intermediate", "hidden")
LOOP_PLANS = ("sorted", "dynamic", "static")
_WEIGHTS = ("plain", "by parts")
_RecordT = TypeVar("_RecordT")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPrefill:
    """How prompts of up to some tokens go through the prefill kernel.

    Args:
        tokens: T, the most.
        block_size: B.
        shard_plan, loop_plan: as in `Tuning`.
        work_tile: most row tiles that share one load of weights.
        loaded_parts: in how many parts gate and up, and down weights of an expert are loaded.
        weight_buffers: parts of each on chip at once.
        weights: plain, or 'by parts': laid out by `pack_weights(for_prefill=True)`.
        hidden_parts: in how many parts of the hidden axis each part of gate and up is loaded.

    Raises:
        ValueError: a value that no kernel has.
    """

    tokens: int
    block_size: int
    shard_plan: str
    loop_plan: str
    work_tile: int
    loaded_parts: tuple[int, int]
    weight_buffers: int
    weights: str
    hidden_parts: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "block_size", "work_tile", "weight_buffers", "hidden_parts"):
            check_positive_int(name, getattr(self, name))
        check_choice("shard_plan", self.shard_plan, SHARD_PLANS)
        check_choice("loop_plan", self.loop_plan, LOOP_PLANS)
        check_choice("weights", self.weights, _WEIGHTS)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "TunedPrefill":
        """Read the fields of a file."""
        parts = tuple(values.get("loaded_parts", ()))
        return _read(cls, {**values, "loaded_parts": parts}, "prefill")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as they are written."""
        return {**asdict(self), "loaded_parts": list(self.loaded_parts)}

    def __str__(self) -> str:
        parts = "whole" if self.loaded_parts == (1, 1) else f"in {self.loaded_parts} parts"
        if self.hidden_parts > 1:
            parts += f", gate and up in {self.hidden_parts} of the hidden axis,"
        return (
            f"{self.loop_plan} loop, {self.shard_plan} shards,"
            f" work tiles of {self.work_tile} row tiles"
            f", {self.weights} weights loaded {parts} into {self.weight_buffers} buffer(s)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedDecode:
    """How steps of up to some tokens go through the decode kernel.

    Args:
        tokens: T, the most.
        mode: one of DECODE_MODES.
    """

    tokens: int
    mode: str

    def __post_init__(self) -> None:
        check_positive_int("tokens", self.tokens)
        check_choice("mode", self.mode, DECODE_MODES)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "TunedDecode":
        """Read the fields of a file."""
        return _read(cls, values, "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPlans:
    """Everything that was tuned; each step takes the first entry that is long enough for it.

    Args:
        prefill: in rising order of tokens.
        decode: likewise.
    """

    prefill: tuple[TunedPrefill, ...] = ()
    decode: tuple[TunedDecode, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            tokens = [each.tokens for each in getattr(self, name)]
            if tokens != sorted(set(tokens)):
                raise ValueError(f"{name}: tokens {tokens} must rise. Sort the entries.")

    def for_prefill(self, tokens: int) -> TunedPrefill | None:
        """Return the plan for a prompt; None where it is longer than all."""
        return next((each for each in self.prefill if tokens <= each.tokens), None)

    def for_decode(self, tokens: int) -> TunedDecode | None:
        """Return the plan for a decode step; None where it is larger than all."""
        return next((each for each in self.decode if tokens <= each.tokens), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as they are written."""
        return {
            "prefill": [each.to_dict() for each in self.prefill],
            "decode": [asdict(each) for each in self.decode],
        }

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "TunedPlans":
        """Read what `to_dict` gave.

        Raises:
            ValueError: a name or a value that is not as it must be.
        """
        reject_unknown("tuned plans", values, ["prefill", "decode"])
        return cls(
            prefill=tuple(TunedPrefill.read(each) for each in values.get("prefill", ())),
            decode=tuple(TunedDecode.read(each) for each in values.get("decode", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedModel:
    """The content of a file: for which model and ranks, and the plans.

    Args:
        model: its name.
        tp, ep: ranks of tensor and expert parallelism.
        lnc: physical cores per logical core.
        plans: what was found.
    """

    model: str
    tp: int
    ep: int
    lnc: int
    plans: TunedPlans

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "lnc"):
            check_positive_int(name, getattr(self, name))

    def check(self, where: str, **wanted: str | int) -> None:
        """Raise ValueError where it was tuned for another model, or for other ranks or cores.

        Args:
            where: the file.
            wanted: `model`, `tp`, `ep`, `lnc` of what it is taken for, or some of them.
        """
        for name, here in wanted.items():
            if here != (there := getattr(self, name)):
                raise ValueError(
                    f"{where}: tuned for {name}={there}, not for {name}={here}. Tune for --{name}"
                    f" {here}."
                )

    def write(self, path: Path, comment: str) -> None:
        """Write the file in one step, a comment first."""
        values = {name: getattr(self, name) for name in ("model", "tp", "ep", "lnc")}
        text = yaml.safe_dump({**values, **self.plans.to_dict()}, sort_keys=False)
        lines = [f"# {line}" for line in comment.splitlines()]
        part = path.with_name(path.name + ".part")
        part.write_text("\n".join([*lines, text]), encoding="utf-8")
        part.replace(path)


def read_tuned(path: str | Path) -> TunedModel:
    """Read a file that `neuron-moe tune` wrote.

    Raises:
        ValueError: it is not as it must be.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no YAML ({error}). Write it with neuron-moe tune.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold names and values. Write it with neuron-moe tune.")
    values = dict(values)
    plans = {name: values.pop(name) for name in ("prefill", "decode") if name in values}
    try:
        return _read(TunedModel, {**values, "plans": TunedPlans.read(plans)}, "tuned model")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read(kind: type[_RecordT], values: Mapping[str, Any], where: str) -> _RecordT:
    """Build a record of the fields of a file; those without a default must be there."""
    known = fields(kind)  # type: ignore[arg-type]
    reject_unknown(where, values, [field.name for field in known])
    missing = [
        field.name for field in known if field.default is MISSING and field.name not in values
    ]
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing. Write it with neuron-moe tune.")
    return kind(**values)
