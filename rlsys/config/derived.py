"""What follows from a config and is asked for in several places. Pure."""

from __future__ import annotations

from itertools import pairwise

from rlsys.config.algorithm import FULL_KL, AdvantageBaseline, AdvantageScale, AlgorithmConfig
from rlsys.config.schema import (
    ActorConfig,
    AsyncSchedule,
    CassetteMode,
    CriticConfig,
    InferenceConfig,
    OnUpdate,
    RunConfig,
    SamplingConfig,
    SearchConfig,
)


def max_staleness(config: RunConfig) -> int:
    """Most versions between the one that sampled a token and the one that is trained on it."""
    schedule = config.trainer.schedule
    return schedule.max_staleness if isinstance(schedule, AsyncSchedule) else 0


def on_update(config: RunConfig) -> OnUpdate:
    """What episodes in flight do when new weights come; only an asynchronous run has any then."""
    schedule = config.trainer.schedule
    return schedule.on_update if isinstance(schedule, AsyncSchedule) else OnUpdate.finish


def needs_server(search: SearchConfig) -> bool:
    """Whether searches go to a server: all but those that are only played from a cassette do."""
    return search.enabled and (search.cassette.path is None or search.cassette.mode is not CassetteMode.replay)


def megatron_groups(config: RunConfig) -> dict[str, ActorConfig | InferenceConfig | CriticConfig]:
    """Settings of the groups whose processes hold a Megatron model."""
    groups: dict[str, ActorConfig | InferenceConfig | CriticConfig] = {
        "actor": config.actor,
        "inference": config.inference,
    }
    return groups | ({"critic": config.critic} if has_critic(config.algorithm) else {})


def has_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether values are learned."""
    return algorithm.baseline is AdvantageBaseline.critic


def has_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether a reference policy is kept."""
    return algorithm.kl_coef > 0 or algorithm.eval_ref_policy


def moves_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether the reference policy is another one later in the run."""
    return algorithm.ref_policy_ema_tau < 1 or algorithm.ref_policy_reset_period is not None


def sums_over_vocabulary(algorithm: AlgorithmConfig) -> bool:
    """Whether the KL term compares distributions, not the sampled token's log-probs alone."""
    return algorithm.kl_coef > 0 and algorithm.kl_estimator in FULL_KL


def truncates_sampling(sampling: SamplingConfig) -> bool:
    """Whether rollouts are drawn from less than the whole distribution, and nobody has said that this is meant."""
    return (sampling.top_p != 1.0 or sampling.top_k != -1) and not sampling.accept_truncation


def needs_whole_mini_batch(algorithm: AlgorithmConfig) -> bool:
    """Whether an advantage depends on the other groups of its mini-batch, so that training waits for them."""
    over_batch = (AdvantageScale.batch, AdvantageScale.whiten)
    return algorithm.baseline is AdvantageBaseline.batch or algorithm.advantage_scale in over_batch


def mini_batch_sizes(groups: int, mini_batches: int) -> tuple[int, ...]:
    """Groups of each of `mini_batches` optimiser steps, in order, of a step that has `groups` in all.

    Mini-batch i of m ends after i / m of the groups, rounded down. So two sizes differ by one group at most, and the
    larger mini-batches are spread evenly over the step: 3 of 8 groups have 2, 3 and 3.
    """
    ends = [groups * number // mini_batches for number in range(mini_batches + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


def loss_length(config: RunConfig) -> int:
    """Tokens that the aggregation `fixed-length` divides by."""
    given = config.algorithm.loss_length
    return given if given is not None else config.task.max_total_tokens - config.task.max_prompt_tokens
