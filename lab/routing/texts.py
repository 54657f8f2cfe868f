"""Texts by domain, as tokens."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from neuron_moe.models.text import TextCodec

HELD_OUT_FILE = "heldout.jsonl"


def read_texts(path: Path) -> dict[str, list[str]]:
    """Return the texts of each domain, in order.

    Args:
        path: JSON lines (.jsonl) with "domain" and "text", or any other file: one text, whose
            domain is the file's name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not such an object, or there is no text.
    """
    texts: defaultdict[str, list[str]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        if path.suffix not in ("", ".jsonl"):
            texts[path.stem] = [file.read()]
        else:
            _read_lines(path, file.readlines(), texts)
    if not any(text for each in texts.values() for text in each):
        raise ValueError(
            f"{path}: holds no text. Give a text file, or .jsonl with a domain and a text a line."
        )
    return dict(texts)


def _read_lines(path: Path, lines: Sequence[str], texts: defaultdict[str, list[str]]) -> None:
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: must be JSON, but {error}.") from error
        if not isinstance(record, dict) or not {"domain", "text"} <= record.keys():
            raise ValueError(f"{path}, line {number}: must be a JSON object with domain and text.")
        texts[record["domain"]].append(record["text"])


def cut_sequences(
    texts: Sequence[str], codec: TextCodec, most_tokens: int, longest: int
) -> list[list[int]]:
    """Return the tokens of texts in sequences of at most `longest`, `most_tokens` in all."""
    sequences: list[list[int]] = []
    left = most_tokens
    for text in texts:
        tokens = codec.encode(text)[:left]
        sequences += [tokens[first : first + longest] for first in range(0, len(tokens), longest)]
        left -= len(tokens)
        if left == 0:
            break
    return sequences
