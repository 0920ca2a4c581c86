"""A command that is told to end when the process that started it ends, however that ends.

`python -m rlsys.cluster.tether PARENT COMMAND ...` has the kernel send it SIGTERM then, and becomes the command. The
kernel goes by the thread that started it (prctl(2)), which must be the parent's main one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def tethered(command: Sequence[str]) -> list[str]:
    """`command` as this process's main thread starts it to have it end with this process."""
    return [sys.executable, "-m", "rlsys.cluster.tether", str(os.getpid()), *command]


def _become(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # It ended before the kernel knew.
            sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
