"""A group: the episodes of one question, whose rewards are compared with each other.

A group walks rollout -> rewards -> scores -> advantages -> training as one value; each stage returns a new one.
Every episode of a group stays in it, so that what it is compared with is there as soon as the group is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlsys.algorithms.advantages import Units
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory

Floats = NDArray[np.float32]
ANSWER_TERMS = frozenset({"exact_match", "correct_answer", "sub_em", "f1", "format", "judge"})
"""Terms of the reward that the answer earns; `reward.max_answer_tags` bounds them."""


@dataclass(frozen=True, slots=True)
class TopkLogprobs:
    """The most likely tokens in the place of each trained token, for a KL term that sums over them."""

    tokens: NDArray[np.int32]
    """[trained tokens, k] the largest of one policy; which one, the KL term's direction says."""
    logprobs: Floats
    """[trained tokens, k] what the reference policy gives them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the scoring groups say of one trajectory. An entry speaks of its token as a target."""

    policy: Floats
    """[seq] log-probs under the policy; 0 where nothing is trained."""
    reference: Floats | None = None
    """[seq] log-probs under the reference policy; None without one."""
    picks: TopkLogprobs | None = None
    values: Floats | None = None
    """[seq] what the critic expects before the token is known; None without a critic."""
    version: int | None = None
    """Of the policy; None where the log-probs are the sampler's own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory with what the update needs of it."""

    trajectory: Trajectory
    reward: float
    turn_rewards: tuple[float, ...]
    """The reward, turn by turn."""
    parts: Mapping[str, float]
    """Term of the reward -> what it came to."""
    advantages: Floats
    """[seq]; zeros until they are worked out."""
    old_logprobs: Floats | None = None
    """[seq] under the policy that the update sets out from, or a recent one (the proximal policy)."""
    ref_logprobs: Floats | None = None
    """[seq] under the reference policy."""
    weights: Floats | None = None
    """[seq] what each token's advantage counts for, correcting for an older sampler; None is 1 for all."""
    picks: TopkLogprobs | None = None
    values: Floats | None = None
    """[seq] the critic's, before the update; None without a critic."""
    returns: Floats | None = None
    """[seq] what the critic is trained on; None without one."""
    units: Units | None = None
    """What its group has settled, where advantages depend on the mini-batch too; None elsewhere."""
    kl_sum: float | None = None
    """KL to the reference policy that was taken off the rewards, without its weight and summed over trained tokens,
    in nats; None where it is no part of the reward."""
    kl_coef: float = 0.0
    """The weight with which it was."""
    scored_version: int | None = None
    """Of the policy that `old_logprobs` are under, where they were recomputed."""

    def with_scores(self, scores: Scores) -> Sample:
        """The same sample after the scoring stage."""
        return replace(
            self,
            old_logprobs=scores.policy,
            ref_logprobs=scores.reference,
            picks=scores.picks,
            values=scores.values,
            scored_version=scores.version,
        )

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss counts."""
        return int(self.trajectory.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one question."""

    question: Question
    samples: tuple[Sample, ...]

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest policy that sampled a trained token; None if no such token is known."""
        versions = [known[known >= 0] for known in (sample.trajectory.versions for sample in self.samples)]
        return min((int(known.min()) for known in versions if known.size), default=None)

    @property
    def has_spread(self) -> bool:
        """Whether some answers earned more than others, so that the group tells right from wrong.

        What is compared are the reward's terms of the answer: all right, or all wrong, is no spread, whatever a
        penalty of length makes of it (DAPO, arXiv 2503.14476, eq. 11). A reward without one is compared as a whole.
        """

        def earned(sample: Sample) -> tuple[float, ...]:
            by_answer = tuple(sample.parts[term] for term in sorted(ANSWER_TERMS & sample.parts.keys()))
            return by_answer or (sample.reward,)

        return len(set(map(earned, self.samples))) > 1

    @property
    def tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(len(sample.trajectory.tokens) for sample in self.samples)
