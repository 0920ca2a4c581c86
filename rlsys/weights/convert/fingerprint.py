"""Whether a source is the one that it was."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def fingerprint(folder: Path, files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Name, bytes and time of change in ns of `files`, which are relative to `folder`.

    Contents are not read: that would take as long as converting them.
    """
    stats = [(str(path), (folder / path).stat()) for path in sorted(files)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
