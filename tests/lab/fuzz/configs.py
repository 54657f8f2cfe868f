"""A published config.json with one random change: it is planned, or refused in a sentence."""

import contextlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuron_moe.tools import cli
from tests.lab.fuzz.checkpoints import VALUES
from tests.lab.fuzz.endings import judge

CONFIGS = Path(__file__).parents[3] / "configs"


def _places(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Give each key of an object and of the objects in it, with the object it stands in."""
    for key, value in sorted(values.items()):
        yield values, key
        if isinstance(value, dict):
            yield from _places(value)


def _spoil(values: dict[str, Any], rng: random.Random) -> str:
    """Change a config in one place; say which."""
    holder, key = rng.choice(list(_places(values)))
    before = holder[key]
    kind = rng.random()
    if kind < 0.15:
        del holder[key]
        return f"without {key}"
    if kind < 0.3:
        holder[key + "_"] = holder.pop(key)
        return f"{key} misspelt"
    if kind < 0.5 and isinstance(before, int | float) and not isinstance(before, bool):
        holder[key] = rng.choice([before * 2, before + 1, -before, before * 1000, before / 2])
    else:
        holder[key] = rng.choice(VALUES)
    return f"{key}={str(holder[key])[:40]}"


def attack_config(seed: int, scratch: Path) -> str:
    """Plan and inspect a model of a spoilt config.json; say what is wrong with what happens."""
    rng = random.Random(f"config {seed}")
    source = rng.choice(sorted(CONFIGS.glob("*.json")))
    values = json.loads(source.read_text())
    change = _spoil(values, rng)
    folder = scratch / f"config-{seed}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    args = rng.choice([["plan", "--model", str(folder)], ["inspect", "--model", str(folder)]])
    if args[0] == "inspect":
        args += rng.choice([[], ["--tp", "4"], ["--ep", "4"]])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(args)
    problem = judge(status, err.getvalue())
    return f"seed {seed}: {source.name} {change}: {args[0]}: {problem}" if problem else ""
