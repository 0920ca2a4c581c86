"""Exceptions whose messages are written for the user, and helpers to combine and format them."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

Code = Literal[
    "missing",
    "unknown",
    "wrong_type",
    "out_of_range",
    "conflict",
    "not_found",
    "exists",
    "malformed",
    "mismatch",
    "empty",
    "unsupported",
    "not_installed",
    "unreachable",
    "denied",
    "in_use",
    "no_room",
    "user_code",
    "unsafe",
]
"""Error codes; docs/troubleshooting.md explains each."""


class UserError(Exception):
    """Raised for invalid user input. The message is one sentence with the key, the value and the fix.

        raise UserError("trainer.steps=0 must be at least 1.", code="out_of_range", key="trainer.steps")

    `key` is the config key, option, file or address at fault, as the user wrote it. The CLI prints the sentence and the
    code, and exits with status 2.
    """

    def __init__(self, sentence: str, *, code: Code, key: str) -> None:
        super().__init__(sentence)
        self.code, self.key = code, key

    def __reduce__(self) -> Any:
        """Pickle the keyword-only arguments too, since errors cross process boundaries."""
        return partial(type(self), code=self.code, key=self.key), self.args


class RunError(Exception):
    """Failure of a run, such as a dead worker or a time-out. The message is one sentence that names the cause.

    `code` tells causes outside of the run, such as a full disk. It survives pickling, since errors cross process
    boundaries.
    """

    def __init__(self, *sentence: str, code: Code | None = None) -> None:
        super().__init__(*sentence)
        self.code = code


class PeerLost(RunError):
    """A process could not finish, because another one that it exchanges data with is gone, hangs or has left."""


class Interrupted(Exception):
    """The run stopped at the user's request."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that only disks raise, so they need no file name to be told from others."""
_DISK: Mapping[int, tuple[Code | None, str]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ("no_room", "free some space there")),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), ("denied", "let this user read and write there")),
    errno.EFBIG: ("no_room", "allow larger files (ulimit -f)"),
    errno.EIO: (None, "check its disk"),
}
"""Error number of a disk error -> code and fix."""


def disk_error(problem: OSError, place: object) -> RunError:
    """Return the error to show for `problem` at the file or folder `place`: one sentence with the fix, and a code."""
    code, fix = _DISK.get(problem.errno or 0, (None, "check this path"))
    return RunError(f"{place} cannot be read or written ({problem.strerror or problem}): {fix}.", code=code)


def root_cause(
    error: BaseException, place: str = "A file (in output_dir or TMPDIR, or the output of this command)"
) -> BaseException:
    """Return the error to show: the first UserError or RunError of an exception group, else its first error.

    A disk error becomes a RunError about its file, or about `place` if it names none.
    """
    if isinstance(error, OSError) and error.errno in _DISK and (error.filename or error.errno in _FULL):
        return disk_error(error, error.filename or place)
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [root_cause(inner, place) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, UserError | RunError)), causes[0])


def code_of(error: BaseException) -> Code | None:
    """Return the code of a UserError or a RunError, and None for any other error."""
    return error.code if isinstance(error, UserError | RunError) else None


def with_code(sentence: object, code: Code | None) -> str:
    """Append the error code in brackets: `... [not_found]`."""
    return str(sentence) if code is None else f"{sentence} [{code}]"


def without_code(text: str) -> tuple[str, Code | None]:
    """Split the output of `with_code` into sentence and code."""
    sentence, _, last = text.rstrip().rpartition(" [")
    code = next((code for code in get_args(Code) if last == f"{code}]"), None)
    return (text.rstrip(), None) if code is None else (sentence, code)


def first_line(problem: object) -> str:
    """Return the first line of an error's message without its full stop, or the error's type if it has no message."""
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__).rstrip(".")


def in_one(problems: Sequence[UserError | RunError], *more: str) -> UserError:
    """Merge `problems` into one UserError: one line per problem, then the lines of `more`.

    The code and the key come from the first UserError in `problems`.
    """
    first = next(problem for problem in problems if isinstance(problem, UserError))
    return UserError("\n".join([*map(str, problems), *more]), code=first.code, key=first.key)
