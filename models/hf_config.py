"""Read a Hugging Face config.json strictly: every key is read, ignored on purpose, or an error.

A model's `from_hf` creates a `ConfigReader`, asks it for each key by name and type, and calls
`finish()`, which raises for whatever nobody requested. A misspelt key never loads as a default.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from neuron_moe.errors import UnknownKeyError, check_positive_int

_LARGEST_NUMBER = 2**31 - 1
_LARGEST = {"num_hidden_layers": 10_000}  # a list of layers is made before anything else
T = TypeVar("T", int, float, bool, str)
# What the formats of compressed-tensors that are read here are called there.
COMPRESSED_FORMATS = (
    *("float-quantized", "naive-quantized", "mxfp4-pack-quantized"),
    "pack-quantized",  # integers of four bits
)
INT4 = {"type": "int", "num_bits": 4, "symmetric": True}
_QUANTIZATIONS = ("fp8", "compressed-tensors", "neuron_moe")  # the last is what convert writes
_FP8_BLOCK = [128, 128]
# What is published and not read here.
_OTHER_METHODS = {
    "awq": "weights of AWQ, integers of 4 bits",
    "gptq": "weights of GPTQ, integers of 2 to 8 bits",
    "auto-round": "weights of AutoRound, integers of 2 to 8 bits",
    "gguf": "weights of GGUF, the format of llama.cpp",
    "bitsandbytes": "weights of bitsandbytes, nf4 or int8",
    "modelopt": "weights of ModelOpt, NVFP4 or fp8 with scales of activations",
    "fbgemm_fp8": "weights of FBGEMM, fp8 with an upper bound of activations",
}

# Keys that every transformers config may carry, or that tools add, and that change nothing in
# inference.
BOOKKEEPING_KEYS = (
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)
# Keys of training, and of the tokenizer, that change nothing in inference either.
TRAINING_KEYS = (
    "attention_dropout",
    "bos_token_id",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint.

    Raises:
        ValueError: it is not a JSON object, a key stands in it twice, or a number is not finite.
    """
    try:
        values = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be JSON, but {error}. Download it again.") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}: must be a JSON object, not a {type(values).__name__}. Download it again."
        )
    return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands there twice, as {found[key]!r} and {value!r}")
        found[key] = value
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is larger than any number of 64 bits")
    return value


class ConfigReader:
    """Hand out the keys of one mapping and remember which were requested."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f"{where}={values!r}: must be a mapping of Hugging Face keys.")
        self._values = values
        self._where = where
        self._known: set[str] = set()

    @classmethod
    def of_family(
        cls,
        config: Mapping[str, Any],
        model_type: str,
        *ignored: str,
        aliases: Sequence[str] = (),
    ) -> "ConfigReader":
        """Return a reader of a family's config.json, opened as most families open it.

        Args:
            config: its keys.
            model_type: what the file must say it is.
            ignored: keys that change nothing here, beside those of bookkeeping and training.
            aliases: what else it may say it is.

        Raises:
            ValueError: another model type, or a quantisation that is not read here.
        """
        reader = cls(config, f"config.json ({model_type})")
        if reader.get_raw("model_type") not in aliases:
            reader.require("model_type", model_type)
        reader.require_quantization()
        reader.ignore(*BOOKKEEPING_KEYS, *TRAINING_KEYS, *ignored)
        return reader

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return `key` as `kind`; without a default, an absent or null key is an error.

        A null switch is off, as Python reads None in transformers' models; where null is a default
        of a number there, it is one here.

        Raises:
            ValueError: the key is missing or of another type.
        """
        value = self.get_optional(key, kind)
        if value is not None:
            return value
        if kind is bool and self.is_null(key):
            return kind(False)
        if default is None:
            raise ValueError(self._missing(key, kind))
        return default

    def get_optional(self, key: str, kind: type[T]) -> T | None:
        """Return `key` as `kind`, or None where it is absent or null."""
        value = self.get_raw(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            most = _LARGEST.get(key, _LARGEST_NUMBER)
            if not -most <= value <= most:  # catches NaN too
                is_long = isinstance(value, int) and abs(value) >= 10**100
                shown = "a number of a hundred digits or more" if is_long else value
                raise ValueError(
                    f"{self._where}: {key}={shown}: must be finite and at most {most}."
                    " Correct the value in config.json."
                )
            if kind is float:
                return kind(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(
                f"{self._where}: {key}={value!r}: must be {kind.__name__}, not"
                f" {type(value).__name__}. Correct the value in config.json."
            )
        return value

    def get_renamed(self, key: str, old: str, kind: type[T]) -> T:
        """Return `key`, or `old`, as some versions spell it.

        Raises:
            ValueError: both are missing, they disagree, or one is of another type.
        """
        other = self.get_optional(old, kind)
        value = self.get(key, kind, other)
        if other not in (None, value):
            raise ValueError(
                f"{self._where}: {key}={value!r}, {old}={other!r}: must agree. Keep one of them."
            )
        return value

    def get_size(self, key: str, default: int) -> int:
        """Return a key that must be a positive integer."""
        value = self.get(key, int, default)
        check_positive_int(key, value)
        return value

    def get_ints(self, key: str, noun: str = "whole number") -> tuple[int, ...]:
        """Return a key that is null, one integer or a list of them as a tuple."""
        value = self.get_raw(key)
        items = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if not all(
            isinstance(item, int) and not isinstance(item, bool) and abs(item) <= _LARGEST_NUMBER
            for item in items
        ):
            raise ValueError(
                f"{self._where}: {key}={value!r}: must be a {noun} or a list of them."
                " Correct the value in config.json."
            )
        return items

    def get_strings(self, key: str) -> tuple[str, ...]:
        """Return a key that is null or a list of strings as a tuple."""
        value = self.get_raw(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError(
                f"{self._where}: {key}={value!r}: must be a list of names."
                " Correct the value in config.json."
            )
        return tuple(value)

    def get_section(self, key: str) -> Mapping[str, Any]:
        """Return a key that is null or an object of its own."""
        value = self.get_raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(
                f"{self._where}: {key}={value!r}: must be an object with keys of its own."
                " Correct the value in config.json."
            )
        return value or {}

    def is_absent(self, key: str) -> bool:
        """Say whether `key` is not there, not even as null."""
        return key not in self._values

    def is_null(self, key: str) -> bool:
        """Say whether `key` is there, as null."""
        return key in self._values and self._values[key] is None

    def get_raw(self, key: str) -> Any:
        """Return `key` as it stands, or None where it is absent; the caller checks it."""
        self._known.add(key)
        return self._values.get(key)

    def require(self, key: str, expected: T) -> None:
        """Raise ValueError unless `key` is absent or has the one value the model implements."""
        value = self.get(key, type(expected), expected)
        if value != expected:
            raise ValueError(
                f"{self._where}: {key}={value!r}: must be {expected!r}; nothing else is"
                " implemented for this architecture. Correct config.json only if it does not"
                " say what these weights are; else take another checkpoint."
            )

    def require_quantization(self, *methods: str) -> None:
        """Raise ValueError if `quantization_config` tells of weights that are not read here.

        Args:
            methods: what this family has beside fp8 in blocks and the weights of 8 bits, or MXFP4,
                of compressed-tensors, which every family may have.
        """
        section = self.get_raw("quantization_config")
        if section is None or (isinstance(section, Mapping) and not section):
            return
        method = section.get("quant_method") if isinstance(section, Mapping) else None
        known = (*methods, *_QUANTIZATIONS)
        if method not in known:
            shown = _OTHER_METHODS.get(str(method), f"quantization_config={section!r}")
            raise ValueError(
                f"{self._where}: {shown}: quant_method must be {' or '.join(known)}. Take the"
                " checkpoint it was made of, in bf16 or one of these, often the same id without the"
                " method behind it; `neuron-moe convert` then writes a narrower format."
            )
        wrong = "" if method in methods else _unread(method, section)
        if wrong:
            raise ValueError(
                f"{self._where}: quantization_config of {method}: {wrong}. Take a checkpoint in a"
                " format that is read here, such as bf16."
            )

    def ignore(self, *keys: str) -> None:
        """List keys that are known and change nothing here."""
        self._known.update(keys)

    def finish(self) -> None:
        """Raise UnknownKeyError for the keys nobody read, each with its nearest known name."""
        unknown = [key for key in self._values if key not in self._known]
        if not unknown:
            return
        hints = []
        for key in unknown:
            near = difflib.get_close_matches(key, sorted(self._known), n=1, cutoff=0.75)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            hints.append(f"{key}={self._values[key]!r}{hint}")
        raise UnknownKeyError(
            f"{self._where}: unknown key {', '.join(hints)}: a key that is not understood may"
            " change the result. Correct the name or remove the key."
        )

    def _missing(self, key: str, kind: type) -> str:
        unread = [name for name in self._values if name not in self._known]
        near = difflib.get_close_matches(key, unread, n=1, cutoff=0.75)
        hint = f" Did you mean it by {near[0]!r}?" if near else ""
        return (
            f"{self._where}: {key} is missing: this {kind.__name__} is a fact of the checkpoint."
            f"{hint} Add it to config.json."
        )


def _unread(method: str, section: Mapping[str, Any]) -> str:
    """Say what of a `quantization_config` is not read here; '' if all is."""
    block = section.get("weight_block_size")
    if method == "fp8" and block not in (None, _FP8_BLOCK):
        return f"weight_block_size={block!r} must be {_FP8_BLOCK}, or absent for one scale a weight"
    if section.get("activation_scheme") == "static":
        return "activation_scheme='static', with scales of activations, must be 'dynamic'"
    if method != "compressed-tensors":
        return ""
    if section.get("kv_cache_scheme"):
        return "kv_cache_scheme, with scales of keys and values, must be null"
    groups = section.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        given = {"symmetric": True} | dict(weights if isinstance(weights, Mapping) else {})
        found = {key: given.get(key) for key in INT4}
        if found["type"] != "float" and found != INT4:
            return f"{name} has weights of {found}, must be of type 'float', or {INT4}"
        inputs = group.get("input_activations")
        if isinstance(inputs, Mapping) and inputs.get("dynamic") is False:
            return f"{name} has input_activations of dynamic=False, must be dynamic"
    stored = section.get("format")
    if stored not in COMPRESSED_FORMATS:
        return f"format={stored!r} must be {' or '.join(COMPRESSED_FORMATS)}"
    return ""


def respell(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return config.json with keys as they are read here.

    Args:
        config: its keys.
        names: how the family spells a key, by ours.

    Raises:
        ValueError: a key is there in both spellings, with two values.
    """
    theirs = set(names.values())
    given = {key: value for key, value in config.items() if key not in theirs}
    for ours, name in names.items():
        if name in config and config.get(ours, config[name]) != config[name]:
            raise ValueError(
                f"{ours}={config[ours]!r}, {name}={config[name]!r}: must agree. Keep the last."
            )
        given |= {ours: config[name]} if name in config else {}
    return given


def read_text_section(
    config: Mapping[str, Any],
    model_type: str,
    depth_key: str,
    ignored: Sequence[str],
    *,
    is_tied: bool = False,
) -> tuple[Mapping[str, Any], int | None]:
    """Return what config.json says of the text model, and the layers of the vision tower beside it.

    Args:
        config: the whole of it; a text model's own is returned as it is, with None.
        model_type: of a model with a vision tower.
        depth_key: how its section calls the number of layers.
        ignored: keys of the whole that change nothing for text.
        is_tied: the head is the embedding where the whole does not say.

    Raises:
        ValueError: a missing, unknown or contradictory key.
    """
    reader = ConfigReader(config, f"config.json ({model_type})")
    if reader.get_raw("model_type") != model_type:
        return config, None
    reader.ignore(*BOOKKEEPING_KEYS, *ignored)
    is_tied = reader.get("tie_word_embeddings", bool, is_tied)  # the whole model's word counts
    reader.require_quantization()
    vision = ConfigReader(reader.get_section("vision_config"), "vision_config")
    text = reader.get_section("text_config")
    reader.finish()
    return {**text, "tie_word_embeddings": is_tied}, vision.get(depth_key, int)
