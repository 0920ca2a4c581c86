"""Own documents to a corpus: one passage a line, as `rlsys.search.corpus` reads it.

Contract: each line is {"id", "contents": '"title"\\ntext', ..., "source"}, where "..." is what else the
document's row holds and `source` (kept if the row has one) is its file. The same files give the same bytes.
A document that makes one passage hands on its id, one that makes more numbers them: "id#1", "id#2". No two
passages share an id. The output appears whole or not at all.

Memory: one document, and about 100 bytes a passage to know its id again (as much again to drop duplicates).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import xxhash

from rlsys.errors import UserError
from rlsys.search.ingest.chunker import Word, chunk_text, find_words
from rlsys.search.ingest.sources import Document, Fields, File, Skipped, find_files, read

_REPEATED_BYTES = 1 << 26
"""Most that one document repeats in all its passages, beside its text."""
Costs = Callable[[str, Sequence[Word]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Chunking:
    """How documents are cut; sizes count the text of a passage, not its title."""

    size: int = 100
    """Most words of a passage, or tokens if there is a tokenizer; 100 words as in wiki-18."""
    overlap: int = 0
    """Most words, or tokens, that a passage repeats of the one before in the same section."""
    tokenizer: str = ""
    """Encoder, or folder with a tokenizer.json, whose tokens are counted; "" counts words."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"size {self.size} holds no word: give 1 or more")
        if not 0 <= self.overlap < self.size:
            raise UserError(f"overlap {self.overlap} must be 0 or more, and less than size {self.size}")


@dataclass(slots=True)
class Summary:
    """What an ingestion read and wrote."""

    documents: int = 0
    passages: int = 0
    duplicates: int = 0
    """Passages left out because an earlier one says the same, title included."""
    skipped: list[Skipped] = field(default_factory=list)
    words: int = 0
    """Over all passages, title not included."""
    longest: int = 0
    """Words of the longest passage."""

    @property
    def mean_words(self) -> float:
        """Words of a passage on average, 0 without passages."""
        return self.words / self.passages if self.passages else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for people; what was skipped is grouped by reason, with up to three names."""
        shown = [
            ("documents", f"{self.documents:,}"),
            ("passages", f"{self.passages:,}"),
            ("duplicates left out", f"{self.duplicates:,}"),
            ("words a passage", f"mean {self.mean_words:.1f}, most {self.longest:,}"),
        ]
        for reason, count in Counter(entry.reason for entry in self.skipped).most_common():
            names = [entry.name for entry in self.skipped if entry.reason == reason][:3]
            more = ", ..." if count > len(names) else ""
            shown.append((f"skipped, {reason}", f"{count:,}: {', '.join(names)}{more}"))
        return shown


def ingest(
    sources: Sequence[Path],
    out: Path,
    chunking: Chunking | None = None,
    fields: Fields | None = None,
    *,
    drop_duplicates: bool = False,
) -> Summary:
    """Cut the documents of `sources` (files, or folders walked in the order of names) into passages at `out`.

    Raises UserError for what cannot be read, for ids that occur twice and where there is nothing to write;
    a file that was at `out` before is untouched then.
    """
    chunking = chunking or Chunking()
    costs = token_costs(chunking.tokenizer) if chunking.tokenizer else None
    writer = _Writer(drop_duplicates)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    found = list(find_files(sources, out))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            for document in _documents(found, fields or Fields(), writer.summary):
                file.writelines(writer.lines(document, chunking, costs))
            file.flush()
            os.fsync(file.fileno())
        if not writer.summary.passages:
            raise UserError(_nothing(sources, writer.summary))
        part.replace(out)
    except OSError as problem:
        raise UserError(f"{out} cannot be written ({problem.strerror}): give another place") from problem
    finally:
        part.unlink(missing_ok=True)
    return writer.summary


def token_costs(name: str) -> Costs:
    """Tokens of each word in its text, for the tokenizer of encoder (or folder) `name`; no special tokens."""
    from tokenizers import Tokenizer

    from rlsys.search.encoders.spec import resolve_folder

    path = resolve_folder(name) / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"tokenizer {name!r} has no {path}: give a folder with a tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def costs(text: str, words: Sequence[Word]) -> list[int]:
        ends = iter(sorted(end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets))
        counted = []
        end = next(ends, None)
        for word in words:
            count = 0
            while end is not None and end <= word.end:
                count += 1
                end = next(ends, None)
            counted.append(count)
        return counted

    return costs


def _documents(found: Sequence[File | Skipped], fields: Fields, summary: Summary) -> Iterator[Document]:
    for file in found:
        for document in [file] if isinstance(file, Skipped) else read(file, fields):
            if isinstance(document, Skipped):
                summary.skipped.append(document)
            else:
                summary.documents += 1
                yield document


class _Writer:
    """Passages to lines, with a count of everything."""

    def __init__(self, drop_duplicates: bool) -> None:
        self.summary = Summary()
        self._drop_duplicates = drop_duplicates
        self._ids: set[bytes] = set()
        self._contents: set[bytes] = set()

    def lines(self, document: Document, chunking: Chunking, costs: Costs | None) -> Iterator[bytes]:
        """The lines of one document's passages."""
        passages = [
            (section.title, text)
            for section in document.sections
            for text in chunk_text(
                section.text, size=chunking.size, overlap=chunking.overlap, code=section.code, costs=costs
            )
        ]
        if len(passages) > 1:
            _check_repeated(document, passages)
        for number, (title, text) in enumerate(passages, start=1):
            contents = f'"{title}"\n{text}'
            if self._drop_duplicates and not _add(self._contents, contents):
                self.summary.duplicates += 1
                continue
            passage_id = document.id if len(passages) == 1 else f"{document.id}#{number}"
            if not _add(self._ids, str(passage_id)):
                raise UserError(
                    f"{document.where} makes a second passage with id {passage_id!r}: give every document an "
                    "id of its own, or name another id field"
                )
            words = len(find_words(text))
            self.summary.passages += 1
            self.summary.words += words
            self.summary.longest = max(self.summary.longest, words)
            yield _line(document, passage_id, contents)


def _check_repeated(document: Document, passages: Sequence[tuple[str, str]]) -> None:
    """Raise UserError if what the passages of a document repeat would fill the disk."""
    fields = len(_line(document, "", "")) * (len(passages) - 1)
    if fields + sum(len(title) for title, _ in passages[1:]) > _REPEATED_BYTES:
        raise UserError(
            f"{document.where} makes {len(passages)} passages that all repeat its title and its other fields, which "
            f"takes more than {_REPEATED_BYTES >> 20} MiB: shorten these, or give a larger size"
        )


def _line(document: Document, passage_id: str | int, contents: str) -> bytes:
    passage = {"id": passage_id, "contents": contents, **document.fields}
    passage.setdefault("source", document.source)
    try:
        return orjson.dumps(passage, default=_plain, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as problem:
        raise UserError(
            f"{document.where} holds what JSON cannot ({problem}): take that field out of the row"
        ) from problem


def _plain(value: Any) -> str:
    """Values of parquet that JSON lacks, such as decimals and times, as text."""
    if isinstance(value, bytes):
        raise TypeError("bytes")
    return str(value)


def _add(seen: set[bytes], text: str) -> bool:
    """Whether `text` is new to `seen`, which then knows it."""
    before = len(seen)
    seen.add(xxhash.xxh128_digest(text.encode()))
    return len(seen) > before


def _nothing(sources: Sequence[Path], summary: Summary) -> str:
    reasons = Counter(entry.reason for entry in summary.skipped)
    passed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    told = f" (passed over: {passed})" if passed else ""
    return f"{', '.join(map(str, sources))} holds no document{told}: give text, Markdown, jsonl or parquet files"
