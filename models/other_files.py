"""What a file is that no model file reads, in words for whoever has it.

Families are not guessed from each other: two that look alike in config.json may route otherwise.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuron_moe.checkpoint.reader import OTHER_FORMATS

# How families call the number of their experts.
_EXPERT_KEYS = {
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("num_routed_experts", "n_experts"),
}
_FOLDERS = {
    "*.gguf": f"*.gguf is {OTHER_FORMATS['.gguf']}",
    "adapter_config.json": "This is an adapter (LoRA): merge it into its model, as"
    " merge_and_unload of peft does, and save that.",
    "params.json": "This is the form of the model's makers: take the one for transformers, which"
    " has config.json.",
}


def what_it_is(config: Mapping[str, Any], known: Sequence[str]) -> str:
    """Return why a config.json cannot be read whose model type is not among the known ones."""
    architectures = config.get("architectures")
    names = ", ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    shown = f"model_type={config.get('model_type')!r}" + (f" ({names})" if names else "")
    near = difflib.get_close_matches(str(config.get("model_type")), known, cutoff=0.5)
    read = f"must be one of {len(known)} such as {', '.join(near or known[:3])}: model_types() of"
    read += " neuron_moe.models.loader returns them"
    values = dict(_walk(config))
    if config.get("model_type") is None:
        return f"{shown}: says which family a checkpoint is of; {read}. Add it to config.json."
    if any(_is_many(value) for key, value in values.items() if key in _EXPERT_KEYS):
        return (
            f"{shown}: a Mixture-of-Experts family that no file in models/ reads, and others are"
            f" not guessed from it; {read}. CONTRIBUTING.md says how to add a model."
        )
    if "vocab_size" not in values:
        return f"{shown}: has no part that reads text; {read}. Take a model that generates text."
    return (
        f"{shown}: a dense model, for config.json tells of no experts; {read}. Run it with"
        " transformers or vLLM, or take a Mixture-of-Experts model."
    )


def what_is_in(folder: Path) -> str:
    """Return what to do about a folder without config.json."""
    for pattern, what in _FOLDERS.items():
        if any(folder.glob(pattern)):
            return what
    return "Check the path, or download it."


def _walk(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all keys with their values, sections included; the largest number of a name last."""
    found = [(key, value) for key, value in values.items() if not isinstance(value, Mapping)]
    for value in values.values():
        if isinstance(value, Mapping):
            found += _walk(value)
    yield from sorted(found, key=lambda pair: _is_many(pair[1]))


def _is_many(value: object) -> bool:
    """Say whether a number of experts, or the numbers of all layers, are more than one."""
    if isinstance(value, list):
        return any(map(_is_many, value))
    return isinstance(value, int) and value > 1
