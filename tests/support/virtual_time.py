"""Runs async tests in virtual time."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from rlsys.apps.planner.virtual_time import run_virtually


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorate an async test to run on a new loop, in virtual time."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        run_virtually(test(*arguments, **fixtures))

    return run
