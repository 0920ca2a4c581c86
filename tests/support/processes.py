"""Finds processes, also of a run, and judges them; they may end at any moment: their parent may not have noticed yet."""

import os
from collections.abc import Sequence
from pathlib import Path

import psutil


def is_gone(process: psutil.Process | int) -> bool:
    """Return True if a process, or the one with an id, has ended."""
    try:
        one = psutil.Process(process) if isinstance(process, int) else process
        return one.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # Also of a zombie.
        return []


def descendants_with(*words: str, root: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the running descendants of `root`, by default of this process, whose command has `words` in a row."""
    every = (psutil.Process() if root is None else root).children(recursive=True)
    return [one for one in every if _contains(words_of(one), list(words))]


def _contains(longer: Sequence[str], part: Sequence[str]) -> bool:
    return any(longer[at : at + len(part)] == part for at in range(len(longer) - len(part) + 1))


def worker_of(run: psutil.Process, engine: int) -> psutil.Process:
    """Return the process of an engine's worker, which writes the engine's log."""
    for one in run.children(recursive=True):
        try:
            if Path(os.readlink(f"/proc/{one.pid}/fd/1")).name == f"rollout-{engine}.log" and "ray::" in one.name():
                return one
        except (OSError, psutil.Error):
            continue
    raise AssertionError(f"engine {engine} has no process")
