"""config.json with one key null, absent or of another value: where both run, they agree.

A family reads null and absent as transformers' class does, or refuses them; a default of ours in
place of theirs would give other logits without a word.
"""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from neuron_moe.models.loader import load_model
from tests.models.families import FAMILIES, GPT_OSS, write_checkpoint
from tests.rows import thinned

IDS = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(1))
ABSENT = object()
CONFIGS = {"gpt_oss": GPT_OSS.config()} | {
    name: family.config()
    for name, family in FAMILIES.items()
    if name.split("-")[-1] != "alternating"
}
# Sizes of tensors, and what changes nothing: neither is a question of how null is read.
LEFT_OUT = {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "attention_dropout",
    "output_router_logits",
    "router_aux_loss_coef",
    "vocab_size",
    "hidden_size",
    "d_model",
    "num_hidden_layers",
    "n_layers",
    "n_heads",
    "max_position_embeddings",
    "max_seq_len",
    "vision_config",  # of a tower that is not read; without a size it is as large as published
}
WHOLE = ("text_config",)  # the same
KNOWN = (  # family, key, change: those that were wrong
    ("dbrx", "ffn_config.moe_normalize_expert_weights", "null"),
    ("deepseek_v3", "rope_interleave", "null"),
    ("gpt_oss", "rope_parameters", "null"),
    ("gpt_oss", "rope_parameters", "absent"),
)
FEW = 24  # changes of the default run

Change = tuple[tuple[str, ...], str, Any]


def _changes(values: dict[str, Any]) -> Iterator[Change]:
    """Yield each change of one key: where, in words, the new value."""
    paths = [((key,), value) for key, value in values.items()]
    paths += [
        ((key, inner), value)
        for key, section in values.items()
        if isinstance(section, dict)
        for inner, value in section.items()
    ]
    for path, value in paths:
        if path == WHOLE or not LEFT_OUT.isdisjoint(path):
            continue
        if value is not None:
            yield path, "null", None
        yield path, "absent", ABSENT
        if isinstance(value, bool):
            yield path, "flipped", not value
        elif isinstance(value, float):
            yield path, "half as large again", value * 1.5
        elif isinstance(value, int):
            yield path, "one more", value + 1
        elif value is None:
            yield from ((path, str(new), new) for new in (True, 3, 0.5))


def _write(values: dict[str, Any], change: Change, folder: Path) -> None:
    path, _, new = change
    changed = copy.deepcopy(values)
    *outer, key = path
    section = changed
    for name in outer:
        section = section[name]
    if new is ABSENT:
        section.pop(key, None)
    else:
        section[key] = new
    (folder / "config.json").write_text(json.dumps(changed))


def _logits(folder: Path) -> tuple[Any, Any]:
    """Return those of transformers and ours; None where one refuses or fails."""
    with torch.no_grad():
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
            if loading["missing_keys"]:  # drawn at random
                return None, None
            theirs = model.eval()(input_ids=IDS, use_cache=False).logits
        except Exception:  # noqa: BLE001  whatever transformers makes of a changed key
            return None, None
        try:
            ours = load_model(folder, dtype=torch.float32)(IDS)
        except ValueError:
            return theirs, None
    return theirs, ours


class Outcome:
    """What became of the changes of a family."""

    def __init__(self) -> None:
        self.agreed, self.refused = 0, 0
        self.wrong: list[str] = []

    def add(self, name: str, change: Change, folder: Path) -> None:
        theirs, ours = _logits(folder)
        if ours is None:
            self.refused += theirs is not None
            return
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        if error < 1e-3:
            self.agreed += 1
        else:
            self.wrong.append(f"{name}: {'.'.join(change[0])} {change[1]}: {error:.1e}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("mutated") for name in CONFIGS}


def _prepared(name: str, folder: Path) -> dict[str, Any]:
    """Write the checkpoint of a family once; return its config.json as transformers wrote it."""
    original = folder / "original.json"
    if not original.exists():
        write_checkpoint(CONFIGS[name], folder, seed=3)
        original.write_text((folder / "config.json").read_text())
    values: dict[str, Any] = json.loads(original.read_text())
    return values


def _try(name: str, folder: Path, changes: list[Change]) -> Outcome:
    values, outcome = _prepared(name, folder), Outcome()
    for change in changes:
        _write(values, change, folder)
        outcome.add(name, change, folder)
    return outcome


@pytest.mark.parametrize(("family", "key", "change"), KNOWN)
def test_a_change_that_was_read_wrong(
    family: str, key: str, change: str, folders: dict[str, Path]
) -> None:
    path = tuple(key.split("."))
    new = None if change == "null" else ABSENT
    assert not _try(family, folders[family], [(path, change, new)]).wrong


def test_some_changes_are_read_as_transformers_reads_them(folders: dict[str, Path]) -> None:
    rng, agreed = random.Random(5), 0
    for name in ("qwen3_moe", "deepseek_v3", "gpt_oss"):
        changes = list(_changes(_prepared(name, folders[name])))
        outcome = _try(name, folders[name], rng.sample(changes, FEW // 3))
        assert not outcome.wrong
        agreed += outcome.agreed
    assert agreed > 0


@pytest.mark.long
@pytest.mark.parametrize("name", thinned(CONFIGS, 8, pytest.mark.slow))
def test_every_change_is_read_as_transformers_reads_it(name: str, folders: dict[str, Path]) -> None:
    outcome = _try(name, folders[name], list(_changes(_prepared(name, folders[name]))))
    print(f"{name}: {outcome.agreed} agree, {outcome.refused} refused")  # noqa: T201
    assert not outcome.wrong
    assert outcome.agreed > 5
