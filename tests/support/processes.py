"""Finds and judges processes, which may end at any moment: their parent may not have noticed yet."""

from collections.abc import Sequence

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
