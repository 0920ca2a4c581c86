"""The part of the schema that says what counts as a collapse, and what is done about it. Pure data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GuardAction(StrEnum):
    """What is done when a run shows signs of collapse."""

    warn = "warn"
    stop = "stop"
    """Warn, write a checkpoint and end the run."""


@dataclass
class GuardsConfig:
    """Signs of collapse. A bound that is null is not watched."""

    action: GuardAction = GuardAction.warn
    patience: int = 3
    """Steps in a row that a bound must be passed."""
    entropy_floor: float | None = 0.01
    """Least mean entropy of trained tokens, in nats."""
    kl_ceiling: float | None = 1.0
    """Largest KL to the reference policy, in nats a token, by the estimator in use."""
    ratio_ceiling: float | None = 20.0
    """Largest ratio of new and old probability of a token."""
    many_answers_ceiling: float | None = 0.1
    """Largest share of episodes that give more than one answer."""
    same_answer_ceiling: float | None = 0.5
    """Largest share of episodes, over all questions of a step, whose answer is one and the same."""
