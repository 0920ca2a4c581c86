"""Atomic writes, bounded reads and folder locks.

A run's folder may come from somebody else, or from a disk that has lost parts of it. So only regular files are read, under
the limits below, and what is parsed holds nothing that breaks those who walk through it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import yaml

from rlsys.errors import UserError

OBJECT_BYTES = 64 * 1024**2
"""Most that a file of one JSON object may have."""
LINE_BYTES = 64 * 1024**2
"""Most that a line of a file of JSON lines may have, unpacked."""
PACKED_BYTES = 4 * 1024**3
"""Most that a file in gzip may have, packed: one may end in zeros without end."""
CONFIG_BYTES = 256 * 1024
"""Most that a YAML file may have, whose reader takes a second for about 100 KB."""
DEPTH = 64
"""Most levels that lists and objects are nested; Python's own limit ends in a RecursionError."""

_PART = re.compile(r"\..+\.\d+\.part")


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`; a reader sees the old content or the new, never a part."""
    with open_atomically(path) as file:
        file.write(text.encode())


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


@contextmanager
def open_regular(path: Path, most: int | None = None) -> Iterator[BinaryIO]:
    """Open a file for reading without waiting.

    Raises OSError for one that is not regular, such as a pipe or a device, and for one of more than `most` bytes.
    """

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)

    with open(path, "rb", opener=opened) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", str(path))
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"It has {found.st_size} bytes and may have {most}", str(path))
        yield file


def read_regular(path: Path, most: int = OBJECT_BYTES) -> bytes:
    """The content of the regular file at `path`. Raises OSError, also for one of more than `most` bytes."""
    with open_regular(path, most) as file:
        return file.read(most)


def limited_lines(file: BinaryIO | BufferedIOBase) -> Iterator[bytes]:
    """The lines of `file`. Raises OSError at one of more than `LINE_BYTES` bytes, which may be an endless one."""
    while line := file.readline(LINE_BYTES + 1):
        if len(line) > LINE_BYTES:
            raise OSError(errno.EFBIG, f"A line of it has more than {LINE_BYTES} bytes")
        yield line


def parse_json(text: bytes | str) -> Any:
    """The JSON value in `text`.

    Raises ValueError for text that holds none, for integers beyond 64 bits, and for nesting beyond `DEPTH` levels.
    """
    try:
        found = json.loads(text, parse_int=_integer)
    except RecursionError as problem:
        raise ValueError(f"It is nested more than {DEPTH} levels deep.") from problem
    require_shallow(found)
    return found


def require_shallow(value: Any) -> None:
    """Raise ValueError if lists and dicts of `value` are nested more than `DEPTH` levels deep."""
    level: list[Any] = [[value]]
    for _ in range(DEPTH + 1):
        insides = (nested.values() if isinstance(nested, dict) else nested for nested in level)
        level = [nested for inside in insides for nested in inside if isinstance(nested, dict | list)]
        if not level:
            return
    raise ValueError(f"It is nested more than {DEPTH} levels deep.")


def read_yaml(path: Path) -> Any:
    """What the YAML file at `path` holds, which nothing but JSON could not hold.

    Raises OSError, also for a file of more than `CONFIG_BYTES`, and ValueError for what `parse_json` would not take and
    for aliases: a few hundred bytes of them stand for gigabytes.
    """
    content = read_regular(path, CONFIG_BYTES)
    try:
        return parse_json(json.dumps(yaml.load(content, _PlainLoader)))
    except (yaml.YAMLError, TypeError, AttributeError, LookupError, OverflowError) as problem:
        # PyYAML itself stumbles over `!!bool x` and the like.
        raise ValueError(str(problem)) from problem


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


class _PlainLoader(yaml.SafeLoader):
    """Takes no aliases, and no nesting beyond `DEPTH` levels."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """See yaml.composer.Composer."""
        self._depth += 1
        if self._depth > DEPTH or self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"It has an alias, or is nested more than {DEPTH} levels deep.")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _integer(digits: str) -> int:
    """Raises ValueError for a number of more than 64 bits: as a float, which figures are made to be, it may overflow."""
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError("It holds an integer of more than 64 bits.")
    return number


LOCK = "lock"
"""The file in a folder that is made to be claimed."""
_RUN_LOCK = ".lock"
_ATTEMPTS = 100
"""To lock what others remove as they end; where nothing can ever be, all of them fail."""


class Claimed(UserError):
    """The folder is another process's."""


@contextmanager
def claim(run_dir: Path) -> Iterator[None]:
    """Have the folder of a run for this process alone; its lock stays there.

    Raises Claimed if another process has it, OSError if none can.
    """
    with (run_dir / _RUN_LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise Claimed(
                f"{run_dir} is of a run that still goes on: end that one first, or branch from one of its earlier "
                "checkpoints with resume=PATH.",
                code="in_use",
                key=str(run_dir),
            ) from problem
        yield


@contextmanager
def working_folder(home: Path) -> Iterator[None]:
    """Have `home` for this process alone; it is made where there is none, and gone afterwards if nothing is left in it.

    Raises BlockingIOError if another process has it, another OSError if it cannot be.
    """
    lock = _locked(home)
    try:
        yield
    finally:
        if [path.name for path in home.iterdir()] == [LOCK]:
            # Who opened this lock meanwhile sees that it is gone and begins anew.
            (home / LOCK).unlink()
            with suppress(OSError):
                home.rmdir()
        lock.close()


def _locked(home: Path) -> TextIO:
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):
            home.mkdir(parents=True, exist_ok=True)
            file = (home / LOCK).open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), (home / LOCK).stat()):
                    return file
            except BlockingIOError:
                file.close()
                raise
            file.close()
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(home))
