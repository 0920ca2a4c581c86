"""The processes that this one has started, and what those have started: found again, and certainly ended."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterable

import psutil

STOP_S = 3.0
"""How long processes may take to end by themselves."""
PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""


def adopt_orphans() -> None:
    """Make orphans of this process's descendants its own children, so that `descendants` finds them.

    A worker that is killed leaves an engine's processes behind, which would otherwise go to init.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All that this process has started, and what that has started, but multiprocessing's own helper."""
    return [child for child in psutil.Process().children(recursive=True) if not _is_helper(child)]


def _is_helper(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # Or dead and not yet taken note of, which remains to be done.
        return False


def end(processes: Iterable[psutil.Process], timeout_s: float = STOP_S) -> None:
    """Wait until `processes` have ended, and kill those that take longer than `timeout_s`."""
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)
