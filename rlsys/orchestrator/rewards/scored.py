"""The reward of an episode, as it leaves the terms. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward of one episode."""

    reward: float
    turn_rewards: tuple[float, ...]
    """[turns], at least one: what of the reward fell on each turn."""
    parts: Mapping[str, float]
    """Term -> its value over the episode, unweighted."""
