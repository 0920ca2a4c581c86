"""Downloads large files of data sets from the Hugging Face Hub: resumable, verified, joined while they arrive.

A target appears under its name only once every piece has the Hub's size and checksum. Pieces are appended to `NAME.part`,
which needs no extra disk space. An interrupted download resumes from there if the pieces have not changed. A complete
target is not downloaded again; an existing file with its name is verified first.

`hf_hub_download` does not fit: it discards a partial file when the process ends (pieces have up to 43 GB) and compares only
sizes. Respects `HF_ENDPOINT` (a mirror) and `HF_TOKEN`; receipts of targets are in `.downloads`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
from huggingface_hub import errors as hub_errors
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, tqdm

from rlsys.errors import Code, RunError, UserError, first_line
from rlsys.files import write_atomically

_RECEIPTS = ".downloads"
_TRIES, _LONGEST_WAIT_S = 6, 60
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
_MISTAKES: dict[type[Exception], tuple[Code, str]] = {
    hub_errors.OfflineModeIsEnabled: ("conflict", "HF_HUB_OFFLINE forbids downloads: unset it."),
    hub_errors.GatedRepoError: (
        "denied",
        "data set {dataset} is gated: request access on its page, then set HF_TOKEN.",
    ),
    hub_errors.RepositoryNotFoundError: (
        "not_found",
        "data set {dataset} does not exist or is private: check the name, or set HF_TOKEN.",
    ),
    hub_errors.RevisionNotFoundError: ("not_found", "data set {dataset} has no revision {revision!r}: give another."),
    hub_errors.EntryNotFoundError: ("not_found", "a file of data set {dataset} is gone ({problem}): see its page."),
    hub_errors.HFValidationError: ("malformed", "data set {dataset} is not a valid name ({problem}): check the name."),
    hub_errors.FileMetadataError: (
        "malformed",
        "data set {dataset} has no metadata to verify it ({problem}): check HF_ENDPOINT, or unset it.",
    ),
}
"""Error of huggingface_hub -> code and sentence of the user's mistake; specific errors before general ones."""

Advance = Callable[[int], None]
"""Receives the number of bytes just downloaded; negative if bytes are discarded."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a data set at one commit; `name` is its path in the repository, `size` is in bytes."""

    name: str
    url: str
    size: int
    checksum: str
    """Hex digest: SHA-256 of the content (64 digits) for LFS files, git's SHA-1 of the blob (40) for others."""


@dataclass(frozen=True, slots=True)
class Target:
    """A local file, at path `name` below the download folder, and the remote files that it joins, in order."""

    name: str
    pieces: Sequence[RemoteFile]

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Hub:
    """Looks up files of data sets; an endpoint or token of None is taken from the environment."""

    endpoint: str | None = None
    token: str | None = None

    def find(self, dataset: str, patterns: Iterable[str], revision: str = "main") -> list[RemoteFile]:
        """Return the files of `dataset` that match names or globs; matches of a glob are sorted by name.

        URLs are pinned to the current commit of `revision`, so that a download resumed weeks later gets the same bytes.
        Raises UserError for missing or inaccessible files, RunError if the Hub cannot be reached.
        """
        with _explained(dataset, revision):
            files: list[RemoteFile] = []
            for pattern in patterns:
                names = [pattern]
                if "*" in pattern:
                    api = HfApi(endpoint=self.endpoint, token=self.token)
                    listed = api.list_repo_files(dataset, repo_type="dataset", revision=revision)
                    names = sorted(name for name in listed if fnmatchcase(name, pattern))
                    if not names:
                        raise UserError(
                            f"data set {dataset} has no file {pattern} at {revision}: see its page.",
                            code="not_found",
                            key=f"{dataset}/{pattern}",
                        )
                for name in names:
                    revision, file = self._describe(dataset, name, revision)
                    files.append(file)
            return files

    def _describe(self, dataset: str, name: str, revision: str) -> tuple[str, RemoteFile]:
        """Return the commit that `revision` resolves to, and the file at that commit."""
        url = hf_hub_url(dataset, name, repo_type="dataset", revision=revision, endpoint=self.endpoint)
        found = get_hf_file_metadata(url, token=self.token, endpoint=self.endpoint, retry_on_errors=True)
        has_checksum = re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", found.etag or "")
        if found.commit_hash is None or found.size is None or not has_checksum:
            raise UserError(
                f"{url} has no commit, size or checksum, so it cannot be verified: check HF_ENDPOINT, or unset it.",
                code="malformed",
                key=url,
            )
        pinned = hf_hub_url(dataset, name, repo_type="dataset", revision=found.commit_hash, endpoint=self.endpoint)
        return found.commit_hash, RemoteFile(name, pinned, found.size, str(found.etag))


class Downloader:
    """Downloads targets into one folder, locked against other processes."""

    def __init__(self, folder: Path, hub: Hub, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._folder = folder
        self._headers = {**build_hf_headers(token=hub.token), "Accept-Encoding": "identity"}
        self._sleep = sleep

    def missing(self, target: Target) -> int:
        """Return the number of bytes of `target` still to download, judged by file sizes only."""
        part = self._part(target)
        if (self._folder / target.name).is_file():
            return 0
        here = part.stat().st_size if part.is_file() and self._is_stated(target, whole=False) else 0
        return max(target.size - here, 0)

    def fetch(self, target: Target, advance: Advance) -> Path:
        """Download the rest of `target` and return its path.

        Raises UserError for an unwritable folder, another file with the target's name, or a forbidden download. Raises
        RunError if retries fail or the checksum is wrong twice.
        """
        path, part = self._folder / target.name, self._part(target)
        with self._alone():
            if path.exists():
                self._check(path, target)
                advance(target.size)
                return path
            part.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_stated(target, whole=False):
                part.unlink(missing_ok=True)
                self._write_receipt(target, whole=False)
            with part.open("ab+") as file:
                start = 0
                for piece in target.pieces:
                    self._complete(piece, file, start, advance)
                    start += piece.size
                file.truncate(start)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            self._write_receipt(target, whole=True)
        return path

    def _complete(self, piece: RemoteFile, file: BinaryIO, start: int, advance: Advance) -> None:
        """Download the rest of `piece`, which begins at byte `start` of `file`; start over once on a wrong checksum."""
        for _ in range(2):
            self._fetch_rest(piece, file, start, advance)
            if _is_right(piece, file, start):
                return
            file.truncate(start)
            advance(-piece.size)
        raise RunError(
            f"{piece.url} had a wrong checksum twice: the endpoint or the disk is faulty; "
            "run again, or set HF_ENDPOINT to another mirror"
        )

    def _fetch_rest(self, piece: RemoteFile, file: BinaryIO, start: int, advance: Advance) -> None:
        size, tries = piece.size, 0

        class Bar(tqdm):
            """Progress bar that shows nothing and calls `advance`."""

            def __init__(self, *_: object, **__: object) -> None:
                super().__init__(disable=True)

            def update(self, n: float | None = 1) -> None:
                advance(int(n or 0))

        best = have = file.seek(0, os.SEEK_END) - start
        advance(min(have, size))
        while have < size:
            try:
                with _refusals(piece):
                    options: dict[str, Any] = {"headers": self._headers, "expected_size": size, "tqdm_class": Bar}
                    http_get(piece.url, file, resume_size=have, **options)
            except (hub_errors.HfHubHTTPError, httpx.TransportError, RecursionError) as problem:
                # `http_get` recurses after each interruption, hence RecursionError.
                have = file.seek(0, os.SEEK_END) - start
                tries = 1 if have > best else tries + 1
                best = max(best, have)
                if tries == _TRIES:
                    raise RunError(
                        f"{piece.url} cannot be downloaded ({_said(problem)}) after {_TRIES} attempts: the partial file "
                        "is kept, run again to continue"
                    ) from problem
                self._sleep(min(2**tries, _LONGEST_WAIT_S))
            except RunError:
                if file.seek(0, os.SEEK_END) > start + size:  # Excess bytes would be taken for the next piece.
                    file.truncate(start)
                raise
            else:
                return

    def _check(self, path: Path, target: Target) -> None:
        """Raise UserError unless the file at `path` is `target`."""
        if not path.is_file() or path.stat().st_size != target.size:
            raise UserError(
                f"{path} exists, but is not the Hub's file of {target.size:,} bytes: remove it, or choose another folder.",
                code="exists",
                key=str(path),
            )
        if self._is_stated(target, whole=True):
            return
        with path.open("rb") as file:
            start = 0
            for piece in target.pieces:
                if not _is_right(piece, file, start):
                    raise UserError(
                        f"{path} exists, but its content differs from the Hub's: remove it.",
                        code="exists",
                        key=str(path),
                    )
                start += piece.size
        self._write_receipt(target, whole=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            (self._folder / _RECEIPTS).mkdir(parents=True, exist_ok=True)
            with (self._folder / _RECEIPTS / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RunError(f"another download is running in {self._folder}: wait for it") from None
                yield
        except OSError as problem:
            reason = problem.strerror or problem
            raise UserError(
                f"{self._folder} is not writable ({reason}): choose another folder.",
                code="denied",
                key=str(self._folder),
            ) from problem

    def _part(self, target: Target) -> Path:
        return self._folder / f"{target.name}.part"

    def _receipt(self, target: Target, *, whole: bool) -> tuple[Path, object]:
        """Return the receipt's path, and its content for a complete (`whole`) or partial `target`."""
        pieces = [{"size": piece.size, "checksum": piece.checksum} for piece in target.pieces]
        return self._folder / _RECEIPTS / f"{target.name}.json", {"whole": whole, "pieces": pieces}

    def _is_stated(self, target: Target, *, whole: bool) -> bool:
        """True if the receipt lists exactly these pieces, as complete (`whole`) or partial."""
        path, statement = self._receipt(target, whole=whole)
        with suppress(OSError, ValueError, RecursionError):
            return json.loads(path.read_text()) == statement
        return False

    def _write_receipt(self, target: Target, *, whole: bool) -> None:
        path, statement = self._receipt(target, whole=whole)
        write_atomically(path, json.dumps(statement))


def require_space(folder: Path, needed: int) -> None:
    """Raise UserError if the disk of `folder` has fewer than `needed` bytes free; `folder` need not exist yet."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        sizes = f"{free / 1e9:,.1f} GB free, and {needed / 1e9:,.1f} GB are needed"
        raise UserError(f"{folder} has {sizes}: make room, or choose another folder.", code="no_room", key=str(folder))


def _is_right(piece: RemoteFile, file: BinaryIO, start: int) -> bool:
    """True if `file` from byte `start` on matches the checksum of `piece`."""
    digest = hashlib.sha256()
    if len(piece.checksum) == 40:
        digest = hashlib.sha1(f"blob {piece.size}\0".encode(), usedforsecurity=False)
    file.seek(start)
    left = piece.size
    while block := file.read(min(1 << 20, left)):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest() == piece.checksum


@contextmanager
def _refusals(piece: RemoteFile) -> Iterator[None]:
    """Convert permanent HTTP errors of the body: UserError for a forbidden file, RunError for others."""
    try:
        yield
    except hub_errors.HfHubHTTPError as problem:
        status = problem.response.status_code
        if status in (401, 403):
            raise UserError(
                f"{piece.url} is forbidden (HTTP {status}): check HF_TOKEN.", code="denied", key=piece.url
            ) from problem
        if status not in _PASSING_STATUS:
            reason = problem.response.reason_phrase
            raise RunError(f"{piece.url} cannot be downloaded: HTTP {status} {reason}") from problem
        raise
    except OSError as problem:
        if problem.errno is not None:
            raise
        # huggingface_hub raises an OSError without errno if the size is wrong.
        raise RunError(f"{piece.url} sent more or fewer than its {piece.size:,} bytes: run again") from problem


@contextmanager
def _explained(dataset: str, revision: str) -> Iterator[None]:
    """Convert errors of huggingface_hub in the body into UserError or RunError of one sentence."""
    try:
        yield
    except (httpx.HTTPError, ValueError, OSError) as problem:
        said = _said(problem)
        for kind, (code, sentence) in _MISTAKES.items():
            if isinstance(problem, kind):
                raise UserError(
                    sentence.format(dataset=dataset, revision=revision, problem=said), code=code, key=dataset
                ) from problem
        if isinstance(problem, hub_errors.HfHubHTTPError):
            if problem.response.status_code in (401, 403):
                raise UserError(
                    f"data set {dataset} is forbidden ({said}): check HF_TOKEN.", code="denied", key=dataset
                ) from problem
            raise RunError(f"the Hub fails for {dataset}: {said}; try later") from problem
        if isinstance(problem, httpx.HTTPError):
            raise RunError(
                f"the Hub cannot be reached for {dataset} ({said}): check the network, or set HF_ENDPOINT to a mirror"
            ) from problem
        raise


def _said(problem: Exception) -> str:
    if isinstance(problem, hub_errors.HfHubHTTPError) and problem.response.status_code in _PASSING_STATUS:
        return f"HTTP {problem.response.status_code}"
    return first_line(problem)
