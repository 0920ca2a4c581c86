"""Works out advantages and the weights of late tokens from scored groups. Pure.

`finish` needs the scores of one group, `over_mini_batch` also the other groups of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rlsys.algorithms.advantages import RewardedEpisode, batch_advantages, group_estimates
from rlsys.algorithms.corrections import correct
from rlsys.algorithms.kl import KlController, estimate
from rlsys.config.algorithm import AlgorithmConfig, KlEstimator, KlPlace
from rlsys.config.derived import needs_whole_mini_batch
from rlsys.data.trajectory import Group, MaskOf, Sample, Trajectory, trained_tokens

T = TypeVar("T")


def finish(group: Group, config: AlgorithmConfig, kl: KlController, mask_of: MaskOf = trained_tokens) -> Group:
    """The scored group with advantages, the critic's returns, and the weights of its tokens.

    `kl` weights the KL term where it is part of the reward; `mask_of` are the tokens that take part in the
    critic's estimates. Advantages are final unless the config needs the whole mini-batch (`over_mini_batch`).
    Raises ValueError if a sample was not scored, or if a score of a trained token that is needed is not finite.
    """
    in_reward = config.kl_in is KlPlace.reward and config.kl_coef > 0
    divergences = [_kl(sample, config.kl_estimator) if in_reward else None for sample in group.samples]
    episodes = [
        RewardedEpisode(
            turn_rewards=sample.turn_rewards,
            turn_of_token=turns_of(sample.trajectory, mask_of),
            penalties=None if divergence is None else kl.coef * divergence,
            values=sample.values,
        )
        for sample, divergence in zip(group.samples, divergences, strict=True)
    ]
    over_batch = needs_whole_mini_batch(config)
    samples = [
        replace(
            _with_advantages(sample, found.advantages),
            returns=None if found.returns is None else found.returns.astype(np.float32),
            units=found.units if over_batch else None,
            kl_sum=None if divergence is None else float(divergence.sum()),
            kl_coef=kl.coef if in_reward else 0.0,
            weights=correct(
                _known(sample, sample.old_logprobs, "no log-probs of the policy: score it first"),
                sample.trajectory.rollout_logprobs,
                sample.trajectory.loss_mask,
                config.correction,
            )[0],
        )
        for sample, found, divergence in zip(group.samples, group_estimates(episodes, config), divergences, strict=True)
    ]
    return replace(group, samples=tuple(samples))


def over_mini_batch(groups: Sequence[Group], config: AlgorithmConfig) -> list[Group]:
    """Finished groups of one whole mini-batch, with advantages that depend on all of them.

    Raises ValueError for a group that was not finished, or not with a config that needs this.
    """
    lacking = "nothing that its group has settled: finish that first"
    units = [[_known(sample, sample.units, lacking) for sample in group.samples] for group in groups]
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


def _with_advantages(sample: Sample, advantages: NDArray[np.float64]) -> Sample:
    return replace(sample, advantages=advantages.astype(np.float32))


def _kl(sample: Sample, estimator: KlEstimator) -> NDArray[np.float64]:
    """[seq] KL to the reference policy of trained tokens, 0 elsewhere."""
    policy = _known(sample, sample.old_logprobs, "no log-probs of the policy: score it first")
    lacking = "no log-probs of the reference policy to take a KL off its reward"
    reference, mask = _known(sample, sample.ref_logprobs, lacking), sample.trajectory.loss_mask
    kl = np.zeros(len(mask))
    trained = [torch.from_numpy(logprobs[mask].astype(np.float64)) for logprobs in (policy, reference)]
    kl[mask] = estimate(estimator, *trained).numpy()
    return kl


def _known(sample: Sample, value: T | None, lacking: str) -> T:
    """`value`, which is None where an earlier stage is missing; raises ValueError that names the sample then."""
    if value is None:
        trajectory = sample.trajectory
        raise ValueError(f"Sample {trajectory.sample} of {trajectory.question_uid} has {lacking}.")
    return value
