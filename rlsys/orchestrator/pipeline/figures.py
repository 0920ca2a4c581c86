"""The figures of a step, from the groups that were trained. Pure.

docs/metrics.md says what each means and what other systems call it; a test keeps the two together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from rlsys.algorithms.corrections import CorrectionStats, measure
from rlsys.config.algorithm import CorrectionLevel
from rlsys.data.answers import normalize
from rlsys.data.group import Group, Sample
from rlsys.data.trajectory import Action, Finish, Trajectory, Turn
from rlsys.orchestrator.pipeline.learning_figures import extremes, learning_figures
from rlsys.orchestrator.rewards.reading import count_answer_tags
from rlsys.trainer.batches.flops import Flops

TRAINING_PASSES = 3
"""A forward pass, and a backward pass of twice its operations."""


def step_figures(
    groups: Sequence[Group],
    version: int,
    level: CorrectionLevel,
    answer_tag: str,
) -> dict[str, float]:
    """Everything that the groups of a step say, as flat keys.

    `version` is the policy that was trained, `level` that of the off-policy weights where there are any. There is at
    least one group, and no group is empty.
    """
    samples = [sample for group in groups for sample in group.samples]
    trajectories = [sample.trajectory for sample in samples]
    return {
        **learning_figures(groups),
        **group_figures(groups),
        **answer_figures(groups, answer_tag),
        **episode_figures(trajectories),
        **token_figures(trajectories),
        "logprob/max_diff": max((_logprob_difference(sample, version) for sample in samples), default=0.0),
        **staleness_figures(groups, version),
        **correction_figures(groups, level),
    }


def group_figures(groups: Sequence[Group]) -> dict[str, float]:
    """How much the episodes of a question differ: means over groups of shares of 1.

    Answers are compared as exact match does, over the episodes that gave one; a group without any says nothing.
    """
    answered = [
        [normalize(answer) for answer in _answers(group.samples)] for group in groups if _answers(group.samples)
    ]
    responses = [[_response(sample.trajectory) for sample in group.samples] for group in groups]
    return {
        "group/without_spread": fmean(not group.has_spread for group in groups),
        "group/distinct_responses": fmean(len(set(found)) / len(found) for found in responses),
        **({"group/distinct_answers": fmean(len(set(found)) / len(found) for found in answered)} if answered else {}),
    }


def answer_figures(groups: Sequence[Group], tag: str) -> dict[str, float]:
    """Signs that answers are written for the reward, not for the question, as shares of all episodes.

    More than one answer is more than one opening or closing `tag`. The most frequent answer counts if at least two
    questions got it, for the episodes of one question may well agree.
    """
    episodes = [sample.trajectory for group in groups for sample in group.samples]
    given: Counter[str] = Counter()
    asked: dict[str, set[int]] = defaultdict(set)
    for number, group in enumerate(groups):
        for answer in map(normalize, _answers(group.samples)):
            given[answer] += 1
            asked[answer].add(number)
    same = max((count for answer, count in given.items() if len(asked[answer]) > 1), default=0)
    return {
        "answers/many_share": fmean(count_answer_tags(one.turns, tag) > 1 for one in episodes),
        "answers/same_share": same / len(episodes),
    }


def episode_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What the policy did: actions, searches, calls of tools, ends."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    searches = [turn for turn in turns if turn.action is Action.SEARCH]
    valid = [sum(turn.action is not Action.INVALID for turn in one.turns) for one in trajectories]
    acted = [(count, len(one.turns)) for count, one in zip(valid, trajectories, strict=True) if one.turns]
    return {
        **extremes("env/number_of_actions", [len(one.turns) for one in trajectories]),
        "env/number_of_valid_action": fmean(valid),
        "env/ratio_of_valid_action": fmean([count / actions for count, actions in acted] or [0.0]),
        "env/number_of_valid_search": fmean(one.searches for one in trajectories),
        "env/finish_ratio": fmean(one.finish is Finish.ANSWER for one in trajectories),
        "rollout/episodes": len(trajectories),
        "rollout/aborted": sum(one.finish is Finish.ABORTED for one in trajectories),
        "rollout/search_errors": sum(bool(turn.tool_error) for turn in searches),
        "rollout/search_s_mean": fmean([turn.tool_s for turn in searches] or [0.0]),
        "rollout/generated_tokens": sum(turn.generated_tokens for turn in turns),
        "rollout/cached_prompt_share": sum(turn.cached_tokens for turn in turns)
        / max(1, sum(turn.prompt_tokens for turn in turns)),
        **tool_figures(trajectories),
    }


def tool_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How often each tool that the policy called was called, how many calls failed, and how long they took."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    called: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        if turn.action is Action.TOOL and turn.observation:
            called[turn.tool].append(turn)
    return {
        name: value
        for tool, calls in called.items()
        for name, value in {
            f"tool/{tool}/calls": len(calls) / len(trajectories),
            f"tool/{tool}/errors": sum(bool(turn.tool_error) for turn in calls),
            f"tool/{tool}/s_mean": fmean(turn.tool_s for turn in calls),
        }.items()
    }


def token_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Lengths, what of them is trained, and what is not as it was sampled."""
    prompts = [one.prompt_length for one in trajectories]
    responses = [len(one.tokens) - one.prompt_length for one in trajectories]
    trained = sum(int(one.loss_mask.sum()) for one in trajectories)
    differing = sum(one.tokens_differing for one in trajectories)
    return {
        **extremes("prompt_length", prompts),
        **extremes("response_length", responses),
        "response_length/clip_ratio": fmean(one.finish is Finish.TOKEN_LIMIT for one in trajectories),
        "state_tokens/total": trained,
        "state_tokens/coverage": trained / max(1, sum(responses)),
        "state_tokens/coverage_with_prompt": trained / max(1, sum(prompts) + sum(responses)),
        "tokens/differing": differing,
        "tokens/differing_share": differing / max(1, trained),
    }


def staleness_figures(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions lie between the policy that sampled a trained token and `version`, the trained one.

    `lag_k` is the share of tokens that are k versions old, for each k up to the oldest. Trained tokens that
    nothing sampled have no version; they are counted and enter nothing else. Raises ValueError if a token
    comes from a version after `version`.
    """
    trajectories = [sample.trajectory for group in groups for sample in group.samples]
    versions = np.concatenate([one.versions[one.loss_mask] for one in trajectories])
    sampled = versions[versions >= 0]
    newest = int(sampled.max(initial=0))
    if newest > version:
        raise ValueError(f"A token of version {newest} cannot be trained on by version {version}: it is later.")
    counts = np.bincount(version - sampled, minlength=1)
    tokens = max(1, len(sampled))
    return {
        **{f"staleness/lag_{lag}": int(count) / tokens for lag, count in enumerate(counts)},
        "staleness/max": len(counts) - 1,
        "staleness/mean": int(counts @ np.arange(len(counts))) / tokens,
        "staleness/unversioned_tokens": len(versions) - len(sampled),
    }


def correction_figures(groups: Sequence[Group], level: CorrectionLevel) -> dict[str, float]:
    """What the off-policy weights, taken at `level`, did to the step's tokens; nothing if there are none.

    Every figure is over all trained tokens of all samples with weights; `CorrectionStats` defines each.
    """
    stats = [
        measure(
            sample.old_logprobs,
            sample.trajectory.rollout_logprobs,
            sample.trajectory.loss_mask,
            sample.weights,
            level,
        )
        for group in groups
        for sample in group.samples
        if sample.weights is not None and sample.old_logprobs is not None
    ]
    if not stats:
        return {}
    total = sum(stats, start=CorrectionStats())
    return {
        "correction/ess": total.effective_share,
        "correction/clipped_share": total.cut_share,
        "correction/cut_mass": total.cut_mass,
        "correction/uncorrected_share": total.unknown_share,
        "correction/abs_log_ratio": total.abs_log_ratio,
        "correction/kl_k1": total.k1,
        "correction/kl_k3": total.k3,
    }


def training_flops(groups: Sequence[Group], cost: Flops) -> float:
    """Floating-point operations that the model needs to train once on `groups`; none for anything done twice."""
    trajectories = [sample.trajectory for group in groups for sample in group.samples]
    return TRAINING_PASSES * sum(cost.of(len(one.tokens), int(one.loss_mask.sum())) for one in trajectories)


def _answers(samples: Sequence[Sample]) -> list[str]:
    return [answer for sample in samples if (answer := sample.trajectory.answer) is not None]


def _response(trajectory: Trajectory) -> bytes:
    return trajectory.tokens[trajectory.prompt_length :].tobytes()


def _logprob_difference(sample: Sample, version: int) -> float:
    """The largest difference of recomputed and sampled log-probs of the same tokens and the same policy.

    A token that `version` sampled was recomputed by it as well; an older one may not have been.
    """
    trajectory = sample.trajectory
    if trajectory.tokens_differing or sample.old_logprobs is None:
        return 0.0
    sampled = np.isfinite(trajectory.rollout_logprobs) & (trajectory.versions == version)
    comparable = trajectory.loss_mask & sampled
    if not comparable.any():
        return 0.0
    return float(np.abs(sample.old_logprobs - trajectory.rollout_logprobs)[comparable].max())
