"""Prepare the corpus of the small model: fetch, clean, split, train a tokenizer, tokenise.

    neuron-moe prepare_corpus --out .corpus

Runs on Debian 12 (``apt-get download`` and ``dpkg-deb``), half a minute on two cores. It writes:

    tokens_<domain>.npy   uint16 [tokens]   training documents, each with its start and end token
    starts_<domain>.npy   int64  [docs]     where each document starts in it
    heldout_<domain>.npy  uint16 [tokens]   held-out documents, likewise
    heldout.jsonl         one held-out document a line: {"domain", "name", "text"}
    tokenizer.json, tokenizer_config.json   byte-level BPE in the Hugging Face form
    corpus.json           the record: packages, versions, licences, sizes, digests
    licences/<package>.md the copyright file of each package

The split is by a digest of the document's name, so it does not move when a source grows.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from lab.train.corpus_sources import DOMAINS, SOURCES, Document, Source
from neuron_moe.errors import check_positive_int
from neuron_moe.tools.parsers import Parser

BOS, EOS, PAD = "<|startoftext|>", "<|endoftext|>", "<|pad|>"
HELD_OUT_PER_MILLE = 40
_SMALLEST_VOCABULARY = 256 + 3
# The tokenizer sees this much of each domain, so that the biggest does not take all the words.
_TOKENIZER_BYTES_PER_DOMAIN = 4_000_000


def is_held_out(document: Document) -> bool:
    """Say whether a document belongs to the held-out set: 4 % of them, by a digest of the name."""
    digest = hashlib.sha256(f"{document.domain}/{document.name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def fetch(source: Source, folder: Path) -> tuple[Path, dict[str, str]]:
    """Download and unpack a source's packages with apt and dpkg.

    Args:
        source: the source.
        folder: where the packages and their unpacked files go.

    Returns:
        The root of the unpacked files, and the version of each package.
    """
    root = folder / source.package
    root.mkdir(parents=True)
    packages = (source.package, *source.readers)
    for package in packages:
        download = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package]
        subprocess.run(download, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    versions = {}
    for package in packages:
        (archive,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True)
        field = ["dpkg-deb", "-f", str(archive), "Version"]
        versions[package] = subprocess.run(
            field, check=True, capture_output=True, text=True
        ).stdout.strip()
    return root, versions


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on up to 4 MB of each domain.

    Args:
        documents: training documents.
        vocab_size: entries, the three special ones and the 256 bytes included.

    Returns:
        A tokenizer that puts <|startoftext|> before a text.
    """
    sample: list[str] = []
    taken: defaultdict[str, int] = defaultdict(int)
    for document in documents:
        if taken[document.domain] < _TOKENIZER_BYTES_PER_DOMAIN:
            taken[document.domain] += len(document.text.encode())
            sample.append(document.text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that AutoTokenizer reads."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": model_max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_tokens(
    documents: Sequence[Document], tokenizer: Tokenizer, folder: Path, name: str
) -> dict[str, NDArray[np.int64]]:
    """Tokenise the documents of each domain into one array.

    Args:
        documents: documents of all domains.
        tokenizer: puts <|startoftext|> before a text; <|endoftext|> is added here.
        folder: where the arrays go.
        name: the arrays are <name>_<domain>.npy.

    Returns:
        Where each document starts, by domain, and last the number of tokens: int64 [docs + 1].
    """
    eos = tokenizer.token_to_id(EOS)
    starts = {}
    for domain in DOMAINS:
        texts = [document.text for document in documents if document.domain == domain]
        pieces = [[*encoding.ids, eos] for encoding in tokenizer.encode_batch(texts)]
        starts[domain] = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        flat = (token for piece in pieces for token in piece)
        tokens = np.fromiter(flat, np.uint16, int(starts[domain][-1]))
        np.save(folder / f"{name}_{domain}.npy", tokens)
    return starts


def prepare(out: Path, vocab_size: int, model_max_length: int) -> dict[str, Any]:
    """Fetch every source and write the corpus.

    Args:
        out: folder of the corpus; made if missing.
        vocab_size: entries of the tokenizer.
        model_max_length: written into the tokenizer's configuration.

    Returns:
        The record that is also written to corpus.json.
    """
    (out / "licences").mkdir(parents=True, exist_ok=True)
    documents: list[Document] = []
    packages = []
    with tempfile.TemporaryDirectory() as scratch:
        for source in SOURCES:
            root, versions = fetch(source, Path(scratch))
            read = list(source.read(root))
            documents += read
            notice = root / "usr/share/doc" / source.package / "copyright"
            (out / "licences" / f"{source.package}.md").write_bytes(notice.read_bytes())
            packages.append(
                {
                    "domain": source.domain,
                    "package": source.package,
                    "versions": versions,
                    "licence": source.licence,
                    "documents": len(read),
                    "bytes": sum(len(document.text.encode()) for document in read),
                }
            )
    # A shuffle by digest: neighbours in a stream are then unrelated, whatever the source's order.
    documents.sort(key=lambda d: hashlib.sha256(f"{d.domain}:{d.name}".encode()).digest())
    train = [document for document in documents if not is_held_out(document)]
    held_out = [document for document in documents if is_held_out(document)]
    tokenizer = train_tokenizer(train, vocab_size)
    save_tokenizer(tokenizer, out, model_max_length)
    starts = write_tokens(train, tokenizer, out, "tokens")
    for domain in DOMAINS:
        np.save(out / f"starts_{domain}.npy", starts[domain][:-1])
    held_out_starts = write_tokens(held_out, tokenizer, out, "heldout")
    with (out / "heldout.jsonl").open("w") as file:
        for document in held_out:
            line = {"domain": document.domain, "name": document.name, "text": document.text}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    record: dict[str, Any] = {
        "packages": packages,
        "vocab_size": tokenizer.get_vocab_size(),
        "train": {
            domain: {
                "documents": sum(d.domain == domain for d in train),
                "bytes": sum(len(d.text.encode()) for d in train if d.domain == domain),
                "tokens": int(starts[domain][-1]),
            }
            for domain in DOMAINS
        },
        "held_out": {
            domain: {
                "documents": sum(d.domain == domain for d in held_out),
                "bytes": sum(len(d.text.encode()) for d in held_out if d.domain == domain),
                "tokens": int(held_out_starts[domain][-1]),
            }
            for domain in DOMAINS
        },
        "heldout_sha256": hashlib.sha256((out / "heldout.jsonl").read_bytes()).hexdigest(),
    }
    (out / "corpus.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = Parser("prepare_corpus", __doc__)
    parser.add_argument("--out", type=Path, default=Path(".corpus"), help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=4096, help="entries of the tokenizer")
    parser.add_argument("--max-length", type=int, default=1024, help="longest context, in tokens")
    options = parser.parse_args(argv)
    check_positive_int("--max-length", options.max_length)
    if options.vocab_size < _SMALLEST_VOCABULARY:
        raise ValueError(
            f"--vocab-size={options.vocab_size}: must be at least {_SMALLEST_VOCABULARY}, one entry"
            " for each byte and for each special token."
        )
    record = prepare(options.out, options.vocab_size, options.max_length)
    for domain, counts in record["train"].items():
        held_out = record["held_out"][domain]["bytes"]
        print(
            f"{domain:11} {counts['documents']:5} documents {counts['bytes'] / 1e6:6.2f} MB "
            f"{counts['tokens'] / 1e6:6.2f} M tokens "
            f"{counts['bytes'] / counts['tokens']:5.2f} bytes/token, held out "
            f"{held_out / 1e6:.2f} MB"
        )
    print(f"{options.out}: a vocabulary of {record['vocab_size']} tokens")
    return 0
