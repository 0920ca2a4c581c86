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
    """[seq] under the policy that the update sets out from, or a recent one (the proximal policy)."""
    ref_logprobs: NDArray[np.float32] | None = None
    """[seq] under the reference policy."""
    weights: NDArray[np.float32] | None = None
    """[seq] what each token's advantage counts for, correcting for an older sampler; None is 1 for all."""

    def with_logprobs(self, old: NDArray[np.float32], reference: NDArray[np.float32] | None) -> Sample:
        """The same sample after the log-prob stage."""
        return replace(self, old_logprobs=old, ref_logprobs=reference)


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one question."""

    question: Question
    samples: tuple[Sample, ...]

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest policy that sampled a trained token; None if no such token is known."""
        versions = [one.trajectory.versions[one.trajectory.versions >= 0] for one in self.samples]
        return min((int(found.min()) for found in versions if found.size), default=None)

    @property
    def has_spread(self) -> bool:
        """Whether the rewards differ, without which every advantage is zero."""
        return len({sample.reward for sample in self.samples}) > 1

    @property
    def tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(len(sample.trajectory.tokens) for sample in self.samples)
