"""The attacks by name; each takes a seed and a folder to write in, and says what is wrong."""

from collections.abc import Callable
from pathlib import Path

from neuron_moe.models.sample_checkpoint import make_checkpoint
from tests.lab.fuzz.checkpoints import attack_checkpoint
from tests.lab.fuzz.command_lines import attack_command_line
from tests.lab.fuzz.configs import attack_config
from tests.lab.fuzz.edits import attack_edits
from tests.lab.fuzz.modules import attack_module
from tests.lab.fuzz.ranks import attack_ranks


def _attack_checkpoint(seed: int, scratch: Path) -> str:
    source = scratch / "checkpoint"
    if not source.exists():
        make_checkpoint(source)
    return attack_checkpoint(seed, source, scratch)


ATTACKS: dict[str, Callable[[int, Path], str]] = {
    "torch": lambda seed, _: attack_module(seed, "torch"),
    "nki": lambda seed, _: attack_module(seed, "nki"),
    "edits": lambda seed, _: attack_edits(seed, "torch"),
    "edits_nki": lambda seed, _: attack_edits(seed, "nki"),
    "checkpoints": _attack_checkpoint,
    "configs": attack_config,
    "commands": attack_command_line,
    "ranks": lambda seed, _: attack_ranks(seed),
}
