"""Own documents to a corpus: one passage a line, as `rlsys.search.corpus` reads it.

Contract: each line is {"id", "contents": '"title"\\ntext', ..., "source"}, where "..." is what else the document's row
holds and `source` (kept if the row has one) is its file. The same files give the same bytes. A document that makes one
passage hands on its id, one that makes more numbers them: "id#1", "id#2". No two passages share an id. The output
appears whole or not at all. Memory: one document, and about 100 bytes a passage to know its id again (as much again to
drop duplicates).

Texts are cut to chunks by a pure function of their words (`cut`). Invariants, for every text: read in order, the fresh
parts of the chunks hold every word once; a chunk is a slice of the text, so nothing is changed inside it; it starts and
ends at a word and costs at most the limit (a single word that costs more makes a chunk of its own). A chunk ends at the
best of these places that lies within the limit:

1. the last end of a paragraph in the second half of what fits,
2. the last end of a sentence in the second half,
3. the last end of a sentence at all, so that a sentence is cut only if it is longer than a chunk,
4. the last end of a line inside code,
5. the last word that fits.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import orjson
import xxhash

from rlsys.errors import UserError
from rlsys.search.ingest.sources import Document, Fields, File, Skipped, find_files, read

_REPEATED_BYTES = 1 << 26  # most that one document repeats in all its passages, beside its text
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}][、。，．！？；：」』）】》]*|[^\s{_CJK}]+")
"""Chinese and Japanese put no spaces between words: there each character counts as one."""
_CLOSERS = "\"'”’»)]}」』）】》*_"
_OPENERS = "\"'“‘«([{「『（【《*_¿¡"
_SENTENCE_END = tuple(".!?…。！？")
_ABBREVIATION = re.compile(
    r"(?:[A-Z]|\d{1,3}|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|No|Fig|cf|al|etc|[A-Za-z](?:\.[A-Za-z])+)\."
)
_LIST_MARK = re.compile(r"[-*+•]|\d{1,3}[.)]")


class CutQuality(IntEnum):
    """Ranks of the places between two words, the higher the better for a cut."""

    WORD = 0
    LINE = 1  # the end of a line of code
    SENTENCE = 2
    PARAGRAPH = 3


@dataclass(frozen=True, slots=True)
class Word:
    """A run of characters that is never cut: `text[start:end]`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Words `first` to `end` - 1; those before `fresh` repeat the end of the chunk before."""

    first: int
    fresh: int
    end: int


Costs = Callable[[str, Sequence[Word]], Sequence[int]]  # text and its words -> what each word costs


@dataclass(frozen=True, slots=True)
class Chunking:
    """Settings of the cutting of documents; sizes count the text of a passage, not its title."""

    size: int = 100  # most words of a passage, or tokens if there is a tokenizer; 100 words as in wiki-18
    overlap: int = 0  # most words, or tokens, that a passage repeats of the one before in the same section
    tokenizer: str = ""  # encoder, or folder with a tokenizer.json, whose tokens are counted; "" counts words

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"size {self.size} holds no word: give 1 or more")
        if not 0 <= self.overlap < self.size:
            raise UserError(f"overlap {self.overlap} must be 0 or more, and less than size {self.size}")


@dataclass(slots=True)
class Summary:
    """Counts of what an ingestion read and wrote."""

    documents: int = 0
    passages: int = 0
    duplicates: int = 0  # passages left out because an earlier one says the same, title included
    skipped: list[Skipped] = field(default_factory=list)
    words: int = 0  # over all passages, title not included
    longest: int = 0  # words of the longest passage

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for people; what was skipped is grouped by reason, with up to three names."""
        shown = [
            ("documents", f"{self.documents:,}"),
            ("passages", f"{self.passages:,}"),
            ("duplicates left out", f"{self.duplicates:,}"),
            ("words a passage", f"mean {self.words / max(1, self.passages):.1f}, most {self.longest:,}"),
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
    """CutQuality the documents of `sources` (files, or folders walked in the order of names) into passages at `out`.

    Raises UserError for what cannot be read, for ids that occur twice and where there is nothing to write; a file that
    was at `out` before is untouched then.
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
            reasons = Counter(entry.reason for entry in writer.summary.skipped)
            passed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            told = f" (passed over: {passed})" if passed else ""
            kinds = "give text, Markdown, jsonl or parquet files"
            raise UserError(f"{', '.join(map(str, sources))} holds no document{told}: {kinds}")
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
        ends = sorted(end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets)
        until = [0, *(bisect_right(ends, word.end) for word in words)]
        return [after - before for before, after in pairwise(until)]

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
    """Writes passages as lines, with a count of everything."""

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
    """True where `text` is new to `seen`, which then knows it."""
    before = len(seen)
    seen.add(xxhash.xxh128_digest(text.encode()))
    return len(seen) > before


def find_words(text: str) -> list[Word]:
    """The words of `text`, in order."""
    return [Word(*match.span()) for match in _WORD.finditer(text)]


def chunk_text(
    text: str,
    *,
    size: int,
    overlap: int = 0,
    code: Sequence[tuple[int, int]] = (),
    costs: Callable[[str, Sequence[Word]], Sequence[int]] | None = None,
) -> list[str]:
    """The chunks of `text`. See `cut` for `size` and `overlap`.

    `code` gives, in order, the character ranges that are kept whole where they fit. `costs` says what each word costs;
    without it a word costs 1. A text without a word has no chunks.
    """
    words = find_words(text)
    prices = [1] * len(words) if costs is None else costs(text, words)
    chunks = cut(prices, find_cuts(text, words, code), size=size, overlap=overlap)
    return [text[words[chunk.first].start : words[chunk.end - 1].end] for chunk in chunks]


def cut(costs: Sequence[int], cuts: Sequence[CutQuality], *, size: int, overlap: int) -> list[Chunk]:
    """Chunks that cost at most `size` and repeat words that cost at most `overlap` (less than `size`).

    `cuts[i]` says how good the place after word i is. What is repeated starts at the start of a sentence if one is in
    reach, and gives way to a sentence that would have to be cut otherwise.
    """
    spent = [0, *accumulate(costs)]
    count = len(costs)
    chunks: list[Chunk] = []
    fresh = 0
    while fresh < count:
        first = _repeat_from(spent, cuts, fresh, overlap, chunks[-1].first) if chunks and overlap else fresh
        end = _fitting(spent, first, size)
        if first < fresh and not _has_sentence_end(cuts, fresh, end):
            alone = _fitting(spent, fresh, size)
            starts_sentence = cuts[fresh - 1] >= CutQuality.SENTENCE
            if end <= fresh or (starts_sentence and _has_sentence_end(cuts, fresh, alone)):
                first, end = fresh, alone
        end = max(end, fresh + 1)
        if end < count:
            half = bisect_right(spent, spent[first] + size // 2)
            end = _best_end(cuts, max(fresh + 1, half), fresh + 1, end)
        chunks.append(Chunk(first, fresh, end))
        fresh = end
    return chunks


def _fitting(spent: Sequence[int], first: int, size: int) -> int:
    """The furthest end with which words from `first` on cost at most `size`."""
    return bisect_right(spent, spent[first] + size) - 1


def _has_sentence_end(cuts: Sequence[CutQuality], first: int, end: int) -> bool:
    return any(cuts[word] >= CutQuality.SENTENCE for word in range(first, end))


def _best_end(cuts: Sequence[CutQuality], half: int, least: int, most: int) -> int:
    """The best end from `least` to `most`; ends from `half` on are those in the second half."""
    paragraph, sentence, line = CutQuality.PARAGRAPH, CutQuality.SENTENCE, CutQuality.LINE
    for start, level in ((half, paragraph), (half, sentence), (least, sentence), (least, line)):
        for end in range(most, start - 1, -1):
            if cuts[end - 1] >= level:
                return end
    return most


def _repeat_from(spent: Sequence[int], cuts: Sequence[CutQuality], fresh: int, overlap: int, before: int) -> int:
    """The first word of the repetition before word `fresh`: later than the chunk before, which starts at `before`."""
    earliest = fresh
    while earliest > before + 1 and spent[fresh] - spent[earliest - 1] <= overlap:
        earliest -= 1
    starts = (word for word in range(earliest, fresh) if cuts[word - 1] >= CutQuality.SENTENCE)
    return next(starts, earliest)


def find_cuts(text: str, words: Sequence[Word], code: Iterable[tuple[int, int]] = ()) -> list[CutQuality]:
    """The quality of the place after each word; the place after the last word ends a paragraph."""
    cuts: list[CutQuality] = []
    ranges = iter(code)
    begin, stop = next(ranges, (len(text), len(text)))
    for word, following in pairwise(words):
        while stop <= word.start:
            begin, stop = next(ranges, (len(text) + 1, len(text) + 1))
        if begin <= word.start and following.start < stop:
            cuts.append(CutQuality.LINE if "\n" in text[word.end : following.start] else CutQuality.WORD)
        elif begin <= following.start and (word.start < begin or stop <= following.start):
            cuts.append(CutQuality.PARAGRAPH)
        else:
            gap = text[word.end : following.start]
            cuts.append(_prose_cut(text[word.start : word.end], gap, text[following.start : following.end]))
    return [*cuts, CutQuality.PARAGRAPH] if words else []


def _prose_cut(word: str, gap: str, following: str) -> CutQuality:
    if gap.count("\n") > 1:
        return CutQuality.PARAGRAPH
    if "\n" in gap and _LIST_MARK.fullmatch(following):
        return CutQuality.SENTENCE
    stem = word.rstrip(_CLOSERS)
    if not stem.endswith(_SENTENCE_END):
        return CutQuality.WORD
    if stem.endswith(tuple("。！？")):
        return CutQuality.SENTENCE
    goes_on = not gap or following.lstrip(_OPENERS)[:1].islower()
    return CutQuality.WORD if goes_on or _ABBREVIATION.fullmatch(stem.lstrip(_OPENERS)) else CutQuality.SENTENCE
