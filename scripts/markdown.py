"""Fills the prose of generated Markdown pages to a line width."""

from __future__ import annotations

from textwrap import fill

WIDTH = 110
"""Longest line in characters; tables, code and headings may be longer."""
_VERBATIM = ("```", "    ", "|", "#")
"""Beginnings of blocks that are left unchanged."""


def filled(page: str) -> str:
    """Return `page` with its paragraphs and list items filled to `WIDTH`. Code blocks must not contain empty lines."""
    return "\n\n".join(_block(block) for block in page.split("\n\n"))


def _block(block: str) -> str:
    lines = block.split("\n")
    if block.lstrip("\n").startswith(_VERBATIM) or max(map(len, lines)) <= WIDTH:
        return block
    if block.startswith("* "):
        return "\n".join(_filled(line, indent="  ") for line in lines)
    return _filled(" ".join(lines))


def _filled(text: str, indent: str = "") -> str:
    return fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
