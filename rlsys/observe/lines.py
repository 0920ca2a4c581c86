"""A file of JSON objects, one a line, on disk as soon as each is known.

A resumed run goes on at the `position` it had when it was saved: what came after is of steps that are done again. A
line that a crash has cut short is ended, so that the next one is whole; one that a full disk has cut short is taken back.
All is ASCII, so that no cut breaks a character.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlsys.errors import RunError
from rlsys.files import json_safe


class LineLog:
    """Appends rows to a file."""

    def __init__(self, path: Path, position: int | None = None) -> None:
        """`position`: bytes of the file that count; None counts all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._end = self._file.tell()
        if position is not None and position < self._end:
            self._file.truncate(position)
            self._end = position
        if self._is_torn():
            self._write(b"\n")

    @property
    def position(self) -> int:
        """Bytes written so far. They are on the disk by then: a machine that goes down does not take them along."""
        os.fsync(self._file.fileno())
        return self._end

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; a figure that is NaN or infinite is written as null. Raises RunError if it cannot be."""
        self._write(json.dumps(json_safe(dict(row)), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _is_torn(self) -> bool:
        return self._end > 0 and os.pread(self._file.fileno(), 1, self._end - 1) != b"\n"

    def _write(self, line: bytes) -> None:
        begun = self._end
        try:
            while line:
                written = self._file.write(line)
                self._end, line = self._end + written, line[written:]
        except OSError as problem:
            with suppress(OSError):
                self._file.truncate(begun)
                self._end = begun
            raise RunError(f"{self._path} could not be written: {problem.strerror}.") from problem
