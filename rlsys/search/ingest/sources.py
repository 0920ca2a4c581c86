"""Files of documents, found and read one document at a time.

Contract: files come in the order of their paths, documents in the order of the file; memory holds one
document (of parquet, one row group's batch). What is passed over is told, never silent: hidden entries,
unknown kinds of files, empty files and empty rows. What cannot be read raises UserError with the place.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rlsys.errors import UserError
from rlsys.search.ingest.markdown import Section, sections

TEXT, MARKDOWN, JSONL, PARQUET = ".txt", ".md", ".jsonl", ".parquet"
_KINDS = {
    TEXT: TEXT,
    ".text": TEXT,
    MARKDOWN: MARKDOWN,
    ".markdown": MARKDOWN,
    JSONL: JSONL,
    PARQUET: PARQUET,
}
_TEXT_FIELDS = ("contents", "text", "content", "body")
_TITLE_FIELDS = ("title",)
_ID_FIELDS = ("id", "_id")
_PARQUET_ROWS = 256


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
    name: str
    """The path below the source it was found in, with forward slashes; of a file given itself, its name."""


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
    where: str
    """For messages: the file, and the line or row."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What else its row holds."""


def find_files(sources: Iterable[Path], out: Path) -> Iterator[File | Skipped]:
    """The files of `sources`, folders walked in the order of names; `out` itself is not one of them.

    A symbolic link to a folder is not followed. Raises UserError for a source that is missing, is `out`, or
    is a file of a kind that cannot be read.
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
    try:
        yield from _read(file, names)
    except OSError as problem:
        raise UserError(f"{file.path} cannot be read ({problem.strerror}): make it readable") from problem


def _read(file: File, names: Fields) -> Iterator[Document | Skipped]:
    kind = _KINDS[file.path.suffix.lower()]
    if kind in (TEXT, MARKDOWN):
        text = _read_text(file.path)
        if not text.strip():
            yield Skipped(file.name, "empty")
            return
        title = Path(file.name).stem
        parts = list(sections(text, title)) if kind == MARKDOWN else [Section(title, text)]
        if not parts:
            yield Skipped(file.name, "no text below its headings")
            return
        yield Document(file.name, parts, file.name, str(file.path))
        return
    rows, unit = (_jsonl_rows(file.path), "line") if kind == JSONL else (_parquet_rows(file.path), "row")
    found = False
    for number, row in rows:
        found = True
        yield _row_document(file, f"{unit} {number}", number, row, names)
    if not found:
        yield Skipped(file.name, "empty")


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
    title_field = _field(row, names.title, _TITLE_FIELDS, where, "title")
    id_field = _field(row, names.id, _ID_FIELDS, where, "id")
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
    if named:
        if named not in row:
            raise UserError(f"{where} lacks the {what} field {named!r}: it has {', '.join(map(str, row))}")
        return named
    return next((name for name in usual if name in row), None)


def _split_title(text: str) -> tuple[str, str]:
    """Title and text of contents that start with a title line in double quotes; else "" and the text."""
    first, newline, rest = text.partition("\n")
    quoted = first.strip()
    if newline and rest.strip() and len(quoted) > 2 and quoted[0] == quoted[-1] == '"':
        return quoted[1:-1], rest
    return "", text
