"""How small files are written: whole or not at all, and as JSON that every reader accepts; and what a file holds."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_PART = re.compile(r"\..+\.\d+\.part")


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`; a reader sees the old content or the new, never a part."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """As `write_atomically`, of bytes."""
    with open_atomically(path) as file:
        file.write(content)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces the one at `path` once the body has written it.

    An OSError, also one of the body, names `path`: what a full disk refuses names no file by itself.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror or str(problem), str(path)) from problem
    finally:
        part.unlink(missing_ok=True)


def forget_parts(folder: Path) -> None:
    """Delete what a process that was killed had written of files in `folder`; nobody may be writing there."""
    for path in folder.glob(".*.part"):
        if _PART.fullmatch(path.name):
            path.unlink()


def sha256_of(path: str | Path) -> str:
    """SHA-256 of the file at `path`, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_safe(value: Any) -> Any:
    """`value` in plain JSON types: NaN and infinities become None (JSON has none), scalars of numpy and
    torch become numbers, paths become strings.

    Raises TypeError for anything else that JSON cannot hold.
    """
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} does not fit into a JSON file.")
