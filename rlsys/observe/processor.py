"""Processor time of the run on this host."""

from __future__ import annotations

import contextlib

import psutil


def tree_cpu_seconds() -> float:
    """Seconds of processor time that this process and its living descendants have used so far."""
    root = psutil.Process()
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
