"""What a run ran on: machine, Python, the versions of what decides its figures, the content of files."""

from __future__ import annotations

import platform
import socket
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "rlsys",
    "torch",
    "megatron-core",
    "transformer-engine",
    "sglang",
    "ray",
    "transformers",
    "faiss-cpu",
    "faiss-gpu-cu12",
)


def environment() -> dict[str, str]:
    """By name; packages that are not installed are left out."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Packages with another version than before, a phrase each."""
    names = [name for name in PACKAGES if before.get(name) != now.get(name)]
    return [f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
