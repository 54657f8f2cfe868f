"""neuron-moe completion: what makes a shell complete commands, options and their values.

    neuron-moe completion bash > ~/.neuron-moe-completion

Then `source ~/.neuron-moe-completion` in ~/.bashrc, or of `completion zsh` in ~/.zshrc. Nothing
runs when a key is pressed: the script holds the words, so make it anew after an update.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

from neuron_moe.configs import config_names
from neuron_moe.tools.commands import bench, check, chip
from neuron_moe.tools.menu import load
from neuron_moe.tools.parsers import DESCRIBE, Described, Parser

_SHELLS = ("bash", "zsh")
_MODELS = ("--model", "--models")
_FILES, _NUMBER = "%files", "%number"  # last among the words of an option
# {menus} to {options} are branches of a case.
_SCRIPT = """\
# neuron-moe completion {shell}
{head}_neuron_moe() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" words="" place=1
    case "$command" in
        {menu_names}) command="$command ${{COMP_WORDS[2]}}"; place=2 ;;
    esac
    if (( COMP_CWORD == 1 )); then
        words={commands}
    elif (( COMP_CWORD == place )); then
        case "${{COMP_WORDS[1]}}" in
{menus}
        esac
    else
        if [[ "$word" != -* ]]; then
            case "$command $before" in
{values}
            esac
            local number option=""
            for (( number = COMP_CWORD - 1; number > place; number-- )); do
                case "${{COMP_WORDS[number]}}" in
                    --*) option="${{COMP_WORDS[number]}}"; break ;;
                esac
            done
            case "$command $option" in
{lists}
            esac
        fi
        [[ -z "$words" ]] && case "$command" in
{options}
        esac
    fi
    local IFS=$'\n' files=()
    case "$words" in
        *{files})
            compopt -o filenames 2> /dev/null
            files=( $(compgen -f -- "$word") ) ;;
    esac
    COMPREPLY=( $(compgen -W "${{words%%%*}}" -- "$word") )
    if (( ${{#COMPREPLY[@]}} )); then
        COMPREPLY=( $(printf '%q\n' "${{COMPREPLY[@]}}") )
    fi
    COMPREPLY+=( "${{files[@]}}" )
}}
complete -F _neuron_moe neuron-moe
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def main(argv: list[str] | None = None) -> int:
    """Print a script; return the exit status."""
    parser = Parser("completion", __doc__)
    parser.add_argument("shell", choices=_SHELLS)
    print(script(parser.parse_args(argv).shell), end="")
    return 0


def script(shell: str) -> str:
    """Return what a shell has to read."""
    # A circle otherwise: the table of commands names this file.
    from neuron_moe.tools.subcommands import SUBCOMMANDS

    menus = {"bench": bench.MENU, "check": check.MENU, "chip": chip.MENU}
    modules = {name: module for name, (module, _) in SUBCOMMANDS.items() if name not in menus}
    for menu, found in menus.items():
        modules |= {f"{menu} {name}": module for name, (module, _) in found.entries.items()}
    actions = {command: _actions(module) for command, module in modules.items()}
    values = {
        f"{command} {name}": (_words(action), action.nargs in ("+", "*"))
        for command, found in actions.items()
        for action in found
        for name in action.option_strings
        if action.nargs != 0
    }
    return _SCRIPT.format(
        shell=shell,
        head=_ZSH if shell == "zsh" else "",
        files=_FILES,
        commands=shlex.quote("\n".join(SUBCOMMANDS)),
        menu_names="|".join(menus),
        menus=_branches({menu: "\n".join(found.entries) for menu, found in menus.items()}),
        values=_branches({name: words for name, (words, _) in values.items()}),
        lists=_branches({name: words for name, (words, is_list) in values.items() if is_list}),
        options=_branches({command: _options(found) for command, found in actions.items()}),
    )


def _actions(module: str) -> list[argparse.Action]:
    """Return what a command takes; nothing where a package is missing that it needs."""
    try:
        load(module).main([DESCRIBE])
    except Described as described:
        return described.actions
    except (ImportError, ValueError):
        return []
    raise AssertionError(f"{module}: does not parse its arguments first")


def _options(actions: list[argparse.Action]) -> str:
    """Return what may stand where no value is expected."""
    named = [name for action in actions for name in action.option_strings if name[:2] == "--"]
    others = [_words(action) for action in actions if not action.option_strings]
    return "\n".join([*named, *others])


def _words(action: argparse.Action) -> str:
    """Return the values of an option."""
    if action.choices is not None:
        return "\n".join(map(str, action.choices))
    if set(action.option_strings) & set(_MODELS):
        return "\n".join([*config_names(), _FILES])
    return _NUMBER if action.type in (int, float) else _FILES


def _branches(words: Mapping[str, str]) -> str:
    """Return branches of a case in which `words` is set; equal ones share one."""
    names = dict[str, list[str]]()
    for name, each in words.items():
        names.setdefault(each, []).append(shlex.quote(name))
    return "\n".join(
        f"            {'|'.join(those)}) words={shlex.quote(each)} ;;"
        for each, those in names.items()
    )
