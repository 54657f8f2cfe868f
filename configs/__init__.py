"""Published model configurations, in the keys of the checkpoint's own config.json."""

import json
from importlib import resources
from typing import Any

from neuron_moe.errors import closest


def config_names() -> list[str]:
    """Return the names `load_config` knows."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load_config(name: str) -> dict[str, Any]:
    """Return the config.json of a published model, such as 'gpt_oss_20b'.

    Raises:
        ValueError: no such configuration is shipped.
    """
    if name not in config_names():
        raise ValueError(f"config={name!r}: not shipped. {closest(name, config_names())}")
    text = resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    values: dict[str, Any] = json.loads(text)
    return values
