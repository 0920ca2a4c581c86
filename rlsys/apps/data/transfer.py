"""One piece over HTTP: ranges, retries and a checksum that is kept up while bytes arrive.

Contract: a broken connection costs nothing that has arrived. A try counts as progress only if more is here
than ever before; after some tries in a row without progress the transfer is given up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import BinaryIO, Protocol

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from rlsys.apps.data.hub import RemoteFile
from rlsys.errors import RunError, UserError

_BLOCK = 1 << 20
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
_TRIES = 6

Advance = Callable[[int], None]
"""Told how many bytes further a download is; fewer than 0 where bytes turned out to be worthless."""


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class _NoProgress(Exception):
    """A try that brought nothing, and may be repeated."""


class Piece:
    """What is here of one remote file, from byte `start` of `file` to its end.

    `file` is open for appending and reading; what it holds from `start` on is taken to be of this piece.
    """

    def __init__(self, remote: RemoteFile, file: BinaryIO, start: int, advance: Advance) -> None:
        self.remote = remote
        self._file = file
        self._start = start
        self._advance = advance
        self._digest = new_digest(remote)
        self.have = update_digest(self._digest, file, start, remote.size)
        """Bytes that are here."""
        advance(self.have)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are here, right or wrong."""
        return self.have == self.remote.size

    @property
    def is_right(self) -> bool:
        """Whether what is here has the checksum that the Hub states."""
        return self._digest.hexdigest() == self.remote.checksum

    def append(self, block: bytes) -> None:
        """The next bytes. Raises RunError for more than there should be."""
        if self.have + len(block) > self.remote.size:
            raise RunError(f"{self.remote.url} sends more than its {self.remote.size:,} bytes: run again")
        self._file.write(block)
        self._digest.update(block)
        self.have += len(block)
        self._advance(len(block))

    def restart(self) -> None:
        """Throw away what is here."""
        self._file.truncate(self._start)
        self._digest = new_digest(self.remote)
        self._advance(-self.have)
        self.have = 0


def new_digest(remote: RemoteFile) -> _Digest:
    """The hash of which `remote.checksum` is the result: SHA-256, or git's of a blob, by its length."""
    if len(remote.checksum) == 64:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {remote.size}\0".encode(), usedforsecurity=False)


def update_digest(digest: _Digest, file: BinaryIO, start: int, limit: int) -> int:
    """Hash at most `limit` bytes of `file` from `start` on; return how many there were."""
    file.seek(start)
    hashed = 0
    while block := file.read(min(_BLOCK, limit - hashed)):
        digest.update(block)
        hashed += len(block)
    return hashed


def complete(piece: Piece, client: httpx.Client, sleep: Callable[[float], None]) -> None:
    """Fetch what is missing of `piece`, and all of it once more if its checksum is wrong.

    Raises RunError if there is no more progress or the checksum is wrong again, UserError if the Hub refuses.
    """
    for last in (False, True):
        _fetch_rest(piece, client, sleep)
        if piece.is_right:
            return
        piece.restart()
        if last:
            raise RunError(
                f"{piece.remote.url} arrived twice with a wrong checksum: the endpoint or the disk is at fault; "
                "run again, or set HF_ENDPOINT to another mirror"
            )


def _fetch_rest(piece: Piece, client: httpx.Client, sleep: Callable[[float], None]) -> None:
    best = piece.have

    def attempt() -> None:
        nonlocal best
        reason = _request(piece, client)
        if piece.have <= best and not piece.is_whole:
            raise _NoProgress(reason)
        best = piece.have

    tries = Retrying(
        stop=stop_after_attempt(_TRIES),
        wait=wait_exponential_jitter(initial=1, max=60),
        retry=retry_if_exception_type(_NoProgress),
        sleep=sleep,
        reraise=True,
    )
    try:
        while not piece.is_whole:
            tries(attempt)
    except _NoProgress as problem:
        raise RunError(
            f"{piece.remote.url} cannot be fetched ({problem}), tried {_TRIES} times: what has arrived is kept, "
            "run again to go on"
        ) from problem


def _request(piece: Piece, client: httpx.Client) -> str:
    """Append what one request brings; return why it brought no more."""
    headers = {"Range": f"bytes={piece.have}-"} if piece.have else {}
    try:
        with client.stream("GET", piece.remote.url, headers=headers) as answer:
            if refusal := _refusal(piece, answer):
                return refusal
            if piece.have and answer.status_code != httpx.codes.PARTIAL_CONTENT:
                piece.restart()
            # Without a chunk size: to fill a chunk, httpx would hold back bytes and lose them when the connection drops.
            for block in answer.iter_raw():
                piece.append(block)
    except (httpx.TransportError, httpx.TooManyRedirects) as problem:
        return str(problem) or type(problem).__name__
    return "it ends early"


def _refusal(piece: Piece, answer: httpx.Response) -> str:
    """Why `answer` brings nothing of use, "" if it does."""
    status = answer.status_code
    if status in (401, 403):
        raise UserError(f"{piece.remote.url} may not be read (HTTP {status}): check HF_TOKEN")
    if status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE or (
        status == httpx.codes.PARTIAL_CONTENT and not _starts_at(answer, piece.have)
    ):
        piece.restart()
        return "it sends another part than was asked for"
    if status in _PASSING_STATUS:
        return f"HTTP {status}"
    if status not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
        raise RunError(f"{piece.remote.url} cannot be fetched: HTTP {status} {answer.reason_phrase}")
    return ""


def _starts_at(answer: httpx.Response, offset: int) -> bool:
    match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    return match is not None and int(match[1]) == offset
