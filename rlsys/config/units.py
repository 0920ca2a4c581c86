"""What the figures of a configuration are counted in. Pure."""

from __future__ import annotations

_BY_ENDING = {"_s": "s", "_ms": "ms", "_bytes": "bytes", "_gib": "GiB", "_tokens": "tokens"}
"""Ending of a key -> unit."""
_BY_NAME = {
    "steps": "steps",
    "interval": "steps",
    "warmup_steps": "steps",
    "max_staleness": "versions",
    "patience": "steps",
    "keep_every": "steps",
    "keep_last": "checkpoints",
    "ref_policy_ema_update_period": "steps",
    "ref_policy_reset_period": "steps",
    "kl_horizon": "episodes",
    "kl_target": "nats",
    "kl_ceiling": "nats",
    "entropy_floor": "nats",
    "max_turns": "turns",
    "n_samples": "episodes",
    "max_episodes": "episodes",
    "prompts_per_step": "prompts",
    "mini_batches": "optimiser steps",
    "max_running": "requests",
    "max_concurrent": "requests",
    "requests_per_minute": "requests/min",
    "retries": "tries",
    "topk": "passages",
    "limit": "questions",
    "samples": "answers",
    "engines": "engines",
    "nodes": "machines",
    "devices_per_node": "devices",
    "threads": "threads",
    "overlong_buffer": "tokens",
    "overlong_limit": "tokens",
    "loss_length": "tokens",
    "kl_topk_tokens": "tokens",
    "max_answer_tags": "tags",
    "sample_trajectories": "trajectories",
    "trajectories": "trajectories",
    "validation_batch": "questions",
    "tp": "ranks",
    "pp": "ranks",
    "cp": "ranks",
    "ep": "ranks",
    "pp_layers": "layers",
    "structure_score": "reward",
    "final_score": "reward",
    "retrieval_score": "reward",
    "many_answers_score": "reward",
    "value_clip": "reward",
}
"""Last part of a key -> unit, where its ending does not say it."""


def unit_of(key: str) -> str:
    """What the number under `key` is counted in; empty for what is a plain number, a share or a ratio."""
    name = key.rpartition(".")[2]
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((unit for ending, unit in _BY_ENDING.items() if name.endswith(ending)), "")
