"""A checkpoint with one random damage: it loads as it was, or one sentence says what is wrong."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from neuron_moe.models.loader import load_model
from neuron_moe.models.text import TextCodec

VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**62,
    10**30,
    10**400,
    0.0,
    -1.5,
    1e300,
    "",
    "x",
    [],
    [1],
    [[2]],
    {},
    {"a": 1},
)


def _change_value(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    key = rng.choice(sorted(values))
    values[key] = rng.choice(VALUES)
    path.write_text(json.dumps(values))
    return f"{key}={str(values[key])[:40]}"


def _drop_key(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    key = rng.choice(sorted(values))
    del values[key]
    path.write_text(json.dumps(values))
    return f"without {key}"


def _write_text(folder: Path, rng: random.Random) -> str:
    path = folder / rng.choice(["config.json", "generation_config.json", "tokenizer.json"])
    text = rng.choice(["", "{", "[]", "null", '{"a": NaN}', '{"a": 1, "a": 2}', "\x00" * 9])
    path.write_text(text)
    return f"{path.name}: {text!r}"


def _cut(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    data = path.read_bytes()
    size = rng.choice([0, 7, 8, 100, len(data) // 2, len(data) - 1])
    path.write_bytes(data[:size])
    return f"{path.name} cut to {size}"


def _spoil_header(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    place = rng.randrange(8 + length)
    data[place] = rng.randrange(256)
    path.write_bytes(data)
    return f"byte {place} of {path.name} is {data[place]}"


def _remove(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(file for file in folder.iterdir() if file.is_file()))
    path.unlink()
    if rng.random() < 0.5:
        path.mkdir()
    return f"{path.name} is gone or a folder"


DAMAGES: tuple[Callable[[Path, random.Random], str], ...] = (
    _change_value,
    _drop_key,
    _write_text,
    _cut,
    _spoil_header,
    _remove,
)


def attack_checkpoint(seed: int, source: Path, scratch: Path) -> str:
    """Damage a copy of a checkpoint and load it; say what is wrong with what happens."""
    rng = random.Random(seed)
    folder = Path(shutil.copytree(source, scratch / f"damaged-{seed}"))
    damage = rng.choice(DAMAGES)(folder, rng)
    try:
        codec, model = TextCodec(folder), load_model(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([codec.encode("router")]))
        finite = bool(logits.isfinite().all())
        return "" if finite else f"seed {seed}: {damage}: loads, and computes NaN"
    except (ValueError, FileNotFoundError, IsADirectoryError) as error:
        return "" if len(str(error)) > 20 else f"seed {seed}: {damage}: says only {error!r}"
    except Exception as error:  # noqa: BLE001  what the attack looks for
        return f"seed {seed}: {damage}: {type(error).__name__}: {str(error)[:200]}"
    finally:
        shutil.rmtree(folder)
