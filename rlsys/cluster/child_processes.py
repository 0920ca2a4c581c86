"""Processes that this one has started, and what those have started: found again, and certainly ended.

`python -m rlsys.cluster.child_processes PARENT COMMAND ...` becomes a command that the kernel sends SIGTERM when the process
PARENT ends, however that ends. The kernel goes by the thread that started it (prctl(2)), which must be the parent's main
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Sequence

import psutil

STOP_S = 3.0  # How long processes may take to end by themselves.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # From linux/prctl.h.


def ends_with_parent(command: Sequence[str]) -> list[str]:
    """`command` as this process's main thread starts it to have it end with this process."""
    return [sys.executable, "-m", "rlsys.cluster.child_processes", str(os.getpid()), *command]


def adopt_orphans() -> None:
    """Make orphans of this process's descendants its own children, so that `descendants` finds them.

    A worker that is killed leaves an engine's processes behind, which would otherwise go to init.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[psutil.Process]:
    """All that this process has started, and what that has started, but multiprocessing's own helper."""
    return [child for child in psutil.Process().children(recursive=True) if not _is_helper(child)]


def end(processes: Iterable[psutil.Process], timeout_s: float = STOP_S) -> None:
    """Wait until `processes` have ended, and kill those that take longer than `timeout_s`."""
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


def _is_helper(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # Or dead and not yet taken note of, which remains to be done.
        return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _become(parent: int, command: list[str]) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if sys.platform == "linux" and os.getppid() != parent:  # It ended before the kernel knew.
        sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
