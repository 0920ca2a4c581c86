"""What is worked out for a group between the stages: advantages, and weights for late tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlsys.agent.trajectory import Trajectory
from rlsys.algorithms.advantages import batch_normalized, centred, group_normalized
from rlsys.algorithms.corrections import correct
from rlsys.config.schema import AdvantageScale, CorrectionConfig
from rlsys.data.question import Question
from rlsys.pipeline.group import Group, Sample
from rlsys.reward.exact_match import score


def judge(question: Question, trajectories: Sequence[Trajectory], scale: AdvantageScale) -> Group:
    """Score every episode of `question` and compare them with each other.

    With `AdvantageScale.batch` advantages are only centred: `scale_by_batch` divides them.
    """
    rewards = [score(trajectory, question) for trajectory in trajectories]
    advantages = group_normalized(rewards) if scale is AdvantageScale.group else centred(rewards)
    return Group(
        question,
        tuple(
            Sample(trajectory, reward, float(advantage))
            for trajectory, reward, advantage in zip(trajectories, rewards, advantages, strict=True)
        ),
    )


def scale_by_batch(groups: Sequence[Group]) -> list[Group]:
    """The groups of one whole mini-batch, their centred rewards divided by the spread of all of them.

    Centres anew, so that it makes no difference what the advantages were. Rewards that are all equal
    within their groups give zeros.
    """
    scaled = batch_normalized([centred([sample.reward for sample in group.samples]) for group in groups])
    return [
        replace(
            group,
            samples=tuple(
                replace(sample, advantage=float(advantage))
                for sample, advantage in zip(group.samples, advantages, strict=True)
            ),
        )
        for group, advantages in zip(groups, scaled, strict=True)
    ]


def correct_group(group: Group, config: CorrectionConfig) -> Group:
    """The scored group with the weights of its tokens; kind `none` leaves them None.

    Raises ValueError if a sample has no recomputed log-probs, or if one of a trained token is not finite.
    """
    return replace(group, samples=tuple(_corrected(sample, config) for sample in group.samples))


def _corrected(sample: Sample, config: CorrectionConfig) -> Sample:
    trajectory = sample.trajectory
    if sample.old_logprobs is None:
        raise ValueError(
            f"Sample {trajectory.sample} of {trajectory.question_uid} has no recomputed log-probs: score it first."
        )
    weights, _ = correct(sample.old_logprobs, trajectory.rollout_logprobs, trajectory.loss_mask, config)
    return replace(sample, weights=weights)
