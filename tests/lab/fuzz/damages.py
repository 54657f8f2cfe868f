"""Damages of a checkpoint in two files: what is changed, and what must be named for it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
NORM = "model.norm.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
HUGE = 10**30
MISSING = object()


@dataclass(frozen=True)
class Damage:
    """One change.

    Args:
        name: what is done.
        apply: does it to a folder.
        said: what the message must name: file, key and rule.
    """

    name: str
    apply: Callable[[Path], object]
    said: tuple[str, ...]


def _with_header(
    edit: Callable[[dict[str, Any]], object], file: str = FIRST
) -> Callable[[Path], object]:
    """Change the JSON header of a file; the data stays."""

    def apply(folder: Path) -> None:
        raw = (folder / file).read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        edited = edit(header)
        text = edited if isinstance(edited, bytes) else json.dumps(edited).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])

    return apply


def _entry(field: str, value: object) -> Callable[[Path], object]:
    """Change or drop a field of the first file's entry of the norm."""

    def edit(header: dict[str, Any]) -> dict[str, Any]:
        kept = {key: old for key, old in header[NORM].items() if key != field}
        return header | {NORM: kept if value is MISSING else kept | {field: value}}

    return _with_header(edit)


def _with_bytes(edit: Callable[[bytes], bytes], file: str = FIRST) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(edit((folder / file).read_bytes()))


def _with_json(file: str, edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change a JSON file; a str is written as it is."""

    def apply(folder: Path) -> None:
        edited = edit(json.loads((folder / file).read_text()))
        (folder / file).write_text(edited if isinstance(edited, str) else json.dumps(edited))

    return apply


def header_damages() -> Iterator[Damage]:
    """Damages of a safetensors file."""
    for dtype in ("F4", "f32", "", None, 7, ["F32"], "F8_E4M3FNUZ"):
        yield Damage(f"dtype {dtype!r}", _entry("dtype", dtype), (FIRST, NORM, "must be one of"))
    for dtype in ("F32", "U8", "F64"):
        yield Damage(f"dtype {dtype}", _entry("dtype", dtype), (FIRST, NORM, "bytes, must have"))
    shapes = ([-1, 64], "64", None, 64, [64.0], [True], [None], {"0": 64})
    for shape in shapes:
        yield Damage(f"shape {shape!r}", _entry("shape", shape), (FIRST, NORM, "must be lists of"))
    for shape in ([63], [64, 64], [], [HUGE], [0]):
        yield Damage(f"shape {shape}", _entry("shape", shape), (FIRST, NORM, "bytes, must have"))
    for offsets in ([0], [0, 1, 2], [-1, 5], "0-128", None, [0.5, 1], [[0], [128]]):
        said = (FIRST, NORM, "must be lists of")
        yield Damage(f"offsets {offsets!r}", _entry("data_offsets", offsets), said)
    for offsets in ([128, 0], [0, HUGE], [0, 127], [0, 0]):
        said = (FIRST, NORM, "bytes, must have")
        yield Damage(f"offsets {offsets}", _entry("data_offsets", offsets), said)
    for field in ("dtype", "shape", "data_offsets"):
        said = (FIRST, NORM, "must have dtype, shape and data_offsets")
        yield Damage(f"without {field}", _entry(field, MISSING), said)
    for value in (None, [], "F32", 1):
        said = (FIRST, NORM, "must have dtype, shape and data_offsets")
        edit = _with_header(lambda header, value=value: header | {NORM: value})
        yield Damage(f"entry {value!r}", edit, said)
    yield from _damages_of_whole_headers()


def _damages_of_whole_headers() -> Iterator[Damage]:
    texts = {b"": "JSON", b"{": "JSON", b"[]": "JSON object", b"null": "JSON object"}
    texts |= {b"\xff\xfe{}": "JSON", b"[" * 9999: "JSON", b'{"a": 1, "a": 2}': "'a' comes twice"}
    for text, said in texts.items():
        edit = _with_header(lambda _, text=text: text)
        yield Damage(f"header {text[:20]!r}", edit, (FIRST, "must be", said))
    for size in (0, 7, 8, 60):
        edit = _with_bytes(lambda raw, size=size: raw[:size])
        yield Damage(f"cut to {size}", edit, (FIRST, f"{size} bytes", "must"))
    for size in (0, 1, 1 << 40, (1 << 64) - 1):
        edit = _with_bytes(lambda raw, size=size: size.to_bytes(8, "little") + raw[8:])
        yield Damage(f"header size {size}", edit, (FIRST, "must"))
    yield Damage(
        "one byte short", _with_bytes(lambda raw: raw[:-1]), (FIRST, "truncated", "must be")
    )
    yield Damage(
        "one byte more", _with_bytes(lambda raw: raw + b"x"), (FIRST, "foreign", "must be")
    )
    gone = _with_header(lambda header: {k: v for k, v in header.items() if k != NORM})
    yield Damage("tensor gone", gone, (FIRST, "foreign bytes", "must be"))
    renamed = _with_header(
        lambda header: {("x" if key == NORM else key): value for key, value in header.items()}
    )
    yield Damage("tensor renamed", renamed, (INDEX, NORM, "both must agree"))
    twice = _with_header(lambda header: header | {"x": header[NORM]})
    yield Damage("tensor twice", twice, (FIRST, "x begins at byte", "must begin at"))


def index_damages() -> Iterator[Damage]:
    """Damages of the index."""
    for text in ("", "{", "\x00", '{"weight_map": {"a": "x", "a": "y"}}'):
        yield Damage(f"index {text!r}", _with_json(INDEX, lambda _, t=text: t), (INDEX, "JSON"))
    for whole in ([], None, 1, {}, {"weight_map": []}, {"weight_map": "x"}, {"weight_map": None}):
        said = (INDEX, "must have a `weight_map`")
        yield Damage(f"index {whole!r}", _with_json(INDEX, lambda _, w=whole: w), said)
    for file in (7, None, [FIRST], {}):
        said = (INDEX, "must have a `weight_map`")
        yield Damage(f"file {file!r}", _with_json(INDEX, _place(NORM, file)), said)
    for file in ("", "../x.safetensors", "/x.safetensors", "x.bin", "a/b.safetensors", "."):
        said = (INDEX, repr(file), "must be the plain name")
        yield Damage(f"file {file!r}", _with_json(INDEX, _place(NORM, file)), said)
    said = ("x.safetensors", "must be there", INDEX)
    yield Damage("file gone", _with_json(INDEX, _place(NORM, "x.safetensors")), said)
    agree = (INDEX, "both must agree")
    yield Damage("other file", _with_json(INDEX, _place(NORM, SECOND)), (*agree, NORM))
    yield Damage("ghost", _with_json(INDEX, _place("ghost", FIRST)), (*agree, "ghost"))
    lacks = _with_json(INDEX, _place(NORM, MISSING))
    yield Damage("lacks a tensor", lacks, (*agree, NORM))
    yield Damage("shard gone", lambda folder: (folder / SECOND).unlink(), (SECOND, "must be there"))


def _place(key: str, file: object) -> Callable[[dict[str, Any]], object]:
    def edit(index: dict[str, Any]) -> dict[str, Any]:
        files = {name: at for name, at in index["weight_map"].items() if name != key}
        return index | {"weight_map": files if file is MISSING else files | {key: file}}

    return edit


CONFIG = "config.json"
# Values that contradict the weights or themselves, by key; each must be named with its rule.
WRONG = {
    "hidden_size": (0, -1, 63, 65, 2**40, "64", None, 64.5, [], True),
    "num_hidden_layers": (0, 2, 4, 10**6, "3"),
    "n_routed_experts": (0, 7, 9, "8"),
    "num_experts_per_tok": (0, 9, "2"),
    "num_attention_heads": (0, 3, 5),
    "kv_lora_rank": (0, 41, None),
    "moe_intermediate_size": (0, 31, None),
    "vocab_size": (0, 299, 2**31),
    "rms_norm_eps": (-1.0, "x", 1e300),
    "model_type": ("deepseek", None, 7, "llama"),
    "first_k_dense_replace": (-1, 3, "1"),
    "topk_group": (0, 5),
    "n_group": (0, 3),
    "norm_topk_prob": ("yes", 1),
    "routed_scaling_factor": ("x", None),
    "quantization_config": ({"quant_method": "gptq"}, 7, {"weight_block_size": [1, 1]}),
    "rope_parameters": (7, {"rope_type": "linear", "rope_theta": 1.0}, {"rope_theta": -1.0}),
}
# Where a size disagrees with the weights, what is named are the tensors.
BY_TENSOR = {"hidden_size": (63, 65), "num_hidden_layers": (2, 4), "n_routed_experts": (7, 9)}
BY_TENSOR |= {"num_attention_heads": (3, 5), "kv_lora_rank": (41,), "vocab_size": (299, 2**31)}
BY_TENSOR |= {"moe_intermediate_size": (31,)}
# What messages call a key.
CALLED = {"num_experts_per_tok": "", "rope_parameters": "rope"}


def config_damages() -> Iterator[Damage]:
    """Damages of config.json."""
    for text in (
        "",
        "{",
        "[]",
        "null",
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        "\x00" * 9,
        '{"a": 1e999}',
    ):
        yield Damage(
            f"config {text!r}", _with_json(CONFIG, lambda _, t=text: t), (CONFIG, "must be")
        )
    for key, values in WRONG.items():
        for value in values:
            if value in BY_TENSOR.get(key, ()) and not isinstance(value, bool):
                said = ("must",)
            else:
                said = (CONFIG, CALLED.get(key, key))
            edit = _with_json(CONFIG, lambda config, k=key, v=value: config | {k: v})
            yield Damage(f"{key}={value!r}", edit, said)
    unknown = _with_json(CONFIG, lambda config: config | {"hidden_sizes": 64})
    yield Damage("unknown key", unknown, (CONFIG, "hidden_sizes", "did you mean 'hidden_size'"))
    for key in ("hidden_size", "kv_lora_rank", "model_type", "n_routed_experts", "vocab_size"):
        gone = _with_json(CONFIG, lambda config, k=key: {n: v for n, v in config.items() if n != k})
        yield Damage(f"without {key}", gone, (CONFIG, key))
    yield Damage("config gone", lambda folder: (folder / CONFIG).unlink(), (CONFIG, "must exist"))


DAMAGES = [*header_damages(), *index_damages(), *config_damages()]
