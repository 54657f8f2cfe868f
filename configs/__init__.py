"""Published model configurations, in the keys of the checkpoint's own config.json."""

import json
import re
from importlib import resources
from typing import Any

from neuron_moe.errors import closest

# What follows a name in the ids of variants with the same architecture.
_VARIANTS = re.compile(r"(_(instruct|base|chat|thinking|pt|hf|fp8|bf16|v0_1|[0-9]{4}))*")
# Names that are not spellings of ours.
_ALIASES = {
    "deepseek_r1": "deepseek_v3",
    "ernie_4_5": "ernie_4_5_21b_a3b",
    "llama_4_maverick": "llama4_maverick",
    "llama_4_maverick_17b_128e": "llama4_maverick",
    "llama_4_scout": "llama4_scout",
    "llama_4_scout_17b_16e": "llama4_scout",
    "mixtral": "mixtral_8x7b",
    "qwen3_235b": "qwen3_235b_a22b",
    "qwen3_30b": "qwen3_30b_a3b",
    "qwen3_5_35b": "qwen3_5_35b_a3b",
    "qwen3_5_397b": "qwen3_5_397b_a17b",
}


def find_config(name: str) -> str | None:
    """Return the shipped configuration that a name means, or None.

    Case and signs between words do not count, nor do the organisation of a Hugging Face id and the
    variant behind it.

    Example:
        >>> find_config("Qwen/Qwen3-30B-A3B-Instruct-2507"), find_config("gpt-oss-120b")
        ('qwen3_30b_a3b', 'gpt_oss_120b')
    """
    plain = re.sub(r"[^a-z0-9]+", "_", name.rpartition("/")[2].lower()).strip("_")
    meant = {**{known: known for known in config_names()}, **_ALIASES}
    for known in sorted(meant, key=len, reverse=True):
        if plain.startswith(known) and _VARIANTS.fullmatch(plain.removeprefix(known)):
            return meant[known]
    return None


def config_names() -> list[str]:
    """Return the names `load_config` knows."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load_config(name: str) -> dict[str, Any]:
    """Return the config.json of a published model, by any name `find_config` knows.

    Raises:
        ValueError: no such configuration is shipped.
    """
    found = find_config(name)
    if found is None:
        raise ValueError(f"config={name!r}: not shipped. {closest(name, config_names())}")
    text = resources.files(__name__).joinpath(f"{found}.json").read_text(encoding="utf-8")
    values: dict[str, Any] = json.loads(text)
    return values
