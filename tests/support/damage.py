"""What may have become of a file of a run's folder."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

DEEP = b"[" * 100_000 + b"]" * 100_000
"""Python's own parser ends in a RecursionError."""
LEVELS = b'{"a":' * 150 + b"1" + b"}" * 150
"""Parsed without one, which comes later, to those who walk through it."""
ALIASES = b"{a: &a [x, x]%s}\n" % b"".join(b", %c: &%c [*%c, *%c]" % (n, n, n - 1, n - 1) for n in range(98, 115))
"""287 bytes of YAML for a list of 2 ** 18 texts, which each further 17 bytes double."""


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
    """Whoever opens it waits for a writer."""
    file.unlink()
    os.mkfifo(file)


def device(file: Path) -> None:
    """Harmless, unlike /dev/zero, where it is read after all."""
    file.unlink()
    file.symlink_to("/dev/null")


def circle(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def denied(file: Path) -> None:
    """Whom permissions do not hold back, such as root, reads it."""
    file.write_bytes(b"{")
    file.chmod(0)


def holding(content: bytes) -> Callable[[Path], None]:
    """Replaces what a file holds, in gzip where it was."""

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
"""By name. Nothing can be read of such a file, but of `OBJECTS`, which are objects without what they should hold."""
OBJECTS = ("nan", "surrogate")
