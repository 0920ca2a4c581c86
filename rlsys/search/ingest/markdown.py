"""Markdown to plain sections: one for each heading, titled with the path of headings above it.

Contract: links and images become their words, code stays as it is, list items and table rows keep a line
each, HTML loses its tags and comments. The `title` of YAML front matter heads every path. A heading with nothing under
it makes no section: it stands in the paths of the headings below it.

Documents are untrusted. Time and memory grow with their length; of front matter nothing but the title is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_FRONT_MATTER_CHARS = 1 << 15
"""Longer front matter is text: YAML is read slowly."""
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
            headings = {above: one for above, one in headings.items() if above < level}
            headings[level] = words
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
        title = _title(match[1])
        (title or "").encode()
    except (yaml.YAMLError, ValueError, OverflowError):
        # The last two: of a version with too many digits, and of escapes of characters that do not exist.
        return "", source
    return ("", source) if title is None else (" ".join(title.split())[:_TITLE_CHARS], source[match.end() :])


def _title(front_matter: str) -> str | None:
    """The title as it is written, "" without one; None if the front matter is no mapping.

    Nothing is made of the YAML but this text: no dates and numbers, which may be none, and no values of aliases,
    which may be larger than any memory. A title that is an alias, a list or a mapping counts as none.
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
                title = _scalar(event)
            keys_and_values += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
    return title


def _scalar(event: yaml.Event) -> str:
    """A scalar as it is written; "" for a null, and for anything else."""
    if not isinstance(event, yaml.ScalarEvent) or (event.style is None and event.value in _NO_TITLE):
        return ""
    return str(event.value)


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


def _without_tags(html: str) -> str:
    """What is left of `html` without tags, comments and the like. What is never closed is text."""
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
    """Where to go on behind the "<" at `begin`, and whether what lies between is text, for it is no markup.

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
