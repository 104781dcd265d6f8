#!/usr/bin/env python3
"""Build the training data of the small model shipped in ``assets/gdn``.

Two bodies of public-domain English prose are used, both taken from Debian packages:

* the King James Bible (``bible-kjv``, ``bible-kjv-text``), one document per chapter, one verse per line;
* the six novels of Jane Austen (``r-cran-janeaustenr``), one document per chapter, one paragraph per block.

Packages that are not installed are fetched with ``apt-get download`` and unpacked with ``dpkg -x`` below the output
folder; nothing is installed and R is not needed. Two chapters in forty of each source are held out, one for choosing a
checkpoint (``valid``) and one for reporting (``test``). Lines of the training part that also stand word for word in a
held-out chapter are dropped from the training part. The tokenizer is trained on the training part alone.

Files written to the output folder:

``train.jsonl``, ``valid.jsonl``, ``test.jsonl``
    documents, one JSON object a line with the keys ``source``, ``title`` and ``text``;
``train.npy``, ``valid.npy``, ``test.npy``
    token ids (uint16), every document followed by ``<|endoftext|>``;
``tokenizer/``
    a byte-level BPE tokenizer in the format of ``transformers``;
``manifest.json``
    counts, settings and SHA-256 digests. The same packages give the same digests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PACKAGES = ("bible-kjv", "bible-kjv-text", "r-cran-janeaustenr")
BIBLE_PROGRAM = "usr/bin/bible"
BIBLE_DATA = "usr/lib/bible.data"
AUSTEN_DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"

HOLD_OUT_PERIOD = 40
HOLD_OUT_AT = {13: "test", 33: "valid"}
REPEAT_MIN_CHARS = 60
EDITORIAL = re.compile(r"\[(End volume|At this point)")


class Document(NamedTuple):
    """One chapter: its source (``kjv`` or ``austen``), its heading and its text, which starts with the heading."""

    source: str
    title: str
    text: str


def locate_packages(work: Path) -> Path:
    """Return a file-system root that holds the three packages, fetching them below ``work`` if need be."""
    wanted = (BIBLE_PROGRAM, BIBLE_DATA, AUSTEN_DATA)
    unpacked = work / "packages"
    for root in (Path("/"), unpacked):
        if all((root / name).exists() for name in wanted):
            return root
    unpacked.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=unpacked, check=True)
    for archive in sorted(unpacked.glob("*.deb")):
        subprocess.run(["dpkg", "-x", archive.name, "."], cwd=unpacked, check=True)
    return unpacked


def read_bible(root: Path) -> Iterator[Document]:
    """Yield the chapters of the King James Bible: a heading such as ``Genesis 1``, a blank line, one verse per line.

    The reader program prints book and chapter headings flush left between blank lines and starts each verse with two
    spaces and its number. Headings are kept, numbers are dropped, wrapped lines are joined.
    """
    command = [str(root / BIBLE_PROGRAM), "-l9999", "-p", str((root / BIBLE_DATA).parent), "ge1:1-re22:21"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    verse_start = re.compile(r"^ +\d+ ")
    title, verses = "", list[str]()
    for line in printed.splitlines():
        if verse_start.match(line):
            verses.append(verse_start.sub("", line).strip())
        elif re.fullmatch(r"(\d )?[A-Z][A-Za-z ]* \d+", line):
            if verses:
                yield Document("kjv", title, title + "\n\n" + "\n".join(verses))
            title, verses = line, []
        elif line.strip():
            verses[-1] += " " + line.strip()
    yield Document("kjv", title, title + "\n\n" + "\n".join(verses))


def read_r_strings(block: bytes) -> list[str]:
    """Decode a character vector from R's binary (XDR, version 3) serialisation."""

    def integer(at: int) -> int:
        return int.from_bytes(block[at : at + 4], "big", signed=True)

    if block[:2] != b"X\n" or integer(2) != 3:
        raise ValueError("not an R object in XDR serialisation, version 3")
    at = 18 + integer(14)  # magic, three version numbers, length and name of the native encoding
    if integer(at) & 0xFF != 16:
        raise ValueError("not an R character vector")
    count = integer(at + 4)
    at += 8
    strings = []
    for _ in range(count):
        length = integer(at + 4)  # after the flags of the element
        strings.append(block[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return strings


def read_austen(root: Path) -> Iterator[Document]:
    """Yield the chapters of the novels: a heading (``Emma, Chapter 7``), then paragraphs with blank lines between.

    Chapters are numbered through each novel. Title pages, volume headings, closing words, editors' notes, rows of
    asterisks and the underscores that mark italics are dropped; each paragraph becomes one line.
    """
    packed = (root / AUSTEN_DATA).read_bytes()
    while packed:
        stream = zlib.decompressobj()
        lines = read_r_strings(stream.decompress(packed[4:]))  # after the four-byte length of the block
        packed = stream.unused_data
        novel = lines[0].title().replace(" And ", " and ")
        body = re.split(r"\n(?:finis|the end)\s*$|\n\*vide ", "\n".join(lines), flags=re.IGNORECASE)[0]
        body = re.sub(r"\nVOLUME [IVX]+\n", "\n", body)
        chapters = re.split(r"\nchapter [ivxlc\d]+\n", body, flags=re.IGNORECASE)[1:]
        for number, chapter in enumerate(chapters, start=1):
            title = f"{novel}, Chapter {number}"
            blocks = (" ".join(block.replace("_", "").split()) for block in re.split(r"\n\s*\n", chapter))
            paragraphs = [block for block in blocks if block.strip("* ") and not EDITORIAL.match(block)]
            yield Document("austen", title, "\n\n".join([title, *paragraphs]))


def split_documents(documents: list[Document]) -> tuple[dict[str, list[Document]], int]:
    """Divide one source into train, valid and test; also return how many training lines were dropped as repeats."""
    parts: dict[str, list[Document]] = {"train": [], "valid": [], "test": []}
    for index, document in enumerate(documents):
        parts[HOLD_OUT_AT.get(index % HOLD_OUT_PERIOD, "train")].append(document)
    held_out = {line for part in ("valid", "test") for doc in parts[part] for line in doc.text.split("\n")}
    repeats = {line for line in held_out if len(line) >= REPEAT_MIN_CHARS}
    dropped = 0
    for index, document in enumerate(parts["train"]):
        lines = document.text.split("\n")
        kept = [line for line in lines if line not in repeats]
        dropped += len(lines) - len(kept)
        parts["train"][index] = document._replace(text="\n".join(kept))
    return parts, dropped


def train_tokenizer(documents: list[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ``vocab_size`` entries, of which id 0 is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def main() -> None:
    """Fetch, clean, split, tokenize and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/data"), help="output folder (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokenizer entries (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    root = locate_packages(args.out)
    parts: dict[str, list[Document]] = {"train": [], "valid": [], "test": []}
    manifest: dict[str, object] = {"vocab_size": args.vocab_size, "hold_out_period": HOLD_OUT_PERIOD}
    for read in (read_bible, read_austen):
        documents = list(read(root))
        source_parts, dropped = split_documents(documents)
        manifest[f"{documents[0].source}_lines_dropped_as_repeats"] = dropped
        for name, chosen in source_parts.items():
            parts[name] += chosen

    tokenizer = train_tokenizer(parts["train"], args.vocab_size)
    tokenizer.save_pretrained(args.out / "tokenizer")
    end = tokenizer.eos_token_id
    for name, documents in parts.items():
        rows = [json.dumps(document._asdict(), ensure_ascii=False) for document in documents]
        (args.out / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        ids = [[*tokenizer.encode(document.text), end] for document in documents]
        np.save(args.out / f"{name}.npy", np.concatenate([np.array(row, dtype=np.uint16) for row in ids]))
        for source in ("kjv", "austen"):
            pairs = [(doc, row) for doc, row in zip(documents, ids, strict=True) if doc.source == source]
            manifest[f"{name}_{source}"] = {
                "documents": len(pairs),
                "bytes": sum(len(doc.text.encode()) for doc, _ in pairs),
                "tokens": sum(len(row) for _, row in pairs),
            }
    files = [*sorted(args.out.glob("*.npy")), *sorted(args.out.glob("*.jsonl")), args.out / "tokenizer/tokenizer.json"]
    manifest["sha256"] = {
        path.relative_to(args.out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    text = json.dumps(manifest, indent=2)
    (args.out / "manifest.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
