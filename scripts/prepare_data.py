#!/usr/bin/env python3
"""Build the training data of the small models shipped in ``assets``.

Two bodies of public-domain English prose are used, both taken from Debian packages:

* the King James Bible (``bible-kjv``, ``bible-kjv-text``), one document per chapter, one verse per line;
* the six novels of Jane Austen (``r-cran-janeaustenr``), one document per chapter, one paragraph per block.

Packages that are not installed are fetched with ``apt-get download`` and unpacked with ``dpkg -x`` below the output
folder; nothing is installed and R is not needed. Two chapters in forty of each source are held out, one for choosing a
checkpoint (``valid``) and one for reporting (``test``). Lines of the training part that also stand word for word in a
held-out chapter are dropped from the training part.

Beside the prose there is a task with exact answers, sums with worked steps (``replayssm.study.task``): its problems are
drawn with a fixed seed, and which are held out follows from a hash of each problem. The tokenizer is trained on the
training part of the prose and a few problems, and takes every digit alone.

Files written to the output folder:

``train.jsonl``, ``valid.jsonl``, ``test.jsonl``
    documents, one JSON object a line with the keys ``source``, ``title`` and ``text``;
``train.npy``, ``valid.npy``, ``test.npy``
    token ids (uint16), every document followed by ``<|endoftext|>``;
``task_train.npy``, ``task_valid.npy``
    the same for problems of the task, one document each;
``tokenizer/``
    a byte-level BPE tokenizer in the format of ``transformers``;
``manifest.json``
    counts, settings and SHA-256 digests. The same packages give the same digests.

``--excerpt FILE`` also writes whole chapters of the test part, at most 128 KiB of them, for measurements on held-out
text. In the file a line ``<|endoftext|>`` stands after every chapter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from replayssm.study.task import problems

END_OF_TEXT = "<|endoftext|>"
PACKAGES = ("bible-kjv", "bible-kjv-text", "r-cran-janeaustenr")
BIBLE_PROGRAM = "usr/bin/bible"
BIBLE_DATA = "usr/lib/bible.data"
AUSTEN_DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"

HOLD_OUT_PERIOD = 40
HOLD_OUT_AT = {13: "test", 33: "valid"}
REPEAT_MIN_CHARS = 60
EXCERPT_BYTES = 128 * 1024
TASK_SEED = 20
TASK_PROBLEMS = {"train": 60_000, "valid": 500}
TASK_TOKENIZER_PROBLEMS = 200  # enough to make its words tokens, too few to spend merges on its numbers
EDITORIAL = re.compile(r"\[(End volume|At this point)")


class Document(NamedTuple):
    """One chapter: its source (``kjv`` or ``austen``), its heading and its text, which starts with the heading."""

    source: str
    title: str
    text: str


def locate_packages(unpacked: Path) -> Path:
    """Return a file-system root that holds the three packages, fetching them to ``unpacked`` if need be."""
    wanted = (BIBLE_PROGRAM, BIBLE_DATA, AUSTEN_DATA)
    for root in (Path("/"), unpacked):
        if all((root / name).exists() for name in wanted):
            return root
    unpacked.mkdir(parents=True, exist_ok=True)
    if not all(any(unpacked.glob(f"{name}_*.deb")) for name in PACKAGES):
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


def excerpt(documents: list[Document], limit: int) -> str:
    """Chapters of both sources by turns, those that fit ``limit`` bytes, each with a line of end-of-text after it.

    The sources share the limit in halves; chapters that do not fit are skipped, the others keep their order.
    """
    chosen = list[list[str]]()
    for source in dict.fromkeys(document.source for document in documents):
        left, texts = limit // 2, list[str]()
        for document in documents:
            text = f"{document.text.rstrip()}\n{END_OF_TEXT}\n"
            if document.source == source and len(text.encode()) <= left:
                texts.append(text)
                left -= len(text.encode())
        chosen.append(texts)
    return "".join(text for turn in zip_longest(*chosen, fillvalue="") for text in turn)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ``vocab_size`` entries, of which id 0 is the end-of-text token.

    Digits are split off one by one first, so that a number is a row of digits whatever its value.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def save_tokens(file: Path, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[int]:
    """Write the tokens of all texts, each followed by end-of-text, and return the number of tokens of each."""
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    np.save(file, np.concatenate([np.array(row, dtype=np.uint16) for row in rows]))
    return [len(row) for row in rows]


def main() -> None:
    """Fetch, clean, split, tokenize and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/data"), help="output folder (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokenizer entries (default: %(default)s)")
    parser.add_argument(
        "--packages", type=Path, help="folder with the .deb files, or to fetch them to (default: packages in --out)"
    )
    parser.add_argument("--excerpt", type=Path, help="write an excerpt of the test part to this file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    root = locate_packages(args.packages or args.out / "packages")
    parts: dict[str, list[Document]] = {"train": [], "valid": [], "test": []}
    manifest: dict[str, object] = {"vocab_size": args.vocab_size, "hold_out_period": HOLD_OUT_PERIOD}
    for read in (read_bible, read_austen):
        documents = list(read(root))
        source_parts, dropped = split_documents(documents)
        manifest[f"{documents[0].source}_lines_dropped_as_repeats"] = dropped
        for name, chosen in source_parts.items():
            parts[name] += chosen

    task = {part: [problem.text for problem in problems(part, n, TASK_SEED)] for part, n in TASK_PROBLEMS.items()}
    texts = [document.text for document in parts["train"]] + task["train"][:TASK_TOKENIZER_PROBLEMS]
    tokenizer = train_tokenizer(texts, args.vocab_size)
    tokenizer.save_pretrained(args.out / "tokenizer")
    for name, documents in parts.items():
        rows = [json.dumps(document._asdict(), ensure_ascii=False) for document in documents]
        (args.out / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        counts = save_tokens(args.out / f"{name}.npy", tokenizer, [document.text for document in documents])
        for source in ("kjv", "austen"):
            pairs = [(doc, count) for doc, count in zip(documents, counts, strict=True) if doc.source == source]
            manifest[f"{name}_{source}"] = {
                "documents": len(pairs),
                "bytes": sum(len(doc.text.encode()) for doc, _ in pairs),
                "tokens": sum(count for _, count in pairs),
            }
    for part, solved in task.items():
        counts = save_tokens(args.out / f"task_{part}.npy", tokenizer, solved)
        manifest[f"task_{part}"] = {"problems": len(counts), "tokens": sum(counts), "seed": TASK_SEED}
    if args.excerpt:
        text = excerpt(parts["test"], EXCERPT_BYTES)
        args.excerpt.write_text(text, encoding="utf-8")
        manifest["excerpt"] = {
            "chapters": text.count(END_OF_TEXT),
            "bytes": len(text.encode()),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
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
