"""The texts the small model learns from: which Debian package, which licence, how it becomes text.

Every source is a Debian package whose text is in the public domain or under a permissive licence.
A reader turns one unpacked package into documents: one chapter, one dictionary page, one manual
page, one source file. Documents are what the train and held-out sets are split by, so a reader
never yields the same text twice.

The packages are read, never installed: ``dpkg-deb -x`` unpacks them into a folder. Two need a
program to be read and get it from a package beside them: ``bible`` decodes the text of
bible-kjv-text, and ``mandoc`` sets manual pages.
"""

from __future__ import annotations

import gzip
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_ENTRIES_PER_DICTIONARY_PAGE = 40
_MANUAL_WIDTH = 80
_R_CHARSXP, _R_NA_LENGTH = 9, 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text that is wholly in the train set or wholly in the held-out set.

    Args:
        domain: the kind of text, one of `DOMAINS`.
        name: what the document is, unique in its domain ("Genesis 1").
        text: the text, with a line break at its end.
    """

    domain: str
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Debian package and how to read it.

    Args:
        domain: the kind of text the package gives.
        package: the Debian package that holds the text.
        licence: the licence of that text, as the package's copyright file states it.
        readers: further packages that hold a program needed to read it.
        read: the unpacked packages' root -> documents.
    """

    domain: str
    package: str
    licence: str
    read: Callable[[Path], Iterator[Document]]
    readers: tuple[str, ...] = ()


def read_bible(root: Path) -> Iterator[Document]:
    """Yield the King James Bible, one chapter a document, verses numbered and one a line."""
    program, data = str(root / "usr/bin/bible"), str(root / "usr/lib")
    command = [program, "-p", data, "-l100000", "gen1:1-rev22:21"]
    printed = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL)
    heading, verses = "", []  # type: tuple[str, list[str]]
    for line in printed.stdout.decode("ascii").splitlines():
        if verse := re.fullmatch(r" {1,3}(\d+) (.*)", line):
            verses.append(f"{verse[1]} {verse[2].strip()}")
        elif re.fullmatch(r"[A-Z0-9][\w ]* \d+", line.strip()):
            if verses:
                yield _chapter("scripture", heading, verses)
            heading, verses = line.strip(), []
    yield _chapter("scripture", heading, verses)


def read_novels(root: Path) -> Iterator[Document]:
    """Yield Jane Austen's six novels, one chapter a document, a paragraph on one line."""
    database = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while database:  # R's lazy-load format: big-endian length of the unpacked object, then zlib
        stream = zlib.decompressobj()
        lines = _r_strings(stream.decompress(database[4:]))
        database = stream.unused_data
        title = lines[0].title()
        chapter, paragraphs = 0, []  # type: tuple[int, list[str]]
        for paragraph in _paragraphs(lines):
            if re.match(r"(chapter|volume) [ivxlc\d]+\.?$", paragraph, re.IGNORECASE):
                if len(paragraphs) > 1:
                    yield _chapter("novel", f"{title}, {chapter}", ["\n\n".join(paragraphs)])
                chapter += 1
                paragraphs = [f"CHAPTER {paragraph.split()[1].rstrip('.').upper()}"]
            elif chapter:  # what stands before the first chapter is the title page
                paragraphs.append(paragraph)
        yield _chapter("novel", f"{title}, {chapter}", ["\n\n".join(paragraphs)])


def read_wordnet(root: Path) -> Iterator[Document]:
    """Yield WordNet as pages of a dictionary: each meaning once, under its first word, in order.

    WordNet's database rather than its dict form: there a meaning is repeated under each of its
    synonyms, and the same definition would stand in both sets.
    """
    names = {"n": "n.", "v": "v.", "a": "adj.", "s": "adj.", "r": "adv."}
    entries = []
    for part in ("noun", "verb", "adj", "adv"):
        for line in (root / "usr/share/wordnet" / f"data.{part}").read_text().splitlines():
            if line.startswith(" "):  # the licence at the head of the file
                continue
            facts, _, gloss = line.partition(" | ")
            fields = facts.split()
            count = int(fields[3], 16)
            words = [re.sub(r"\(.*?\)$", "", word) for word in fields[4 : 4 + 2 * count : 2]]
            words = list(dict.fromkeys(word.replace("_", " ") for word in words))
            also = f" Also: {', '.join(words[1:])}." if len(words) > 1 else ""
            meaning = gloss.strip().rstrip(";")
            entries.append((words[0], f"{words[0]}, {names[fields[2]]} {meaning}.{also}"))
    entries.sort(key=lambda entry: (entry[0].lower(), entry[1]))
    for first in range(0, len(entries), _ENTRIES_PER_DICTIONARY_PAGE):
        page = entries[first : first + _ENTRIES_PER_DICTIONARY_PAGE]
        text = "\n".join(entry for _, entry in page) + "\n"
        yield Document(domain="dictionary", name=f"from {page[0][0]} ({first})", text=text)


def read_manual(root: Path) -> Iterator[Document]:
    """Yield FreeBSD's manual pages as plain text, 80 columns wide; repeated pages once."""
    pages = sorted((root / "usr/share/man").glob("man*/*.gz"))

    def set_page(page: Path) -> str:
        command = [str(root / "usr/bin/mandoc"), "-T", "ascii", "-O", f"width={_MANUAL_WIDTH}"]
        source = gzip.decompress(page.read_bytes())
        printed = subprocess.run(command, input=source, capture_output=True, check=False).stdout
        return re.sub(".\b", "", printed.decode("ascii", errors="replace"))

    seen: set[str] = set()
    with ThreadPoolExecutor(2) as pool:
        for page, text in zip(pages, pool.map(set_page, pages), strict=True):
            # Several names lead to one page; its heading shows the name it was requested by.
            body = text.partition("\n")[2].strip()
            if len(body) > 400 and body not in seen:
                seen.add(body)
                name = page.name.removesuffix("freebsd.gz")
                yield Document(domain="manual", name=name, text=text.strip() + "\n")


def read_python(root: Path) -> Iterator[Document]:
    """Yield Python source files of 400 bytes to 100 kB, repeated files once."""
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        raw = path.read_bytes()
        generated = path.name.startswith("_sysconfigdata") or "pydoc_data" in path.parts
        if path.is_symlink() or generated or raw in seen or not 400 <= len(raw) <= 100_000:
            continue
        seen.add(raw)
        text = raw.decode("utf-8", errors="ignore").expandtabs(4)
        text = "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"
        yield Document(domain="code", name=str(path.relative_to(root / "usr/lib")), text=text)


def _chapter(domain: str, name: str, lines: list[str]) -> Document:
    heading = f"{name}\n\n" if domain == "scripture" else ""
    return Document(domain=domain, name=name, text=heading + "\n".join(lines) + "\n")


def _paragraphs(lines: list[str]) -> list[str]:
    """Join the lines between blank lines."""
    text = "\n".join(line.strip() for line in lines)
    return [" ".join(part.split()) for part in re.split(r"\n{2,}", text) if part.strip()]


def _r_strings(serialized: bytes) -> list[str]:
    """Read the one character vector of an R object in R's XDR serialisation, version 3."""
    native = struct.unpack_from(">I", serialized, 14)[0]  # length of the encoding's name
    at = 18 + native
    vector, count = struct.unpack_from(">II", serialized, at)
    if serialized[:2] != b"X\n" or vector & 0xFF != 16:
        raise ValueError(
            "Rdata.rdb: not a character vector in R's XDR form. Use janeaustenr 1.0.0."
        )
    at, strings = at + 8, []
    for _ in range(count):
        flags, length = struct.unpack_from(">II", serialized, at)
        if flags & 0xFF != _R_CHARSXP or length == _R_NA_LENGTH:
            raise ValueError(f"Rdata.rdb, byte {at}: not a string. Use janeaustenr 1.0.0.")
        strings.append(serialized[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return strings


SOURCES = (
    Source(
        domain="scripture",
        package="bible-kjv-text",
        licence="public domain (the King James Bible of 1611)",
        read=read_bible,
        readers=("bible-kjv",),
    ),
    Source(
        domain="novel",
        package="r-cran-janeaustenr",
        licence="public domain (Jane Austen, 1811-1818), in an MIT package",
        read=read_novels,
    ),
    Source(
        domain="dictionary",
        package="wordnet-base",
        licence="WordNet 3.0 licence (permissive; Princeton University)",
        read=read_wordnet,
    ),
    Source(
        domain="manual",
        package="freebsd-manpages",
        licence="BSD-2-Clause-FreeBSD and BSD-4-Clause",
        read=read_manual,
        readers=("mandoc",),
    ),
    Source(
        domain="code",
        package="libpython3.11-stdlib",
        licence="PSF-2.0",
        read=read_python,
        readers=("libpython3.11-minimal",),
    ),
    Source(
        domain="code",
        package="python3-django",
        licence="BSD-3-Clause",
        read=read_python,
    ),
)

DOMAINS = tuple(dict.fromkeys(source.domain for source in SOURCES))
