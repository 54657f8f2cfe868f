"""Corpus readers, the split and the tokenizer, on packages of a few lines."""

import json
import struct
import zlib

import numpy as np
import pytest

from lab.train import prepare_corpus
from lab.train.corpus_sources import (
    DOMAINS,
    Document,
    Source,
    read_novels,
    read_python,
    read_wordnet,
)
from lab.train.export_tiny import held_out_samples
from lab.train.prepare_corpus import is_held_out, train_tokenizer


def r_character_vector(lines):
    """Serialise lines as R does a character vector: XDR, version 3."""
    head = b"X\n" + struct.pack(">III", 3, 0x00040201, 0x00030500) + struct.pack(">I", 5) + b"UTF-8"
    body = struct.pack(">II", 0x10, len(lines))
    for line in lines:
        text = line.encode()
        body += struct.pack(">II", 0x00040009, len(text)) + text
    return head + body


def test_novels_come_by_chapter_with_paragraphs_on_one_line(tmp_path):
    folder = tmp_path / "usr/lib/R/site-library/janeaustenr/data"
    folder.mkdir(parents=True)
    lines = ["EMMA", "", "by Jane", "", "CHAPTER I", "", "It was", "late.", "", "Yes.", ""]
    lines += ["CHAPTER II", "", "Morning."]
    raw = r_character_vector(lines)
    (folder / "Rdata.rdb").write_bytes((struct.pack(">I", len(raw)) + zlib.compress(raw)) * 2)
    documents = list(read_novels(tmp_path))
    assert [document.name for document in documents] == ["Emma, 1", "Emma, 2"] * 2
    assert documents[0].text == "CHAPTER I\n\nIt was late.\n\nYes.\n"


def test_another_r_object_is_refused(tmp_path):
    folder = tmp_path / "usr/lib/R/site-library/janeaustenr/data"
    folder.mkdir(parents=True)
    raw = r_character_vector(["x"]).replace(struct.pack(">I", 0x10), struct.pack(">I", 0x0D))
    (folder / "Rdata.rdb").write_bytes(struct.pack(">I", len(raw)) + zlib.compress(raw))
    with pytest.raises(ValueError, match="not a character vector"):
        list(read_novels(tmp_path))


def test_a_meaning_stands_once_under_its_first_word(tmp_path):
    folder = tmp_path / "usr/share/wordnet"
    folder.mkdir(parents=True)
    noun = '  1 licence\n00001 04 n 02 hot_dog 0 frank 1 001 @ 2 n 0000 | a sausage; "one"  \n'
    (folder / "data.noun").write_text(noun)
    for part in ("verb", "adv"):
        (folder / f"data.{part}").write_text("")
    (folder / "data.adj").write_text("00002 00 s 01 awake(p) 0 000 | not asleep  \n")
    (page,) = read_wordnet(tmp_path)
    assert page.text == 'awake, adj. not asleep.\nhot dog, n. a sausage; "one". Also: frank.\n'


def test_python_files_come_once_and_without_tabs(tmp_path):
    folder = tmp_path / "usr/lib/python3"
    folder.mkdir(parents=True)
    text = "def f():\n\treturn 1   \n" * 40
    for name in ("a.py", "b.py"):
        (folder / name).write_text(text)
    (folder / "short.py").write_text("x = 1\n")
    (document,) = read_python(tmp_path)
    assert document.name == "python3/a.py"
    assert document.text.startswith("def f():\n    return 1\n")


def test_the_split_holds_out_a_twenty_fifth_and_never_moves():
    documents = [Document(domain="novel", name=f"Emma, {n}", text="") for n in range(5000)]
    held_out = [document.name for document in documents if is_held_out(document)]
    assert 150 < len(held_out) < 250
    assert held_out[:3] == ["Emma, 17", "Emma, 20", "Emma, 56"]


def test_the_tokenizer_starts_every_text_and_loses_nothing():
    text = "In the beginning\n    def f(x):  # naïve ☃\n"
    tokenizer = train_tokenizer([Document(domain="code", name="a", text=text * 9)], 300)
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id("<|startoftext|>") == 0
    assert tokenizer.decode(ids) == text


def test_the_corpus_is_written_from_its_sources(tmp_path, monkeypatch):
    """The network is left out: each source reads documents made here."""
    root = tmp_path / "root"

    def fetch(source, folder):
        notice = root / "usr/share/doc" / source.package
        notice.mkdir(parents=True, exist_ok=True)
        (notice / "copyright").write_text(f"licence of {source.package}")
        return root, {source.package: "1.0"}

    def source_of(domain):
        def read(_root):
            for number in range(300):
                text = f"{domain} number {number}\n" * 30
                yield Document(domain=domain, name=str(number), text=text)

        return Source(domain=domain, package=f"pkg-{domain}", licence="free", read=read)

    monkeypatch.setattr(prepare_corpus, "fetch", fetch)
    monkeypatch.setattr(prepare_corpus, "SOURCES", [source_of(domain) for domain in DOMAINS])
    out = tmp_path / "corpus"
    assert prepare_corpus.main(["--out", str(out), "--vocab-size", "300"]) == 0
    record = json.loads((out / "corpus.json").read_text())
    for domain in DOMAINS:
        tokens = np.load(out / f"tokens_{domain}.npy")
        starts = np.load(out / f"starts_{domain}.npy")
        assert (tokens[starts] == 0).all()  # the start token
        assert (tokens[starts[1:] - 1] == 1).all()  # the end token
        assert record["train"][domain]["documents"] == len(starts)
        assert record["held_out"][domain]["documents"] == 300 - len(starts)
        assert (out / "licences" / f"pkg-{domain}.md").read_text() == f"licence of pkg-{domain}"
    samples = held_out_samples(out / "heldout.jsonl")
    assert len(samples) == 40 * len(DOMAINS)
    assert all(0 < len(sample["text"]) <= 600 for sample in samples)
