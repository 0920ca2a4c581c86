"""The figures of a step, from the groups that were trained. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from rlsys.agent.trajectory import Action, Finish
from rlsys.algorithms.corrections import CorrectionStats, measure
from rlsys.config.schema import CorrectionLevel
from rlsys.pipeline.group import Group, Sample


def step_figures(
    groups: Sequence[Group], version: int | None = None, level: CorrectionLevel | None = None
) -> dict[str, float]:
    """Rewards, lengths, actions, token drift and prefix reuse, as flat keys.

    With `version`, the policy that was trained, `staleness_figures` too; with `level`, `correction_figures`.
    """
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
        "rollout/invalid_share": fmean([turn.action is Action.INVALID for turn in turns] or [0.0]),
        "rollout/finished_share": fmean(t.finish is Finish.ANSWER for t in trajectories),
        "rollout/aborted": sum(t.finish is Finish.ABORTED for t in trajectories),
        "rollout/cached_prompt_share": sum(turn.cached_tokens for turn in turns)
        / max(1, sum(turn.prompt_tokens for turn in turns)),
        "tokens/differing": sum(trajectory.tokens_differing for trajectory in trajectories),
        "tokens/differing_share": sum(t.tokens_differing for t in trajectories) / max(1, trained),
        "logprob/max_diff": max((_logprob_difference(sample, version) for sample in samples), default=0.0),
        **(staleness_figures(groups, version) if version is not None else {}),
        **(correction_figures(groups, level) if level is not None else {}),
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
        raise ValueError(
            f"A token of version {newest} cannot be trained on by version {version}: it is later."
        )
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


def _logprob_difference(sample: Sample, version: int | None) -> float:
    """The largest difference of recomputed and sampled log-probs of the same tokens and the same policy.

    A token that `version` sampled was recomputed by it as well; an older one may not have been. Without
    `version` all tokens are taken for its.
    """
    trajectory = sample.trajectory
    if trajectory.tokens_differing or sample.old_logprobs is None:
        return 0.0
    comparable = trajectory.loss_mask & np.isfinite(trajectory.rollout_logprobs)
    if version is not None:
        comparable &= trajectory.versions == version
    if not comparable.any():
        return 0.0
    return float(np.abs(sample.old_logprobs - trajectory.rollout_logprobs)[comparable].max())
