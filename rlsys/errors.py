"""Errors that speak to the user."""

from __future__ import annotations

from collections.abc import Sequence
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
"""Kinds of mistakes; docs/troubleshooting.md says of each what it means."""


class UserError(Exception):
    """A mistake in what the user gave: one sentence with the key, the value and the fix.

        raise UserError("trainer.steps=0 must be at least 1.", code="out_of_range", key="trainer.steps")

    `key` is the config key, option, file or address at fault, as the user wrote it. The command line prints the sentence
    and the code, and exits with status 2.
    """

    def __init__(self, sentence: str, *, code: Code, key: str) -> None:
        super().__init__(sentence)
        self.code, self.key = code, key

    def __reduce__(self) -> Any:
        """Pickle the keyword arguments too: errors cross processes."""
        return partial(type(self), code=self.code, key=self.key), self.args


class RunError(Exception):
    """A run that cannot go on (a dead worker, a time-out): one sentence that names who is missing."""


class Interrupted(Exception):
    """The user asked the run to stop, and it has."""


def root_cause(error: BaseException) -> BaseException:
    """The error that people should read: of a group of errors, the first that is made for them."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [root_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, UserError | RunError)), causes[0])


def code_of(error: BaseException) -> Code | None:
    """The code of a user's mistake; None of anything else."""
    return error.code if isinstance(error, UserError) else None


def with_code(sentence: object, code: Code | None) -> str:
    """The sentence, and its code in brackets, by which docs/troubleshooting.md explains it."""
    return str(sentence) if code is None else f"{sentence} [{code}]"


def without_code(text: str) -> tuple[str, Code | None]:
    """Sentence and code of a text that `with_code` has made."""
    sentence, _, last = text.rstrip().rpartition(" [")
    code = next((code for code in get_args(Code) if last == f"{code}]"), None)
    return (text.rstrip(), None) if code is None else (sentence, code)


def in_one(problems: Sequence[UserError | RunError], *more: str) -> UserError:
    """One mistake of several, with the code and key of the first user's mistake: a line for each and for `more`."""
    first = next(problem for problem in problems if isinstance(problem, UserError))
    return UserError("\n".join([*map(str, problems), *more]), code=first.code, key=first.key)
