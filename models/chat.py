"""Chat templates: from messages to the text that a checkpoint was taught to answer.

A checkpoint holds its template as a Jinja file or inside its tokenizer's configuration. Templates
are programs of strangers, so they run in Jinja's immutable sandbox, with the few helpers that
published ones expect of the transformers library.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from neuron_moe.models.hf_config import read_json_object

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILES = ("tokenizer_config.json", "chat_template.json")
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_WAY_OUT = (
    "Give plain text (`neuron-moe generate` without --chat), or download the chat template with the"
    " tokenizer."
)


class ChatTemplate:
    """Render messages as the checkpoint in a folder wants them.

    Raises:
        ValueError: the checkpoint has no template, or one that Jinja cannot read.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        settings = [_read_settings(self._folder / name) for name in SETTINGS_FILES]
        source = self._find_source(settings)
        tokens = _read_settings(self._folder / _SPECIAL_TOKENS_FILE)
        self._special_tokens = _special_tokens(tokens) | _special_tokens(settings[0])
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            why = str(error).rstrip(".")
            raise ValueError(
                f"{self._folder}: its chat template is broken: {why}. {_WAY_OUT}"
            ) from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt that requests the answer to the last message.

        Args:
            messages: each with a `role`, such as user or system, and its `content`.

        Raises:
            ValueError: the template refuses these messages.
        """
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
            return text or _raise("it writes nothing")
        except Exception as error:  # a stranger's program
            why = str(error).rstrip(".")
            raise ValueError(
                f"{self._folder}: its chat template refuses roles"
                f" {[message.get('role') for message in messages]}: {why}."
                " Use the roles it knows; some know no system message."
            ) from error

    def _find_source(self, settings: Sequence[Mapping[str, Any]]) -> str:
        path = self._folder / TEMPLATE_FILE
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: must be UTF-8, but {error}. {_WAY_OUT}") from error
        for values in settings:
            found = values.get("chat_template")
            if isinstance(found, list):  # several by name
                by_name = {each.get("name"): each.get("template") for each in found}
                found = by_name.get("default")
            if isinstance(found, str):
                return found
        raise ValueError(f"{self._folder}: this checkpoint has no chat template. {_WAY_OUT}")


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  as the library declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja with the settings and helpers that published templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as templates are written for it: with the defaults of transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_settings(path: Path) -> Mapping[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what templates call bos_token and the like; a token is text, or an object with it."""
    texts = {
        name: value.get("content") if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
