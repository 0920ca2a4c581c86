"""Reads pages: from the bytes of a page to its title and its text, in a process that may be ended at any moment.

The page is a stranger's: the text is only text, without control characters, and bounded. Reading hostile HTML may take
minutes in C code that no exception reaches (libxml2 looks through all attributes of an element for each new one), so it
runs in the process `python -m rlsys.search.web.extract`. Contract, on standard input and output: a job is a JSON line
{"media_type", "charset", "bytes"} and that many bytes; its answer is a JSON line, {"title", "text"} or null for a page
that has no text or cannot be read. The first line is READY. The process ends with its input, and at once when a job takes
too long. Answers are JSON, not pickles, so that a page that takes this process over cannot take over its parent.
"""

from __future__ import annotations

import codecs
import logging
import os
import re
import resource
import signal
import sys
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

import orjson
import trafilatura

READY = b"ready\n"
_MAX_MEMORY_BYTES = 2 * 1024**3
MAX_TEXT_CHARS = 200_000
_MAX_TITLE_CHARS = 300
_SNIFFED_BYTES = 2048
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w:.-]{1,40})""", re.IGNORECASE)
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_DIRECTION_CONTROLS = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, slots=True)
class Page:
    """The title and the text of a page."""

    title: str  # one line, maybe empty
    text: str  # paragraphs, one a line; at most MAX_TEXT_CHARS characters

    @property
    def contents(self) -> str:
        """Title and text as a corpus has them: `"title"\\ntext`."""
        return f'"{self.title}"\n{self.text}'


def extract(body: bytes, media_type: str, charset: str | None) -> Page | None:
    """The page in `body`, or None where it has no text. Raises RecursionError or MemoryError for some hostile pages."""
    text = decode(body, charset)
    if media_type == "text/plain":
        return _page("", text)
    # The precise extractor alone: its fallbacks are slower and mostly find what it left out on purpose.
    document = trafilatura.bare_extraction(text, fast=True, include_comments=False, with_metadata=True)
    if document is None or isinstance(document, dict):
        return None
    return _page(str(document.title or ""), str(document.text or ""))


def decode(body: bytes, charset: str | None) -> str:
    """`body` as text by the HTML standard: byte order mark, `charset`, its own declaration, UTF-8, Windows-1252."""
    for mark, name in _BYTE_ORDER_MARKS:
        if body.startswith(mark):
            return body.decode(name, "replace")
    declared = _META_CHARSET.search(body[:_SNIFFED_BYTES])
    for named in (charset, declared[1].decode("ascii", "ignore") if declared else None):
        # Names of codecs that are not charsets (`hex`, `idna`) end in one of these errors, too.
        with suppress(LookupError, ValueError):
            codec = codecs.lookup(named or "").name
            # Pages that say Latin-1 mean its superset.
            return body.decode("cp1252" if codec in ("iso8859-1", "ascii") else codec, "replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return body.decode("cp1252", "replace")


def clean(text: str) -> str:
    """`text` without controls other than line breaks, without blanks at the ends of lines, and without empty lines."""
    kept = "".join(
        one
        for one in text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " ")
        if one == "\n" or (unicodedata.category(one) not in ("Cc", "Cs") and one not in _DIRECTION_CONTROLS)
    )
    return "\n".join(filter(None, (line.strip() for line in kept.split("\n"))))


def one_line(text: str) -> str:
    """`text` as `clean` leaves it, with single blanks only."""
    return " ".join(clean(text).split())


def _page(title: str, text: str) -> Page | None:
    text = clean(text[:MAX_TEXT_CHARS])
    return Page(one_line(title)[:_MAX_TITLE_CHARS], text) if text else None


def main() -> None:
    """Answer jobs until the input ends. The one argument is the limit of a job, in seconds."""
    seconds = float(sys.argv[1])
    jobs = sys.stdin.buffer
    # Whatever a library prints goes to the log, not between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers.write(READY)
    answers.flush()
    while line := jobs.readline():
        answers.write(_answer(orjson.loads(line), jobs, seconds) + b"\n")
        answers.flush()


def _answer(job: dict[str, str | int | None], jobs: BinaryIO, seconds: float) -> bytes:
    body = jobs.read(int(job["bytes"] or 0))
    charset = job["charset"]
    # The default action of SIGALRM ends a process in C code too, and when its parent is gone.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        page = extract(body, str(job["media_type"]), None if charset is None else str(charset))
    except Exception:  # noqa: BLE001  whatever a hostile page does to a parser, it is a page without text
        page = None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return orjson.dumps(page)


if __name__ == "__main__":
    main()
