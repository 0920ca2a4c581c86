"""Import-time stand-ins for packages without a CPU build; see `rlsys.rollout.sglang_cpu`.

This folder, not this package, is put at the end of `sys.path`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def absent(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """A module's `__getattr__` that hands out functions which raise when they are called."""

    def attribute(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> NoReturn:
            raise RuntimeError(f"{module}.{name} was called, but {module} has no CPU build here.")

        return missing

    return attribute
