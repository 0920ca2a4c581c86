"""The figures of a step, from the groups that were trained. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from rlsys.agent.trajectory import Action, Finish
from rlsys.pipeline.group import Group, Sample


def step_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths, actions, token drift and prefix reuse, as flat keys."""
    samples = [sample for group in groups for sample in group.samples]
    trajectories = [sample.trajectory for sample in samples]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    generated = sum(turn.generated_tokens for turn in turns)
    trained = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
    return {
        "reward/mean": fmean(sample.reward for sample in samples),
        "reward/groups_without_spread": fmean(
            len({sample.reward for sample in group.samples}) == 1 for group in groups
        ),
        "rollout/episodes": len(trajectories),
        "rollout/generated_tokens": generated,
        "rollout/trained_tokens": trained,
        "rollout/tokens_mean": fmean(len(trajectory.tokens) for trajectory in trajectories),
        "rollout/turns_mean": fmean(len(trajectory.turns) for trajectory in trajectories),
        "rollout/searches_mean": fmean(trajectory.searches for trajectory in trajectories),
        "rollout/search_errors": sum(bool(turn.search_error) for turn in turns),
        "rollout/search_s_mean": fmean(
            [turn.search_s for turn in turns if turn.action is Action.SEARCH] or [0.0]
        ),
        "rollout/invalid_share": fmean(turn.action is Action.INVALID for turn in turns),
        "rollout/finished_share": fmean(t.finish is Finish.ANSWER for t in trajectories),
        "rollout/aborted": sum(t.finish is Finish.ABORTED for t in trajectories),
        "rollout/cached_prompt_share": sum(turn.cached_tokens for turn in turns)
        / max(1, sum(turn.prompt_tokens for turn in turns)),
        "tokens/differing": sum(trajectory.tokens_differing for trajectory in trajectories),
        "tokens/differing_share": sum(t.tokens_differing for t in trajectories) / max(1, trained),
        "logprob/max_diff": max((_logprob_difference(sample) for sample in samples), default=0.0),
    }


def _logprob_difference(sample: Sample) -> float:
    """The largest difference of recomputed and sampled log-probs, where the tokens did not change."""
    trajectory = sample.trajectory
    if trajectory.tokens_differing or sample.old_logprobs is None:
        return 0.0
    comparable = trajectory.loss_mask & np.isfinite(trajectory.rollout_logprobs)
    if not comparable.any():
        return 0.0
    return float(np.abs(sample.old_logprobs - trajectory.rollout_logprobs)[comparable].max())
