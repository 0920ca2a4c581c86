"""What a judge has said, in memory and, where a path is given, in a file that is kept over runs.

The file is jsonl, one `{"key": HEX, "yes": BOOL}` a line, and is only ever appended to, each line by one write:
several runs may share it on a local disk. A line that cannot be read (a writer was killed, a disk was full) is
left out and costs one question; where two lines contradict each other the later one holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from rlsys.errors import RunError, UserError
from rlsys.files import parse_json


def key_of(model: str, prompt: str) -> str:
    """What a verdict is kept by: SHA-256 of the model's name and all that it was asked, in hex."""
    return hashlib.sha256(json.dumps([model, prompt]).encode()).hexdigest()


class Verdicts:
    """Verdicts by key. Raises UserError for a file that cannot be used; `close` it at the end."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._known: dict[str, bool] = {}
        self._file: int | None = None
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(
                f"reward.judge.cache_path={path} cannot be used ({error.strerror}): give a file in a folder that can "
                "be written, or null."
            ) from error
        self._known.update(filter(None, map(_parse, content.splitlines())))
        if content and not content.endswith(b"\n"):
            self._append(b"\n")  # or the next verdict would join the line that was cut off

    def get(self, key: str) -> bool | None:
        """The verdict, or None where there is none."""
        return self._known.get(key)

    def put(self, key: str, verdict: bool) -> None:
        """Keep a verdict. Raises RunError where the file cannot take it."""
        self._known[key] = verdict
        self._append(json.dumps({"key": key, "yes": verdict}).encode() + b"\n")

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            whole = os.write(self._file, line) == len(line)
        except OSError as error:
            raise RunError(f"reward.judge.cache_path={self._path} cannot be written: {error.strerror}.") from error
        if not whole:
            raise RunError(f"reward.judge.cache_path={self._path} cannot be written: its disk is full.")


def _parse(line: bytes) -> tuple[str, bool] | None:
    try:
        match parse_json(line):
            case {"key": str(key), "yes": bool(verdict)}:
                return key, verdict
    except ValueError:
        pass
    return None
