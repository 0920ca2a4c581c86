"""Whether a source is the one that it was."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def fingerprint(folder: Path, files: Iterable[Path] | None = None) -> list[tuple[str, int, int]]:
    """Name, bytes and time of change in ns of `files` (relative; null: all in the folder, at any depth).

    Contents are not read: that would take as long as converting them.
    """
    if files is None:
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    stats = [(str(path), (folder / path).stat()) for path in sorted(files)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
