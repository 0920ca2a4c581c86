"""What a search returns, as far as an episode looks at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hit:
    """A passage."""

    contents: str


@dataclass(frozen=True)
class Result:
    """Passages, or an error."""

    passages: Sequence[Hit] = ()
    error: str = ""
