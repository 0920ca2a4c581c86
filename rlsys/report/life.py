"""Tells from what a run has written whether it goes on: pure, but for `life_here`, which asks this machine."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlsys.observe.status import FINISHED, HEARTBEAT_S

QUIET_S = 2 * HEARTBEAT_S  # A run that lives has written within so long
SILENT_S = 6 * HEARTBEAT_S
"""A process that has written nothing for so long is dead, or its machine or disk hangs."""


class Phase(StrEnum):
    """How far a run is."""

    unknown = "unknown"
    running = "running"
    finished = "finished"
    failed = "failed"
    gone = "gone"  # Its process has ended without a word, as one that is killed does
    silent = "silent"  # Nothing has been heard of it for a while


@dataclass(frozen=True, slots=True)
class RunLife:
    """How far a run is, and one sentence about it."""

    phase: Phase
    sentence: str


def life_of(
    status: Mapping[str, Any] | None, has_summary: bool, now: float, host: str, alive: Callable[[int], bool]
) -> RunLife:
    """How far the run is that `status.json` and `summary.json` say at `now`, seconds since the epoch.

    `alive` tells whether a process of `host`, this machine, lives.
    """
    if status is None:
        if has_summary:
            return RunLife(Phase.finished, "The run has finished.")
        return RunLife(Phase.unknown, "The run has not said what it does: it has not begun, or is of an older rlsys.")
    ended, step = status.get("ended"), f"step {status.get('step')} of {status.get('steps')}"
    if ended == FINISHED:
        return RunLife(Phase.finished, f"The run has finished after {step}.")
    if isinstance(ended, str):
        return RunLife(Phase.failed, f"The run has {ended} (after {step}).")
    pid, quiet_s = status.get("pid"), now - _number(status.get("at"))
    # One that writes lives, whatever its number says: in a container of the same name numbers are others. A time to come
    # says nothing: the clock has been set back.
    if abs(quiet_s) > QUIET_S and status.get("host") == host and isinstance(pid, int) and not alive(pid):
        return RunLife(
            Phase.gone, f"The run's process has ended without a word, as one that was killed does, after {step}."
        )
    if quiet_s > SILENT_S:
        return RunLife(Phase.silent, f"Nothing has been heard of the run for {quiet_s:.0f} s; it was after {step}.")
    return RunLife(Phase.running, f"The run goes on; it is after {step}.")


def life_here(status: Mapping[str, Any] | None, has_summary: bool) -> RunLife:
    """`life_of` now, as this machine sees it."""
    return life_of(status, has_summary, time.time(), socket.gethostname(), _is_alive)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # Another user's, or no number of a process.
        return True
    return True


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
