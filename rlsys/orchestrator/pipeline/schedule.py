"""What a config's schedule means for the pipeline. Pure."""

from __future__ import annotations

from functools import partial
from math import floor, inf

from rlsys.config.derived import has_critic, max_staleness, mini_batch_sizes, needs_whole_mini_batch
from rlsys.config.schema import RunConfig, Schedule
from rlsys.orchestrator.pipeline.grouping import over_mini_batch
from rlsys.orchestrator.pipeline.learn import MiniBatches
from rlsys.orchestrator.pipeline.rollout_pipeline import ScoreBatchSize
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler


def is_on_policy(config: RunConfig) -> bool:
    """Whether every token is sampled by the very policy that is trained on it."""
    return max_staleness(config) == 0


def make_scheduler(config: RunConfig) -> StalenessScheduler:
    """The scheduler of a run that begins."""
    curation, groups = config.algorithm.curation, config.trainer.prompts_per_step
    replaced = floor(curation.max_replaced * groups) if curation.drop_no_spread else 0
    return StalenessScheduler(groups, max_staleness(config), curation.oversample, replaced, config.trainer.steps)


def score_batch_size(config: RunConfig) -> ScoreBatchSize:
    """Portions of the log-prob stage: what is there, up to the largest mini-batch.

    In sequence it gets the whole step, once all rollouts have ended, aborted ones included.
    """
    trainer = config.trainer
    if trainer.schedule.kind is Schedule.sequential:
        return ScoreBatchSize(inf, trainer.prompts_per_step)
    return ScoreBatchSize(1, max(mini_batch_sizes(trainer.prompts_per_step, trainer.mini_batches)))


def mini_batches(config: RunConfig) -> MiniBatches:
    """How a step is cut into optimiser steps."""
    trainer, algorithm = config.trainer, config.algorithm
    whole = partial(over_mini_batch, config=algorithm)
    return MiniBatches(
        sizes=mini_batch_sizes(trainer.prompts_per_step, trainer.mini_batches),
        whole=whole if needs_whole_mini_batch(algorithm) else None,
        scored_first=has_critic(algorithm) and trainer.mini_batches > 1,
    )


def learning(config: RunConfig, step: int) -> tuple[str, ...]:
    """Groups that learn in `step`, counted from 1: while the critic warms up, it alone."""
    if not has_critic(config.algorithm):
        return ("actor",)
    return ("critic",) if step <= config.critic.warmup_steps else ("actor", "critic")
