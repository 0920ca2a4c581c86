"""Carries requests of other processes to the driver of a run, and its answers back, as files in the run's folder.

    RUN/requests/1700000000000000000-ab12cd34.json           {"action": "leave", "engine": 1, ...}, by the asking process
                 1700000000000000000-ab12cd34.answer         {"text": "...", "ended": false, ...}, by the driver

The driver answers with what the request waits for, and at last with its end; then the asking process deletes both files.
Each file has one writer and is replaced as a whole, so the folder may be on a disk that machines share. The folder belongs
to the user of the run, and nobody else can write to it. The driver empties it when it starts, so it never carries out a
request that was meant for an earlier process. A driver that goes back to a checkpoint reads open requests again.

A request whose file is gone has been withdrawn: what the driver has begun goes on, but is not answered.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from rlsys.errors import Code, RunError, UserError, code_of
from rlsys.files import read_regular, write_atomically
from rlsys.observe.environment import version_of
from rlsys.observe.records import read_object

REQUESTS = "requests"
"""Name of the folder within a run folder."""
Action = Literal["join", "leave", "list"]
POLL_S = 0.2
"""Interval at which the asking process looks for an answer."""
TAKE_TIMEOUT_S = 120.0
"""Time limit for the driver's first answer. It reads no requests while it starts or goes back to a checkpoint."""
_MOST_BYTES = 64 * 1024
_REQUEST, _ANSWER = ".json", ".answer"
_ACTIONS: tuple[Action, ...] = get_args(Action)
_CODES: tuple[Code, ...] = get_args(Code)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """Request about the engines of a run."""

    action: Action
    engine: int | None = None
    """Number of the engine; None lets the driver choose."""
    limit_s: float | None = None
    """Time that the engine's prompt groups may take; None lets all of them end."""
    rlsys: str | None = field(default_factory=lambda: version_of("rlsys"))
    """Version of the asking process."""
    name: str = field(default_factory=lambda: f"{time.time_ns()}-{secrets.token_hex(4)}")
    """Unique; sorts by time."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    ended: bool = False
    code: Code | None = None
    """Code of a refusal."""
    key: str = ""
    """Key of a refusal."""
    failed: bool = False
    rows: Sequence[Mapping[str, Any]] = ()
    """Result of `list`: one row for each engine."""


class Inbox:
    """Driver's end of the requests."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / REQUESTS
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)
        for file in self._folder.iterdir():
            file.unlink(missing_ok=True)

    def requests(self) -> list[Request]:
        """Return all requests without an end, the oldest first; refuse those that cannot be read."""
        found = []
        for file in sorted(self._folder.glob(f"*{_REQUEST}")):
            request = _read_request(file)
            if isinstance(request, Request):
                found.append(request)
            elif request is not None:
                self.refuse(file.stem, request)
        return found

    def say(self, request: Request, text: str) -> None:
        """Answer with what a request waits for."""
        self._answer(request.name, Answer(text))

    def end(self, request: Request, text: str, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        """Answer with the result of a request."""
        self._answer(request.name, Answer(text, ended=True, rows=rows))

    def refuse(self, name: str, error: UserError | RunError) -> None:
        """Answer that the request `name` was not, or could not be carried out."""
        key = error.key if isinstance(error, UserError) else ""
        self._answer(name, Answer(str(error), ended=True, code=code_of(error), key=key, failed=True))

    def close(self) -> None:
        """Refuse all requests without an end, because the run ends."""
        for file in self._folder.glob(f"*{_REQUEST}"):
            self.refuse(file.stem, RunError("The run has ended meanwhile."))

    def _answer(self, name: str, answer: Answer) -> None:
        """Write an answer, unless the request was withdrawn. A run goes on if its disk is full."""
        request = self._folder / f"{name}{_REQUEST}"
        try:
            if request.exists():
                write_atomically(self._folder / f"{name}{_ANSWER}", json.dumps(asdict(answer)))
        except OSError as problem:
            _log.warning("a request could not be answered: %s", problem)
        finally:
            if answer.ended:
                with suppress(OSError):
                    request.unlink(missing_ok=True)


def ask(
    run_dir: Path, request: Request, say: Callable[[str], None], over: Callable[[], str | None]
) -> Sequence[Mapping[str, Any]]:
    """Send a request to the driver of the run in `run_dir` and return the rows of its end.

    `say` gets each new text of the answer. `over` returns a sentence once the run is no longer active. Raises UserError if
    the run takes no requests of this process, if it has ended, or if the driver refuses the request. Raises RunError if the
    request fails, or if the driver does not answer in time. An exception withdraws the request.
    """
    folder, key = run_dir / REQUESTS, str(run_dir)
    if sentence := over():
        raise UserError(f"{run_dir} takes no requests: {sentence}", code="conflict", key=key)
    if not folder.is_dir():
        what = f"{run_dir} takes no requests: an older rlsys runs it, or it has not begun; use a run of this rlsys."
        raise UserError(what, code="unsupported", key=key)
    if (owner := folder.stat().st_uid) != os.getuid():
        what = (
            f"{run_dir} belongs to user {owner}, and only this user can change the run: run the command as that user."
        )
        raise UserError(what, code="denied", key=key)
    sent, answered = folder / f"{request.name}{_REQUEST}", folder / f"{request.name}{_ANSWER}"
    write_atomically(sent, json.dumps(asdict(request)))
    try:
        answer = _awaited(answered, say, over)
    finally:
        sent.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if answer.failed and answer.code is not None:
        raise UserError(answer.text, code=answer.code, key=answer.key)
    if answer.failed:
        raise RunError(answer.text)
    say(answer.text)
    return answer.rows


def _awaited(file: Path, say: Callable[[str], None], over: Callable[[], str | None]) -> Answer:
    """Return the answer that ends a request, and pass on the texts of those before."""
    until, said = time.monotonic() + TAKE_TIMEOUT_S, ""
    while True:
        sentence = over()  # Read first: the driver answers before it ends.
        answer = _read_answer(file)
        if answer is not None and answer.ended:
            return answer
        if answer is not None and answer.text != said:
            said = answer.text
            say(said)
        if sentence:
            raise RunError(f"The request was not carried out: {sentence}")
        if not said and time.monotonic() > until:
            raise RunError(
                f"The run has not answered for {TAKE_TIMEOUT_S:.0f} s, so the request was withdrawn: the run may be "
                "starting or going back to a checkpoint; repeat the command."
            )
        time.sleep(POLL_S)


def _read_request(file: Path) -> Request | UserError | None:
    """Return the request in a file, the reason for its refusal, or None if it was withdrawn."""
    try:
        row = read_object(read_regular(file, _MOST_BYTES)) or {}
    except FileNotFoundError:
        return None
    except OSError:
        row = {}
    engine, limit_s, own = row.get("engine"), row.get("limit_s"), version_of("rlsys")
    action = next((one for one in _ACTIONS if one == row.get("action")), None)
    if (
        action is None
        or not (engine is None or type(engine) is int)
        or not (limit_s is None or (type(limit_s) in (int, float) and limit_s >= 0))
    ):
        return UserError("The request cannot be read.", code="malformed", key=file.name)
    if row.get("rlsys") != own:
        what = f"This is rlsys {row.get('rlsys')}, and the run's is {own}: use the rlsys of the run."
        return UserError(what, code="mismatch", key="rlsys")
    return Request(action, engine, limit_s, own, file.stem)


def _read_answer(file: Path) -> Answer | None:
    """Return the answer in a file; None if there is none yet."""
    try:
        row = read_object(read_regular(file)) or {}
        answer = Answer(**row)
    except (OSError, TypeError):
        return None
    return answer if isinstance(answer.text, str) and answer.code in (None, *_CODES) else None
