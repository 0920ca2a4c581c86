"""Errors that speak to the user."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: one sentence with the key, the value and what to do.

    The command line prints the sentence alone and exits with status 2.
    """


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
