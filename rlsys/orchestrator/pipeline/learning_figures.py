"""What a step had to learn from: rewards, advantages, values, and how far the policy is from its reference. Pure.

A figure of something that a run does not have (values without a critic, a divergence without a reference) is left
out. Names are those of Search-R1 and veRL where they have one, so `critic/score`, `critic/rewards` and
`critic/advantages` are there without a critic too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from rlsys.algorithms.kl import DISTINCT, estimate
from rlsys.algorithms.losses import explained_variance
from rlsys.data.answers import score
from rlsys.data.group import Floats, Group, Sample
from rlsys.orchestrator.pipeline.grouping import mean_kl


def learning_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, advantages, returns, values and divergences of a step's groups."""
    samples = [sample for group in groups for sample in group.samples]
    return {
        **reward_figures(groups),
        **advantage_figures(samples),
        **critic_figures(samples),
        **divergence_figures(samples),
    }


def extremes(name: str, values: ArrayLike) -> dict[str, float]:
    """`name`/mean, /max and /min of `values`; nothing of none."""
    found = np.asarray(values, dtype=np.float64)
    if not found.size:
        return {}
    return {
        f"{name}/mean": float(found.mean()),
        f"{name}/max": float(found.max()),
        f"{name}/min": float(found.min()),
    }


def reward_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards of episodes, their parts term by term, and exact match of the same episodes whatever the reward is.

    Where a KL term is taken off the rewards, `critic/kl` is that KL in nats a token, episodes weighing alike,
    `critic/kl_coef` its weight, and `critic/rewards` is what it leaves of an episode's reward.
    """
    samples = [sample for group in groups for sample in group.samples]
    terms = sorted({term for sample in samples for term in sample.parts})
    lowered = [sample for sample in samples if sample.kl_sum is not None]
    left = [sample.reward - sample.kl_coef * (sample.kl_sum or 0.0) for sample in lowered]
    kl = mean_kl(groups)
    return {
        **extremes("critic/score", [sample.reward for sample in samples]),
        **extremes("critic/rewards", left),
        **({} if kl is None else {"critic/kl": kl, "critic/kl_coef": fmean(one.kl_coef for one in lowered)}),
        "reward/exact_match": fmean(
            score(sample.trajectory, group.question) for group in groups for sample in group.samples
        ),
        **{
            f"reward/term/{term}": fmean(sample.parts[term] for sample in samples if term in sample.parts)
            for term in terms
        },
    }


def advantage_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Advantages over all trained tokens; `zero_share` of them teach nothing. Nothing without a trained token."""
    advantages = _trained(samples, (sample.advantages for sample in samples))
    if not advantages.size:
        return {}
    return {
        **extremes("critic/advantages", advantages),
        "critic/advantages/std": float(advantages.std()),
        "critic/advantages/zero_share": float((advantages == 0).mean()),
    }


def critic_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns and values over all trained tokens, and how much of the returns the values explain.

    Of the values before the step's updates. Nothing without a critic.
    """
    learned = [sample for sample in samples if sample.values is not None and sample.returns is not None]
    values = _trained(learned, (sample.values for sample in learned))
    returns = _trained(learned, (sample.returns for sample in learned))
    if not values.size:
        return {}
    return {
        **extremes("critic/returns", returns),
        **extremes("critic/values", values),
        "critic/vf_explained_var": explained_variance(values, returns),
    }


def divergence_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """KL(policy || reference), for k5 KL(reference || policy), in nats a trained token, by each estimator.

    Of the policy that the updates set out from, whose log-probs are `old_logprobs`. By those alone that differ in
    value: there k4 is k1, and k3++ is k3. Nothing without a reference.
    """
    compared = [one for one in samples if one.old_logprobs is not None and one.ref_logprobs is not None]
    old = _trained(compared, (sample.old_logprobs for sample in compared))
    reference = _trained(compared, (sample.ref_logprobs for sample in compared))
    if not old.size:
        return {}
    policy, other = torch.from_numpy(old), torch.from_numpy(reference)
    return {f"kl/{one}": float(estimate(one, policy, other).mean()) for one in DISTINCT}


def _trained(samples: Sequence[Sample], arrays: Iterable[Floats | None]) -> NDArray[np.float64]:
    """[trained tokens] of all samples, in float64; a sample without an array is left out."""
    found = [
        array[sample.trajectory.loss_mask] for sample, array in zip(samples, arrays, strict=True) if array is not None
    ]
    return np.concatenate([np.empty(0), *found]).astype(np.float64)
