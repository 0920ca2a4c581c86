"""Whose a folder is: at most one process at a time writes to it, and tidies up in it.

A claim is a lock of the operating system on a file: it ends with its process, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rlsys.errors import UserError

LOCK = "lock"
"""The file in a folder that is made to be claimed."""
_RUN_LOCK = ".lock"
_ATTEMPTS = 100
"""To lock what others remove as they end; where nothing can ever be, all of them fail."""


class Claimed(UserError):
    """The folder is another process's."""


@contextmanager
def claim(run_dir: Path) -> Iterator[None]:
    """Have the folder of a run for this process alone; its lock stays there.

    Raises Claimed if another process has it, OSError if none can.
    """
    with (run_dir / _RUN_LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise Claimed(
                f"{run_dir} is of a run that still goes on: end that one first, or branch from one of its earlier "
                "checkpoints with resume=PATH."
            ) from problem
        yield


@contextmanager
def working_folder(home: Path) -> Iterator[None]:
    """Have `home` for this process alone; it is made where there is none, and gone afterwards if nothing is left in it.

    Raises BlockingIOError if another process has it, another OSError if it cannot be.
    """
    lock = _locked(home)
    try:
        yield
    finally:
        if [path.name for path in home.iterdir()] == [LOCK]:
            # Who opened this lock meanwhile sees that it is gone and begins anew.
            (home / LOCK).unlink()
            with suppress(OSError):
                home.rmdir()
        lock.close()


def _locked(home: Path) -> TextIO:
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):
            home.mkdir(parents=True, exist_ok=True)
            file = (home / LOCK).open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), (home / LOCK).stat()):
                    return file
            except BlockingIOError:
                file.close()
                raise
            file.close()
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(home))
