"""What the command line says to continue: texts, files, messages of a chat, or token ids."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuron_moe.models.language_model import Prompting
from neuron_moe.models.text import TextCodec
from neuron_moe.tools.parsers import Parser

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to continue.

    Attributes:
        text: as given; None where it was token ids.
        token_ids: what the model reads.
        shown: what is printed in front of the answer.
    """

    text: str | None
    token_ids: list[int]
    shown: str


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts of a command, and what of the checkpoint's files they need.

    Attributes:
        prompts: in the order of the command line.
        codec: turns tokens into text; None where the prompts are token ids.
        stop_token_ids: tokens that end an answer.
        pad_token_id: filler of left padding.
    """

    prompts: list[Prompt]
    codec: TextCodec | None
    stop_token_ids: tuple[int, ...]
    pad_token_id: int

    def show(self, token_ids: Sequence[int]) -> str:
        """Return an answer for people: its text, or its token ids where there is no tokenizer."""
        if self.codec is None:
            return format_ids(token_ids)
        return self.codec.decode(token_ids)


def add_prompt_options(parser: Parser) -> None:
    """Add the options that `read_prompts` reads."""
    parser.add_argument(
        "--prompt",
        action="append",
        help="text to continue, - reads it from standard input; may be given again",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        dest="prompt",
        type=Path,
        metavar="FILE",
        help="a file with text to continue; may be given again",
    )
    parser.more.add_argument(
        "--prompt-ids",
        action="append",
        metavar="1,2,3",
        help="token ids to continue, instead of text and without a tokenizer; may be given again",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a message of a user: put it into the checkpoint's chat template",
    )
    parser.more.add_argument("--system", metavar="TEXT", help="with --chat: message of the system")


def read_texts(args: argparse.Namespace) -> list[str]:
    """Return the prompts that are texts, files and standard input read.

    One newline at the end of a file or of standard input is left out.

    Raises:
        ValueError: options that do not go together, or a file that is no text.
    """
    texts, ids = args.prompt or [], args.prompt_ids or []
    if bool(texts) == bool(ids):
        raise ValueError(
            "--prompt and --prompt-ids: give one of them."
            " Text is --prompt or --prompt-file, token ids are --prompt-ids 1,2,3."
        )
    if ids and args.chat:
        raise ValueError("--chat: a chat template takes text. Use --prompt, or leave --chat out.")
    if args.system is not None and not args.chat:
        raise ValueError("--system: belongs to a chat. Add --chat.")
    if texts.count(STANDARD_INPUT) > 1:
        raise ValueError("--prompt -: standard input can be read once. Give it once.")
    return [_read(text) for text in texts]


def read_prompts(args: argparse.Namespace, folder: Path, texts: Sequence[str]) -> Prompts:
    """Return the prompts of a command line as tokens of a checkpoint.

    Args:
        args: of a parser with `add_prompt_options`.
        folder: of the checkpoint.
        texts: what `read_texts` gave.

    Raises:
        FileNotFoundError: there is no tokenizer for a text.
        ValueError: no chat template, or a prompt that gives no tokens.
    """
    reader = Prompting(folder)
    stop_and_pad = reader.stop_token_ids, reader.pad_token_id
    if args.prompt_ids:
        prompts = [Prompt(None, _parse_ids(ids), f"[{ids}] ") for ids in args.prompt_ids]
        return Prompts(prompts, None, *stop_and_pad)
    if args.chat:
        asked = ((text, reader.encode_chat(text, args.system), f"{text}\n\n") for text in texts)
    else:
        asked = ((text, reader.encode(text), text) for text in texts)
    return Prompts([Prompt(*each) for each in asked], reader.codec, *stop_and_pad)


def format_ids(token_ids: Sequence[int]) -> str:
    """Return token ids as `--prompt-ids` takes them."""
    return ",".join(map(str, token_ids))


def _read(text: str | Path) -> str:
    if isinstance(text, Path):
        try:
            return text.read_text(encoding="utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--prompt-file {text}: must be UTF-8 text, but {error.reason} at byte"
                f" {error.start}. Convert it."
            ) from error
    return sys.stdin.read().removesuffix("\n") if text == STANDARD_INPUT else text


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(
            f"--prompt-ids {text!r}: must be token ids with commas between, such as 1,2,3."
        ) from error
