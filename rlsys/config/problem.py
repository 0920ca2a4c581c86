"""What is wrong with a config, as those who look at it say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a config cannot run."""

    key: str
    """The key, or the group of keys, to change."""
    sentence: str
