"""The environment of a run: machine, Python, the versions of what decides its figures, the project's commit; and a run's lives.

The machine is the driver's: the one of the process that was started to train. Other machines of the run are not told.

A run's `run.json` has a life for each time it was begun or went on: {"lives": [{"begun": seconds since the epoch,
"after_step", "environment", "commit", "changed", "command"}]}. Commit, and whether files differ from it, are null where
the project is no checkout of git, or git is not there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from rlsys.files import parse_json, read_regular, write_atomically

RUN = "run.json"
PACKAGES = (
    *("rlsys", "torch", "megatron-core", "transformer-engine", "sglang", "ray", "transformers"),
    *("faiss-cpu", "faiss-gpu-cu12"),
)
_log = logging.getLogger(__name__)
_PROJECT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 10.0
"""Of another program's answer."""
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Life:
    """One time that a run was begun, or went on."""

    begun: float
    """Seconds since the epoch."""
    after_step: int
    """The step that it went on after; 0 for a run that begins."""
    environment: dict[str, str]
    """Of the driver's machine, see `environment`."""
    commit: str | None
    """Of the project."""
    changed: bool | None
    """Whether the project's files differ from the commit."""
    command: list[str]


def environment() -> dict[str, str]:
    """Describe the machine that this process is on, by name; what is not there, and packages not installed, are left out.

    All GPUs of the machine are told, whichever of them a run takes.
    """
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / _GIB:.1f} GiB",
        **_gpus(shutil.which("nvidia-smi")),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Packages with another version than before, a phrase each."""
    names = [name for name in PACKAGES if before.get(name) != now.get(name)]
    return [f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]


def tree_cpu_seconds() -> float:
    """Seconds of processor time that this process and its living descendants have used so far."""
    root = psutil.Process()
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def begin_life(run_dir: Path, after_step: int) -> None:
    """Add the life that begins now, in this process, to the folder of a run."""
    lives: list[Life] = []
    try:
        lives = read_lives(run_dir)
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        _log.warning("%s is damaged: the lives that the run had before are lost.", run_dir / RUN)
    commit, changed = commit_of(_PROJECT)
    lives.append(Life(time.time(), after_step, environment(), commit, changed, list(sys.argv)))
    write_atomically(run_dir / RUN, json.dumps({"lives": list(map(asdict, lives))}, indent=2) + "\n")


def commit_of(folder: Path) -> tuple[str | None, bool | None]:
    """The commit that the checkout at `folder` is at, and whether its files differ; None for what is not known."""
    git = ["git", "-C", str(folder), "--no-optional-locks"]  # No locks: somebody may be at work in the checkout.
    commit = _output([*git, "rev-parse", "HEAD"]) if (folder / ".git").exists() else None
    if commit is None:
        return None, None
    status = _output([*git, "status", "--porcelain"])
    return commit.strip(), None if status is None else bool(status)


def read_lives(run_dir: Path) -> list[Life]:
    """Read the lives of a run, in order. Raises OSError without a file, ValueError for one that is damaged."""
    try:
        found: list[dict[str, Any]] = parse_json(read_regular(run_dir / RUN))["lives"]
        return [Life(**life) for life in found]
    except (TypeError, LookupError) as damage:
        raise ValueError(f"{RUN} does not hold the lives of a run.") from damage


@cache
def _gpus(nvidia_smi: str | None) -> dict[str, str]:
    """Names and number of the machine's GPUs, their driver, and the CUDA that torch is built for; empty without any.

    Asked in another process, once: CUDA in this one would take memory of the cards, and a driver may take seconds.
    """
    query = ["--query-gpu=name,driver_version", "--format=csv,noheader"]
    output = _output([nvidia_smi, *query]) if nvidia_smi else None
    rows = [line.rpartition(", ") for line in (output or "").splitlines() if ", " in line]
    if not rows:
        return {}
    # Takes a second, which a machine without GPUs need not wait for.
    from torch.version import cuda

    cards = Counter(name for name, _, _ in rows)
    return {
        "gpus": ", ".join(f"{count} x {name}" for name, count in cards.items()),
        "gpu driver": rows[0][2].strip(),
        **({"cuda of torch": cuda} if cuda else {}),
    }


def _output(command: list[str]) -> str | None:
    """The output of a program; None if it cannot be asked, fails, or takes too long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
