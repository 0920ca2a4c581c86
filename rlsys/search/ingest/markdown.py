"""Markdown to plain sections: one for each heading, titled with the path of headings above it.

Contract: links and images become their words, code stays as it is, list items and table rows keep a line
each, HTML loses its tags. The `title` of YAML front matter heads every path. A heading with nothing under
it makes no section: it stands in the paths of the headings below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of text under one title; `code` gives the character ranges of code in it, in order."""

    title: str
    text: str
    code: tuple[tuple[int, int], ...] = ()


def sections(source: str, name: str) -> Iterator[Section]:
    """The sections of a Markdown document in order; `name` is the title of text that has none."""
    title, body = _split_front_matter(source)
    headings: dict[int, str] = {}
    plain = _Plain()
    tokens = iter(MarkdownIt("commonmark").enable("table").parse(body))
    for token in tokens:
        if token.type == "heading_open" and token.level == 0:
            yield from plain.section(_path(title, headings) or name)
            level = int(token.tag[1:])
            headings = {above: words for above, words in headings.items() if above < level}
            headings[level] = " ".join(_words(next(tokens)).split())
            plain = _Plain()
        else:
            plain.add(token)
    yield from plain.section(_path(title, headings) or name)


def _split_front_matter(source: str) -> tuple[str, str]:
    """Its title, "" if there is none, and the document without it."""
    match = _FRONT_MATTER.match(source)
    if match is None:
        return "", source
    try:
        fields = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return "", source
    if not isinstance(fields, dict):
        return "", source
    return " ".join(str(fields.get("title") or "").split()), source[match.end() :]


def _path(title: str, headings: dict[int, str]) -> str:
    names = [title, *(headings[level] for level in sorted(headings))]
    distinct = [name for above, name in zip(["", *names], names, strict=False) if name and name != above]
    return " > ".join(distinct)


@dataclass(slots=True)
class _Plain:
    """Plain text as it grows, block by block."""

    _parts: list[str] = field(default_factory=list)
    _length: int = 0
    _code: list[tuple[int, int]] = field(default_factory=list)
    _lists: int = 0
    """How many lists are open, one in the other."""
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
                self._add_words(_words(token))
            case "html_block":
                self._add_words(_without_tags(token.content))
            case "fence" | "code_block":
                self._add_code(token.content)

    def section(self, title: str) -> Iterator[Section]:
        text = "".join(self._parts)
        if text.strip():
            yield Section(title, text, tuple(self._code))

    def _add_words(self, words: str) -> None:
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


def _words(inline: Token) -> str:
    """What a reader sees of an inline token."""
    seen = []
    for child in inline.children or []:
        match child.type:
            case "text" | "code_inline":
                seen.append(child.content)
            case "softbreak" | "hardbreak":
                seen.append("\n")
            case "image":
                seen.append(_words(child))
    return "".join(seen)


class _TagStripper(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_data(self, data: str) -> None:
        self.seen.append(data)


def _without_tags(html: str) -> str:
    stripper = _TagStripper()
    stripper.feed(html)
    stripper.close()
    return "".join(stripper.seen).strip()
