"""Tokenizer and stop tokens of a checkpoint folder."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from neuron_moe.models.shipped import checkpoint_folder
from neuron_moe.models.text import UNFINISHED, TextCodec, TextStream, special_tokens

TEXTS = ["The router reads the hidden state.", " leading", "naïve café — 東京 🚀", "1\n2\t3"]


@pytest.mark.parametrize("text", TEXTS, ids=["plain", "space", "unicode", "control"])
def test_tokens_are_those_of_transformers(text: str, checkpoint_of: Callable[..., Path]) -> None:
    folder = checkpoint_of()
    ids = TextCodec(folder).encode(text)
    assert ids == AutoTokenizer.from_pretrained(folder)(text).input_ids
    assert TextCodec(folder).decode(ids) == text


TEXT = "naïve café — 東京 🚀 \N{REPLACEMENT CHARACTER} the router,  reads\n\tit."


@given(st.lists(st.integers(0, 10_000), max_size=40), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_any_tokens_stream_to_what_they_decode_to(numbers: list[int], shown: int) -> None:
    codec = TextCodec(checkpoint_folder("tiny_gpt_oss"))
    text_ids = codec.encode(TEXT)
    ids = [text_ids[number % len(text_ids)] for number in numbers]  # splits characters as well
    prompt, answer = ids[:shown], ids[shown:]
    assume(not codec.decode(prompt).endswith(UNFINISHED))  # what was printed stays
    stream = TextStream(codec, prompt)
    pieces = [stream.push(token) for token in answer]
    assert codec.decode(prompt) + "".join(pieces) + stream.finish() == codec.decode(ids)


def test_a_step_decodes_a_bounded_number_of_tokens(checkpoint_of: Callable[..., Path]) -> None:
    codec = TextCodec(checkpoint_of())
    stream, longest = TextStream(codec, codec.encode(TEXT)), 0
    decode = codec.decode

    def count(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    codec.decode = count  # type: ignore[method-assign]
    for token in codec.encode(TEXT) * 5:
        stream.push(token)
    assert longest <= 12  # eight of the prompt, and one character of four bytes


def test_a_broken_character_comes_out_at_the_end(checkpoint_of: Callable[..., Path]) -> None:
    codec = TextCodec(checkpoint_of())
    stream = TextStream(codec)
    first_byte = codec.encode("🚀")[0]
    assert stream.push(first_byte) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_stop_tokens_of_the_generation_config_win(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    codec = TextCodec(checkpoint_of())
    stop, pad = codec.encode("<|return|>")[0], codec.encode("<|endoftext|>")[0]
    assert codec.stop_token_ids == (stop, pad)
    assert codec.pad_token_id == pad
    (tmp_path / "tokenizer.json").write_bytes((checkpoint_of() / "tokenizer.json").read_bytes())
    assert TextCodec(tmp_path).stop_token_ids == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "pad_token_id": 3}))
    assert TextCodec(tmp_path).stop_token_ids == (7,)
    assert TextCodec(tmp_path).pad_token_id == 3


def test_a_missing_tokenizer_and_an_empty_prompt_are_refused(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: there is no tokenizer"):
        TextCodec(tmp_path)
    with pytest.raises(ValueError, match="prompt='': must give at least one token"):
        TextCodec(checkpoint_of()).encode("")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", '{"a": 1}', "must be a tokenizer"),
        ("config.json", "{", "must be JSON"),
        ("generation_config.json", "[]", "must be a JSON object, not a list"),
        ("generation_config.json", "{x", "must be JSON"),
    ],
)
def test_broken_files_are_named(
    name: str, content: str, words: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint_of(), folder)
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{name}: {words}"):
        TextCodec(folder)


@pytest.mark.parametrize("kind", ["folder", "dangling"])
def test_a_generation_config_that_is_no_file_is_not_passed_over(
    kind: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint_of(), tmp_path / "copy"))
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere.json")
    with pytest.raises(ValueError, match=r"generation_config\.json: must be a file"):
        TextCodec(folder)


@pytest.mark.parametrize("outer", [{}, {"eos_token_id": 8}])
def test_special_tokens_of_a_text_section_count(outer: dict[str, int], tmp_path: Path) -> None:
    config = {**outer, "text_config": {"eos_token_id": [77, 78], "pad_token_id": 5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert special_tokens(tmp_path) == ((8,) if outer else (77, 78), 5)
