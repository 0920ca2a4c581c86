"""Whose a run's folder is: at most one process at a time writes to it, and tidies up in it.

A claim ends with its process, however that ends. It is a lock of the operating system on a file that stays.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlsys.errors import UserError

_LOCK = ".lock"


class Claimed(UserError):
    """The folder is another process's."""


@contextmanager
def claim(run_dir: Path) -> Iterator[None]:
    """Have `run_dir` for this process alone. Raises Claimed if another one has it, OSError if none can."""
    with (run_dir / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise Claimed(
                f"{run_dir} is of a run that still goes on: end that one first, or branch from one of its earlier "
                "checkpoints with resume=PATH."
            ) from problem
        yield
