"""Lets processes start with the library of torch-memory-saver, which SGLang's memory saver preloads (LD_PRELOAD).

The library needs the CUDA runtime. Where that comes with torch's wheels, it is in a folder that only torch's own libraries
search, and a process whose preloaded library lacks another one ends before its first instruction (sglang#36533).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_START_S = 60.0
_SEARCHED = "LD_LIBRARY_PATH"


def runtime_folder(maps: str) -> str | None:
    """Return the folder of the CUDA runtime in `maps`, the text of /proc/PID/maps; None if the process has not loaded it."""
    mapped = (line.split(maxsplit=5) for line in maps.splitlines())
    files = (Path(fields[5]) for fields in mapped if len(fields) == 6)
    return next((str(file.parent) for file in files if file.name.startswith("libcudart.so.")), None)


def start_variables() -> dict[str, str]:
    """Return the environment variables with which the memory saver finds this process's CUDA runtime. Import torch first."""
    folder = runtime_folder(_MAPS.read_text())
    return {_SEARCHED: ":".join(filter(None, (folder, os.environ.get(_SEARCHED))))} if folder else {}


def start_failure() -> str:
    """Return why a process cannot start with the memory saver, as a phrase; empty if it can."""
    import torch_memory_saver  # Imports torch.

    try:
        with torch_memory_saver.configure_subprocess():
            there = os.environ | start_variables()
            command = ["true"]
            done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=_START_S, check=False)
    except (RuntimeError, subprocess.TimeoutExpired) as problem:  # It has no library for torch's CUDA version.
        return str(problem)
    # The loader skips a library that is damaged, and says so.
    return done.stderr.strip() or (f"exit code {done.returncode}" if done.returncode else "")
