"""neuron-moe completion: what makes a shell complete commands, options and their values.

    neuron-moe completion bash > ~/.neuron-moe-completion

Then `source ~/.neuron-moe-completion` in ~/.bashrc, or of `completion zsh` in ~/.zshrc. Nothing
runs when a key is pressed: the script holds the words, so make it anew after an update.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from neuron_moe.configs import config_names
from neuron_moe.tools import subcommands
from neuron_moe.tools.menu import Menu, load
from neuron_moe.tools.parsers import DESCRIBE, Described, Parser

_MODEL_NAMES = ("--model", "--models")
_MODEL = {"bash": "_neuron_moe_models", "zsh": "_neuron_moe_models"}
_PREAMBLE = {
    "bash": '_neuron_moe_models() {{ compgen -W "{0}" -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "_neuron_moe_models() {{ compadd {0}; _files; }}",
}


def main(argv: list[str] | None = None) -> int:
    """Print a script; return the exit status."""
    parser = Parser("completion", __doc__)
    parser.add_argument("shell", choices=tuple(_PREAMBLE))
    print(script(parser.parse_args(argv).shell))
    return 0


def script(shell: str) -> str:
    """Return what a shell has to read."""
    root = argparse.ArgumentParser("neuron-moe")
    _add_all(root, subcommands.MENU)
    preamble = _PREAMBLE[shell].format(" ".join(config_names()))
    return str(shtab.complete(root, shell, preamble=preamble))


def _add_all(parser: argparse.ArgumentParser, menu: Menu) -> None:
    """Add the commands of a menu, but those whose packages are missing."""
    commands = parser.add_subparsers()
    for name, (entry, text) in {**menu.entries, **menu.others}.items():
        try:
            module = load(entry)
            if hasattr(module, "MENU"):
                _add_all(commands.add_parser(name, help=text), module.MENU)
            else:
                module.main([DESCRIBE])
        except Described as described:
            for action in described.parser._actions:
                _say_values(action)
            commands.add_parser(name, help=text, parents=[described.parser], add_help=False)
        except (ImportError, ValueError):
            continue


def _say_values(action: argparse.Action) -> None:
    if set(action.option_strings) & set(_MODEL_NAMES):
        action.complete = _MODEL  # type: ignore[attr-defined]
    elif action.type is Path:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
