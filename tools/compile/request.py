"""What a command line requests: a model and how it is served, found by name or in files.

`--config` takes a machine, a model, both in either order with anything between ("trn2.3xlarge",
"gpt-oss-120b", "gpt_oss_120b@trn2.48xlarge-lnc1"), or a JSON file of settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_moe.configs import config_names, find_config, load_config
from neuron_moe.configs.deployments import deployment_names, load_deployments
from neuron_moe.errors import check_choice
from neuron_moe.models.deployment import Deployment
from neuron_moe.models.hf_config import read_json_object
from neuron_moe.models.loader import parse_config, read_config
from neuron_moe.models.shipped import checkpoint_folder, find_checkpoint
from neuron_moe.parallel.topology import INSTANCES, instance
from neuron_moe.planner.sizes import ModelSizes

DEFAULT_INSTANCE = "trn2.48xlarge"
_SETTINGS = ("lnc", "tp", "ep", "sp", "quantization", "batch", "max_length", "buckets")
_FORMATS = {"mxfp4": "e5m2", "fp8": "e4m3", "compressed-tensors": "e5m2"}
_LENGTHS, _BLOCK_SIZE, _BATCH, _LONGEST = (512, 2048, 8192), 128, 8, 8192


@dataclass(frozen=True, slots=True)
class Request:
    """What shall be compiled.

    Attributes:
        deployment: how it is served, checked.
        raw_config: its config.json.
        folder: of its checkpoint; None where only the name of a configuration is known.
    """

    deployment: Deployment
    raw_config: Mapping[str, Any]
    folder: Path | None


def find_request(
    model: str | None, config: str | None, changes: Sequence[str], *, download: bool = False
) -> Request:
    """Find model and settings.

    Args:
        model: folder of a checkpoint, or name of a shipped configuration; None: `config` names it.
        config: a machine, a model, both, or a file; None: `model` on the default machine.
        changes: settings as "batch=8".
        download: fetch a model of the hub that its cache does not hold.

    Raises:
        ValueError: a name that is not known, or a setting that cannot be.
        FileNotFoundError: a file that is not there.
    """
    machine, named, settings = _read_config_option(config)
    named = (named if model is None else _known_model(model)) or named
    folder = None
    if model is not None and _known_model(model) is None:
        folder = checkpoint_folder(model, download=download)
        raw_config: Mapping[str, Any] = read_config(folder)
        label, twin = str(model), named or _twin(raw_config)
    else:
        if named is None:
            given = "no model" if config is None else f"--config={config}: names no model"
            raise ValueError(
                f"{given}. Add --model with a folder or one of {', '.join(config_names())}."
            )
        raw_config, label, twin = load_config(named), named, named
    _refuse_machine(machine)
    settings = {**_settings_of(twin, machine, raw_config, settings), **_read_changes(changes)}
    deployment = Deployment.read(
        settings,
        model=label,
        machine=machine,
        config_json="" if folder is None else json.dumps(raw_config, sort_keys=True),
    )
    return Request(deployment, raw_config, folder)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _known_model(name: str) -> str | None:
    """Return the shipped configuration that a name means, or None."""
    return None if find_checkpoint(name) is not None else find_config(name)


def _read_config_option(config: str | None) -> tuple[str, str | None, dict[str, Any]]:
    """Return machine, model or None, and settings that `--config` gives."""
    if config is None:
        return DEFAULT_INSTANCE, None, {}
    if config.endswith(".json"):
        values = dict(read_json_object(Path(config)))
        machine = values.pop("instance", DEFAULT_INSTANCE)
        return str(machine), values.pop("model", None), values
    rest, machine = _plain(config), DEFAULT_INSTANCE
    for name in sorted(INSTANCES, key=len, reverse=True):
        if _plain(name) in rest:
            rest, machine = rest.replace(_plain(name), ""), name
            break
    settings: dict[str, Any] = {}
    if found := re.search(r"lnc_?(\d)", rest):
        rest, settings["lnc"] = rest.replace(found[0], ""), int(found[1])
    rest = rest.strip("_")
    named = find_config(rest) if rest else None
    if rest and named is None:
        check_choice("config", config, (*config_names(), *INSTANCES))
    return machine, named, settings


def _refuse_machine(machine: str) -> None:
    """Raise ValueError for a machine on which the kernels do not run."""
    reasons = instance(machine).refuses
    if reasons:
        usable = [name for name, each in INSTANCES.items() if not each.refuses]
        raise ValueError(
            f"instance={machine!r}: our kernels do not run there: {'; '.join(reasons)}. Use"
            f" {', '.join(usable)}."
        )


def _twin(raw_config: Mapping[str, Any]) -> str | None:
    """Return the shipped configuration of the same sizes, or None."""

    def sizes(config: Mapping[str, Any]) -> ModelSizes:
        return ModelSizes.from_config("", config, "bf16")

    wanted = sizes(raw_config)
    return next((name for name in config_names() if sizes(load_config(name)) == wanted), None)


def _settings_of(
    twin: str | None, machine: str, raw_config: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the shipped settings of a model, cut for the machine, with those given on top."""
    lnc = given.get("lnc", instance(machine).lncs[-1])
    cores = instance(machine).logical_cores(lnc)
    files = sorted(deployment_names(), key=lambda name: name != _plain(machine))
    shipped: Mapping[str, Any] = next(
        (found for name in files if twin and (found := load_deployments(name).get(twin))), {}
    )
    settings = dict(shipped) if shipped else _default_settings(raw_config)
    tp = min(settings["tp"], cores)
    if shipped and shipped["tp"] * shipped["ep"] != cores:
        settings |= {"tp": tp, "ep": cores // tp}
    return {**settings, "lnc": lnc, **given}


def _default_settings(raw_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a model that is not shipped, on one rank."""
    _, facts = parse_config(raw_config, "config.json")
    method = (raw_config.get("quantization_config") or {}).get("quant_method")
    longest = min(_LONGEST, facts.max_position_embeddings)
    lengths = [length for length in _LENGTHS if length <= longest] or [longest]
    return {
        "tp": 1,
        "ep": 1,
        "sp": True,
        "quantization": _FORMATS.get(str(method), "bf16"),
        "batch": _BATCH,
        "max_length": longest,
        "buckets": [{"tokens": length, "block_size": _BLOCK_SIZE} for length in lengths],
    }


def _read_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Return settings of "name=value" texts.

    Raises:
        ValueError: an unknown name, or a text without a value.
    """
    found: dict[str, Any] = {}
    for change in changes:
        name, separator, text = change.partition("=")
        check_choice("--set", name, _SETTINGS)
        if not separator:
            raise ValueError(f"--set {change}: must be NAME=VALUE, such as batch=8.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found
