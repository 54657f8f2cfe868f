"""Chat templates: the prompts that transformers makes of the same files."""

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from neuron_moe.models.chat import ChatTemplate
from neuron_moe.models.text import TextCodec

PLAIN = """\
{%- if tools is not none %}tools{% endif -%}
{{ bos_token }}{% for message in messages %}
    {% if loop.first and message.role == 'system' %}
[{{ message.content | trim }}]
    {% else %}
<{{ message.role }}>{{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""
# What published templates use beyond plain Jinja.
SPECIAL = """\
{%- set found = namespace(role='') -%}
{%- for message in messages -%}
    {%- if message.role == 'stop' -%}{%- break -%}{%- endif -%}
    {%- set found.role = message.role -%}
{%- endfor -%}
{%- generation -%}{{ messages | tojson }}{%- endgeneration -%}
{{ strftime_now('%Y') }} {{ found.role }} {{ messages[0].content.split(' ')[-1] }}"""
TO_JSON = """\
{{ messages | tojson(sort_keys=True, separators=(',', ':')) }}
{{ messages | tojson(ensure_ascii=True) }}{{ messages | tojson(indent=2) }}"""
SYSTEM = {"role": "system", "content": "  Be brief.  "}
USER = {"role": "user", "content": "Whät is a router?"}
STOP = {"role": "stop", "content": ""}


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint that may be changed."""
    return Path(shutil.copytree(checkpoint_of(), tmp_path / "chat"))


def keep(folder: Path, place: str, template: str) -> None:
    """Put a template where a published checkpoint may have it."""
    if place.endswith(".jinja"):
        (folder / place).write_text(template, encoding="utf-8")
        return
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    named = [{"name": "other", "template": "x"}, {"name": "default", "template": template}]
    settings["chat_template"] = template if place == "one" else named
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("place", ["chat_template.jinja", "one", "by name"])
@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (PLAIN, [SYSTEM, USER]),
        (PLAIN, [USER]),
        (SPECIAL, [USER, STOP, SYSTEM]),
        (TO_JSON, [SYSTEM, USER]),
    ],
    ids=["system", "user", "special", "json"],
)
def test_tokens_are_those_of_transformers(
    place: str, template: str, messages: list[dict[str, str]], folder: Path
) -> None:
    keep(folder, place, template)
    text = ChatTemplate(folder).render(messages)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert TextCodec(folder).encode(text, is_template=True) == ids


def test_a_template_sees_the_date_and_the_special_tokens(folder: Path) -> None:
    keep(folder, "chat_template.jinja", "{{ bos_token }}{{ strftime_now('%Y') }}")
    settings = {"bos_token": {"content": "<s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    year = datetime.now().year
    assert ChatTemplate(folder).render([USER]) in {f"<s>{year}", f"<s>{year - 1}"}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "its chat template is broken"),
        ("{{ raise_exception('no system here') }}", r"refuses roles \['user'\]: no system here"),
        ("{{ messages[0].content + 1 }}", "refuses roles"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages | nosuch }}", r"broken: No filter named 'nosuch'\. Give"),
        ("{{ 1 / 0 }}", "refuses roles .*division by zero"),
        ("{{ range(10 ** 6) | list }}", "refuses roles .*Range too big"),
        ("{{ messages[0].content.index('#') }}", "refuses roles .*substring not found"),
        ("{% if false %}x{% endif %}", "it writes nothing"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "its chat template is broken"),
    ],
    ids=[
        *("broken", "raises", "types", "escapes", "changes", "filter", "divides", "range"),
        *("value", "nothing", "deep"),
    ],
)
def test_a_bad_template_is_refused(template: str, words: str, folder: Path) -> None:
    keep(folder, "chat_template.jinja", template)
    with pytest.raises(ValueError, match=words):
        ChatTemplate(folder).render([USER])


def test_a_checkpoint_without_a_template_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="this checkpoint has no chat template"):
        ChatTemplate(folder)


def test_a_template_in_another_encoding_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: must be UTF-8, but .*download"):
        ChatTemplate(folder)
