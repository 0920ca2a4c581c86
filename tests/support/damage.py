"""Damages files of a run folder in many ways."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

DEEP = b"[" * 100_000 + b"]" * 100_000
"""JSON that raises a RecursionError in Python's parser."""
LEVELS = b'{"a":' * 150 + b"1" + b"}" * 150
"""JSON that parses, but is deep enough for a RecursionError in code that walks through it."""
ALIASES = b"{a: &a [x, x]%s}\n" % b"".join(b", %c: &%c [*%c, *%c]" % (n, n, n - 1, n - 1) for n in range(98, 115))
"""287 bytes of YAML for a list of 2 ** 18 texts; each further 17 bytes double it."""


def removed(file: Path) -> None:
    file.unlink()


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:3])


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def pipe(file: Path) -> None:
    """Replace the file by a named pipe, which blocks its readers."""
    file.unlink()
    os.mkfifo(file)


def device(file: Path) -> None:
    """Replace the file by a link to /dev/null, which is harmless to read (/dev/zero would never end)."""
    file.unlink()
    file.symlink_to("/dev/null")


def circle(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def denied(file: Path) -> None:
    """Replace the file by an unreadable one; its content is invalid too, because root can read it."""
    file.write_bytes(b"{")
    file.chmod(0)


def holding(content: bytes) -> Callable[[Path], None]:
    """Function that replaces a file's content by `content`, compressed if the file is a .gz."""

    def replaced(file: Path) -> None:
        file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)

    return replaced


DAMAGES = {
    "removed": removed,
    "emptied": emptied,
    "cut": cut,
    "folder": folder,
    "pipe": pipe,
    "device": device,
    "circle": circle,
    "denied": denied,
    "blank": holding(b"\n\n"),
    "binary": holding(b"\xff\x00\xfe"),
    "other": holding(b"[1, 2]\n"),
    "deep": holding(DEEP),
    "levels": holding(LEVELS),
    "huge": holding(b'{"step": 1%s}\n' % (b"0" * 400)),
    "nan": holding(b'{"step": NaN, "time": 1e999}\n'),
    "surrogate": holding(b'{"step": "\\ud800"}\n'),
    "aliases": holding(ALIASES),
}
"""Name -> function that damages a file. Only files damaged by `OBJECTS` can be read in part."""
OBJECTS = ("nan", "surrogate")
"""Damages that leave valid JSON objects without the expected keys."""
