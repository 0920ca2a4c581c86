"""Atomic writes, bounded reads and folder locks.

Run folders are untrusted input: they may come from another user or be damaged. Readers therefore accept regular files
only, up to the size limits below, and parsers bound nesting depth and integer size.
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

from rlsys.errors import UserError, first_line

OBJECT_BYTES = 64 * 1024**2
"""Maximum size of a JSON file."""
LINE_BYTES = 64 * 1024**2
"""Maximum size of one line of a JSONL file, uncompressed."""
PACKED_BYTES = 4 * 1024**3
"""Maximum compressed size of a gzip file. The format allows any number of padding zeros after the data."""
CONFIG_BYTES = 256 * 1024
"""Maximum size of a YAML file; PyYAML parses about 100 KB per second."""
_PARQUET_ROWS = 256
"""Rows of a parquet file that are read at a time."""
DEPTH = 64
"""Maximum nesting depth of lists and objects, well below Python's recursion limit."""

_PART = re.compile(r"\..+\.\d+\.part")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: a reader sees the old content or the new, never a part."""
    with open_atomically(path) as file:
        file.write(text.encode())


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces the file at `path` when the body completes.

    Every OSError, also one from the body, names `path`, as `named` does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with named(path), part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Re-raise every OSError of the body with `path` as its file name: errors of a failed write have none."""
    try:
        yield
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror or str(problem), str(path)) from problem


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_partial_files(folder: Path) -> None:
    """Delete temporary files that killed writers left in `folder`. No other process may be writing there."""
    for path in folder.glob(".*.part"):
        if _PART.fullmatch(path.name):
            path.unlink()


@contextmanager
def open_regular(path: Path, most: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading, without blocking.

    Raises OSError if `path` is not a regular file (for example a pipe) or is larger than `most` bytes.
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
    """Return the content of the regular file at `path`. Raises OSError as `open_regular` does."""
    with open_regular(path, most) as file:
        return file.read(most)


def limited_lines(file: BinaryIO | BufferedIOBase) -> Iterator[bytes]:
    """Yield the lines of `file`. Raises OSError at a line longer than `LINE_BYTES`."""
    while line := file.readline(LINE_BYTES + 1):
        if len(line) > LINE_BYTES:
            raise OSError(errno.EFBIG, f"One of its lines has more than {LINE_BYTES} bytes")
        yield line


def parse_json(text: bytes | str) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, integers beyond 64 bits and nesting beyond `DEPTH` levels."""
    try:
        found = json.loads(text, parse_int=_integer)
    except RecursionError as problem:
        raise ValueError(f"It is nested more than {DEPTH} levels deep.") from problem
    require_shallow(found)
    return found


def require_shallow(value: Any) -> None:
    """Raise ValueError if lists and dicts in `value` are nested more than `DEPTH` levels deep."""
    level: list[Any] = [[value]]
    for _ in range(DEPTH + 1):
        insides = (nested.values() if isinstance(nested, dict) else nested for nested in level)
        level = [nested for inside in insides for nested in inside if isinstance(nested, dict | list)]
        if not level:
            return
    raise ValueError(f"It is nested more than {DEPTH} levels deep.")


def read_yaml(path: Path) -> Any:
    """Parse the YAML file at `path`, restricted to the JSON data model.

    Raises OSError if the file cannot be read or is larger than `CONFIG_BYTES`. Raises ValueError for invalid YAML, for
    values beyond the limits of `parse_json`, and for aliases: a few hundred bytes of them can expand to gigabytes.
    """
    content = read_regular(path, CONFIG_BYTES)
    try:
        return parse_json(json.dumps(yaml.load(content, _PlainLoader)))
    except (yaml.YAMLError, TypeError, AttributeError, LookupError, OverflowError) as problem:
        # PyYAML raises these for some malformed tags, such as `!!bool x`.
        raise ValueError(str(problem)) from problem


def parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the content of each row of a parquet file. Raises UserError if it is damaged."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            rows = (row for batch in table.iter_batches(batch_size=_PARQUET_ROWS) for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except (pyarrow.ArrowException, OSError) as problem:
        raise UserError(
            f"{path} cannot be read as parquet ({first_line(problem)}): write it again, or correct its suffix.",
            code="malformed",
            key=str(path),
        ) from problem


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of the file at `path` in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_safe(value: Any) -> Any:
    """Convert `value` to plain JSON types.

    NaN and infinities become None, numpy and torch scalars become numbers, and paths become strings. Raises TypeError
    for any other type that JSON lacks.
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
    """YAML loader that rejects aliases and nesting beyond `DEPTH` levels."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node; overrides `yaml.composer.Composer`."""
        self._depth += 1
        if self._depth > DEPTH or self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"It has an alias, or is nested more than {DEPTH} levels deep.")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _integer(digits: str) -> int:
    """Parse an integer. Raises ValueError beyond 64 bits, since converting a larger integer to float can overflow."""
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError("It holds an integer of more than 64 bits.")
    return number


SHARED_MEMORY = Path("/dev/shm")
"""Folder of the shared memory of this machine's processes."""


def tie_shared_memory(pattern: str, folder: Path, owner: int) -> None:
    """Put a link into `folder` to the shared memory whose name matches `pattern`, for `remove_shared_memory`.

    The memory need not exist yet: a process that does this first leaves none behind, even if it is killed. `owner` is a
    process id.
    """
    (folder / f"{owner}-{os.getpid()}-{pattern}").symlink_to(SHARED_MEMORY / pattern)


def remove_shared_memory(folder: Path, owner: int | None = None) -> None:
    """Remove the shared memory to which links of `owner` in `folder` point, and the links; by default, of all owners."""
    for link in folder.glob("*" if owner is None else f"{owner}-*"):
        if link.is_symlink() and (memory := Path(os.readlink(link))).parent == SHARED_MEMORY:
            for path in SHARED_MEMORY.glob(memory.name):
                path.unlink(missing_ok=True)
            link.unlink(missing_ok=True)


LOCK = "lock"
"""Name of the lock file in a `working_folder`."""
_RUN_LOCK = ".lock"
_ATTEMPTS = 100
"""Maximum number of attempts to lock a folder; an attempt fails if another process removes the folder meanwhile."""


class Claimed(UserError):
    """Raised if another process holds the lock of a run folder."""


@contextmanager
def claim(run_dir: Path) -> Iterator[None]:
    """Hold the exclusive lock of a run folder. The lock file stays in the folder.

    Raises Claimed if another process holds the lock, and OSError if the folder cannot be locked.
    """
    with (run_dir / _RUN_LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise Claimed(
                f"{run_dir} belongs to a run that is still active: stop that run first, or branch from one of its "
                "earlier checkpoints with resume=PATH.",
                code="in_use",
                key=str(run_dir),
            ) from problem
        yield


@contextmanager
def working_folder(home: Path) -> Iterator[None]:
    """Hold the exclusive lock of `home`. Creates the folder if needed, and removes it afterwards if it is empty.

    Raises BlockingIOError if another process holds the lock, and another OSError if the folder cannot be locked.
    """
    lock = _locked(home)
    try:
        yield
    finally:
        if [path.name for path in home.iterdir()] == [LOCK]:
            # A process that has opened this lock file meanwhile detects the removal and retries.
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
