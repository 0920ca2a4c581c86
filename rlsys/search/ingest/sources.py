"""Files of documents, found and read one document at a time: text, Markdown, jsonl and parquet.

Contract: files come in the order of their paths, documents in the order of the file; memory holds one document (of
parquet, one row group's batch). What is passed over is told, never silent: hidden entries, unknown kinds of files,
empty files and empty rows. What cannot be read raises UserError with the place.

Markdown becomes one plain section for each heading, titled with the path of headings above it: links and images become
their words, code stays as it is, list items and table rows keep a line each, HTML loses its tags and comments. The
`title` of YAML front matter heads every path. A heading with nothing under it makes no section: it stands in the paths
of the headings below it.

Documents are untrusted. Time and memory grow with their length; of front matter nothing but the title is read.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any

import orjson
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from rlsys.errors import UserError

TEXT, MARKDOWN, JSONL, PARQUET = ".txt", ".md", ".jsonl", ".parquet"
_KINDS = {TEXT: TEXT, ".text": TEXT, MARKDOWN: MARKDOWN, ".markdown": MARKDOWN, JSONL: JSONL, PARQUET: PARQUET}
_TEXT_FIELDS = ("contents", "text", "content", "body")
_PARQUET_ROWS = 256
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_FRONT_MATTER_CHARS = 1 << 15  # longer front matter is text: YAML is read slowly
_TITLE_CHARS = 200
"""A longer title of front matter is cut, and a longer heading is text: every passage repeats those above it."""
_NO_TITLE = ("", "~", "null", "Null", "NULL")
_HIDDEN = (("<!--", "-->"), ("<![CDATA[", "]]>"), ("<!", ">"), ("<?", ">"))
"""Beginnings and ends of what HTML does not show."""
_TAG_START = re.compile(r"</?[A-Za-z]")
_TAG_MARK = re.compile(r"[<>]|=\s*([\"'])")
"""The end of a tag, or the beginning of a value that may hold such characters."""


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
    """The files of `sources`, folders walked in the order of names; `out` itself is not one of them.

    A symbolic link to a folder is not followed. Raises UserError for a source that is missing, is `out`, or is a file
    of a kind that cannot be read.
    """
    for source in sources:
        if source.is_dir():
            yield from _walk(source, source, out.resolve())
        elif not source.is_file():
            raise UserError(f"source {source} does not exist: give a file or a folder of documents")
        elif source.resolve() == out.resolve():
            raise UserError(f"{source} is both a source and the output: write to another file")
        elif source.suffix.lower() not in _KINDS:
            raise UserError(
                f"source {source} is of no kind that can be read ({', '.join(_KINDS)}): convert it, "
                "or rename it if it is one of them"
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
        raise UserError(f"{file.path} cannot be read ({problem.strerror}): make it readable") from problem


def _text_document(file: File, kind: str) -> Document | Skipped:
    text, title = _read_text(file.path), Path(file.name).stem
    if not text.strip():
        return Skipped(file.name, "empty")
    parts = list(sections(text, title)) if kind == MARKDOWN else [Section(title, text)]
    if not parts:
        return Skipped(file.name, "no text below its headings")
    return Document(file.name, parts, file.name, str(file.path))


def _read_text(path: Path) -> str:
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if b"\0" in data:
        raise UserError(
            f"{path} is binary (byte {data.index(0)} is zero): take it out of the folder, or save it as UTF-8"
        )
    return _decode(data, str(path)).replace("\r\n", "\n")


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        raise UserError(
            f"{where} is not UTF-8 at byte {problem.start} (0x{data[problem.start]:02x}): convert it, "
            "for example with `iconv -f latin1 -t utf-8`"
        ) from problem


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                yield number, orjson.loads(_decode(line.removeprefix(codecs.BOM_UTF8), where))
            except orjson.JSONDecodeError as problem:
                raise UserError(f"{where} is not JSON ({problem}): mend the line") from problem


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            batches = table.iter_batches(batch_size=_PARQUET_ROWS)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except pyarrow.ArrowException as problem:
        reason = str(problem).splitlines()[0]
        raise UserError(f"{path} cannot be read as parquet ({reason}): write it again") from problem


def _row_document(file: File, place: str, number: int, row: Any, names: Fields) -> Document | Skipped:
    where = f"{file.path} {place}"
    if not isinstance(row, dict):
        raise UserError(f"{where} is not an object: write one with a text field, such as {{'text': ...}}")
    text_field = _field(row, names.text, _TEXT_FIELDS, where, "text")
    title_field = _field(row, names.title, ("title",), where, "title")
    id_field = _field(row, names.id, ("id", "_id"), where, "id")
    if text_field is None:
        raise UserError(
            f"{where} has none of the fields {', '.join(_TEXT_FIELDS)}, only {', '.join(map(str, row)) or 'nothing'}: "
            "say which one holds the text"
        )
    text = row[text_field]
    if not isinstance(text, str):
        raise UserError(f"{where} has no text in {text_field!r} but {type(text).__name__}: it must be a string")
    if not text.strip():
        return Skipped(f"{file.name} {place}", "empty text")
    identity = f"{file.name}:{number}" if id_field is None else row[id_field]
    if not isinstance(identity, str | int) or isinstance(identity, bool) or identity == "":
        raise UserError(f"{where} has {identity!r} in {id_field!r}: an id must be a string or an integer")
    title = "" if title_field is None or row[title_field] is None else " ".join(str(row[title_field]).split())
    quoted, body = _split_title(text)
    if quoted and title in ("", quoted):
        title, text = quoted, body
    used = {text_field, title_field, id_field, "contents", "id"}
    rest = {name: value for name, value in row.items() if name not in used}
    return Document(identity, [Section(title, text)], file.name, where, rest)


def _field(row: Mapping[str, Any], named: str, usual: Sequence[str], where: str, what: str) -> str | None:
    if named and named not in row:
        raise UserError(f"{where} lacks the {what} field {named!r}: it has {', '.join(map(str, row))}")
    return named or next((name for name in usual if name in row), None)


def _split_title(text: str) -> tuple[str, str]:
    """Title and text of contents that start with a title line in double quotes; else "" and the text."""
    first, newline, rest = text.partition("\n")
    quoted = first.strip()
    if newline and rest.strip() and len(quoted) > 2 and quoted[0] == quoted[-1] == '"':
        return quoted[1:-1], rest
    return "", text


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
            case "fence" | "code_block":
                self._add_code(token.content)

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

    def _add_code(self, code: str) -> None:
        code = code.strip("\n")
        if code.strip():
            self._append(code, "\n\n")
            self._code.append((self._length - len(code), self._length))

    def _append(self, text: str, separator: str) -> None:
        if self._parts:
            text = separator + text
        self._parts.append(text)
        self._length += len(text)


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
    """The place to go on at behind the "<" at `begin`, and True where what lies between is text, for it is no markup.

    It is further on every time, so that nothing is read twice. `absent` are ends that do not occur any more.
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
