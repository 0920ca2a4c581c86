"""Import-time stand-ins for packages without a CPU build; see `rlsys.rollout.sglang_cpu`.

The folder itself, not this package, is appended to `sys.path`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def absent(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """Return a `__getattr__` for `module`, which returns functions that raise when called."""

    def attribute(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> NoReturn:
            raise RuntimeError(f"{module}.{name} was called, but {module} has no CPU build here.")

        return missing

    return attribute
