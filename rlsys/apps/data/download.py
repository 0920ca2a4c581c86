"""Large files from the Hub: resumed where they broke off, checked, and joined as they arrive.

Contract, for a target of one or more pieces:

- it appears under its name only when every piece has the size and the checksum that the Hub states;
- pieces are written one behind the other into `NAME.part`, so that joining takes no further disk space;
- what has arrived stays when the connection or the process breaks off, and the next start goes on from there
  if the pieces are still the same, from zero if not;
- a target that is complete is left alone; a file of its name that was made by other means is checked first.

huggingface_hub's own download is not used: it throws a partial file away when the process ends (pieces here
have up to 43 GB) and compares sizes only. What is known of a target is kept in `.downloads` beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from rlsys.apps.data.hub import Hub, RemoteFile
from rlsys.apps.data.transfer import Advance, Piece, complete, new_digest, update_digest
from rlsys.errors import RunError, UserError
from rlsys.files import write_atomically

_RECEIPTS = ".downloads"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A file to have, and the remote files that it is made of, in order."""

    name: str
    """Its path below the folder of downloads."""
    pieces: Sequence[RemoteFile]

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        return sum(piece.size for piece in self.pieces)


class Downloader:
    """Fetches targets into one folder, on which only one process works at a time."""

    def __init__(self, folder: Path, hub: Hub, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._folder = folder
        self._hub = hub
        self._sleep = sleep

    def missing(self, target: Target) -> int:
        """Bytes of `target` that are not here; by sizes alone, without reading what is here."""
        path, part = self._folder / target.name, self._part(target)
        if path.is_file():
            return 0
        if part.is_file() and self._receipt(target) == _statement(target, whole=False):
            return max(target.size - part.stat().st_size, 0)
        return target.size

    def fetch(self, target: Target, advance: Advance) -> Path:
        """Make `target` complete and return its path.

        Raises UserError for a folder that cannot be written, a file in the way or a download that is not
        allowed; RunError if the Hub breaks off for good or sends wrong bytes twice.
        """
        path, part = self._folder / target.name, self._part(target)
        with self._alone():
            if path.exists():
                self._check(path, target)
                advance(target.size)
                return path
            part.parent.mkdir(parents=True, exist_ok=True)
            if self._receipt(target) != _statement(target, whole=False):
                part.unlink(missing_ok=True)
                self._write_receipt(target, whole=False)
            self._fetch_pieces(part, target, advance)
            part.replace(path)
            self._write_receipt(target, whole=True)
        return path

    def _fetch_pieces(self, part: Path, target: Target, advance: Advance) -> None:
        headers = {**self._hub.headers(), "Accept-Encoding": "identity"}
        with (
            httpx.Client(headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as client,
            part.open("ab+") as file,
        ):
            start = 0
            for remote in target.pieces:
                if file.seek(0, os.SEEK_END) > start + remote.size:
                    advance(remote.size)
                else:
                    complete(Piece(remote, file, start, advance), client, self._sleep)
                start += remote.size
            file.flush()
            os.fsync(file.fileno())

    def _check(self, path: Path, target: Target) -> None:
        """Return if the file at `path` is `target`. Raises UserError for any other."""
        if not path.is_file() or path.stat().st_size != target.size:
            raise UserError(
                f"{path} is in the way: it is not the file of {target.size:,} bytes that the Hub has; "
                "take it away, or choose another folder"
            )
        if self._receipt(target) == _statement(target, whole=True):
            return
        with path.open("rb") as file:
            start = 0
            for remote in target.pieces:
                digest = new_digest(remote)
                update_digest(digest, file, start, remote.size)
                start += remote.size
                if digest.hexdigest() != remote.checksum:
                    raise UserError(f"{path} is in the way: its content is not the Hub's; take it away")
        self._write_receipt(target, whole=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            (self._folder / _RECEIPTS).mkdir(parents=True, exist_ok=True)
            with (self._folder / _RECEIPTS / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RunError(f"another download is at work in {self._folder}: wait for it") from None
                yield
        except OSError as problem:
            reason = problem.strerror or problem
            raise UserError(f"{self._folder} cannot be written ({reason}): choose another folder") from problem

    def _part(self, target: Target) -> Path:
        return self._folder / f"{target.name}.part"

    def _receipt_path(self, target: Target) -> Path:
        return self._folder / _RECEIPTS / f"{target.name}.json"

    def _receipt(self, target: Target) -> object:
        try:
            return json.loads(self._receipt_path(target).read_text())
        except (OSError, ValueError, RecursionError):
            return None

    def _write_receipt(self, target: Target, *, whole: bool) -> None:
        write_atomically(self._receipt_path(target), json.dumps(_statement(target, whole=whole)))


def require_space(folder: Path, needed: int) -> None:
    """Raises UserError if the disk of `folder`, which need not exist yet, has fewer than `needed` bytes free."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{folder} has {free / 1e9:,.1f} GB free and {needed / 1e9:,.1f} GB are needed: make room, "
            "or choose another folder"
        )


def _statement(target: Target, *, whole: bool) -> object:
    pieces = [{"size": piece.size, "checksum": piece.checksum} for piece in target.pieces]
    return {"whole": whole, "pieces": pieces}
