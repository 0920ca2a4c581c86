"""Computes advantages, returns and correction weights from scored groups. Pure.

`finish` needs only the group; `over_mini_batch` computes advantages that depend on the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rlsys.algorithms.advantages import (
    CreditUnits,
    RewardedEpisode,
    batch_advantages,
    custom_batch_advantages,
    group_estimates,
)
from rlsys.algorithms.corrections import correct
from rlsys.algorithms.kl import KlController, KlEstimator, sampled_estimator
from rlsys.config.algorithm import AlgorithmConfig, CorrectionConfig, CorrectionKind, CustomAdvantage, FullKl, KlPlace
from rlsys.config.derived import needs_whole_mini_batch
from rlsys.data.trajectory import Floats, Group, MaskOf, Sample, Trajectory, trained_tokens

T = TypeVar("T")


def finish(group: Group, config: AlgorithmConfig, kl: KlController, mask_of: MaskOf = trained_tokens) -> Group:
    """Return the scored group with advantages, critic returns and correction weights.

    `kl` holds the coefficient of a KL term in the reward; `mask_of` selects the tokens that enter advantage estimates.
    Advantages are final unless the config needs the whole mini-batch (`over_mini_batch`). Raises ValueError if a sample
    lacks log-probs or values that the config needs, or if these are not finite on a trained token.
    """
    estimator = _estimator_in(KlPlace.reward, config)
    coef = 0.0 if estimator is None else kl.coef
    divergences = [None if estimator is None else _kl(sample, estimator) for sample in group.samples]
    episodes = [
        _episode(sample, divergence, coef, mask_of)
        for sample, divergence in zip(group.samples, divergences, strict=True)
    ]
    over_batch = needs_whole_mini_batch(config)
    samples = [
        replace(
            _with_advantages(sample, found.advantages, found.returns, config),
            units=found.units if over_batch else None,
            kl_sum=None if divergence is None else float(divergence.sum()),
            kl_coef=coef,
            weights=_corrections(sample, config.correction),
        )
        for sample, found, divergence in zip(
            group.samples, group_estimates(episodes, config.advantage), divergences, strict=True
        )
    ]
    return replace(group, samples=tuple(samples))


def over_mini_batch(groups: Sequence[Group], config: AlgorithmConfig, mask_of: MaskOf = trained_tokens) -> list[Group]:
    """Return the finished groups of one mini-batch with advantages that depend on all of them.

    `mask_of` is as in `finish`. Raises ValueError if a group was not finished by `finish` with a config that needs the
    whole mini-batch.
    """
    found: Sequence[Sequence[tuple[NDArray[np.float64], NDArray[np.float64] | None]]]
    if isinstance(config.advantage, CustomAdvantage):
        found = custom_batch_advantages(_episodes_of(groups, config, mask_of), config.advantage)
    else:
        units = [[_units(sample) for sample in group.samples] for group in groups]
        found = [[(one, None) for one in each] for each in batch_advantages(units, config.advantage)]
    return [
        replace(
            group,
            samples=tuple(
                _with_advantages(sample, *both, config) for sample, both in zip(group.samples, one, strict=True)
            ),
        )
        for group, one in zip(groups, found, strict=True)
    ]


def mean_kl(groups: Sequence[Group]) -> float | None:
    """Return the mean KL in the reward, in nats per token; None if no episode has a KL term.

    The mean over trained tokens is computed for each episode, then the mean over episodes. Every episode has the same
    weight, whatever its length, as in Search-R1, whose adaptive KL coefficient follows this value.
    """
    means = [
        sample.kl_sum / sample.trained_tokens
        for group in groups
        for sample in group.samples
        if sample.kl_sum is not None and sample.trained_tokens
    ]
    return fmean(means) if means else None


def turns_of(trajectory: Trajectory, mask_of: MaskOf) -> NDArray[np.int32]:
    """Return the turn of each token [seq] that `mask_of` selects; -1 elsewhere.

    A selected observation token belongs to the turn that made the tool call.
    """
    before = np.maximum.accumulate(trajectory.turn_of_token).clip(min=0)
    return np.where(mask_of(trajectory), before, np.int32(-1)).astype(np.int32)


def _episodes_of(groups: Sequence[Group], config: AlgorithmConfig, mask_of: MaskOf) -> list[list[RewardedEpisode]]:
    """Return the episodes of finished groups, with the KL penalties that `finish` subtracted."""
    estimator = _estimator_in(KlPlace.reward, config)
    return [
        [
            _episode(sample, None if estimator is None else _kl(sample, estimator), sample.kl_coef, mask_of)
            for sample in group.samples
        ]
        for group in groups
    ]


def _episode(sample: Sample, divergence: NDArray[np.float64] | None, coef: float, mask_of: MaskOf) -> RewardedEpisode:
    return RewardedEpisode(
        turn_rewards=sample.turn_rewards,
        turn_of_token=turns_of(sample.trajectory, mask_of),
        penalties=None if divergence is None else coef * divergence,
        values=sample.values,
        offsets=_offsets(sample),
    )


def _offsets(sample: Sample) -> NDArray[np.float64] | None:
    """Return the reward of each token's branch less that of the episode [seq]; None if no branch has one of its own."""
    branches = sample.trajectory.branches
    if all(branch.reward is None for branch in branches):
        return None
    own = [0.0 if branch.reward is None else branch.reward - sample.reward for branch in branches]
    ends = [*(branch.start for branch in branches[1:]), len(sample.trajectory.tokens)]
    return np.repeat(own, np.diff(ends, prepend=0))


def _estimator_in(place: KlPlace, config: AlgorithmConfig) -> KlEstimator | None:
    """Return the estimator of a KL term in `place`, the reward or the advantage; None without such a term."""
    if config.kl_in is not place or config.kl_coef == 0:
        return None
    assert not isinstance(config.kl_estimator, FullKl), "neither a reward nor an advantage has distributions"
    return sampled_estimator(config.kl_estimator)


def _corrections(sample: Sample, config: CorrectionConfig) -> Floats | None:
    """Return the correction weight of each token [seq]; None without a correction."""
    if config.kind is CorrectionKind.none:
        return None
    old = _known(sample, sample.old_logprobs, "no log-probs of the policy: score it first")
    return correct(old, sample.trajectory.rollout_logprobs, sample.trajectory.loss_mask, config)[0]


def _with_advantages(
    sample: Sample, advantages: NDArray[np.float64], returns: NDArray[np.float64] | None, config: AlgorithmConfig
) -> Sample:
    """Return the sample with advantages and, unless they are None, returns.

    A KL term in the advantage is subtracted last, so it is neither centred nor scaled. Tokens that were not sampled
    have none: the difference of two log-probs is a KL on average over samples alone.
    """
    estimator = _estimator_in(KlPlace.advantage, config)
    if estimator is not None:
        sampled = sample.trajectory.versions >= 0
        advantages = advantages - config.kl_coef * np.where(sampled, _kl(sample, estimator), 0.0)
    known = sample.returns if returns is None else returns.astype(np.float32)
    return replace(sample, advantages=advantages.astype(np.float32), returns=known)


def _units(sample: Sample) -> CreditUnits:
    if sample.units is None:
        raise _lacks(sample, "no units for batch advantages: call `finish` on its group first")
    return sample.units


def _kl(sample: Sample, estimator: KlEstimator) -> NDArray[np.float64]:
    """Return the KL to the reference policy [seq] at trained tokens; 0 elsewhere."""
    policy = _known(sample, sample.old_logprobs, "no log-probs of the policy: score it first")
    missing = "no log-probs of the reference policy for a KL in its reward or its advantages"
    reference, mask = _known(sample, sample.ref_logprobs, missing), sample.trajectory.loss_mask
    kl = np.zeros(len(mask))
    trained = [torch.from_numpy(logprobs[mask].astype(np.float64)) for logprobs in (policy, reference)]
    kl[mask] = estimator(*trained).numpy()
    return kl


def _known(sample: Sample, value: T | None, missing: str) -> T:
    """Return `value`. If it is None, because an earlier stage did not run, raise a ValueError that names the sample."""
    if value is None:
        raise _lacks(sample, missing)
    return value


def _lacks(sample: Sample, missing: str) -> ValueError:
    trajectory = sample.trajectory
    return ValueError(f"Sample {trajectory.sample} of {trajectory.question_uid} has {missing}.")
