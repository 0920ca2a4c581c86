"""Extracts title and text from the bytes of a web page, in a subprocess that can be killed at any time.

Pages are untrusted; the extracted text has no control characters and a bounded length. Parsing hostile HTML may take
minutes in C code that cannot be interrupted (libxml2 scans all attributes of an element for each new one). So parsing
runs in a subprocess, `python -m rlsys.search.web.extract`.

Protocol on standard input and output: the first output line is READY. A job is a JSON line
{"media_type", "charset", "bytes"}, followed by that many bytes. The response is a JSON line: {"title", "text"}, or null
for a page without readable text. The process exits at the end of its input, and as soon as a job exceeds its time
limit. Responses are JSON and not pickles, so that a page that compromises this process cannot compromise its parent.
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
    """Title and text of a page."""

    title: str  # one line, possibly empty
    text: str  # one paragraph per line; at most MAX_TEXT_CHARS characters

    @property
    def contents(self) -> str:
        """Title and text in corpus format: `"title"\\ntext`."""
        return f'"{self.title}"\n{self.text}'


def extract(body: bytes, media_type: str, charset: str | None) -> Page | None:
    """Return the page in `body`; None without text. Raises RecursionError or MemoryError for some hostile pages."""
    text = decode(body, charset)
    if media_type == "text/plain":
        return _page("", text)
    # fast=True skips the fallbacks, which are slower and mostly return text that was left out on purpose.
    document = trafilatura.bare_extraction(text, fast=True, include_comments=False, with_metadata=True)
    if document is None or isinstance(document, dict):
        return None
    return _page(str(document.title or ""), str(document.text or ""))


def decode(body: bytes, charset: str | None) -> str:
    """Decode `body` as in the HTML standard: by byte order mark, `charset`, meta declaration, UTF-8 or Windows-1252."""
    for mark, name in _BYTE_ORDER_MARKS:
        if body.startswith(mark):
            return body.decode(name, "replace")
    declared = _META_CHARSET.search(body[:_SNIFFED_BYTES])
    for named in (charset, declared[1].decode("ascii", "ignore") if declared else None):
        # Python codecs that are not charsets (`hex`, `idna`) raise one of these errors too.
        with suppress(LookupError, ValueError):
            codec = codecs.lookup(named or "").name
            # Pages declared as Latin-1 use its superset, Windows-1252.
            return body.decode("cp1252" if codec in ("iso8859-1", "ascii") else codec, "replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return body.decode("cp1252", "replace")


def clean(text: str) -> str:
    """Return `text` with stripped lines, without empty lines and control characters."""
    kept = "".join(
        one
        for one in text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " ")
        if one == "\n" or (unicodedata.category(one) not in ("Cc", "Cs") and one not in _DIRECTION_CONTROLS)
    )
    return "\n".join(filter(None, (line.strip() for line in kept.split("\n"))))


def one_line(text: str) -> str:
    """Return `text` cleaned, in one line with single spaces."""
    return " ".join(clean(text).split())


def _page(title: str, text: str) -> Page | None:
    text = clean(text[:MAX_TEXT_CHARS])
    return Page(one_line(title)[:_MAX_TITLE_CHARS], text) if text else None


def main() -> None:
    """Process jobs until the input ends. The only command-line argument is the time limit of a job, in seconds."""
    seconds = float(sys.argv[1])
    jobs = sys.stdin.buffer
    # Text that libraries print goes to standard error, so that it cannot mix with the responses.
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
    # The default action of SIGALRM ends the process even in C code, and even after the parent has ended.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        page = extract(body, str(job["media_type"]), None if charset is None else str(charset))
    except Exception:  # noqa: BLE001  any parser error means a page without text
        page = None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return orjson.dumps(page)


if __name__ == "__main__":
    main()
