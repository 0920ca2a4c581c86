"""What every number of the schema may be. Pure.

Invariant: each integer and float key of the schema has a bound here. Infinity and NaN are within none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

from rlsys.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Bound:
    """A test of a number, and what the number must be, in words."""

    holds: Callable[[float], bool]
    rule: str


COUNT = Bound(lambda value: value >= 1, "must be at least 1")
POSITIVE = Bound(lambda value: value > 0, "must be above 0")
NOT_NEGATIVE = Bound(lambda value: value >= 0, "must not be negative")
SHARE = Bound(lambda value: 0 <= value <= 1, "must be from 0 to 1")
PART = Bound(lambda value: 0 < value < 1, "must be above 0 and below 1")
DECAY = Bound(lambda value: 0 <= value < 1, "must be at least 0 and below 1")
PORT = Bound(lambda value: 1 <= value <= 65535, "must be from 1 to 65535")
NUCLEUS = Bound(lambda value: 0 < value <= 1, "must be above 0 and at most 1")
ABOVE_ONE = Bound(lambda value: value > 1, "must be above 1")
TOP_K = Bound(lambda value: value == -1 or value >= 1, "must be at least 1, or -1 for the whole vocabulary")

_OPTIMIZER = {
    "lr": POSITIVE,
    "min_lr": NOT_NEGATIVE,
    "warmup_fraction": SHARE,
    "weight_decay": NOT_NEGATIVE,
    "beta1": DECAY,
    "beta2": DECAY,
    "eps": POSITIVE,
    "clip_grad": NOT_NEGATIVE,
}

BOUNDS: dict[str, Bound] = {
    "actor.parallel.tp": COUNT,
    "actor.parallel.pp": COUNT,
    "actor.parallel.cp": COUNT,
    "actor.parallel.ep": COUNT,
    **{f"actor.optimizer.{key}": bound for key, bound in _OPTIMIZER.items()},
    "actor.micro_batch_tokens": COUNT,
    "inference.parallel.tp": COUNT,
    "inference.parallel.pp": COUNT,
    "inference.parallel.cp": COUNT,
    "inference.parallel.ep": COUNT,
    "inference.micro_batch_tokens": COUNT,
    "critic.parallel.tp": COUNT,
    "critic.parallel.pp": COUNT,
    "critic.parallel.cp": COUNT,
    "critic.parallel.ep": COUNT,
    **{f"critic.optimizer.{key}": bound for key, bound in _OPTIMIZER.items()},
    "critic.micro_batch_tokens": COUNT,
    "critic.value_clip": POSITIVE,
    "critic.warmup_steps": NOT_NEGATIVE,
    "rollout.engine.tp": COUNT,
    "rollout.engine.memory_fraction": PART,
    "rollout.engine.kv_cache_tokens": COUNT,
    "rollout.engine.max_running": COUNT,
    "rollout.engine.start_timeout_s": POSITIVE,
    "rollout.sampling.temperature": POSITIVE,
    "rollout.sampling.top_p": NUCLEUS,
    "rollout.sampling.top_k": TOP_K,
    "rollout.max_episodes": COUNT,
    "rollout.episode_timeout_s": POSITIVE,
    "task.max_turns": NOT_NEGATIVE,
    "task.max_prompt_tokens": COUNT,
    "task.max_turn_tokens": COUNT,
    "task.max_observation_tokens": COUNT,
    "task.max_total_tokens": COUNT,
    "search.topk": COUNT,
    "search.timeout_s": POSITIVE,
    "search.retries": NOT_NEGATIVE,
    "search.max_concurrent": COUNT,
    "search.hedge_after_s": POSITIVE,
    "search.start_timeout_s": POSITIVE,
    "search.cassette.latency_scale": NOT_NEGATIVE,
    "algorithm.n_samples": COUNT,
    "algorithm.gamma": SHARE,
    "algorithm.gae_lambda": SHARE,
    "algorithm.loss_length": COUNT,
    "algorithm.clip_low": NOT_NEGATIVE,
    "algorithm.clip_high": NOT_NEGATIVE,
    "algorithm.dual_clip": ABOVE_ONE,
    "algorithm.entropy_coef": NOT_NEGATIVE,
    "algorithm.kl_coef": NOT_NEGATIVE,
    "algorithm.kl_topk_tokens": COUNT,
    "algorithm.kl_iw_clip_lower": NOT_NEGATIVE,
    "algorithm.kl_iw_clip_upper": POSITIVE,
    "algorithm.kl_target": POSITIVE,
    "algorithm.kl_horizon": COUNT,
    "algorithm.ref_policy_ema_tau": SHARE,
    "algorithm.ref_policy_ema_update_period": COUNT,
    "algorithm.ref_policy_reset_period": COUNT,
    "algorithm.correction.low": NOT_NEGATIVE,
    "algorithm.correction.high": POSITIVE,
    "algorithm.curation.oversample": COUNT,
    "algorithm.curation.max_replaced": NOT_NEGATIVE,
    "reward.structure_score": NOT_NEGATIVE,
    "reward.final_score": NOT_NEGATIVE,
    "reward.retrieval_score": NOT_NEGATIVE,
    "reward.overlong_buffer": COUNT,
    "reward.overlong_limit": COUNT,
    "reward.max_answer_tags": COUNT,
    "reward.many_answers_score": SHARE,
    "reward.own_timeout_s": POSITIVE,
    "reward.judge.timeout_s": POSITIVE,
    "reward.judge.retries": NOT_NEGATIVE,
    "reward.judge.max_concurrent": COUNT,
    "reward.judge.requests_per_minute": COUNT,
    "guards.patience": COUNT,
    "guards.entropy_floor": NOT_NEGATIVE,
    "guards.kl_ceiling": POSITIVE,
    "guards.ratio_ceiling": ABOVE_ONE,
    "guards.many_answers_ceiling": SHARE,
    "guards.same_answer_ceiling": SHARE,
    "compat.validation_batch": COUNT,
    "cluster.nodes": COUNT,
    "cluster.devices_per_node": COUNT,
    "cluster.device_memory_gib": POSITIVE,
    "cluster.search.port": PORT,
    "cluster.threads": COUNT,
    "cluster.start_timeout_s": POSITIVE,
    "cluster.call_timeout_s": POSITIVE,
    "cluster.sync_bucket_bytes": COUNT,
    "tracking.sample_trajectories": NOT_NEGATIVE,
    "tracking.trajectories": NOT_NEGATIVE,
    "trainer.schedule.max_staleness": NOT_NEGATIVE,
    "trainer.steps": COUNT,
    "trainer.prompts_per_step": COUNT,
    "trainer.mini_batches": COUNT,
    "trainer.seed": NOT_NEGATIVE,
    "eval.interval": NOT_NEGATIVE,
    "eval.limit": COUNT,
    "eval.samples": COUNT,
    "eval.temperature": NOT_NEGATIVE,
    "eval.engines": COUNT,
    "checkpoint.interval": NOT_NEGATIVE,
    "checkpoint.keep_last": COUNT,
    "checkpoint.keep_every": COUNT,
}


def out_of_range(config: RunConfig) -> Iterator[tuple[str, str]]:
    """A key and a sentence for each number that is out of its bound; null is within every bound."""
    for key, bound in BOUNDS.items():
        value = reduce(getattr, key.split("."), config)
        assert value is None or isinstance(value, int | float)
        if value is not None and not (math.isfinite(value) and bound.holds(value)):
            yield key, f"{key}={value} {bound.rule}."
