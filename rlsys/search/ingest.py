"""Converts documents to a corpus with one passage per line, as `rlsys.search.corpus` reads it.

Output: each line is {"id", "contents": '"title"\\ntext', ..., "source"}, where "..." stands for the other fields of
the document's row. `source` is the document's file, unless the row has a `source` of its own. The same files give the
same output. If a document gives a single passage, the passage has the document's id; otherwise the passages have the
ids "id#1", "id#2" and so on. Ids are unique. The output appears whole or not at all. Memory holds one document (for
parquet, one batch of rows) and about 100 bytes per passage for the ids, or 200 bytes if duplicates are dropped.

Input: text, Markdown, jsonl and parquet files, in path order; the documents of a file are read in order. Hidden
entries, unknown file kinds, empty files and empty rows are skipped and reported. An unreadable document raises
UserError with the file and the line or row. Documents are untrusted; time and memory grow only with their length.

Markdown becomes one section of plain text per heading, titled with the `title` of the YAML front matter and the path of
headings. Links and images are replaced by their text, code stays unchanged, list items and table rows keep one line
each, and HTML tags and comments are removed. A heading without text gives no section.

Chunking is a pure function of the words (`cut`). Invariants for every text: the chunks without their overlaps, joined
in order, contain every word once; a chunk is an unchanged slice of the text that starts and ends with a word; the cost
of a chunk is within the limit, unless it is a single word. A chunk ends at the first of these positions that exists
within the limit:

1. the last paragraph end in the second half of the limit,
2. the last sentence end in the second half,
3. the last sentence end, so that only a sentence longer than a chunk is cut,
4. the last line end inside code,
5. the last word that fits.
"""

from __future__ import annotations

import codecs
import os
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
from rlsys.files import open_atomically, parquet_rows

TEXT, MARKDOWN, JSONL, PARQUET = ".txt", ".md", ".jsonl", ".parquet"
_KINDS = {TEXT: TEXT, ".text": TEXT, MARKDOWN: MARKDOWN, ".markdown": MARKDOWN, JSONL: JSONL, PARQUET: PARQUET}
_TEXT_FIELDS = ("contents", "text", "content", "body")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_FRONT_MATTER_CHARS = 1 << 15  # longer front matter is treated as text, because YAML parsing is slow
_FRONT_MATTER_BRACKETS = 400  # front matter with more brackets is treated as text; nesting takes quadratic time
_TITLE_CHARS = 200
"""Limit for titles, because every passage repeats them: front-matter titles are cut, longer headings become text."""
_HIDDEN = (("<!--", "-->"), ("<![CDATA[", "]]>"), ("<!", ">"), ("<?", ">"))
"""Start and end markers of invisible HTML."""
_TAG_START = re.compile(r"</?[A-Za-z]")
_TAG_MARK = re.compile(r"[<>]|=\s*([\"'])")
"""End of a tag, or start of a quoted attribute value, which may contain `<` and `>`."""
_REPEATED_BYTES = 1 << 26  # limit for titles and fields that one document repeats across its passages
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}][、。，．！？；：」』）】》]*|[^\s{_CJK}]+")
"""A word; each Chinese or Japanese character counts as a word, because these languages use no spaces."""
_CLOSERS = "\"'”’»)]}」』）】》*_"
_OPENERS = "\"'“‘«([{「『（【《*_¿¡"
_SENTENCE_END = tuple(".!?…。！？")
_ABBREVIATION = re.compile(
    r"(?:[A-Z]|\d{1,3}|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|No|Fig|cf|al|etc|[A-Za-z](?:\.[A-Za-z])+)\."
)
_LIST_MARK = re.compile(r"[-*+•]|\d{1,3}[.)]")


@dataclass(frozen=True, slots=True)
class Section:
    """Text under one title; `code` holds the character ranges of its code blocks, in order."""

    title: str
    text: str
    code: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Fields:
    """Field names of jsonl and parquet rows; "" selects the first of the usual names that the row has."""

    text: str = ""
    title: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class File:
    path: Path
    name: str  # POSIX path relative to its source folder; the file name if the file itself was given


@dataclass(frozen=True, slots=True)
class Skipped:
    """A skipped file, folder entry or row, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Document:
    """One document in sections; `id` comes from its row or from the file name."""

    id: str | int
    sections: Sequence[Section]
    source: str
    where: str  # file and line or row, for messages
    fields: Mapping[str, Any] = field(default_factory=dict)  # other fields of its row


def find_files(sources: Iterable[Path], out: Path) -> Iterator[File | Skipped]:
    """Yield the files of `sources`, and the folder entries that are skipped, among them `out`.

    Folders are walked in name order; links to folders are not followed.
    Raises UserError for a source that is missing, of unknown kind, or the output itself.
    """
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
            trouble = f"source {source} has an unsupported type (supported: {', '.join(_KINDS)})"
            raise UserError(
                f"{trouble}: convert it, or rename it if it is one of them.", code="unsupported", key=str(source)
            )
        else:
            yield File(source, _printable(source.name))


def _printable(path: str | Path) -> str:
    """Return a path as UTF-8; a byte that is none becomes an escape such as `\\xe9`."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _walk(folder: Path, root: Path, out: Path) -> Iterator[File | Skipped]:
    for path in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = _printable(path.relative_to(root))
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
            yield Skipped(name, f"unknown type {path.suffix or '(no suffix)'}")
        else:
            yield File(path, name)


def read(file: File, names: Fields) -> Iterator[Document | Skipped]:
    """Yield the documents of one file, parsed by its suffix. Raises UserError for a damaged file or row."""
    kind = _KINDS[file.path.suffix.lower()]
    try:
        if kind in (TEXT, MARKDOWN):
            yield _text_document(file, kind)
            return
        rows, unit = (_jsonl_rows(file.path), "line") if kind == JSONL else (parquet_rows(file.path), "row")
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
            f"{reason}: remove it from the folder, or save it as UTF-8.", code="malformed", key=str(file.path)
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
                    f"{where} is not JSON ({problem}): correct the line.", code="malformed", key=str(path)
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
            f"{trouble}, only {', '.join(map(str, row)) or 'nothing'}: name the field that holds the text.",
            code="missing",
            key=str(file.path),
        )
    text = row[text_field]
    if not isinstance(text, str):
        raise UserError(
            f"{where} has a {type(text).__name__} in {text_field!r}: it must be a string.",
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
    """Yield the sections of a Markdown document in order; `name` is the title of untitled text."""
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
    """Return the front matter's title ("" if none) and the document without the front matter."""
    match = _FRONT_MATTER.match(source)
    if match is None or len(match[1]) > _FRONT_MATTER_CHARS:
        return "", source
    if match[1].count("[") + match[1].count("{") > _FRONT_MATTER_BRACKETS:
        return "", source
    try:
        title = _front_title(match[1])
        (title or "").encode()
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        # ValueError and OverflowError: a version with too many digits, or an escape of an invalid character.
        return "", source
    return ("", source) if title is None else (" ".join(title.split())[:_TITLE_CHARS], source[match.end() :])


def _front_title(front_matter: str) -> str | None:
    """Return the title as written, "" without one; None if the front matter is not a mapping.

    No values are constructed, because dates and numbers may be invalid, and aliases may expand without bound. A title
    that is a list or mapping counts as missing.
    """
    root = yaml.compose(front_matter, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return None
    title = next((value for key, value in reversed(root.value) if key.value == "title"), None)
    if not isinstance(title, yaml.ScalarNode) or title.tag == "tag:yaml.org,2002:null":
        return ""
    return str(title.value)


def _path(title: str, headings: dict[int, str]) -> str:
    names = [title, *(headings[level] for level in sorted(headings))]
    return " > ".join(name for above, name in zip(["", *names], names, strict=False) if name and name != above)


@dataclass(slots=True)
class _Plain:
    """Collects the plain text of a section, block by block."""

    _parts: list[str] = field(default_factory=list)
    _length: int = 0
    _code: list[tuple[int, int]] = field(default_factory=list)
    _lists: int = 0  # nesting depth of open lists
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
        """Add the visible text of a block."""
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
    """Return the visible text of an inline token."""
    if token.type in ("text", "code_inline"):
        return token.content
    if token.type in ("softbreak", "hardbreak"):
        return "\n"
    return "".join(map(_words, token.children or [])) if token.type in ("inline", "image") else ""


def _without_tags(html: str) -> str:
    """Return the text of `html` without tags, comments and declarations. Unclosed markup counts as text."""
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
    """Return the end of the markup that starts with the "<" at `begin`, and True if the markup is plain text after all.

    `absent` collects end markers that do not occur in the rest of `html`, so that each is searched for once.
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
    """Quality of a cut between two words; higher is better."""

    WORD = 0
    LINE = 1  # end of a line of code
    SENTENCE = 2
    PARAGRAPH = 3


class Word(NamedTuple):
    """The unit of cutting: `text[start:end]`."""

    start: int
    end: int


class Chunk(NamedTuple):
    """Words `first` to `end` - 1; those before `fresh` repeat the end of the previous chunk."""

    first: int
    fresh: int
    end: int


Costs = Callable[[str, Sequence[Word]], Sequence[int]]  # text and its words -> cost of each word


@dataclass(frozen=True, slots=True)
class Chunking:
    """Chunking settings; sizes count the text of a passage, without its title."""

    size: int = 100  # maximum number of words per passage, or of tokens with a tokenizer; wiki-18 has 100 words
    overlap: int = 0  # maximum number of words or tokens repeated from the previous passage of the same section
    tokenizer: str = ""  # encoder name, or folder with a tokenizer.json, to count tokens; "" counts words

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"size {self.size} is out of range: give 1 or more.", code="out_of_range", key="size")
        if not 0 <= self.overlap < self.size:
            raise UserError(
                f"overlap {self.overlap} must be 0 or more, and less than size {self.size}.",
                code="out_of_range",
                key="overlap",
            )


@dataclass(slots=True)
class Summary:
    """Counters of an ingestion."""

    documents: int = 0
    passages: int = 0
    duplicates: int = 0  # passages dropped because an earlier passage has the same title and text
    skipped: list[Skipped] = field(default_factory=list)
    words: int = 0  # words of all passages, titles excluded
    longest: int = 0  # words of the longest passage

    def refuse(self, sources: Sequence[Path]) -> NoReturn:
        """Raise UserError because `sources` gave no passage."""
        reasons = Counter(entry.reason for entry in self.skipped)
        passed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        told = f" (skipped: {passed})" if passed else ""
        kinds = "give text, Markdown, jsonl or parquet files"
        raise UserError(
            f"{', '.join(map(str, sources))} holds no document{told}: {kinds}.",
            code="empty",
            key=", ".join(map(str, sources)),
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return labels and values for display; skipped entries are grouped by reason, with up to three names."""
        shown = [
            ("documents", f"{self.documents:,}"),
            ("passages", f"{self.passages:,}"),
            ("duplicates left out", f"{self.duplicates:,}"),
            ("words per passage", f"mean {self.words / max(1, self.passages):.1f}, most {self.longest:,}"),
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
    """Cut the documents of `sources` (files, or folders walked in name order) into passages and write them to `out`.

    Raises UserError for unreadable documents, duplicate ids, or no passage at all; `out` is then unchanged.
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
    """Return a cost function that counts tokens per word, without special tokens.

    `name`: an encoder's name, or a folder with a tokenizer.json.
    """
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
    """Formats passages as lines and updates the counters."""

    def __init__(self, drop_duplicates: bool) -> None:
        self.summary = Summary()
        self._drop_duplicates = drop_duplicates
        self._ids: set[bytes] = set()
        self._contents: set[bytes] = set()

    def lines(self, document: Document | Skipped, chunking: Chunking, costs: Costs | None) -> Iterator[bytes]:
        """Yield the lines of one document's passages."""
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
        if repeated + sum(len(title) for title, _ in passages[1:]) > _REPEATED_BYTES:  # the repeats could fill the disk
            problem = f"{document.where} makes {len(passages)} passages, each of which repeats its titles and fields"
            most = f"more than {_REPEATED_BYTES >> 20} MiB"
            raise UserError(
                f"{problem}, {most} in all: shorten titles or fields, or give a larger size.",
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
        trouble = f"{document.where} holds a value that JSON cannot represent ({problem})"
        raise UserError(
            f"{trouble}: remove that field from the row.", code="unsupported", key=document.source
        ) from problem


def _plain(value: Any) -> str:
    """Convert parquet values without a JSON type, such as decimals and times, to text."""
    if isinstance(value, bytes):
        raise TypeError("bytes")
    return str(value)


def _add(seen: set[bytes], text: str) -> bool:
    """Add the hash of `text` to `seen`; True if it is new."""
    before = len(seen)
    seen.add(xxhash.xxh128_digest(text.encode()))
    return len(seen) > before


def find_words(text: str) -> list[Word]:
    """Return the words of `text`, in order."""
    return [Word(*match.span()) for match in _WORD.finditer(text)]


def chunk_text(
    text: str,
    *,
    size: int,
    overlap: int = 0,
    code: Sequence[tuple[int, int]] = (),
    costs: Callable[[str, Sequence[Word]], Sequence[int]] | None = None,
) -> list[str]:
    """Cut `text` into chunks (see `cut`); a text without words gives none.

    `code` holds, in order, the character ranges to keep whole if they fit. `costs` returns the cost of each word;
    without it, each word costs 1.
    """
    words = find_words(text)
    prices = [1] * len(words) if costs is None else costs(text, words)
    chunks = cut(prices, find_cuts(text, words, code), size=size, overlap=overlap)
    return [text[words[chunk.first].start : words[chunk.end - 1].end] for chunk in chunks]


def cut(costs: Sequence[int], cuts: Sequence[CutQuality], *, size: int, overlap: int) -> list[Chunk]:
    """Return chunks of cost up to `size`; each repeats words of cost up to `overlap` from the previous chunk.

    `overlap` must be less than `size`. `cuts[i]` is the quality of a cut after word i. The overlap starts at a sentence
    start if one is within reach. The overlap is dropped if the chunk would otherwise have to cut a sentence.
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
    """Return the largest `end` for which the words `first` to `end` - 1 cost at most `size`."""
    return bisect_right(spent, spent[first] + size) - 1


def _has_sentence_end(cuts: Sequence[CutQuality], first: int, end: int) -> bool:
    return any(cuts[word] >= CutQuality.SENTENCE for word in range(first, end))


def _best_end(cuts: Sequence[CutQuality], half: int, least: int, most: int) -> int:
    """Return the best end from `least` to `most`; `half` is the first end in the second half of the chunk's limit."""
    paragraph, sentence, line = CutQuality.PARAGRAPH, CutQuality.SENTENCE, CutQuality.LINE
    for start, level in ((half, paragraph), (half, sentence), (least, sentence), (least, line)):
        for end in range(most, start - 1, -1):
            if cuts[end - 1] >= level:
                return end
    return most


def _repeat_from(spent: Sequence[int], cuts: Sequence[CutQuality], fresh: int, overlap: int, before: int) -> int:
    """Return the first word of the overlap before word `fresh`; `before` is the first word of the previous chunk."""
    earliest = fresh
    while earliest > before + 1 and spent[fresh] - spent[earliest - 1] <= overlap:
        earliest -= 1
    starts = (word for word in range(earliest, fresh) if cuts[word - 1] >= CutQuality.SENTENCE)
    return next(starts, earliest)


def find_cuts(text: str, words: Sequence[Word], code: Iterable[tuple[int, int]] = ()) -> list[CutQuality]:
    """Return the quality of a cut after each word; the last one is a paragraph end."""
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
