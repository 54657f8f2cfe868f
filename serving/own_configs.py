"""What vLLM reads of a config.json for which neither it nor its transformers has a usable class.

vLLM asks a configuration for sizes before it builds a model. Those of our own reader answer, under
the names that all families share, whatever the file calls them.
"""

from contextlib import suppress
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, PreTrainedConfig
from vllm.transformers_utils.config import _CONFIG_REGISTRY

from neuron_moe.models.loader import CONFIG_FILE, model_types, parse_config

# There is a class, which some files are not for: of the first, vLLM's refuses kinds of layers that
# transformers writes; that of the second does not tell heads, which differ by layer.
REFUSING = ("deepseek_v4", "step3p7")
# What vLLM reads beside sizes, of the file itself.
KEPT = ("architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype")


class OwnConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Facts of a checkpoint, as its family's `Config` has them.

    Attributes:
        theirs: the class that there is of this model type, asked first.
    """

    theirs: ClassVar[Any] = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return what transformers makes of the facts of a config.json; arguments as there.

        Raises:
            ValueError: it is not as it must be.
        """
        if cls.theirs is not None:
            with suppress(Exception):  # they refuse with errors of every kind
                made = cls.theirs.from_dict(dict(config_dict), **kwargs)
                if made.get_text_config().num_attention_heads:
                    return made
        written = {key: value for key, value in config_dict.items() if key[0] != "_"}
        _, facts = parse_config(written | {"model_type": cls.model_type}, CONFIG_FILE)
        plain = {field.name: getattr(facts, field.name) for field in fields(facts)}
        found: dict[str, Any] = {key: written[key] for key in KEPT if key in written}
        found |= {key: value for key, value in plain.items() if isinstance(value, int | float)}
        found["layer_types"] = list(getattr(facts, "layer_types", ())) or None
        return super().from_dict(found, **kwargs)

    def __reduce__(self) -> Any:
        """Say how to make it anew in another process, where its class is made anew, too."""
        return _restore, (self.model_type, vars(self))


def _restore(model_type: str, state: dict[str, Any]) -> PreTrainedConfig:
    made = own_config(model_type)()
    vars(made).update(state)
    return made


@cache
def own_config(model_type: str) -> type[OwnConfig]:
    """Return the class of a model type; there is one in a process."""
    known = (each for each in (_CONFIG_REGISTRY, CONFIG_MAPPING) if model_type in each)
    theirs = next((each[model_type] for each in known), None)
    facts = {"model_type": model_type, "theirs": theirs}
    made: type[OwnConfig] = type(OwnConfig.__name__, (OwnConfig,), facts)
    return made


def register_configs() -> None:
    """Let vLLM read every model type that we read; a second call changes nothing."""
    for name in model_types():
        if name in REFUSING or (name not in _CONFIG_REGISTRY and name not in CONFIG_MAPPING):
            _CONFIG_REGISTRY[name] = own_config(name)
