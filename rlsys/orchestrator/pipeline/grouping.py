"""What is worked out for a group between the stages: its rewards; advantages, and weights of late tokens.

`reward_group` needs the episodes alone, `finish` also their scores, `over_mini_batch` the other groups of the
mini-batch. Only `reward_group` takes time; the others are pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray

from rlsys.algorithms.advantages import RewardedEpisode, Units, batch_advantages, group_estimates
from rlsys.algorithms.corrections import correct
from rlsys.algorithms.kl import estimate
from rlsys.config.algorithm import AlgorithmConfig, KlEstimator, KlPlace
from rlsys.config.derived import needs_whole_mini_batch
from rlsys.data.group import Floats, Group, Sample
from rlsys.data.question import Question
from rlsys.data.trajectory import MaskOf, Trajectory, trained_tokens
from rlsys.orchestrator.pipeline.workers import RewardScorer
from rlsys.orchestrator.rewards.scored import Scored


async def reward_group(question: Question, trajectories: Sequence[Trajectory], rewards: RewardScorer) -> Group:
    """Reward every episode of `question`, all at once. The first failure, or cancellation, ends the others."""
    async with asyncio.TaskGroup() as tasks:
        scores = [tasks.create_task(rewards.score(question, one)) for one in trajectories]
    return Group(question, tuple(map(_rewarded, trajectories, (score.result() for score in scores))))


def finish(group: Group, config: AlgorithmConfig, kl_coef: float, mask_of: MaskOf = trained_tokens) -> Group:
    """The scored group with advantages, the critic's returns, and the weights of its tokens.

    `kl_coef` weights the KL term where it is part of the reward; `mask_of` are the tokens that take part in the
    critic's estimates. Advantages are final unless the config needs the whole mini-batch (`over_mini_batch`).
    Raises ValueError if a sample was not scored, or if a score of a trained token that is needed is not finite.
    """
    in_reward = config.kl_in is KlPlace.reward and config.kl_coef > 0
    kls = [_kl(sample, config.kl_estimator) if in_reward else None for sample in group.samples]
    episodes = [
        _episode(sample, None if kl is None else kl_coef * kl, mask_of)
        for sample, kl in zip(group.samples, kls, strict=True)
    ]
    found = group_estimates(episodes, config)
    goes_on = needs_whole_mini_batch(config)
    samples = [
        replace(
            _with_advantages(sample, one.advantages),
            returns=None if one.returns is None else one.returns.astype(np.float32),
            units=one.units if goes_on else None,
            kl_sum=None if kl is None else float(kl.sum()),
            kl_coef=kl_coef if in_reward else 0.0,
            weights=correct(
                _old_logprobs(sample),
                sample.trajectory.rollout_logprobs,
                sample.trajectory.loss_mask,
                config.correction,
            )[0],
        )
        for sample, one, kl in zip(group.samples, found, kls, strict=True)
    ]
    return replace(group, samples=tuple(samples))


def over_mini_batch(groups: Sequence[Group], config: AlgorithmConfig) -> list[Group]:
    """Finished groups of one whole mini-batch, with advantages that depend on all of them.

    Raises ValueError for a group that was not finished, or not with a config that needs this.
    """
    units = [[_units(sample) for sample in group.samples] for group in groups]
    return [
        replace(group, samples=tuple(map(_with_advantages, group.samples, found)))
        for group, found in zip(groups, batch_advantages(units, config), strict=True)
    ]


def mean_kl(groups: Sequence[Group]) -> float | None:
    """Mean over episodes of their mean KL in the reward, in nats a token; None without an episode that has one.

    Episodes weigh alike whatever their length, as in Search-R1's code, which steers the KL's weight by this.
    """
    means = [
        sample.kl_sum / sample.trained_tokens
        for group in groups
        for sample in group.samples
        if sample.kl_sum is not None and sample.trained_tokens
    ]
    return fmean(means) if means else None


def turns_of(trajectory: Trajectory, mask_of: MaskOf) -> NDArray[np.int32]:
    """[seq] turn of each token that takes part in estimates, -1 elsewhere.

    An observation that takes part belongs to the turn before it, which is the one that asked for it.
    """
    before = np.maximum.accumulate(trajectory.turn_of_token).clip(min=0)
    return np.where(mask_of(trajectory), before, np.int32(-1)).astype(np.int32)


def _rewarded(trajectory: Trajectory, scored: Scored) -> Sample:
    advantages = np.zeros(len(trajectory.tokens), dtype=np.float32)
    return Sample(trajectory, scored.reward, scored.turn_rewards, scored.parts, advantages)


def _episode(sample: Sample, penalties: NDArray[np.float64] | None, mask_of: MaskOf) -> RewardedEpisode:
    return RewardedEpisode(
        turn_rewards=sample.turn_rewards,
        turn_of_token=turns_of(sample.trajectory, mask_of),
        penalties=penalties,
        values=sample.values,
    )


def _with_advantages(sample: Sample, advantages: NDArray[np.float64]) -> Sample:
    return replace(sample, advantages=advantages.astype(np.float32))


def _kl(sample: Sample, estimator: KlEstimator) -> NDArray[np.float64]:
    """[seq] KL to the reference policy of trained tokens, 0 elsewhere."""
    policy, reference, mask = _old_logprobs(sample), sample.ref_logprobs, sample.trajectory.loss_mask
    if reference is None:
        raise ValueError(f"{_name(sample)} has no log-probs of the reference policy to take a KL off its reward.")
    kl = np.zeros(len(mask))
    trained = [torch.from_numpy(one[mask].astype(np.float64)) for one in (policy, reference)]
    kl[mask] = estimate(estimator, *trained).numpy()
    return kl


def _old_logprobs(sample: Sample) -> Floats:
    if sample.old_logprobs is None:
        raise ValueError(f"{_name(sample)} has no log-probs of the policy: score it first.")
    return sample.old_logprobs


def _units(sample: Sample) -> Units:
    if sample.units is None:
        raise ValueError(f"{_name(sample)} has nothing that its group has settled: finish that first.")
    return sample.units


def _name(sample: Sample) -> str:
    return f"Sample {sample.trajectory.sample} of {sample.trajectory.question_uid}"
