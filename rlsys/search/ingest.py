"""Own documents to a corpus: one passage a line, as `rlsys.search.corpus` reads it.

Contract: each line is {"id", "contents": '"title"\\ntext', ..., "source"}, where "..." is what else the document's row
holds and `source` (kept if the row has one) is its file. The same files give the same bytes. A document that makes one
passage hands on its id, one that makes more numbers them: "id#1", "id#2". No two passages share an id. The output
appears whole or not at all. Memory: one document (of parquet, one row group's batch), and about 100 bytes a passage to
know its id again (as much again to drop duplicates).

Files (text, Markdown, jsonl and parquet) come in the order of their paths, documents in the order of the file. What is
passed over is told: hidden entries, unknown kinds of files, empty files and empty rows. What cannot be read raises
UserError with the place. Documents are untrusted: time and memory grow with their length.

Markdown becomes one plain section for each heading, titled with the path of headings above it, and the `title` of YAML
front matter before all: links and images become their words, code stays as it is, list items and table rows keep a line
each, HTML loses its tags and comments. A heading with nothing under it makes no section.

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

import codecs
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from html import unescape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import orjson
import xxhash
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from rlsys.errors import UserError
from rlsys.files import open_atomically

TEXT, MARKDOWN, JSONL, PARQUET = ".txt", ".md", ".jsonl", ".parquet"
_KINDS = {TEXT: TEXT, ".text": TEXT, MARKDOWN: MARKDOWN, ".markdown": MARKDOWN, JSONL: JSONL, PARQUET: PARQUET}
_TEXT_FIELDS = ("contents", "text", "content", "body")
_PARQUET_ROWS = 256
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_FRONT_MATTER_CHARS = 1 << 15  # longer front matter is text: YAML is read slowly
_FRONT_MATTER_BRACKETS = 400  # front matter with more is text: the time of nested ones grows with their square
_TITLE_CHARS = 200
"""A longer title of front matter is cut, and a longer heading is text: every passage repeats those above it."""
_NO_TITLE = ("", "~", "null", "Null", "NULL")
_HIDDEN = (("<!--", "-->"), ("<![CDATA[", "]]>"), ("<!", ">"), ("<?", ">"))
"""Beginnings and ends of what HTML does not show."""
_TAG_START = re.compile(r"</?[A-Za-z]")
_TAG_MARK = re.compile(r"[<>]|=\s*([\"'])")
"""The end of a tag, or the beginning of a value that may hold such characters."""
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


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of text under one title; `code` gives the character ranges of code in it, in order."""

    title: str
    text: str
    code: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of the fields of jsonl and parquet rows; "" takes the first usual name that the row has."""

    text: str = ""
    title: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class File:
    """One file of documents."""

    path: Path
    name: str  # the path below the source it was found in, with forward slashes; of a file given itself, its name


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that gave no document, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Document:
    """One document, in sections; `id` is as it was written, or made from the file's name."""

    id: str | int
    sections: Sequence[Section]
    source: str
    where: str  # for messages: the file, and the line or row
    fields: Mapping[str, Any] = field(default_factory=dict)  # what else its row holds


def find_files(sources: Iterable[Path], out: Path) -> Iterator[File | Skipped]:
    """The files of `sources` without `out`; folders, but no links to any, are walked by name. Raises UserError."""
    for source in sources:
        if source.is_dir():
            yield from _walk(source, source, out.resolve())
        elif not source.is_file():
            raise UserError(
                f"source {source} does not exist: give a file or a folder of documents.",
                code="not_found",
                key=str(source),
            )
        elif source.resolve() == out.resolve():
            raise UserError(
                f"{source} is both a source and the output: write to another file.", code="conflict", key=str(source)
            )
        elif source.suffix.lower() not in _KINDS:
            trouble = f"source {source} is of no kind that can be read ({', '.join(_KINDS)})"
            raise UserError(
                f"{trouble}: convert it, or rename it if it is one of them.", code="unsupported", key=str(source)
            )
        else:
            yield File(source, source.name)


def _walk(folder: Path, root: Path, out: Path) -> Iterator[File | Skipped]:
    for path in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = path.relative_to(root).as_posix()
        if path.name.startswith("."):
            yield Skipped(name, "hidden")
        elif path.is_dir() and path.is_symlink():
            yield Skipped(name, "link to a folder")
        elif path.is_dir():
            yield from _walk(path, root, out)
        elif not path.is_file():
            yield Skipped(name, "not a file")
        elif path.resolve() == out:
            yield Skipped(name, "the output")
        elif path.suffix.lower() not in _KINDS:
            yield Skipped(name, f"unknown kind {path.suffix or 'without a suffix'}")
        else:
            yield File(path, name)


def read(file: File, names: Fields) -> Iterator[Document | Skipped]:
    """The documents of one file, by its suffix. Raises UserError for a file or a row that is damaged."""
    kind = _KINDS[file.path.suffix.lower()]
    try:
        if kind in (TEXT, MARKDOWN):
            yield _text_document(file, kind)
            return
        rows, unit = (_jsonl_rows(file.path), "line") if kind == JSONL else (_parquet_rows(file.path), "row")
        number = 0
        for number, row in rows:
            yield _row_document(file, f"{unit} {number}", number, row, names)
        if not number:
            yield Skipped(file.name, "empty")
    except OSError as problem:
        raise UserError(
            f"{file.path} cannot be read ({problem.strerror}): make it readable.", code="denied", key=str(file.path)
        ) from problem


def _text_document(file: File, kind: str) -> Document | Skipped:
    data = file.path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if b"\0" in data:
        reason = f"{file.path} is binary (byte {data.index(0)} is zero)"
        raise UserError(
            f"{reason}: take it out of the folder, or save it as UTF-8.", code="malformed", key=str(file.path)
        )
    text, title = _decode(data, file.path, str(file.path)).replace("\r\n", "\n"), Path(file.name).stem
    if not text.strip():
        return Skipped(file.name, "empty")
    parts = list(sections(text, title)) if kind == MARKDOWN else [Section(title, text)]
    if not parts:
        return Skipped(file.name, "no text below its headings")
    return Document(file.name, parts, file.name, str(file.path))


def _decode(data: bytes, path: Path, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        trouble = f"{where} is not UTF-8 at byte {problem.start} (0x{data[problem.start]:02x})"
        raise UserError(
            f"{trouble}: convert it, for example with `iconv -f latin1 -t utf-8`.", code="malformed", key=str(path)
        ) from problem


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                yield number, orjson.loads(_decode(line.removeprefix(codecs.BOM_UTF8), path, where))
            except orjson.JSONDecodeError as problem:
                raise UserError(
                    f"{where} is not JSON ({problem}): mend the line.", code="malformed", key=str(path)
                ) from problem


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            batches = table.iter_batches(batch_size=_PARQUET_ROWS)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except pyarrow.ArrowException as problem:
        reason = str(problem).splitlines()[0]
        raise UserError(
            f"{path} cannot be read as parquet ({reason}): write it again.", code="malformed", key=str(path)
        ) from problem


def _row_document(file: File, place: str, number: int, row: Any, names: Fields) -> Document | Skipped:
    where = f"{file.path} {place}"
    if not isinstance(row, dict):
        raise UserError(
            f"{where} is not an object: write one with a text field, such as {{'text': ...}}.",
            code="malformed",
            key=str(file.path),
        )
    text_field = _field(row, names.text, _TEXT_FIELDS, where, "text")
    title_field = _field(row, names.title, ("title",), where, "title")
    id_field = _field(row, names.id, ("id", "_id"), where, "id")
    if text_field is None:
        trouble = f"{where} has none of the fields {', '.join(_TEXT_FIELDS)}"
        raise UserError(
            f"{trouble}, only {', '.join(map(str, row)) or 'nothing'}: say which one holds the text.",
            code="missing",
            key=str(file.path),
        )
    text = row[text_field]
    if not isinstance(text, str):
        raise UserError(
            f"{where} has no text in {text_field!r} but {type(text).__name__}: it must be a string.",
            code="wrong_type",
            key=str(file.path),
        )
    if not text.strip():
        return Skipped(f"{file.name} {place}", "empty text")
    identity = f"{file.name}:{number}" if id_field is None else row[id_field]
    if not isinstance(identity, str | int) or isinstance(identity, bool) or identity == "":
        raise UserError(
            f"{where} has {identity!r} in {id_field!r}: an id must be a string or an integer.",
            code="wrong_type",
            key=str(file.path),
        )
    title = "" if title_field is None or row[title_field] is None else " ".join(str(row[title_field]).split())
    first, _, rest = text.partition("\n")
    quoted = re.fullmatch(r'\s*"(.+)"\s*', first)  # contents that start with a title line in double quotes
    if quoted and rest.strip() and title in ("", quoted[1]):
        title, text = quoted[1], rest
    used = {text_field, title_field, id_field, "contents", "id"}
    others = {name: value for name, value in row.items() if name not in used}
    return Document(identity, [Section(title, text)], file.name, where, others)


def _field(row: Mapping[str, Any], named: str, usual: Sequence[str], where: str, what: str) -> str | None:
    if named and named not in row:
        raise UserError(
            f"{where} lacks the {what} field {named!r}: it has {', '.join(map(str, row))}.", code="unknown", key=named
        )
    return named or next((name for name in usual if name in row), None)


def sections(source: str, name: str) -> Iterator[Section]:
    """The sections of a Markdown document in order; `name` is the title of text that has none."""
    title, body = _split_front_matter(source)
    headings: dict[int, str] = {}
    plain = _Plain()
    tokens = iter(MarkdownIt("commonmark").enable("table").parse(body))
    for token in tokens:
        if token.type == "heading_open" and token.level == 0:
            words = " ".join(_words(next(tokens)).split())
            if len(words) > _TITLE_CHARS:
                plain.add_words(words)
                continue
            yield from plain.section(_path(title, headings) or name)
            level = int(token.tag[1:])
            headings = {above: heading for above, heading in headings.items() if above < level} | {level: words}
            plain = _Plain()
        else:
            plain.add(token)
    yield from plain.section(_path(title, headings) or name)


def _split_front_matter(source: str) -> tuple[str, str]:
    """Its title, "" if there is none, and the document without it."""
    match = _FRONT_MATTER.match(source)
    if match is None or len(match[1]) > _FRONT_MATTER_CHARS:
        return "", source
    if match[1].count("[") + match[1].count("{") > _FRONT_MATTER_BRACKETS:
        return "", source
    try:
        title = _front_title(match[1])
        (title or "").encode()
    except (yaml.YAMLError, ValueError, OverflowError):
        # The last two: of a version with too many digits, and of escapes of characters that do not exist.
        return "", source
    return ("", source) if title is None else (" ".join(title.split())[:_TITLE_CHARS], source[match.end() :])


def _front_title(front_matter: str) -> str | None:
    """The title as it is written, "" without one; None if the front matter is no mapping.

    Nothing is made of the YAML but this text: no dates and numbers, which may be none, and no values of aliases, which
    may be larger than any memory. A title that is an alias, a list or a mapping counts as none.
    """
    title: str | None = None
    depth, keys_and_values, is_title = 0, 0, False
    for event in yaml.parse(front_matter, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.NodeEvent) and depth == 0:
            if title is not None or not isinstance(event, yaml.MappingStartEvent):
                return None
            title = ""
        elif isinstance(event, yaml.NodeEvent) and depth == 1:
            if keys_and_values % 2 == 0:
                is_title = isinstance(event, yaml.ScalarEvent) and event.value == "title"
            elif is_title:
                # As it is written; "" for a null, and for anything but a scalar.
                value = event.value if isinstance(event, yaml.ScalarEvent) else ""
                title = "" if getattr(event, "style", None) is None and value in _NO_TITLE else str(value)
            keys_and_values += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
    return title


def _path(title: str, headings: dict[int, str]) -> str:
    names = [title, *(headings[level] for level in sorted(headings))]
    return " > ".join(name for above, name in zip(["", *names], names, strict=False) if name and name != above)


@dataclass(slots=True)
class _Plain:
    """Plain text as it grows, block by block."""

    _parts: list[str] = field(default_factory=list)
    _length: int = 0
    _code: list[tuple[int, int]] = field(default_factory=list)
    _lists: int = 0  # how many lists are open, one in the other
    _list_starts: bool = False
    _mark: str = ""
    _in_table: bool = False
    _table_starts: bool = False
    _row_started: bool = False

    def add(self, token: Token) -> None:
        match token.type:
            case "bullet_list_open" | "ordered_list_open":
                self._list_starts = self._list_starts or not self._lists
                self._lists += 1
            case "bullet_list_close" | "ordered_list_close":
                self._lists -= 1
            case "list_item_open":
                self._mark = f"{token.info}{token.markup} " if token.info else "- "
            case "table_open" | "table_close":
                self._in_table = self._table_starts = token.type == "table_open"
            case "tr_open":
                self._row_started = False
            case "inline":
                self.add_words(_words(token))
            case "html_block":
                self.add_words(_without_tags(token.content))
            case "fence" | "code_block" if (code := token.content.strip("\n")).strip():
                self._append(code, "\n\n")
                self._code.append((self._length - len(code), self._length))

    def section(self, title: str) -> Iterator[Section]:
        text = "".join(self._parts)
        if text.strip():
            yield Section(title, text, tuple(self._code))

    def add_words(self, words: str) -> None:
        """Add what a reader sees of a block."""
        if not words.strip():
            return
        if self._in_table:
            row_gap = "\n\n" if self._table_starts else "\n"
            self._append(words, " | " if self._row_started else row_gap)
            self._row_started, self._table_starts = True, False
        else:
            self._append(self._mark + words, "\n" if self._lists and not self._list_starts else "\n\n")
            self._mark, self._list_starts = "", False

    def _append(self, text: str, separator: str) -> None:
        self._parts.append(separator + text if self._parts else text)
        self._length += len(self._parts[-1])


def _words(token: Token) -> str:
    """The text that a reader sees of an inline token."""
    if token.type in ("text", "code_inline"):
        return token.content
    if token.type in ("softbreak", "hardbreak"):
        return "\n"
    return "".join(map(_words, token.children or [])) if token.type in ("inline", "image") else ""


def _without_tags(html: str) -> str:
    """The text of `html` without tags, comments and the like. What is never closed is text."""
    seen, at = [], 0
    absent: set[str] = set()
    while (begin := html.find("<", at)) >= 0:
        seen.append(html[at:begin])
        at, is_text = _past_markup(html, begin, absent)
        if is_text:
            seen.append(html[begin:at])
    text = "".join([*seen, html[at:]])
    try:
        return unescape(text).strip()
    except ValueError:  # a character whose number has too many digits
        return text.strip()


def _past_markup(html: str, begin: int, absent: set[str]) -> tuple[int, bool]:
    """The place to go on at behind the "<" at `begin`, and True where what lies between is text; `absent` are ends that do
    not occur any more.
    """
    for opener, closer in _HIDDEN:
        if html.startswith(opener, begin):
            end = -1 if closer in absent else html.find(closer, begin + 2)
            if end >= 0:
                return end + len(closer), False
            absent.add(closer)
            return begin + len(opener), True
    tag = _TAG_START.match(html, begin)
    if tag is None:
        return begin + 1, True
    at = tag.end()
    while mark := _TAG_MARK.search(html, at):
        at, quote = mark.end(), mark[1]
        if mark[0] == ">":
            return at, False
        if mark[0] == "<":
            return at - 1, True
        end = -1 if quote in absent else html.find(quote, at)
        if end >= 0:
            at = end + 1
        else:
            absent.add(quote)
    return len(html), True


class CutQuality(IntEnum):
    """Ranks of the places between two words, the higher the better for a cut."""

    WORD = 0
    LINE = 1  # the end of a line of code
    SENTENCE = 2
    PARAGRAPH = 3


class Word(NamedTuple):
    """A run of characters that is never cut: `text[start:end]`."""

    start: int
    end: int


class Chunk(NamedTuple):
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
            raise UserError(f"size {self.size} holds no word: give 1 or more.", code="out_of_range", key="size")
        if not 0 <= self.overlap < self.size:
            raise UserError(
                f"overlap {self.overlap} must be 0 or more, and less than size {self.size}.",
                code="out_of_range",
                key="overlap",
            )


@dataclass(slots=True)
class Summary:
    """Counts of what an ingestion read and wrote."""

    documents: int = 0
    passages: int = 0
    duplicates: int = 0  # passages left out because an earlier one says the same, title included
    skipped: list[Skipped] = field(default_factory=list)
    words: int = 0  # over all passages, title not included
    longest: int = 0  # words of the longest passage

    def refuse(self, sources: Sequence[Path]) -> NoReturn:
        """Raise UserError for `sources` without a passage."""
        reasons = Counter(entry.reason for entry in self.skipped)
        passed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        told = f" (passed over: {passed})" if passed else ""
        kinds = "give text, Markdown, jsonl or parquet files"
        raise UserError(
            f"{', '.join(map(str, sources))} holds no document{told}: {kinds}.",
            code="empty",
            key=", ".join(map(str, sources)),
        )

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
    """Cut the documents of `sources` (files, or folders walked in the order of names) into passages at `out`.

    Raises UserError for what cannot be read, ids that occur twice and no passage; what was at `out` is untouched then.
    """
    chunking = chunking or Chunking()
    costs = token_costs(chunking.tokenizer) if chunking.tokenizer else None
    writer = _Writer(drop_duplicates)
    found = list(find_files(sources, out))
    try:
        with open_atomically(out) as file:
            for entry in found:
                for document in [entry] if isinstance(entry, Skipped) else read(entry, fields or Fields()):
                    file.writelines(writer.lines(document, chunking, costs))
            if not writer.summary.passages:
                writer.summary.refuse(sources)
    except OSError as problem:
        raise UserError(
            f"{out} cannot be written ({problem.strerror}): give another place.", code="denied", key=str(out)
        ) from problem
    return writer.summary


def token_costs(name: str) -> Costs:
    """Tokens of each word in its text, for the tokenizer of encoder (or folder) `name`; no special tokens."""
    from tokenizers import Tokenizer

    from rlsys.search.encoders.spec import resolve_folder

    path = resolve_folder(name) / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"tokenizer {name!r} has no {path}: give a folder with a tokenizer.json.", code="not_found", key=name
        )
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def costs(text: str, words: Sequence[Word]) -> list[int]:
        ends = sorted(end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets)
        until = [0, *(bisect_right(ends, word.end) for word in words)]
        return [after - before for before, after in pairwise(until)]

    return costs


class _Writer:
    """Writes passages as lines, with a count of everything."""

    def __init__(self, drop_duplicates: bool) -> None:
        self.summary = Summary()
        self._drop_duplicates = drop_duplicates
        self._ids: set[bytes] = set()
        self._contents: set[bytes] = set()

    def lines(self, document: Document | Skipped, chunking: Chunking, costs: Costs | None) -> Iterator[bytes]:
        """The lines of one document's passages."""
        if isinstance(document, Skipped):
            self.summary.skipped.append(document)
            return
        self.summary.documents += 1
        sizes: dict[str, Any] = {"size": chunking.size, "overlap": chunking.overlap, "costs": costs}
        passages = [
            (section.title, text)
            for section in document.sections
            for text in chunk_text(section.text, code=section.code, **sizes)
        ]
        repeated = len(_line(document, "", "")) * (len(passages) - 1) if len(passages) > 1 else 0
        if repeated + sum(len(title) for title, _ in passages[1:]) > _REPEATED_BYTES:  # it would fill the disk
            problem = f"{document.where} makes {len(passages)} passages that all repeat its title and its other fields"
            most = f"more than {_REPEATED_BYTES >> 20} MiB"
            raise UserError(
                f"{problem}, which takes {most}: shorten these, or give a larger size.",
                code="out_of_range",
                key=document.source,
            )
        for number, (title, text) in enumerate(passages, start=1):
            contents = f'"{title}"\n{text}'
            if self._drop_duplicates and not _add(self._contents, contents):
                self.summary.duplicates += 1
                continue
            passage_id = document.id if len(passages) == 1 else f"{document.id}#{number}"
            if not _add(self._ids, str(passage_id)):
                reason = f"{document.where} makes a second passage with id {passage_id!r}"
                raise UserError(
                    f"{reason}: give every document an id of its own, or name another id field.",
                    code="conflict",
                    key=str(passage_id),
                )
            words = len(find_words(text))
            self.summary.passages += 1
            self.summary.words += words
            self.summary.longest = max(self.summary.longest, words)
            yield _line(document, passage_id, contents)


def _line(document: Document, passage_id: str | int, contents: str) -> bytes:
    passage = {"id": passage_id, "contents": contents, **document.fields}
    passage.setdefault("source", document.source)
    try:
        return orjson.dumps(passage, default=_plain, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as problem:
        trouble = f"{document.where} holds what JSON cannot ({problem})"
        raise UserError(
            f"{trouble}: take that field out of the row.", code="unsupported", key=document.source
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
    """The chunks of `text`, see `cut`; none for a text without a word.

    `code` gives, in order, the character ranges that are kept whole where they fit; `costs` what each word costs, else 1.
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
