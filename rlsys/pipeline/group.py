"""A group: the episodes of one question, whose rewards are compared with each other.

A group walks rollout -> log-probs -> training as one value; each stage returns a new one. Every
episode of a group stays in it, so advantages are known as soon as the group is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlsys.agent.trajectory import Trajectory
from rlsys.data.question import Question


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory with what the update needs of it."""

    trajectory: Trajectory
    reward: float
    advantage: float
    old_logprobs: NDArray[np.float32] | None = None
    """[seq] recomputed under the policy that sampled."""
    ref_logprobs: NDArray[np.float32] | None = None
    """[seq] under the reference policy."""

    def with_logprobs(self, old: NDArray[np.float32], reference: NDArray[np.float32] | None) -> Sample:
        """The same sample after the log-prob stage."""
        return replace(self, old_logprobs=old, ref_logprobs=reference)


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one question."""

    question: Question
    samples: tuple[Sample, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(len(sample.trajectory.tokens) for sample in self.samples)
