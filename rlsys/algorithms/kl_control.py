"""The weight of the KL term in the reward: fixed, or steered towards a target.

The weight in force when a step's rewards are worked out is `coef`; what the step's KL turned out to be is observed
afterwards, so it moves the weight of the next one. A small state of plain numbers, without clocks or devices; a run
that is restored goes on with the weight that it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rlsys.config.algorithm import AlgorithmConfig, KlControl

LARGEST_ERROR = 0.2
"""Relative distance from the target beyond which it makes no difference how far off the KL is."""


class KlController(Protocol):
    """Weight of the KL term in the reward."""

    @property
    def coef(self) -> float:
        """Weight of the next step's penalties."""

    def observe(self, mean_kl: float, episodes: int) -> None:
        """Take note of a step: its mean KL in nats a token, and how many episodes it had."""

    def state(self) -> dict[str, float]:
        """What `restore` needs."""

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a `state` of either controller."""


@dataclass(frozen=True, slots=True)
class FixedKl:
    """A weight that stays what the config says, also when a run is restored with another one."""

    coef: float

    def observe(self, mean_kl: float, episodes: int) -> None:
        """Nothing follows from it."""

    def state(self) -> dict[str, float]:
        """The weight, with which an adaptive controller may go on."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Nothing is taken over."""


@dataclass(slots=True)
class AdaptiveKl:
    """A weight that grows while the KL is above the target, and shrinks while it is below.

    coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * episodes / horizon. Source: arXiv 1909.08593, section 2.2, with
    episodes / horizon in place of its constant 0.1, as in its authors' code. The weight stays above 0, because
    `horizon` must be above a fifth of a step's episodes.
    """

    coef: float
    target: float
    """Nats a token."""
    horizon: int
    """Episodes."""

    def observe(self, mean_kl: float, episodes: int) -> None:
        """Move the weight. Raises ValueError if the KL is not finite, or if so many episodes could turn the sign."""
        if not math.isfinite(mean_kl):
            raise ValueError(f"A step's mean KL must be finite, got {mean_kl}; check the reference's log-probs.")
        if LARGEST_ERROR * episodes >= self.horizon:
            raise ValueError(
                f"algorithm.kl_horizon={self.horizon} is no more than a fifth of a step's {episodes} episodes, so that "
                "one step could turn the weight's sign: raise it."
            )
        error = min(max(mean_kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * episodes / self.horizon

    def state(self) -> dict[str, float]:
        """The weight as it is now."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on with the weight of `state`; target and horizon are the config's."""
        self.coef = state["coef"]


def kl_control(config: AlgorithmConfig) -> KlController:
    """The controller that `algorithm.kl_control` names, with `algorithm.kl_coef` to begin with."""
    if config.kl_control is KlControl.adaptive:
        return AdaptiveKl(config.kl_coef, config.kl_target, config.kl_horizon)
    return FixedKl(config.kl_coef)
