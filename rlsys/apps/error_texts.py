"""Text of errors for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from rlsys.errors import Code, RunError, UserError


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
