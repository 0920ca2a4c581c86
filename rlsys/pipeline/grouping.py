"""From finished episodes to a group: rewards become advantages, relative to the group."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.agent.trajectory import Trajectory
from rlsys.algorithms.advantages import group_normalized
from rlsys.data.question import Question
from rlsys.pipeline.group import Group, Sample
from rlsys.reward.exact_match import score


def judge(question: Question, trajectories: Sequence[Trajectory], normalize_std: bool) -> Group:
    """Score every episode of `question` and compare them with each other."""
    rewards = [score(trajectory, question) for trajectory in trajectories]
    advantages = group_normalized(rewards, normalize_std)
    return Group(
        question,
        tuple(
            Sample(trajectory, reward, float(advantage))
            for trajectory, reward, advantage in zip(trajectories, rewards, advantages, strict=True)
        ),
    )
