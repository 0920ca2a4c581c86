"""Computes facts about a config for several modules. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from rlsys.config.algorithm import (
    CRITIC,
    MINI_BATCH,
    AdvantageBaseline,
    AdvantageScale,
    AlgorithmConfig,
    FullKl,
    GaeAdvantage,
    OldLogprobs,
    ReturnsAdvantage,
)
from rlsys.config.schema import (
    ActorConfig,
    AsyncSchedule,
    BoundedWaitSchedule,
    CassetteMode,
    ClusterConfig,
    CriticConfig,
    Device,
    GatewayAgent,
    InferenceConfig,
    Layers,
    LoraConfig,
    OnUpdate,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SearchConfig,
    SourceConfig,
    TaskConfig,
)
from rlsys.errors import UserError


def max_staleness(config: RunConfig) -> int:
    """Return the largest staleness of a trained token; 0 for a schedule without this key."""
    schedule = config.trainer.schedule
    if isinstance(schedule, AsyncSchedule | BoundedWaitSchedule):
        return schedule.max_staleness
    return _bound_of(schedule, "max_staleness") or 0


def max_wait(config: RunConfig) -> int | None:
    """Return the most steps that a ready group waits; None for a schedule without this key."""
    schedule = config.trainer.schedule
    return schedule.max_wait if isinstance(schedule, BoundedWaitSchedule) else _bound_of(schedule, "max_wait")


def _bound_of(schedule: object, name: str) -> int | None:
    """Return the setting `name` of a schedule from outside of the package; None if it has no such setting."""
    value = getattr(schedule, name, None)
    if value is not None and not (type(value) is int and value >= 0):
        key = f"trainer.schedule.{name}"
        sentence = f"{key}={value} must be a whole number of at least 0: set one, or correct the parameter's type."
        raise UserError(sentence, code="out_of_range", key=key)
    return value


def on_update(config: RunConfig) -> OnUpdate:
    """Return the treatment of episodes in flight at a weight update; only a run with staleness has such episodes."""
    schedule = config.trainer.schedule
    if isinstance(schedule, AsyncSchedule | BoundedWaitSchedule):
        return schedule.on_update
    other = AsyncSchedule.on_update if max_staleness(config) else OnUpdate.finish
    value = getattr(schedule, "on_update", other)
    if value not in [*OnUpdate]:
        key = "trainer.schedule.on_update"
        sentence = f"{key}={value} must be {' or '.join(OnUpdate)}: annotate it as rlsys.config.schema.OnUpdate."
        raise UserError(sentence, code="wrong_type", key=key)
    return OnUpdate(value)


def concurrent_episodes(task: TaskConfig, rollout: RolloutConfig) -> int:
    """Return the number of episodes that an engine runs at a time; any more would wait on it for their turn."""
    agent = task.agent
    return min(rollout.max_episodes, agent.concurrency) if isinstance(agent, GatewayAgent) else rollout.max_episodes


def due(step: int, interval: int) -> bool:
    """Return True if an action with this interval, in steps, is due after `step`; interval 0 means never."""
    return interval > 0 and step % interval == 0


def longest_group_s(config: RunConfig) -> float:
    """Return the longest time in seconds that an engine may take for a prompt group.

    It has `episode_timeout_s` for each round of the group's episodes.
    """
    rounds = ceil(config.algorithm.n_samples / concurrent_episodes(config.task, config.rollout))
    return config.rollout.episode_timeout_s * rounds


def stage_limits(cluster: ClusterConfig) -> dict[str, float]:
    """Return the time limits of calls, in seconds, of the stages that have their own."""
    own = cluster.stage_timeout_s
    limits = {
        "scoring": own.scoring,
        "training": own.training,
        "sync": own.sync,
        "checkpoint": own.checkpoint,
        "switch": own.switch,
    }
    return {stage: limit_s for stage, limit_s in limits.items() if limit_s is not None}


def needs_server(search: SearchConfig) -> bool:
    """True if searches reach a server: search is enabled and not replayed from a cassette."""
    return search.enabled and (search.cassette.path is None or search.cassette.mode is not CassetteMode.replay)


def chosen_layers(config: RunConfig) -> Layers:
    """Return the layers that `model.layers` stands for: with `auto`, Transformer Engine's on GPUs and local ones on CPUs."""
    if config.model.layers is not Layers.auto:
        return config.model.layers
    return Layers.te if config.cluster.device is Device.gpu else Layers.local


def megatron_groups(config: RunConfig) -> dict[str, ActorConfig | InferenceConfig | CriticConfig]:
    """Return the settings of each worker group that holds a Megatron model, by group name."""
    groups: dict[str, ActorConfig | InferenceConfig | CriticConfig] = {"actor": config.actor}
    if scoring_forwards(config.algorithm):
        groups["inference"] = config.inference
    return groups | ({"critic": config.critic} if has_critic(config.algorithm) else {})


def scoring_forwards(algorithm: AlgorithmConfig) -> int:
    """Return the number of forward passes of the inference group per episode: policy, reference, both or none.

    A run without any has no inference group.
    """
    return (algorithm.old_logprobs is OldLogprobs.recompute) + has_reference(algorithm)


def backward_passes(config: RunConfig) -> int:
    """Return the operations of the actor's backward pass, in forward passes: 1 for inputs, and 1 for weights unless frozen."""
    return 1 if config.model.lora.rank else 2


def scores_with_policy(algorithm: AlgorithmConfig) -> bool:
    """True if the inference group holds the policy: to recompute log-probs, or to move the reference."""
    recomputes = algorithm.old_logprobs is OldLogprobs.recompute
    return recomputes or (has_reference(algorithm) and moves_reference(algorithm))


def has_critic(algorithm: AlgorithmConfig) -> bool:
    """True if the run trains a critic."""
    advantage = algorithm.advantage
    if isinstance(advantage, ReturnsAdvantage):
        return False
    return isinstance(advantage, GaeAdvantage) or CRITIC in advantage.needs


def has_reference(algorithm: AlgorithmConfig) -> bool:
    """True if the run holds a reference policy, or a teacher in its place."""
    return (algorithm.kl_coef > 0 and not asks_teacher(algorithm)) or algorithm.eval_ref_policy


def asks_teacher(algorithm: AlgorithmConfig) -> bool:
    """True if the teacher is behind an address."""
    return "://" in (algorithm.teacher.model or "")


def of_teacher(config: RunConfig) -> RunConfig | None:
    """Return the config with the teacher's model in the place of the policy's; None unless the run holds a teacher."""
    teacher = config.algorithm.teacher
    if teacher.model is None or not has_reference(config.algorithm) or asks_teacher(config.algorithm):
        return None
    actor, inference = config.actor, config.inference
    return replace(
        config,
        model=replace(config.model, path=teacher.model, family=teacher.family, lora=LoraConfig()),
        actor=replace(actor, parallel=replace(actor.parallel, pp_layers=teacher.pp_layers)),
        inference=replace(inference, parallel=replace(inference.parallel, pp_layers=teacher.pp_layers)),
    )


def moves_reference(algorithm: AlgorithmConfig) -> bool:
    """True if the reference policy changes during the run."""
    return algorithm.ref_policy_ema_tau < 1 or algorithm.ref_policy_reset_period is not None


def full_kl(algorithm: AlgorithmConfig) -> FullKl | None:
    """Return the settings of a KL term that compares distributions; None without such a term."""
    estimator = algorithm.kl_estimator
    return estimator if algorithm.kl_coef > 0 and isinstance(estimator, FullKl) else None


def kl_topk_tokens(algorithm: AlgorithmConfig) -> int | None:
    """Return the number of most likely tokens that the KL term sums over; None unless it sums over a top k."""
    full = full_kl(algorithm)
    return None if full is None else full.topk_tokens


def sums_over_vocabulary(algorithm: AlgorithmConfig) -> bool:
    """True if the KL term sums over the whole vocabulary."""
    full = full_kl(algorithm)
    return full is not None and full.topk_tokens is None


def truncates_sampling(sampling: SamplingConfig) -> bool:
    """True if rollouts sample from a truncated distribution without `accept_truncation`."""
    return (sampling.top_p != 1.0 or sampling.top_k != -1) and not sampling.accept_truncation


def needs_whole_mini_batch(algorithm: AlgorithmConfig) -> bool:
    """True if an advantage depends on other prompt groups of its mini-batch; training then waits for the whole
    mini-batch."""
    advantage = algorithm.advantage
    if isinstance(advantage, GaeAdvantage):
        return advantage.whiten
    if not isinstance(advantage, ReturnsAdvantage):
        return MINI_BATCH in advantage.needs
    over_batch = advantage.scale in (AdvantageScale.batch, AdvantageScale.whiten)
    return advantage.baseline is AdvantageBaseline.batch or over_batch


def mini_batch_sizes(groups: int, mini_batches: int) -> tuple[int, ...]:
    """Return the number of prompt groups in each of a step's `mini_batches` optimiser steps, in order.

    Mini-batch i of m ends after i / m of the step's `groups`, rounded down. Sizes differ by at most one, and larger
    ones are spread evenly: 8 groups in 3 mini-batches are 2, 3 and 3.
    """
    ends = [groups * number // mini_batches for number in range(mini_batches + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


def loss_length(config: RunConfig) -> int:
    """Return the divisor of the aggregation `fixed-length`, in tokens."""
    given = config.algorithm.loss_length
    return given if given is not None else config.task.max_total_tokens - config.task.max_prompt_tokens


class QuestionFile(NamedTuple):
    """A file of questions, and the key that names it."""

    source: str
    """Name of the file's source in `task.sources`; empty for a task without sources."""
    key: str
    path: str


def train_files(task: TaskConfig) -> list[QuestionFile]:
    """Return the files of training questions: one of the task, or one of each source."""
    of_sources = {name: source.train_path for name, source in task.sources.items()}
    return _question_files("train_path", task.train_path, of_sources)


def heldout_files(task: TaskConfig) -> list[QuestionFile]:
    """Return the files of held-out questions: one of the task, or those of the sources that have one."""
    of_sources = {name: source.eval_path for name, source in task.sources.items()}
    return _question_files("eval_path", task.eval_path, of_sources)


def _question_files(name: str, of_task: str | None, of_sources: Mapping[str, str | None]) -> list[QuestionFile]:
    if not of_sources:
        return [] if of_task is None else [QuestionFile("", f"task.{name}", of_task)]
    given = [(source, path) for source, path in of_sources.items() if path is not None]
    return [QuestionFile(source, source_key(source, name), path) for source, path in given]


def source_key(source: str, name: str) -> str:
    """Return the dotted key of a source's key `name`."""
    return f"task.sources.{source}.{name}"


def task_of(task: TaskConfig, name: str) -> TaskConfig:
    """Return the task of the questions of a source: with its tools and limits; `task` itself for a name without source."""
    source = task.sources.get(name)
    if source is None:
        return task
    return replace(
        task,
        tools=task.tools if source.tools is None else source.tools,
        max_turns=task.max_turns if source.max_turns is None else source.max_turns,
        max_turn_tokens=task.max_turn_tokens if source.max_turn_tokens is None else source.max_turn_tokens,
        max_total_tokens=task.max_total_tokens if source.max_total_tokens is None else source.max_total_tokens,
    )


def reward_of(reward: RewardConfig, source: SourceConfig) -> RewardConfig:
    """Return the reward of the questions of a source."""
    return reward if source.reward is None else replace(reward, terms=source.reward)
